"""hf-vaswani translate: one line in, one line out."""

import io
import sys

import pytest
from transformers import pipeline

from hf_vaswani.cli import main


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
    from hf_vaswani import evaluation

    seen = []

    def spy(model, tokenizer, sentences):
        seen.append((list(sentences), model.generation_config.num_beams))
        return ["two\nlines" for _ in sentences]

    monkeypatch.setattr(evaluation, "translate_corpus", spy)
    text = b"\xef\xbb\xbfone\ntwo\n"
    _, out, _ = translate(monkeypatch, capsys, text, "--model", str(tiny_run / "model"), "--num-beams", "3")
    assert seen == [(["one", "two"], 3)]
    assert out == "two lines\ntwo lines\n"


def test_bad_input_is_one_sentence_and_exit_code_2(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    model = str(tiny_run / "model")
    code, out, err = translate(monkeypatch, capsys, b"one\ntwo\xff\n", "--model", model)
    assert (code, out) == (2, "")
    assert "Line 2 of the input is not UTF-8" in err
    code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", str(tmp_path))
    assert code == 2
    assert f"The folder {tmp_path} has no tokenizer" in err
    for name, words in ((str(tiny_run), "its model is"), ("nowhere", "no model folder 'nowhere'")):
        code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", name)
        assert code == 2
        assert words in err
    code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", model, "--num-beams", "0")
    assert (code, "--num-beams" in err) == (2, True)
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2
