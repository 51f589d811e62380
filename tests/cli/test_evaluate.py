"""hf-vaswani evaluate: a test set is translated and scored."""

import csv
import io
import json
import shutil
from pathlib import Path

import fsspec
import pytest
from datasets import Dataset

from hf_vaswani.cli import evaluate as evaluate_verbs
from hf_vaswani.cli import main

from .conftest import size_limit


def read(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def evaluate(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["evaluate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_evaluate_repeats_the_test_score_of_the_training(tiny_run, tmp_path, capsys) -> None:
    result = json.loads((tiny_run / "test.json").read_text())
    data = [str(tiny_run.parent / f"text.{language}") for language in ("en", "de")]
    output = tmp_path / "translations"
    model = ["--model", str(tiny_run / "model")]
    code, out, err = evaluate(capsys, *model, "--data", *data, "--output", str(output), "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    assert found == {key: result[key] for key in ("bleu", "chrf", "ter", "signatures")} | {"lines": 120}
    assert output.read_text("utf-8") == (tiny_run / "test_translations.txt").read_text("utf-8")


def test_evaluate_writes_tables_and_csv_with_sentences_and_several_references(tiny_run, tmp_path, capsys) -> None:
    data = [str(tiny_run.parent / f"text.{language}") for language in ("en", "de", "de")]
    model = ["--model", str(tiny_run / "model"), "--num-beams", "1"]
    code, out, err = evaluate(capsys, *model, "--data", *data, "--lowercase", "--tokenize", "char")
    assert code == 0, err
    assert "nrefs:2|case:lc|eff:no|tok:char" in out and "TER" in out
    code, out, _ = evaluate(capsys, *model, "--data", *data, "--sentences", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["line"] for row in rows] == [str(i) for i in range(1, 121)]
    assert rows[0].keys() == {"line", "bleu", "chrf", "ter", "translation"}
    code, out, _ = evaluate(capsys, *model, "--data", *data, "--sentences", "--format", "json")
    assert [row["chrf"] for row in json.loads(out)["sentences"]] == [float(row["chrf"]) for row in rows]
    code, out, _ = evaluate(capsys, *model, "--data", *data, "--sentences")
    assert len(out.splitlines()) == 2 + 120 + 1 + 2 + 3


def test_evaluate_reads_tables_and_datasets(tiny_run, tmp_path, capsys) -> None:
    model = ["--model", str(tiny_run / "model"), "--num-beams", "1", "--format", "json"]
    lines = [read(tiny_run.parent / f"text.{language}")[:9] for language in ("en", "de")]
    rows = list(zip(*lines, strict=True))
    (tmp_path / "text.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    Dataset.from_dict({"en": lines[0], "de": lines[1]}).save_to_disk(tmp_path / "saved")
    outputs = []
    for options in (
        ["--data", str(tmp_path / "text.tsv"), "--columns", "0", "1"],
        ["--data", str(tmp_path / "saved"), "--columns", "en", "de", "--split", "train"],
    ):
        code, out, err = evaluate(capsys, *model, *options)
        assert code == 0, err
        outputs.append(json.loads(out))
    assert outputs[0] == outputs[1] and outputs[0]["lines"] == 9


def test_evaluate_scores_altered_test_sets(tiny_run, capsys, monkeypatch) -> None:
    data = [str(tiny_run.parent / f"text.{language}") for language in ("en", "de")]
    arguments = ["--model", str(tiny_run / "model"), "--num-beams", "1", "--data", *data]
    arguments += ["--altered", "typos,upper,no_final_mark,typos"]
    words = dict(zip(*(" ".join(read(Path(path))).split() for path in data), strict=True))

    def translated(sources: list[str], *_: object) -> list[str]:
        """A dictionary, which knows neither capitals nor typing errors."""
        return [" ".join(words.get(word, word) for word in line.split()) for line in sources]

    monkeypatch.setattr(evaluate_verbs, "_translate", translated)
    code, out, err = evaluate(capsys, *arguments, "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    plain = {metric: found[metric] for metric in ("bleu", "chrf", "ter")}
    assert list(found["altered"]) == ["typos", "upper", "no_final_mark"]
    # The text has no final marks, so this alteration changes nothing.
    assert found["altered"]["no_final_mark"] == plain
    assert plain["ter"] == 0 and plain["bleu"] == pytest.approx(100)
    assert found["altered"]["upper"]["bleu"] < 1 < found["altered"]["typos"]["bleu"] < 99
    assert evaluate(capsys, *arguments, "--format", "json")[1] == out
    _, table, _ = evaluate(capsys, *arguments)
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows[-4:]] == ["unaltered", "typos", "upper", "no_final_mark"]
    assert rows[-1][1:] == [f"{score:.2f}" for score in plain.values()]
    _, text, _ = evaluate(capsys, *arguments, "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [line["text"] for line in lines[::3]] == ["unaltered", "typos", "upper", "no_final_mark"]
    assert float(lines[3]["score"]) == found["altered"]["typos"]["bleu"]


def test_a_full_disk_leaves_nothing_of_an_output(tmp_path) -> None:
    with size_limit(20), pytest.raises(OSError, match="new could not be written.*File too large"):
        evaluate_verbs._write(tmp_path / "new", "one\n" * 9)
    assert not list(tmp_path.iterdir())


def test_a_test_set_may_be_at_a_url(tiny_run, capsys) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/corpus/a.tsv?sig=SECRET", b"en\tde\none two\teins zwei\n")
    arguments = ["--data", "memory://corpus/a.tsv?sig=SECRET", "--columns", "en", "de", "--format", "json"]
    assert main(["evaluate", "--model", str(tiny_run / "model"), *arguments]) == 0
    memory.store.clear()
    said = capsys.readouterr()
    assert json.loads(said.out)["lines"] == 1 and "SECRET" not in said.out + said.err


def test_the_tokenizer_is_that_of_the_models_target_language(tiny_run, tmp_path, capsys, without_mecab) -> None:
    """By default; what it needs is missing before anything is translated."""
    model = shutil.copytree(tiny_run / "model", tmp_path / "model")
    data = [str(tiny_run.parent / f"text.{language}") for language in ("en", "de")]
    arguments = ["--model", str(model), "--num-beams", "1", "--format", "json", "--data", *data]

    def translates(*pairs: list[str]) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"language_pairs": list(pairs)}))

    for languages, more, tokenizer in (
        ([["en", "zh_Hans"]], [], "zh"),
        ([["en", "zh"], ["de", "zh"]], [], "zh"),
        ([["en", "zh"]], ["--tokenize", "13a"], "13a"),
        ([["en", "ja"]], ["--tokenize", "char"], "char"),
        ([["en", "zh"], ["en", "ja"]], ["--target-language", "zh"], "zh"),
        # The language is not known.
        ([["en", "zh"], ["en", "ja"]], [], "13a"),
        ([], [], "13a"),
    ):
        translates(*languages)
        code, out, err = evaluate(capsys, *arguments, *more)
        assert code == 0 and f"|tok:{tokenizer}|" in json.loads(out)["signatures"]["bleu"], (languages, more, err)
    translates(["en", "ja"])
    code, out, err = evaluate(capsys, *arguments, "--output", str(tmp_path / "new"))
    assert code == 2 and "pip install 'sacrebleu[ja]'" in err and "--tokenize char" in err and not out
    assert not (tmp_path / "new").exists()
