"""Files and folders are written completely or not at all, and readers name what they cannot read."""

import errno
import gzip
import io
import json
import os
from pathlib import Path

import pytest

from hf_vaswani.files import (
    INSTALLED,
    append_line,
    atomic_folder,
    atomic_lines,
    atomic_write_text,
    check_weights,
    decode_lines,
    digest,
    find_damage,
    read_json,
    read_json_lines,
    read_lines,
    temporary_name,
    tsv_cell,
)


def test_a_cell_is_on_one_line_without_tabs() -> None:
    assert tsv_cell("a\t\tb\r\nc\x85d\u2028e f") == "a b c d e f"


def test_a_folder_appears_complete_or_not_at_all(tmp_path) -> None:
    with atomic_folder(tmp_path / "new") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "a").read_text() == "1"
    with (
        pytest.raises(OSError, match=r"new could not be written.*No space"),
        atomic_folder(tmp_path / "new") as folder,
    ):
        (folder / "a").write_text("2")
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "a").read_text() == "1"


def test_lines_appear_together_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "lines.tsv"
    with atomic_lines(path) as file:
        file.write("ä\tb\n")
        assert not path.exists()
        file.write("c\td\n")
    assert path.read_bytes() == "ä\tb\nc\td\n".encode()
    with pytest.raises(OSError, match="lines.tsv could not be written"), atomic_lines(path) as file:
        file.write("e\n")
        raise OSError(28, "No space left on device")
    # An error of the text that is read is not one of writing.
    for error in (ValueError("a.en, line 3"), FileNotFoundError(2, "No such file", "a.en"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, atomic_lines(path) as file:
            raise error
        assert raised.value is error
    assert path.read_bytes() == "ä\tb\nc\td\n".encode()
    assert [each.name for each in tmp_path.iterdir()] == ["lines.tsv"]


def test_an_existing_folder_is_replaced(tmp_path) -> None:
    for text in ("1", "2"):
        with atomic_folder(tmp_path / "new") as folder:
            (folder / text).write_text(text)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "2"]


def test_a_folder_that_cannot_be_replaced_is_still_there(tmp_path, monkeypatch) -> None:
    with atomic_folder(tmp_path / "new") as folder:
        (folder / "1").write_text("1")
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="could not be written"), atomic_folder(tmp_path / "new") as folder:
        (folder / "2").write_text("2")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "1"]


def test_other_errors_pass_through_and_leave_nothing(tmp_path) -> None:
    with pytest.raises(KeyError), atomic_folder(tmp_path / "new"):
        raise KeyError("a bug")
    assert not list(tmp_path.iterdir())


def test_the_main_process_renames_the_folder_and_every_process_reports_a_full_disk(tmp_path) -> None:
    temporary = temporary_name(tmp_path / "new")
    temporary.mkdir()
    with atomic_folder(tmp_path / "new", is_main_process=False) as folder:
        assert folder == temporary
    for said in ("[enforce fail at inline_container.cc:858] . Writing failed", "basic_ios::clear: iostream error"):
        with (
            pytest.raises(OSError, match="new could not be written"),
            atomic_folder(tmp_path / "new", is_main_process=False),
        ):
            raise RuntimeError(said)
    assert [path.name for path in tmp_path.iterdir()] == [temporary.name]


def test_text_is_replaced_atomically(tmp_path) -> None:
    atomic_write_text(tmp_path / "a.txt", "ä")
    atomic_write_text(tmp_path / "a.txt", "ö")
    assert (tmp_path / "a.txt").read_text("utf-8") == "ö"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_the_old_text(tmp_path, monkeypatch) -> None:
    atomic_write_text(tmp_path / "a.txt", "old")

    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write_bytes(path, content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"a\.txt could not be written, and is unchanged: .*No space"):
        atomic_write_text(tmp_path / "a.txt", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]


def test_files_and_their_names_are_on_the_disk_before_work_goes_on(tmp_path, monkeypatch) -> None:
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.add(os.fstat(descriptor).st_ino), fsync(descriptor)))
    atomic_write_text(tmp_path / "a.json", "{}")
    with atomic_lines(tmp_path / "b.txt") as file:
        file.write("b\n")
    assert {path.stat().st_ino for path in (tmp_path, *tmp_path.iterdir())} == synced
    with atomic_folder(tmp_path / "new" / "c") as folder:
        (folder / "d").mkdir()
        (folder / "d" / "e").write_text("e")
    assert {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))} == synced


def test_a_file_system_that_cannot_sync_is_written_to(tmp_path, monkeypatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    number = errno.EINVAL
    atomic_write_text(tmp_path / "a", "old")
    number = errno.EIO
    with pytest.raises(OSError, match="could not be written, and is unchanged"):
        atomic_write_text(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_json_file_without_an_object_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match="a.json is missing"):
        read_json(path)
    for content, what in (
        ("{", "is not JSON"),
        ("[]", "must contain a JSON object, but contains a list"),
        ("\xff", ""),
    ):
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=f"a.json {what}"):
            read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}


def test_files_that_differ_from_their_digests_are_found(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    digests = {name: digest(tmp_path / name) for name in ("a", "b")}
    assert digests["a"] == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert find_damage(tmp_path, digests) is None
    (tmp_path / "b").write_text("c")
    assert find_damage(tmp_path, digests).startswith(f"{tmp_path / 'b'} was changed or damaged")
    (tmp_path / "b").unlink()
    assert find_damage(tmp_path, digests) == f"{tmp_path / 'b'} is missing"


@pytest.mark.parametrize("record", ["progress.json", "../test.json"])
def test_weights_are_compared_with_the_record_of_their_training(tmp_path, record) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    (folder / record).write_text(json.dumps({"files": {weights.name: digest(weights), "other": "0"}}))
    assert check_weights(folder)
    weights.write_bytes(b"Weights")
    with pytest.raises(ValueError, match=r"model\.safetensors was changed or damaged"):
        check_weights(folder)
    (folder / record).unlink()
    assert not check_weights(folder)


def test_a_log_is_read_up_to_its_damage_and_beyond(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    assert read_json_lines(path) == ([], None)
    for step in (1, 2):
        append_line(path, json.dumps({"step": step}))
    assert read_json_lines(path) == ([{"step": 1}, {"step": 2}], None)
    with path.open("ab") as file:
        file.write(b'{"step": "3"}\n{"step": 4, "a": "\xff"}\n[]\n{"step": 5}\n{"st')
    assert read_json_lines(path) == ([{"step": 1}, {"step": 2}, {"step": 5}], 3)


def test_lines_are_decoded_or_named(tmp_path) -> None:
    text = "\ufeffone\r\ntwo\u2028\nthree".encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    for name in ("a.txt", "a.txt.gz"):
        assert list(read_lines(tmp_path / name)) == ["one\r\n", "two\u2028\n", "three"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(ValueError, match=r"a\.txt\.gz cannot be read as gz"):
        list(read_lines(tmp_path / "a.txt.gz"))
    with pytest.raises(ValueError, match="^the input, line 2, is not UTF-8: invalid start byte at byte 3.$"):
        list(decode_lines(io.BytesIO(b"a\nbc\xff\n"), "the input"))
    assert list(decode_lines(io.BytesIO(b"abc\n"), "the input", 4)) == ["abc\n"]
    with pytest.raises(ValueError, match="^the input, line 1, is longer than 3 bytes"):
        list(decode_lines(io.BytesIO(b"abc\n"), "the input", 3))


# ---- The code of a model


def test_renewed_code_is_no_damage(tmp_path) -> None:
    recorded = {}
    for name in ("modeling_vaswani.py", "older_vaswani.py", "weights"):
        (tmp_path / name).write_text("earlier")
        recorded[name] = digest(tmp_path / name)
    (tmp_path / "modeling_vaswani.py").write_bytes((INSTALLED / "modeling_vaswani.py").read_bytes())
    (tmp_path / "older_vaswani.py").unlink()
    assert find_damage(tmp_path, recorded) is None
    for name in ("older_vaswani.py", "modeling_vaswani.py"):
        (tmp_path / name).write_text("by hand")
        assert f"{name} was changed or damaged" in str(find_damage(tmp_path, recorded))
        (tmp_path / name).unlink()
    assert "modeling_vaswani.py is missing" in str(find_damage(tmp_path, recorded))
