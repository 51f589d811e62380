"""hf-vaswani convert, as far as it is not the conversion itself."""

from pathlib import Path

import pytest

from hf_vaswani.cli import main
from hf_vaswani.conversion import convert as conversion


@pytest.fixture
def converted(monkeypatch):
    """What `convert` is called with, which then returns two lines."""
    seen = []
    monkeypatch.setattr(conversion, "convert", lambda *arguments: seen.append(arguments) or ["one", "two"])
    return seen


def test_options_become_arguments(converted, tmp_path, capsys) -> None:
    assert main(["convert", str(tmp_path), "new", "--to", "onnx"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nModel     new\n"
    options = ["--quantization", "int8", "--force", "--sentence", "Hello."]
    assert main(["convert", str(tmp_path), "new", "--to", "ctranslate2", *options]) == 0
    assert converted == [
        (tmp_path, Path("new"), "onnx", None, False, conversion.SENTENCE),
        (tmp_path, Path("new"), "ctranslate2", "int8", True, "Hello."),
    ]


def test_a_sentence_that_is_no_text_is_refused(converted, tmp_path, capsys) -> None:
    assert main(["convert", str(tmp_path), "new", "--to", "onnx", "--sentence", "\udcff"]) == 2
    assert "--sentence is not UTF-8: '\\udcff'" in capsys.readouterr().err and not converted
