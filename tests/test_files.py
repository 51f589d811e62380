"""Nothing is half-written, and what is replaced is lost to no failure."""

from pathlib import Path

import pytest

from hf_vaswani.files import atomic_folder, atomic_write_text, read_json, temporary_name


def test_a_folder_appears_whole_or_not_at_all(tmp_path) -> None:
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


def test_other_errors_come_through_and_leave_nothing(tmp_path) -> None:
    with pytest.raises(KeyError), atomic_folder(tmp_path / "new"):
        raise KeyError("a bug")
    assert not list(tmp_path.iterdir())


def test_of_many_processes_the_first_gives_the_name_and_each_says_that_the_disk_is_full(tmp_path) -> None:
    temporary = temporary_name(tmp_path / "new")
    temporary.mkdir()
    with atomic_folder(tmp_path / "new", first=False) as folder:
        assert folder == temporary
    with pytest.raises(OSError, match="new could not be written"), atomic_folder(tmp_path / "new", first=False):
        raise RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file")
    assert [path.name for path in tmp_path.iterdir()] == [temporary.name]


def test_text_is_replaced_in_one_act(tmp_path) -> None:
    atomic_write_text(tmp_path / "a.txt", "ä")
    atomic_write_text(tmp_path / "a.txt", "ö")
    assert (tmp_path / "a.txt").read_text("utf-8") == "ö"
    assert len(list(tmp_path.iterdir())) == 1


def test_text_that_cannot_be_written_leaves_the_old(tmp_path, monkeypatch) -> None:
    atomic_write_text(tmp_path / "a.txt", "old")

    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write_bytes(path, content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"a\.txt could not be written, and is as it was: .*No space"):
        atomic_write_text(tmp_path / "a.txt", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]


def test_json_that_is_no_object_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match="a.json is missing"):
        read_json(path)
    for content, what in (("{", "is not JSON"), ("[]", "must have one JSON object, but it has a list"), ("\xff", "")):
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=f"a.json {what}"):
            read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
