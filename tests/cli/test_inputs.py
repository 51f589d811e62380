"""Models, target languages and lines of text, as several verbs read them."""

import gzip
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

from hf_vaswani.cli import inputs, main
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.translation import lines as translation
from hf_vaswani.translation import quantization

from .conftest import translate


def test_a_target_language_prepends_its_tag(tiny_run, monkeypatch, capsys) -> None:
    seen = []
    monkeypatch.setattr(translation, "translate_corpus", lambda model, tokenizer, lines: seen.extend(lines) or lines)
    arguments = ["--model", str(tiny_run / "model"), "--target-language", "de"]
    # A bilingual model needs no tag.
    code, _, error = translate(monkeypatch, capsys, b"one\n", *arguments[:3], "fr")
    assert (code, seen) == (2, []) and "The model translates into de, but --target-language is 'fr'" in error
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
    assert code == 2 and "standard input, line 2, has no target language tag" in error and "<2de>" in error


def test_models_with_different_vocabularies_are_refused(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    model, other = str(tiny_run / "model"), tmp_path / "other"
    text = b"one two three\nnine\n"
    _, expected, _ = translate(monkeypatch, capsys, text, "--model", model)
    code, out, _ = translate(monkeypatch, capsys, text, "--model", model, "--model", model)
    assert (code, out) == (0, expected)
    AutoModelForSeq2SeqLM.from_pretrained(model).save_pretrained(other)
    train_tokenizer(["other words"], 280).save_pretrained(other)  # fewer entries than the embedding has rows
    code, out, error = translate(monkeypatch, capsys, text, "--model", model, "--model", str(other))
    assert (code, out) == (2, "") and f"{model} and {other} have different vocabularies" in error


def test_int8_quantizes_the_model(tiny_run, monkeypatch, capsys) -> None:
    seen = []
    monkeypatch.setattr(quantization, "to_int8", lambda model: seen.append(model) or model)
    arguments = ("--model", str(tiny_run / "model"))
    code, out, _ = translate(monkeypatch, capsys, b"one two\n", *arguments, "--int8")
    assert code == 0 and len(seen) == 1
    assert out == translate(monkeypatch, capsys, b"one two\n", *arguments)[1]


def test_greedy_search_warns_about_nothing(tiny_run, monkeypatch, capsys, caplog) -> None:
    transformers_logging.enable_propagation()
    try:
        code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", str(tiny_run / "model"), "--num-beams", "1")
    finally:
        transformers_logging.disable_propagation()
    assert code == 0 and "length_penalty" not in err + caplog.text


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


def test_a_line_without_end_is_refused(tiny_run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(inputs, "LONGEST_LINE", 2**20)
    assert main(["translate", "/dev/zero", "--model", str(tiny_run / "model")]) == 2
    assert "/dev/zero, line 1, is longer than 1,048,576 bytes" in capsys.readouterr().err


def test_tags_are_prepended_or_expected() -> None:
    lines = ["one", "", " \t", "<2de> two"]
    for tag, expected in (("", lines), ("<2de>", ["<2de> one", "", " \t", "<2de> two"])):
        assert list(inputs.Translators([], None, tag, ()).tagged(lines, "file")) == expected
    tagged = inputs.Translators([], None, "", ("<2de>", "<2fr>")).tagged(["<2fr> one", "", "two"], "file")
    assert [next(tagged), next(tagged)] == ["<2fr> one", ""]
    with pytest.raises(ValueError, match="file, line 3, has no target language tag: .*one of <2de>, <2fr>"):
        next(tagged)


def test_a_model_computes_with_the_processors_of_the_process(tiny_run, monkeypatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for processors, expected in ((4, 3), (2, 2)):
            monkeypatch.setattr("hf_vaswani.processes.processors", lambda found=processors: found)
            inputs.load_models([str(tiny_run / "model")], None)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
