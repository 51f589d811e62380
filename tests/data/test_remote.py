"""Text on other file systems: copied once, again when it changes, or streamed, and trained on like a local file."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from datasets import Dataset, config

from hf_vaswani.cli import main
from hf_vaswani.data import remote
from hf_vaswani.data.reading import Source, load_pairs, load_splits
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
            "nowhere://corpus/a.tsv?SECRET",
            ValueError,
            r"^nowhere://corpus/a\.tsv cannot be read: ValueError: Protocol not known[^?]*$",
        ),
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


# ---- Streams -----------------------------------------------------------------------------------------------------

ROWS = [(f"one {i}", f"eins {i}") for i in range(300)]


def content_of(kind: str, folder: Path) -> bytes:
    """Returns a file of the rows, in one of the formats."""
    table = "en\tde\n" + "".join(f"{en}\t{de}\n" for en, de in ROWS)
    if kind == "parquet":
        rows = Dataset.from_list([{"translation": {"en": en, "de": de}, "more": 1} for en, de in ROWS])
        rows.to_parquet(folder / "a", batch_size=70)
        return (folder / "a").read_bytes()
    if kind == "jsonl":
        table = "".join(json.dumps({"en": en, "de": de}) + "\n" for en, de in ROWS)
    return gzip.compress(table.encode()) if kind.endswith(".gz") else table.encode()


def copies() -> set[Path]:
    """Returns the files in the cache, without the locks."""
    return {path for path in Path(config.HF_DATASETS_CACHE).rglob("*") if path.is_file() and path.suffix != ".lock"}


def streamed(files: Any, **more: Any) -> list[tuple[str, str]]:
    return [(row["source"], row["target"]) for row in load_pairs("en", "de", train_files=files, **more)["train"]]


@pytest.mark.parametrize("kind", ["tsv", "tsv.gz", "jsonl", "parquet"])
def test_a_stream_reads_a_file_where_it_is(memory, tmp_path, monkeypatch, kind) -> None:
    memory.pipe_file(f"/corpus/{kind}/t.{kind}", content_of(kind, tmp_path))
    monkeypatch.setattr(type(memory), "get_file", lambda *_, **__: pytest.fail("It is copied."))
    before = copies()
    assert streamed(f"memory://corpus/{kind}/t.{kind}", streaming=True) == ROWS
    assert copies() == before
    monkeypatch.undo()
    assert streamed(f"memory://corpus/{kind}/t.{kind}") == ROWS
    assert copies() != before


def test_a_stream_reads_two_files_where_they_are(memory, monkeypatch) -> None:
    memory.pipe_file("/corpus/t.en", "".join(f"{en}\n" for en, _ in ROWS).encode())
    memory.pipe_file("/corpus/t.de.gz", gzip.compress("".join(f"{de}\n" for _, de in ROWS).encode()))
    monkeypatch.setattr(type(memory), "get_file", lambda *_, **__: pytest.fail("It is copied."))
    files = {"en": "memory://corpus/t.en", "de": "memory://corpus/t.de.gz"}
    assert streamed(files, streaming=True) == ROWS
    lines = load_splits(Source("en", columns={"text": "en"}, files={"train": files["en"]}), streaming=True)["train"]
    assert [row["text"] for row in lines] == [en for en, _ in ROWS]


def test_only_the_training_text_is_streamed(memory) -> None:
    memory.pipe_file("/corpus/v.tsv", b"en\tde\none\teins\n")
    found = load_pairs("en", "de", validation_files="memory://corpus/v.tsv", streaming=True)
    assert found["validation"][:] == {"source": ["one"], "target": ["eins"]}


class Unreliable(io.BytesIO):
    """A file of which a part fails to come some times in a row."""

    def __init__(self, content: bytes, failures: int, seekable: bool = True) -> None:
        super().__init__(content)
        self.middle, self.failures, self.is_seekable = len(content) // 2, failures, seekable

    def seekable(self) -> bool:
        return self.is_seekable

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() >= self.middle and self.failures:
            self.failures -= 1
            # What came of it is lost.
            super().read(7)
            raise OSError("memory://me:SECRET@corpus/t.tsv?SECRET was interrupted")
        return super().read(size)


@pytest.mark.parametrize(("failures", "seekable"), [(2, True), (3, True), (1, False)])
@pytest.mark.parametrize("kind", ["tsv", "tsv.gz", "jsonl", "parquet"])
def test_a_part_that_fails_to_come_is_asked_for_again(
    memory, tmp_path, monkeypatch, caplog, kind, failures, seekable
) -> None:
    content = content_of(kind, tmp_path)
    url = f"memory://me:SECRET@corpus/{kind}/t.{kind}"
    memory.pipe_file(f"/me:SECRET@corpus/{kind}/t.{kind}", content)

    monkeypatch.setattr(type(memory), "open", lambda *_, **__: Unreliable(content, failures, seekable))
    monkeypatch.setattr(remote, "PART", 100)
    monkeypatch.setattr(remote, "WAITS", (0, 0))
    if failures == 2:
        assert streamed(url, streaming=True) == ROWS
        assert f"memory://corpus/{kind}/t.{kind} is read again in 0 s" in caplog.text
    else:
        with pytest.raises(ValueError, match=rf"memory://corpus/{kind}/t\.{kind} cannot be read"):
            streamed(url, streaming=True)
    assert "SECRET" not in caplog.text


# What is wrong with the text at a URL, by the end of its name.
WRONG = {
    "none.tsv": None,
    "no.txt": b"",
    "empty.tsv": b"",
    "columns.tsv": b"en\tfr\none\tun\n",
    "ragged.tsv": b"en\tde\none\n",
    "latin.tsv": b"en\tde\n\xff\teins\n",
    "quoted.csv": b'en,de\n"one"x,eins\n',
    "broken.jsonl": b'{"en": "one", "de": \n',
    "list.jsonl": b"[1]\n",
    "number.jsonl": b'{"en": 1, "de": "eins"}\n',
    "half.jsonl": b'{"en": "\\ud83d", "de": "eins"}\n',
    "broken.json": b"[{]",
    "cut.tsv.gz": gzip.compress(b"en\tde\none\teins\n")[:-9],
    "plain.tsv.gz": b"en\tde\n",
    "a.parquet": b"en\tde\n",
    "twice.parquet.gz": gzip.compress(b"PAR1"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_an_error_has_the_address_and_no_secret_of_a_url(memory, caplog, name, streaming) -> None:
    content, end = WRONG[name], "" if name.endswith("parquet") else "?sig=SECRET"
    if content is not None:
        memory.pipe_file(f"/me:SECRET@corpus/{name}{end}", content)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        streamed(f"memory://me:SECRET@corpus/{name}{end}", streaming=streaming)
    # A copy is named by its place.
    assert name in str(error.value) and "SECRET" not in str(error.value) + caplog.text
    assert not streaming or f"memory://corpus/{name}" in str(error.value)


def test_two_sides_of_different_lengths_have_no_secret(memory) -> None:
    files = {side: f"memory://me:SECRET@corpus/{side}.txt?sig=SECRET" for side in ("en", "de")}
    for number, url in enumerate(files.values(), start=1):
        memory.pipe_file(url.removeprefix("memory:/"), b"one\n" * number)
    with pytest.raises(ValueError, match=r"but memory://corpus/en\.txt has 1 and memory://corpus/de\.txt has 2\."):
        streamed(files, streaming=True)


class RefusedError(Exception):
    """The answer of a server, as aiohttp says it."""

    status = 403

    def __str__(self) -> str:
        return "403, message='Forbidden', url='https://host/a.tsv?sig=SECRET'"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_server_that_refuses_is_not_one_without_the_file(memory, monkeypatch, streaming) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("https://host/a.tsv?sig=SECRET") from RefusedError()

    for name in ("info", "size"):
        monkeypatch.setattr(type(memory), name, refuse)
    with pytest.raises(ValueError, match=r"a\.tsv cannot be read: RefusedError: 403, message='Forbidden'") as error:
        streamed("memory://corpus/a.tsv?sig=SECRET", streaming=streaming)
    assert "SECRET" not in str(error.value)


def test_a_folder_is_no_text(memory) -> None:
    memory.pipe_file("/corpus/a.tsv/part", b"en\tde\n")
    with pytest.raises(ValueError, match=r"'memory://corpus/a\.tsv' is a folder, but a text file is expected"):
        streamed("memory://corpus/a.tsv", streaming=True)


@pytest.mark.parametrize("done", [1, 69, 70, 71, 150, 299])
@pytest.mark.parametrize("kind", ["tsv.gz", "jsonl", "parquet"])
def test_a_stream_goes_on_at_any_row(memory, tmp_path, kind, done) -> None:
    memory.pipe_file(f"/corpus/t.{kind}", content_of(kind, tmp_path))
    first, again = (load_pairs("en", "de", train_files=f"memory://corpus/t.{kind}", streaming=True) for _ in range(2))
    begun = iter(first["train"])
    assert [tuple(next(begun).values()) for _ in range(done)] == ROWS[:done]
    again["train"].load_state_dict(first["train"].state_dict())
    assert [tuple(row.values()) for row in again["train"]] == ROWS[done:]
