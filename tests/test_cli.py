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
    assert lines[0]
    assert lines[2]


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


def test_bad_input_is_one_sentence_and_exit_code_2(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    model = str(tiny_run / "model")
    code, out, err = translate(monkeypatch, capsys, b"one\ntwo\xff\n", "--model", model)
    assert (code, out) == (2, "")
    assert "Line 2 of the input is not UTF-8" in err
    code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", str(tmp_path))
    assert code == 2
    assert f"The folder {tmp_path} has no tokenizer" in err
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2
