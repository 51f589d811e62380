"""Folders of results: files that appear whole, on a local disk and on other file systems."""

import json

import fsspec
import pytest

from hf_vaswani.scale.storage import Folder, open_url


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    if request.param == "local":
        yield Folder(str(tmp_path / "results"))
    else:
        yield Folder("memory://results")
        fsspec.filesystem("memory").rm("/results", recursive=True)


def test_a_file_appears_when_it_is_complete(folder) -> None:
    with folder.writing("data/a.txt") as file:
        file.write_text("half")
        assert folder.sizes("data") == {}
        file.write_text("whole text")
    assert folder.sizes("data") == {"a.txt": 10} and folder.size("data/a.txt") == 10
    assert set(folder.sizes()) == {"data"}


def test_a_failure_leaves_the_earlier_file(folder) -> None:
    folder.write_json("a.json", {"text": "ü"})
    with pytest.raises(OSError, match="full"), folder.writing("a.json") as file:
        file.write_text("{")
        raise OSError("the disk is full")
    assert folder.read_json("a.json") == {"text": "ü"}
    assert set(folder.sizes()) == {"a.json"}
    folder.write_json("a.json", {"text": "new"})
    assert folder.read_json("a.json") == {"text": "new"}


def test_a_file_is_removed_once(folder) -> None:
    folder.write_json("a.json", {})
    folder.remove("a.json")
    folder.remove("a.json")
    assert folder.sizes() == {}


def test_a_damaged_file_is_named(folder) -> None:
    with folder.writing("a.json") as file:
        file.write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(ValueError, match=r"a\.json is damaged: .*delimiter"):
        folder.read_json("a.json")


def test_another_file_system_gets_a_file_under_a_name_of_its_own_first(monkeypatch) -> None:
    folder = Folder("memory://results")
    calls = []
    monkeypatch.setattr(folder.fs, "put_file", lambda local, remote: calls.append(("put", remote)))
    monkeypatch.setattr(folder.fs, "mv", lambda before, after: calls.append(("mv", before, after)))
    with folder.writing("data/a.txt") as file:
        file.write_text("text")
    assert calls == [
        ("put", "/results/data/a.txt.writing"),
        ("mv", "/results/data/a.txt.writing", "/results/data/a.txt"),
    ]


@pytest.mark.parametrize("url", ["nowhere://bucket/folder", "adl://bucket/folder"])
def test_a_protocol_that_cannot_be_used_is_one_sentence(url) -> None:
    with pytest.raises(ValueError, match=f"{url} cannot be reached: "):
        open_url(url)
