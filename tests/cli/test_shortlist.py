"""hf-vaswani shortlist, and translating with what it wrote."""

import json

import pytest
from transformers import pipeline

from hf_vaswani.cli import main
from hf_vaswani.data.tokenizer import load_tokenizer, train_tokenizer
from hf_vaswani.translation.shortlist import FILE

from ..conversion.test_ctranslate2 import WORDS, random_sentences, save_random


@pytest.fixture
def run(tmp_path):
    """A run folder with a random model, and a recipe whose targets are the sources backwards."""
    model = save_random(tmp_path / "run" / "model", vocab_size=400)
    model.generation_config.min_new_tokens = 4
    model.save_pretrained(tmp_path / "run" / "model")
    # CTranslate2's format has no entries with spaces.
    train_tokenizer([" ".join(WORDS)] * 9, 390).save_pretrained(tmp_path / "run" / "model")
    lines = [line for line in random_sentences() if line.strip()]
    pairs = [f"{line}\t{' '.join(reversed(line.split()))}" for line in lines]
    (tmp_path / "pairs.tsv").write_text("\n".join(["en\tde", *pairs, "\tleer"]) + "\n", encoding="utf-8")
    recipe = {"run_dir": str(tmp_path / "run"), "data": {"source_language": "en", "target_language": "de"}}
    recipe["data"]["train_files"] = str(tmp_path / "pairs.tsv")
    (tmp_path / "my.yaml").write_text(json.dumps(recipe))
    return tmp_path, lines


def test_the_shortlist_of_a_run_is_kept_with_its_model(run, capsys) -> None:
    folder, lines = run
    model = folder / "run" / "model"
    settings = ["--shortlist.frequent=4", "--shortlist.candidates=5"]
    assert main(["shortlist", str(folder / "my.yaml"), *settings]) == 0
    said = capsys.readouterr().out
    assert f"{len(lines):,}" in said and str(model / FILE) in said
    content = json.loads((model / FILE).read_text(encoding="utf-8"))
    assert len(content["frequent"]) == 4 and "</s>" in content["frequent"]
    assert content["translations"] and max(map(len, content["translations"].values())) <= 5
    assert not {word for row in content["translations"].values() for word in row} & set(content["frequent"])
    # Fewer pairs are spread over the text.
    assert main(["shortlist", str(folder / "my.yaml"), *settings, "--shortlist.max_pairs=3"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("3 ")
    assert json.loads((model / FILE).read_text(encoding="utf-8")) != content
    assert main(["shortlist", str(folder / "my.yaml"), *settings, "--data.streaming=true"]) == 0
    assert json.loads((model / FILE).read_text(encoding="utf-8")) == content


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_translations_have_the_entries_of_the_shortlist(run, capsys, engine) -> None:
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
    folder, lines = run
    model = folder / "run" / "model"
    (folder / "in.txt").write_text(f"{lines[0]}\n", encoding="utf-8")
    command = ["translate", "--model", str(model), "--num-beams=1", f"--engine={engine}", str(folder / "in.txt")]

    def translated(*options: str) -> str:
        assert main([*command, *options]) == 0
        return capsys.readouterr().out

    whole = translated().split()
    # Whatever the file says is searched; a converted model follows it.
    words, tokenizer = lines[0].split(), load_tokenizer(str(model))
    other, another = [word for line in lines for word in line.split() if word not in (*words, *whole)][:2]
    for word in (other, another):
        (token,), (first,) = map(tokenizer.tokenize, (word, words[0]))
        (model / FILE).write_text(json.dumps({"frequent": ["</s>"], "translations": {first: [token]}}))
        found = translated("--shortlist").split()
        assert found and set(found) <= {word, *words}
    assert translated().split() == whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task=causal_lm"], "a shortlist is for models that translate"),
        (["--run_dir=nowhere"], "nowhere has no model yet: train the recipe first, or name its run by --run_dir"),
        (["--data.train_files=nowhere.tsv"], "nowhere.tsv"),
        (["--shortlist.candidates=0"], "shortlist.candidates must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(run, capsys, options, words) -> None:
    folder, _ = run
    assert main(["shortlist", str(folder / "my.yaml"), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert words.lower() in error.lower()
    assert not (folder / "run" / "model" / FILE).exists()


def test_text_without_pairs_is_said(run, capsys) -> None:
    folder, _ = run
    for text in ("en\tde\n", "en\tde\n\tleer\n", f"en\tde\n{'a ' * 600}\tb\n"):
        (folder / "pairs.tsv").write_text(text)
        assert main(["shortlist", str(folder / "my.yaml")]) == 2
        assert "no pairs" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def command(run) -> list[str]:
    """A command that translates a line greedily with the model of the run."""
    folder, _ = run
    (folder / "in.txt").write_text("a\n")
    return ["translate", "--model", str(folder / "run" / "model"), "--num-beams=1", str(folder / "in.txt")]


def test_models_without_a_shortlist_are_refused(command, capsys) -> None:
    assert main([*command, "--shortlist"]) == 2
    assert "has no shortlist.json: hf-vaswani shortlist writes it" in capsys.readouterr().err


def test_a_damaged_shortlist_stops_nobody_who_does_without(run, command, capsys) -> None:
    pytest.importorskip("ctranslate2")
    (run[0] / "run" / "model" / FILE).write_text("{")
    assert main([*command, "--engine=ctranslate2"]) == 0
    assert main([*command, "--engine=ctranslate2", "--shortlist"]) == 2
    assert "is no shortlist, or it is damaged" in capsys.readouterr().err


def test_entries_with_spaces_are_no_shortlist_of_ctranslate2(run, command, capsys) -> None:
    pytest.importorskip("ctranslate2")
    # Its words begin with spaces.
    save_random(run[0] / "run" / "model")
    assert main(["shortlist", str(run[0] / "my.yaml")]) == 0
    assert main([*command, "--engine=ctranslate2", "--shortlist"]) == 2
    assert "CTranslate2 cannot translate with the shortlist, because an entry has a space" in capsys.readouterr().err
    assert main([*command, "--engine=auto", "--shortlist"]) == 0


def test_a_pipeline_s_call_without_the_shortlist(run) -> None:
    pytest.importorskip("ctranslate2")
    folder, lines = run
    model = str(folder / "run" / "model")
    assert main(["shortlist", str(folder / "my.yaml"), "--shortlist.frequent=2", "--shortlist.candidates=1"]) == 0
    options = {"model": model, "engine": "ctranslate2", "num_beams": 1}
    whole, pipe = pipeline("translation", **options), pipeline("translation", shortlist=True, **options)
    assert pipe(lines) != whole(lines)
    assert pipe(lines, shortlist=None) == whole(lines)
