"""hf-vaswani convert, as far as it is not the conversion itself."""

from pathlib import Path

import huggingface_hub
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


def test_a_source_on_the_hub_is_downloaded_where_no_folder_has_its_name(
    converted, tmp_path, monkeypatch, capsys
) -> None:
    asked = []

    def download(repo_id, revision, ignore_patterns):
        asked.append((repo_id, revision))
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "user/name", "new", "--to", "marian"]) == 0
    (tmp_path / "user" / "name").mkdir(parents=True)
    for source in ("user/name", str(tmp_path / "absolute"), "one", "one/two/three"):
        assert main(["convert", source, "new", "--to", "marian"]) == 0
    assert asked == [("user/name", None)]
    sources = [tmp_path / "cache", Path("user/name"), tmp_path / "absolute", Path("one"), Path("one/two/three")]
    assert [arguments[0] for arguments in converted] == sources
    for arguments in (["user/other@v2"], ["user/other", "--revision", "v2"]):
        assert main(["convert", *arguments, "new", "--to", "marian"]) == 0
    assert asked[1:] == [("user/other", "v2")] * 2


def test_a_sentence_that_is_no_text_is_refused(converted, tmp_path, capsys) -> None:
    assert main(["convert", str(tmp_path), "new", "--to", "onnx", "--sentence", "\udcff"]) == 2
    assert "--sentence is not UTF-8: '\\udcff'" in capsys.readouterr().err and not converted
