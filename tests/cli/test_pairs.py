"""hf-vaswani score and align: log-probabilities and links of given translations."""

import json

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani import alignments
from hf_vaswani.cli import main
from hf_vaswani.translation.alignment import choose_alignment
from hf_vaswani.translation.loading import load_translator

from ..conversion.test_ctranslate2 import random_sentences, save_random
from .conftest import SOURCES, TARGETS, as_pharaoh


@pytest.mark.parametrize("method", ["argmax", "intersection"])
def test_links_are_those_of_the_layer_that_training_chose(tiny_run, files, capsys, method) -> None:
    model, tokenizer = load_translator(tiny_run / "model")
    settings = json.loads((tiny_run / "model" / "config.json").read_text("utf-8"))
    assert settings["alignment_layer"] == 0
    assert main(["align", "--model", str(tiny_run / "model"), "--method", method, *files]) == 0
    expected = alignments(model, tokenizer, SOURCES, TARGETS, layer=0, shift=settings["alignment_shift"])
    assert capsys.readouterr().out.split("\n") == [*(as_pharaoh(each, method) for each in expected), ""]


def test_json_lines_have_words_and_probabilities(tiny_run, files, capsys) -> None:
    model, tokenizer = load_translator(tiny_run / "model")
    for options, unit in (([], "words"), (["--pieces"], "pieces")):
        assert main(["align", "--model", str(tiny_run / "model"), "--format=jsonl", *options, *files]) == 0
        entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for number, (entry, each) in enumerate(
            zip(entries, alignments(model, tokenizer, SOURCES, TARGETS, unit=unit), strict=True), 1
        ):
            assert (entry["line"], entry["source"], entry["target"]) == (number, each.source, each.target)
            assert [tuple(link[:2]) for link in entry["links"]] == each.links()
            for i, j, attention in entry["links"]:
                assert attention == pytest.approx(float(each.probabilities[j, i]), abs=1e-3)


def test_without_a_layer_in_the_config_one_is_chosen_by_the_text(tmp_path, caplog, capsys) -> None:
    save_random(tmp_path / "model", decoder_layers=3)
    lines = random_sentences(30)
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    model, tokenizer = load_translator(tmp_path / "model")
    assert model.config.alignment_layer is None
    command = ["align", "--model", str(tmp_path / "model"), str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(command) == 0
    chosen = capsys.readouterr().out
    layer, shift = choose_alignment(model, tokenizer, lines, lines)
    again = [f"--layer={layer}", *(["--shift"] if shift else [])]
    assert " ".join(again).replace("=", " ") in caplog.text
    assert main([*command, *again]) == 0
    assert capsys.readouterr().out == chosen


def scores(capsys, tmp_path, model: str, sources: list[str], targets: list[str]) -> tuple[int, str, str]:
    for name, lines in (("source.txt", sources), ("target.txt", targets)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    code = main(["score", "--model", model, str(tmp_path / "source.txt"), str(tmp_path / "target.txt")])
    return code, *capsys.readouterr()


def test_scores_are_those_of_beam_search(tiny_run, tmp_path, capsys) -> None:
    """Compares with transformers' search, constrained to the given translation."""
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
