"""hf-vaswani translate: one line in, one line out. score: what a model says of translations. average: one of many.

evaluate: translated and scored. compare: which of two is better.
"""

import csv
import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
from transformers.utils import logging as transformers_logging

import hf_vaswani
from hf_vaswani.cli import evaluate as scoring_verbs
from hf_vaswani.cli import main
from hf_vaswani.cli import translate as text_verbs
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.metrics import score
from hf_vaswani.translation import lines as translation
from hf_vaswani.translation import quantization

from ..conftest import ROOT


def translate(monkeypatch, capsys, text: bytes, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    code = main(["translate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_lines_in_lines_out_empty_lines_stay_empty(tiny_run, monkeypatch, capsys) -> None:
    text = "one two\n\nthree\u2028four\r\n   \nfive".encode()
    code, out, _ = translate(monkeypatch, capsys, text, "--model", str(tiny_run / "model"))
    assert code == 0
    lines = out.split("\n")
    assert len(lines) == 6
    assert (lines[1], lines[3], lines[5]) == ("", "", "")


def test_translations_are_those_of_the_pipeline(tiny_run, monkeypatch, capsys) -> None:
    sentences = ["one two three", "nine", "four five six"]
    model = str(tiny_run / "model")
    expected = [item["translation_text"] for item in pipeline("translation", model=model)(sentences)]
    assert expected == [pipeline("translation_en_to_de", model=model)(s)[0]["translation_text"] for s in sentences]
    _, out, _ = translate(monkeypatch, capsys, "\n".join(sentences).encode(), "--model", model)
    assert out.splitlines() == expected
    _, greedy, _ = translate(monkeypatch, capsys, "\n".join(sentences).encode(), "--model", model, "--num-beams", "1")
    one_beam = [item["translation_text"] for item in pipeline("translation", model=model)(sentences, num_beams=1)]
    assert greedy.splitlines() == one_beam


def test_a_byte_order_mark_is_no_text_and_the_beam_is_the_one_asked_for(tiny_run, monkeypatch, capsys) -> None:
    seen = []

    def spy(model, tokenizer, sentences):
        seen.append((list(sentences), model.generation_config.num_beams))
        return ["two\nlines" for _ in sentences]

    monkeypatch.setattr(translation, "translate_corpus", spy)
    text = b"\xef\xbb\xbfone\ntwo\n"
    _, out, _ = translate(monkeypatch, capsys, text, "--model", str(tiny_run / "model"), "--num-beams", "3")
    assert seen == [(["one", "two"], 3)]
    assert out == "two lines\ntwo lines\n"


def test_bad_input_is_one_sentence_and_exit_code_2(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    model = str(tiny_run / "model")
    code, out, err = translate(monkeypatch, capsys, b"one\ntwo\xff\n", "--model", model)
    assert (code, out) == (2, "")
    assert "the input, line 2, is not UTF-8: invalid start byte at byte 4" in err
    code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", str(tmp_path))
    assert code == 2
    assert f"{tmp_path / 'config.json'} is missing" in err
    for name, words in ((str(tiny_run), "its model is"), ("nowhere", "no model folder 'nowhere'")):
        code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", name)
        assert code == 2
        assert words in err
    code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", model, "--num-beams", "0")
    assert (code, "--num-beams" in err) == (2, True)
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2


def test_a_target_language_is_the_tag_in_front(tiny_run, monkeypatch, capsys) -> None:

    seen = []
    monkeypatch.setattr(translation, "translate_corpus", lambda model, tokenizer, lines: seen.extend(lines) or lines)
    arguments = ["--model", str(tiny_run / "model"), "--target-language", "de"]
    # The model knows its one language, and needs no tag for it.
    code, _, error = translate(monkeypatch, capsys, b"one\n", *arguments[:3], "fr")
    assert (code, seen) == (2, []) and "The model translates into de, and not into 'fr'" in error
    assert translate(monkeypatch, capsys, b"one\n", *arguments)[0] == 0
    assert seen.pop() == "one"
    from hf_vaswani.data import tokenizer
    from hf_vaswani.translation import loading

    load = loading.load_translator

    def tagged(name):
        model, loaded = load(name)
        tokenizer.add_language_tags(loaded, ["de"])
        return model, loaded

    monkeypatch.setattr(loading, "load_translator", tagged)
    assert translate(monkeypatch, capsys, b"one\n\ntwo\n", *arguments)[0] == 0
    assert seen == ["<2de> one", "", "<2de> two"]
    assert translate(monkeypatch, capsys, b"<2de> one\n", *arguments[:2])[0] == 0
    assert seen[3:] == ["<2de> one"]
    assert translate(monkeypatch, capsys, b"<2de> one\n", *arguments)[0] == 0
    assert seen[4:] == ["<2de> one"]
    code, _, error = translate(monkeypatch, capsys, b"<2de> one\ntwo\n", *arguments[:2])
    assert code == 2 and "Line 2 of the input does not say into which language" in error and "<2de>" in error


def test_average_writes_a_model(tiny_run, tmp_path, capsys) -> None:
    """That of the run itself, from the same checkpoints; named one by one, or as the last of their run."""
    from safetensors.torch import load_file
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    names = [str(tiny_run / name) for name in ("checkpoint-8", "checkpoint-12")]
    assert main(["average", *names, "--output", str(tmp_path / "named")]) == 0
    assert main(["average", str(tiny_run), "--last", "2", "--output", str(tmp_path / "last")]) == 0
    assert "checkpoint-8" in capsys.readouterr().out
    expected = load_file(tiny_run / "model" / "model.safetensors")
    for folder in (tmp_path / "named", tmp_path / "last"):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        assert all((model.state_dict()[name] == weight).all() for name, weight in expected.items())
        assert model.generation_config.num_beams == 2
        assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
        assert not list(folder.glob("*.bin")) + list(folder.glob("*.pkl")) + list(folder.glob("progress.json"))
    # Models can be averaged too, of whichever runs; the mean of a model and itself is that model.
    model = str(tiny_run / "model")
    assert main(["average", model, model, "--output", str(tmp_path / "again")]) == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all((again[name] == weight).all() for name, weight in expected.items())


def test_average_of_the_best(tiny_run, tmp_path, capsys) -> None:
    # Only the last checkpoint of this run was validated.
    assert main(["average", str(tiny_run), "--best", "1", "--output", str(tmp_path / "best")]) == 0
    assert "checkpoint-12" in capsys.readouterr().out
    assert main(["average", str(tiny_run), "--best", "2", "--by", "loss", "--output", str(tmp_path / "two")]) == 2
    assert "has 1 such checkpoints, and not 2" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}/checkpoint-9", "--output", "{new}"], "There is no folder"),
        (["{run}", "--output", "{new}"], "say which of its checkpoints"),
        (["{run}/tokenizer", "--output", "{new}"], "model.safetensors cannot be read"),
        (["{run}/checkpoint-8", "--output", "{run}"], "exists already"),
        (["{run}/model", "--last", "1", "--output", "{new}"], "recipe.yaml"),
        (["{run}", "--last", "0", "--output", "{new}"], "N being 1 or more"),
        (["{run}", "--last", "1", "--best", "1", "--output", "{new}"], "--last N or --best N"),
        (["{run}/checkpoint-8", "{run}/checkpoint-12", "--last", "1", "--output", "{new}"], "Of one run"),
    ],
)
def test_what_cannot_be_averaged_is_said(tiny_run, tmp_path, capsys, arguments, words) -> None:
    new = tmp_path / "new"
    assert main(["average", *(argument.format(run=tiny_run, new=new) for argument in arguments)]) == 2
    assert words in capsys.readouterr().err
    assert not new.exists()


def test_average_of_the_best_by_what_the_recipe_ranks_by_or_by_the_other(tmp_path, monkeypatch) -> None:
    from hf_vaswani import averaging

    averaged = []
    monkeypatch.setattr(averaging, "save_average", lambda folders, output: averaged.append(folders[0].name))
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        progress = {
            "step": step,
            "position": {},
            "data": {},
            "launch": {},
            "nonfinite": 0,
            "seconds": 1.0,
            "files": {},
        }
        (tmp_path / f"checkpoint-{step}" / "progress.json").write_text(json.dumps(progress))
    lines = [{"step": 1, "loss": 2.0, "bleu": 9.0}, {"step": 2, "loss": 1.0, "bleu": 8.0}]
    (tmp_path / "validations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for best_by in ("bleu", "loss"):
        text = f"training: {{save_every: 1, validate_every: 1, best_by: {best_by}}}"
        (tmp_path / "recipe.yaml").write_text(text)
        for by in ([], ["--by", "bleu"], ["--by", "loss"]):
            assert main(["average", str(tmp_path), "--best", "1", *by, "--output", str(tmp_path / "new")]) == 0
    assert averaged == [f"checkpoint-{step}" for step in (1, 1, 2, 2, 1, 2)]


def scores(capsys, tmp_path, model: str, sources: list[str], targets: list[str]) -> tuple[int, str, str]:
    for name, lines in (("source.txt", sources), ("target.txt", targets)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    code = main(["score", "--model", model, str(tmp_path / "source.txt"), str(tmp_path / "target.txt")])
    return code, *capsys.readouterr()


def test_scores_are_what_beam_search_reports_of_a_translation(tiny_run, tmp_path, capsys) -> None:
    """That of transformers, which is let to find this translation and no other."""
    folder = str(tiny_run / "model")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sentences = ["one two three", "nine", "four five six", "seven seven eight nine one two", ""]
    targets = ["eins zwei drei", "neun", "", "sieben sieben acht neun eins", "drei"]
    ids = tokenizer(targets)["input_ids"]
    found = model.generate(
        **tokenizer(sentences, return_tensors="pt", padding=True),
        num_beams=3,
        length_penalty=0.0,
        max_length=40,
        return_dict_in_generate=True,
        output_scores=True,
        prefix_allowed_tokens_fn=lambda row, before: (ids[row] + [0])[len(before) - 1 : len(before)] or [0],
    )
    assert tokenizer.batch_decode(found.sequences, skip_special_tokens=True) == targets
    code, out, _ = scores(capsys, tmp_path, folder, sentences, targets)
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and len(rows) == len(sentences)
    for row, expected, tokens in zip(rows, found.sequences_scores.tolist(), ids, strict=True):
        assert float(row[0]) == pytest.approx(expected, abs=1e-3) and int(row[2]) == len(tokens)
        assert float(row[1]) == pytest.approx(float(row[0]) / int(row[2]), abs=1e-4)


def test_scores_of_files_of_unequal_length(tiny_run, tmp_path, capsys) -> None:
    folder = str(tiny_run / "model")
    for sources, targets, shorter in ((["one"], ["eins", "zwei"], "source"), (["one", "two"], ["eins"], "target")):
        code, _, error = scores(capsys, tmp_path, folder, sources, targets)
        assert code == 2 and f"{shorter}.txt ends after line 1, but" in error
    code = main(["score", "--model", folder, str(tmp_path / "source.txt"), str(tmp_path / "missing.txt")])
    assert code == 2 and "missing.txt" in capsys.readouterr().err


# ---- translate: files, outputs, n-best


@pytest.fixture
def texts(tmp_path):
    """Two files of many short lines, some empty; the whole text as bytes."""
    words = ["one", "two three", "", "four five six", "nine"]
    lines = [f"{words[i % 5]} {words[i % 3]}".strip() for i in range(60)]
    (tmp_path / "a.txt").write_text("\n".join(lines[:33]) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n".join(lines[33:]), encoding="utf-8")
    return tmp_path, "\n".join(lines).encode()


def test_files_are_read_in_their_order(tiny_run, texts, monkeypatch, capsys) -> None:
    folder, text = texts
    model = ["--model", str(tiny_run / "model")]
    _, expected, _ = translate(monkeypatch, capsys, text, *model)
    files = [str(folder / "a.txt"), str(folder / "b.txt")]
    assert main(["translate", *model, *files]) == 0
    assert capsys.readouterr().out == expected and expected.count("\n") == 60
    assert main(["translate", *model, *files, "--output", str(folder / "out.txt")]) == 0
    assert capsys.readouterr().out == "" and (folder / "out.txt").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("more", [[], ["--n-best", "2"], ["--n-best", "2", "--format", "jsonl"]], ids=str)
def test_an_output_is_completed(tiny_run, texts, monkeypatch, capsys, more) -> None:
    monkeypatch.setattr(translation, "LINES_AT_A_TIME", 7)
    folder, _ = texts
    arguments = ["translate", "--model", str(tiny_run / "model"), str(folder / "a.txt"), *more]
    output = folder / "out.txt"
    arguments += ["--output", str(output)]
    assert main(arguments) == 0
    whole = output.read_bytes()
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err and output.read_bytes() == whole
    end_of_a_line = len(b"".join(whole.splitlines(keepends=True)[:20]))
    # Nothing yet, a line without its end, whole lines, everything.
    for cut in (0, end_of_a_line - 2, end_of_a_line, len(whole)):
        output.write_bytes(whole[:cut])
        assert main([*arguments, "--resume"]) == 0
        assert output.read_bytes() == whole


@pytest.mark.parametrize(
    ("more", "content", "words"),
    [
        (["--n-best", "2"], "eins\nzwei\n", "was written with another --n-best or --format"),
        (["--n-best", "2", "--format", "jsonl"], "1\t-0.5\teins\n", "was written with another --n-best or --format"),
        ([], "eins\n" * 34, "The output is of 34 lines already, but the text has only 33"),
    ],
)
def test_an_output_of_something_else_is_not_completed(tiny_run, texts, capsys, more, content, words) -> None:
    folder, _ = texts
    output = folder / "out.txt"
    output.write_text(content, encoding="utf-8")
    arguments = ["--model", str(tiny_run / "model"), str(folder / "a.txt"), "--output", str(output), "--resume", *more]
    assert main(["translate", *arguments]) == 2 and words in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == content


def test_outputs_and_texts_are_files(tiny_run, texts, capsys) -> None:
    folder, _ = texts
    for arguments, words in (
        ([str(folder)], "is a folder, and not a text"),
        ([str(folder / "a.txt"), "--output", str(folder)], "is a folder, or in one that is not there"),
        ([str(folder / "a.txt"), "--output", str(folder / "no" / "x")], "is a folder, or in one that is not there"),
    ):
        assert main(["translate", "--model", str(tiny_run / "model"), *arguments]) == 2
        assert words in capsys.readouterr().err


def test_the_n_best_with_their_scores(tiny_run, texts, monkeypatch, capsys) -> None:
    folder = str(tiny_run / "model")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sentences = ["one two three", "", "four five"]
    text, arguments = "\n".join(sentences).encode(), ("--model", folder, "--n-best", "3", "--num-beams", "4")
    _, out, _ = translate(monkeypatch, capsys, text, *arguments)
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert rows[3:6] == [["2", "0.0000", ""]] * 3
    settings = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    for place in (0, 2):
        found = model.generate(**tokenizer([sentences[place]], return_tensors="pt"), **settings)
        expected = tokenizer.batch_decode(found.sequences, skip_special_tokens=True)
        mine = rows[3 * place : 3 * place + 3]
        assert [row[2] for row in mine] == [" ".join(text.split()) for text in expected]
        assert [float(row[1]) for row in mine] == pytest.approx(found.sequences_scores.tolist(), abs=1e-3)
    _, out, _ = translate(monkeypatch, capsys, text, *arguments, "--format", "jsonl")
    objects = [json.loads(line) for line in out.splitlines()]
    assert [item["line"] for item in objects] == [1, 2, 3]
    assert [found["score"] for found in objects[2]["translations"]] == [float(row[1]) for row in rows[6:]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n-best", "0"], "--n-best must be from 1 to 1000, but it is 0"),
        (["--num-beams", "99999"], "--num-beams must be from 1 to 1000, but it is 99999"),
        (["--n-best", "3", "--num-beams", "2"], "--n-best 3 needs a beam of at least 3, but --num-beams is 2"),
        (["--n-best", "1", "--num-beams", "1"], "--n-best 1 needs a beam of at least 2, but --num-beams is 1"),
        (["--format", "tsv"], "--format is of --n-best"),
        (["--resume"], "--resume needs the --output"),
        (["nowhere.txt"], "There is no file 'nowhere.txt'"),
    ],
)
def test_what_does_not_fit_together(tiny_run, monkeypatch, capsys, arguments, words) -> None:
    code, out, error = translate(monkeypatch, capsys, b"one\n", "--model", str(tiny_run / "model"), *arguments)
    assert (code, out) == (2, "") and words in error


def test_the_text_is_not_its_own_output(tiny_run, texts, capsys) -> None:
    file = texts[0] / "b.txt"
    before = file.read_bytes()
    arguments = ["--model", str(tiny_run / "model"), str(file), "--output", str(file), "--resume"]
    assert main(["translate", *arguments]) == 2 and "is one of the files" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_several_models_have_one_vocabulary(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    model, other = str(tiny_run / "model"), tmp_path / "other"
    text = b"one two three\nnine\n"
    _, expected, _ = translate(monkeypatch, capsys, text, "--model", model)
    code, out, _ = translate(monkeypatch, capsys, text, "--model", model, "--model", model)
    assert (code, out) == (0, expected)
    AutoModelForSeq2SeqLM.from_pretrained(model).save_pretrained(other)
    train_tokenizer(["other words"], 280).save_pretrained(other)  # fewer entries than the embedding has rows
    code, out, error = translate(monkeypatch, capsys, text, "--model", model, "--model", str(other))
    assert (code, out) == (2, "") and f"{model} and {other} have different vocabularies" in error


def test_int8_is_another_model(tiny_run, monkeypatch, capsys) -> None:
    seen = []
    monkeypatch.setattr(quantization, "to_int8", lambda model: seen.append(model) or model)
    arguments = ("--model", str(tiny_run / "model"))
    code, out, _ = translate(monkeypatch, capsys, b"one two\n", *arguments, "--int8")
    assert code == 0 and len(seen) == 1
    assert out == translate(monkeypatch, capsys, b"one two\n", *arguments)[1]


# ---- Outputs that are no files, disks that are full, streams that are closed


@contextmanager
def size_limit(size: int) -> Iterator[None]:
    """No file grows beyond it: what a full disk does, under another name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("verb", ["translate", "evaluate"])
def test_a_device_is_written_to(tiny_run, texts, capsys, verb) -> None:
    text = str(texts[0] / "a.txt")
    arguments = ["--data", text, text] if verb == "evaluate" else [text]
    arguments = [verb, *arguments, "--model", str(tiny_run / "model"), "--output"]
    assert main([*arguments, "/dev/null"]) == 0
    capsys.readouterr()
    assert main([*arguments, "/dev/full"]) == 2
    said = capsys.readouterr().err
    assert "hf-vaswani: /dev/full cannot be written: No space left on device." in said and "Traceback" not in said


def test_a_pipe_is_written_to_and_not_completed(tiny_run, texts, capsys) -> None:
    folder, _ = texts
    arguments = ["translate", str(folder / "a.txt"), "--model", str(tiny_run / "model"), "--output"]
    assert main([*arguments, str(folder / "file")]) == 0
    os.mkfifo(folder / "pipe")
    with subprocess.Popen(["cat", str(folder / "pipe")], stdout=subprocess.PIPE) as reader:
        assert main([*arguments, str(folder / "pipe")]) == 0
        assert reader.communicate(timeout=60)[0] == (folder / "file").read_bytes()
    assert main([*arguments, str(folder / "pipe"), "--resume"]) == 2
    assert "pipe is not a regular file: nothing in it could be completed" in capsys.readouterr().err


def test_a_full_disk_keeps_whole_lines_and_is_named(tiny_run, texts, capsys) -> None:
    folder, _ = texts
    output = folder / "out"
    arguments = [str(folder / "a.txt"), "--model", str(tiny_run / "model"), "--n-best", "2", "--output", str(output)]
    assert main(["translate", *arguments]) == 0
    whole = output.read_bytes()
    output.unlink()
    with size_limit(len(whole) - 20):
        assert main(["translate", *arguments]) == 2
    assert f"{output} cannot be written: File too large. Its lines are whole" in capsys.readouterr().err
    kept = output.read_bytes()
    assert 0 < len(kept) <= len(whole) - 20 and kept.endswith(b"\n") and whole.startswith(kept)
    assert main(["translate", *arguments, "--resume"]) == 0 and output.read_bytes() == whole
    with size_limit(20), pytest.raises(OSError, match="new could not be written.*File too large"):
        scoring_verbs._write(folder / "new", "one\n" * 9)
    assert not list(folder.glob("*new*"))


def test_standard_output_that_is_full_or_closed_is_named(tiny_run, texts, monkeypatch, capsys) -> None:
    arguments = ["translate", str(texts[0] / "a.txt"), "--model", str(tiny_run / "model")]
    for verb in (arguments, ["--version"]):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert main(verb) == 2
            monkeypatch.undo()
        assert capsys.readouterr().err == "hf-vaswani: Standard output cannot be written: No space left on device.\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert main(arguments) == 2 and "Standard output is closed" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["translate", *arguments[2:]]) == 2 and "Standard input is closed" in capsys.readouterr().err


def test_standard_output_that_is_full_is_no_trouble_at_the_end(tiny_run, texts) -> None:
    command = f"{sys.executable} -m hf_vaswani.cli translate {texts[0] / 'a.txt'} --model {tiny_run / 'model'}"
    done = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "Standard output cannot be written" in done.stderr


# ---- Compressed text, odd text


def test_compressed_text_is_read(tiny_run, texts, capsys) -> None:
    folder, _ = texts
    (folder / "a.txt.gz").write_bytes(gzip.compress((folder / "a.txt").read_bytes()))
    model, seen = ["--model", str(tiny_run / "model")], []
    for name in ("a.txt", "a.txt.gz"):
        text = str(folder / name)
        assert main(["translate", *model, text]) == 0
        assert main(["score", *model, text, text]) == 0
        other = str(folder / "other.txt")
        Path(other).write_text("one\n" * 33)
        assert main(["compare", text, other, "--references", text, "--samples", "2", "--trials", "2"]) == 0
        seen.append(capsys.readouterr().out.replace(".gz", "").split())
    assert seen[0] == seen[1]
    (folder / "a.txt.gz").write_bytes((folder / "a.txt.gz").read_bytes()[:-9])
    assert main(["translate", *model, str(folder / "a.txt.gz")]) == 2
    assert "a.txt.gz cannot be read as gz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "lines"), [(b"", 0), (b"one", 1), (b"one\r\ntwo\r\n", 2), (b"\xef\xbb\xbfone\n", 1), (b"o\0ne\n\0\n", 2)]
)
def test_every_text_has_as_many_lines_as_before(tiny_run, monkeypatch, capsys, text, lines) -> None:
    code, out, err = translate(monkeypatch, capsys, text, "--model", str(tiny_run / "model"))
    assert code == 0 and out.count("\n") == lines, err


def test_what_never_ends_is_no_line(tiny_run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(text_verbs, "LONGEST_LINE", 2**20)
    assert main(["translate", "/dev/zero", "--model", str(tiny_run / "model")]) == 2
    assert "/dev/zero, line 1, is longer than 1,048,576 bytes" in capsys.readouterr().err


def test_one_beam_warns_of_nothing(tiny_run, monkeypatch, capsys, caplog) -> None:
    transformers_logging.enable_propagation()
    try:
        code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", str(tiny_run / "model"), "--num-beams", "1")
    finally:
        transformers_logging.disable_propagation()
    assert code == 0 and "length_penalty" not in err + caplog.text


# ---- The doors


def test_the_version_and_the_usage(capsys) -> None:
    for arguments, program, words in (
        (["--version"], "hf-vaswani", f"hf-vaswani {hf_vaswani.__version__}\n"),
        (["train", "--help"], "hf-vaswani", "usage: hf-vaswani train RECIPE.yaml"),
        (["train", "--help"], "train.py", "usage: accelerate launch train.py RECIPE.yaml"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments, program)
        assert stop.value.code == 0 and capsys.readouterr().out.startswith(words)


DOORS = {
    "module": ["-m", "hf_vaswani.cli", "translate", "--model", "nowhere"],
    "script": ["-c", "import sys, hf_vaswani_start; sys.exit(hf_vaswani_start.main())", "translate"],
    "launcher": [str(ROOT / "train.py"), "none.yaml"],
}


@pytest.mark.parametrize("door", DOORS)
def test_ctrl_c_while_libraries_are_imported_is_quiet(door) -> None:
    for seconds in (0.3, 0.8, 1.6):
        process = subprocess.Popen(
            [sys.executable, *DOORS[door]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        # On a fast machine it may have come to its own error, or to its own word, before.
        assert (process.returncode, err) in ((130, ""), (130, "hf-vaswani: stopped.\n")) or process.returncode == 2
        assert "Traceback" not in err and not out


def test_ctrl_c_of_others_is_theirs_and_threads_sleep_while_they_wait() -> None:
    """Importing the package changes no signal; the doors set the policy before torch is loaded."""
    programs = (
        "import signal, hf_vaswani; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)",
        "import os, hf_vaswani_start as start; start.before_imports(); import sys; "
        "print(os.environ['OMP_WAIT_POLICY'] == 'PASSIVE' and 'torch' not in sys.modules)",
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
        )
        assert done.stdout == "True\n"


BLOCKED = """
import sys
blocked = sys.argv.pop(1).split(",")
for name in blocked:
    sys.modules[name] = None
from hf_vaswani.cli import main
sys.exit(main())
"""
TRAIN = "accelerate,datasets,evaluate,jinja2,jsonargparse,sacrebleu,tabulate,pandas,pyarrow,matplotlib"
CONVERT = "ctranslate2,onnx,onnxruntime,onnxscript,sentencepiece"


def test_each_extra_does_without_the_others(tiny_run, tmp_path) -> None:
    (tmp_path / "text").write_text("one two\n")
    model, text = str(tiny_run / "model"), str(tmp_path / "text")
    for blocked, arguments in (
        (TRAIN, ["convert", model, str(tmp_path / "ctranslate2"), "--to", "ctranslate2"]),
        (TRAIN, ["convert", model, str(tmp_path / "onnx"), "--to", "onnx"]),
        (f"{TRAIN},{CONVERT}", ["translate", "--model", model, text]),
        (f"{TRAIN},{CONVERT}", ["score", "--model", model, text, text]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, blocked, *arguments], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
    for arguments in (["train", "none.yaml"], ["evaluate", "--model", model, "--data", text, text]):
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, TRAIN, *arguments], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 2 and "pip install 'hf_vaswani[train]'" in done.stderr, done.stderr


# ---- evaluate, compare -------------------------------------------------------------------------------------------


def read(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def evaluate(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["evaluate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_evaluate_gives_the_score_of_the_trainings_test(tiny_run, tmp_path, capsys) -> None:
    result = json.loads((tiny_run / "test.json").read_text())
    data = [str(tiny_run.parent / f"text.{language}") for language in ("en", "de")]
    output = tmp_path / "translations"
    model = ["--model", str(tiny_run / "model")]
    code, out, err = evaluate(capsys, *model, "--data", *data, "--output", str(output), "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    assert found == {key: result[key] for key in ("bleu", "chrf", "ter", "signatures")} | {"lines": 120}
    assert output.read_text("utf-8") == (tiny_run / "test_translations.txt").read_text("utf-8")
    code, out, err = evaluate(capsys, *model, "--data", *data, "--output", str(output))
    assert code == 2 and "exists already" in err


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


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (["text.en"], [], "--data names one text"),
        (["text.en", "none.de"], [], "There is no file"),
        (["text.en", "short.de"], [], "must have the same number of lines, but"),
        (["text.en", "text.de"], ["--columns", "en", "de"], "--columns are those of one file"),
        (["text.en", "text.de"], ["--tokenize", "14b"], "sacreBLEU has no tokenizer '14b'"),
        (["text.en", "text.de"], ["--num-beams", "0"], "--num-beams must be from 1 to 1000, but it is 0"),
        (["text.en", "text.de"], ["--output", "no/folder"], "is in a folder that does not exist"),
        (["empty.en", "empty.de"], [], "There is no text in"),
    ],
)
def test_evaluate_names_bad_input(tiny_run, tmp_path, capsys, data, options, words) -> None:
    for name, count in (("text.en", 3), ("text.de", 3), ("short.de", 2), ("empty.en", 0), ("empty.de", 0)):
        (tmp_path / name).write_text("one\n" * count)
    files = [str(tmp_path / name) for name in data]
    code, out, err = evaluate(capsys, "--model", str(tiny_run / "model"), "--data", *files, *options)
    assert code == 2 and words in err and err.count("\n") == 1 and not out


def test_compare_shows_one_table(tmp_path, capsys) -> None:
    references = [f"the house number {i} stands near the old bridge" for i in range(40)]
    texts = {"references": references, "good": [line.replace("old", "new") for line in references]}
    texts["bad"] = [line.replace("house number", "car") for line in texts["good"]]
    names = {name: str(tmp_path / name) for name in texts}
    for name, lines in texts.items():
        Path(names[name]).write_text("".join(f"{line}\n" for line in lines))
    arguments = ["compare", names["good"], names["bad"], "--references", names["references"]]
    arguments += ["--samples", "100", "--trials", "100"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()[2:8]] == ["BLEU", "BLEU", "chrF2", "chrF2", "TER", "TER"]
    assert table.count("0.0099*") == 6 and "nrefs:1|bs:100|seed:12345" in table and "+" in table
    assert main([*arguments, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--format", "csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["score"]) for row in table] == [row["score"] for row in rows]
    assert rows[0]["score"] == score(texts["good"], references)["bleu"]
    for systems, words in (
        ([names["good"]], "needs at least two systems"),
        ([names["good"], names["good"]], "one is there twice"),
        ([names["good"], str(tmp_path / "none")], "There is no file"),
    ):
        assert main(["compare", *systems, "--references", names["references"]]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "short").write_text("one\n")
    assert main([*arguments[:4], names["references"], str(tmp_path / "short")]) == 2
    assert "short has 1 lines, but" in capsys.readouterr().err
