"""Text on other file systems: copied once, again when it changes, and trained on like a local file."""

import json
from pathlib import Path

import fsspec
import pytest

from hf_vaswani.cli import main
from hf_vaswani.data.reading import load_pairs
from hf_vaswani.data.remote import local_copy, local_files

from ..conftest import tiny_recipe


@pytest.fixture
def memory():
    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").store.clear()


def test_local_paths_stay(tmp_path) -> None:
    for name in ("text.en", str(tmp_path / "a:b.tsv"), "C:/text.en"):
        assert local_copy(name) == name
    assert local_files(None) is None


def test_a_file_is_copied_once_and_again_when_it_changes(memory, monkeypatch) -> None:
    memory.pipe_file("/corpus/train.tsv", b"en\tde\none\teins\n")
    url = "memory://corpus/train.tsv"
    first = local_copy(url)
    assert first.endswith("/train.tsv") and Path(first).read_bytes() == b"en\tde\none\teins\n"
    calls, get = [], memory.get_file
    monkeypatch.setattr(type(memory), "get_file", lambda self, *paths: calls.append(paths) or get(*paths))
    assert local_copy(url) == first and not calls
    memory.pipe_file("/corpus/train.tsv", b"en\tde\ntwo\tzwei\n")
    second = local_copy(url)
    assert second != first and Path(second).read_bytes() == b"en\tde\ntwo\tzwei\n" and len(calls) == 1


def test_pairs_of_a_url_are_those_of_the_file(memory, tmp_path) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"en": f"one {i}", "de": f"eins {i}"}) + "\n" for i in range(9))
    )
    memory.put_file(str(tmp_path / "t.jsonl"), "/corpus/t.jsonl")
    found = load_pairs("en", "de", train_files="memory://corpus/t.jsonl")["train"]
    assert found[:] == load_pairs("en", "de", train_files=str(tmp_path / "t.jsonl"))["train"][:]


def test_an_interrupted_copy_is_made_again(memory, monkeypatch) -> None:
    memory.pipe_file("/corpus/a.tsv", b"en\tde\none\teins\n")
    get = type(memory).get_file

    def broken(self, remote, local, **_):
        with open(local, "wb") as file:
            file.write(b"en")
        raise OSError("the connection was lost")

    monkeypatch.setattr(type(memory), "get_file", broken)
    with pytest.raises(ValueError, match=r"memory://corpus/a\.tsv cannot be read: OSError: the connection was lost"):
        local_copy("memory://corpus/a.tsv")
    monkeypatch.setattr(type(memory), "get_file", get)
    assert Path(local_copy("memory://corpus/a.tsv")).read_bytes() == b"en\tde\none\teins\n"


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("memory://corpus/none.tsv", FileNotFoundError, r"There is no file 'memory://corpus/none\.tsv'"),
        (
            "nowhere://corpus/a.tsv",
            ValueError,
            "nowhere://corpus/a.tsv cannot be read: ValueError: Protocol not known",
        ),
        ("memory://me:SECRET@corpus/a.tsv", FileNotFoundError, r"There is no file 'memory://corpus/a\.tsv'"),
        ("nowhere://corpus/a.tsv?SECRET", ValueError, r"^nowhere://corpus/a\.tsv cannot be read: [^?]*$"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_sentence(url, error, message) -> None:
    with pytest.raises(error, match=message):
        local_copy(url)


def test_a_training_on_urls_has_the_weights_of_one_on_files(memory, tmp_path, capsys) -> None:
    arguments = tiny_recipe(tmp_path, max_steps=2, save_every=2, average_last=1)
    for side in ("en", "de"):
        memory.put_file(str(tmp_path / f"text.{side}"), f"/corpus/text.{side}")
    remote = [argument.replace(str(tmp_path / "text."), "memory://corpus/text.") for argument in arguments]
    assert remote != arguments and remote[0] == arguments[0]
    for name, given in (("local", arguments), ("remote", remote)):
        assert main(["train", *given, "--run_dir", str(tmp_path / name)]) == 0, capsys.readouterr()
    files = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("local", "remote")]
    assert files[0] == files[1]
    assert "memory://corpus/text.en" in (tmp_path / "remote" / "recipe.yaml").read_text()
    capsys.readouterr()
    assert main(["train", *remote, "--run_dir", str(tmp_path / "remote")]) == 0
    assert "is complete" in capsys.readouterr().err
