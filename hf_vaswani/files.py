"""Atomic writes, digests, and readers of lines and JSON whose errors name the file."""

import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast


def temporary_name(path: Path) -> Path:
    """Returns the path beside `path` under which it is written before it is renamed, on the same file system."""
    return path.with_name(f".{path.name}.writing")


# Errors of file systems that cannot wait for what is asked.
CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk, if the file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        # A folder that may be written and not read; on Windows, any folder.
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path, is_main_process: bool = True) -> Iterator[Path]:
    """
    Writes a folder that appears under its name only when everything in it is on disk, and replaces an earlier one.

    Args:
        folder (`Path`): the final name.
        is_main_process (`bool`): whether this process creates and renames the folder. The other processes only write
            into it, and wait for the main process before and after that.

    Yields:
        `Path`: the temporary folder to write into. It is removed if writing fails.

    Raises:
        OSError: writing fails, for example because the disk is full.
    """
    try:
        if is_main_process:
            with _renamed_at_the_end(folder) as temporary:
                yield temporary
        else:
            yield temporary_name(folder)
    except Exception as error:
        # safetensors and torch report a full disk by error classes and messages of their own.
        if isinstance(error, OSError) or re.search("os error|file write failed|inline_container|iostream", str(error)):
            raise OSError(f"{folder} could not be written, and was removed: {error}") from error
        raise


@contextmanager
def _renamed_at_the_end(folder: Path) -> Iterator[Path]:
    temporary, old = temporary_name(folder), folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        # A process was killed between the two renamings below: this is the only copy until the new one is written.
        old.rename(folder)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    # Parent folders that are created on the way, innermost first.
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file() or path.is_dir():
                sync(path)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        for parent in (folder, *parents):
            sync(parent.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            for parent in parents:
                parent.rmdir()
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Gives a file that was written under another name its own, both safe from a power failure."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    Replaces a file by one that is written under a temporary name.

    Args:
        path (`Path`): the final name.

    Yields:
        `Path`: the temporary name. What is there is removed if writing fails.

    Raises:
        OSError: writing fails, for example because the disk is full; the file is unchanged.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        put_in_place(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # An error that the caller raises itself has no errno, or the name of another file.
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            raise OSError(f"{path} could not be written, and is unchanged: {error}") from error
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """Replaces a text file atomically, in UTF-8; see [`atomic_write_bytes`]."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """
    Replaces a file atomically: readers see either the old or the new content.

    Args:
        path (`Path`): the file.
        content (`bytes`): its whole content.

    Raises:
        OSError: writing fails, for example because the disk is full; the file is unchanged.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def atomic_lines(path: Path) -> Iterator[IO[str]]:
    """
    Writes a text file of any size that appears under its name only when it is complete.

    Args:
        path (`Path`): the final name.

    Yields:
        `IO[str]`: the open file, in UTF-8. It is removed if writing fails.

    Raises:
        OSError: writing fails, for example because the disk is full.
    """
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        yield file


def append_line(path: Path, line: str) -> None:
    """
    Appends a line to a text file.

    Raises:
        OSError: writing fails, for example because the disk is full.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def tsv_cell(text: str) -> str:
    """Returns a text that fits in a cell of a TSV file: on one line, without tabs."""
    return re.sub(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+", " ", text)


def split_revision(name: str) -> tuple[str, str | None]:
    """
    Splits `user/name@revision` into the id on the Hub and the branch, tag or commit.

    Args:
        name (`str`): id with or without a revision; or a local path, which has none.

    Raises:
        ValueError: there is nothing on a side of the `@`.
    """
    if "@" not in name or os.path.exists(name):
        return name, None
    repository, _, revision = name.partition("@")
    if not repository or not revision:
        raise ValueError(f"There is no {name!r}: a revision follows a Hub id, as in user/name@v2.")
    return repository, revision


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(folder: Path, digests: Mapping[str, str]) -> str | None:
    """
    Compares the files of a folder with the digests recorded when they were written.

    Args:
        folder (`Path`): the folder.
        digests (`Mapping[str, str]`): SHA-256 by file name. Other files are not checked. Code that was renewed
            since is intact.

    Returns:
        `str`, *optional*: the first file that differs and how, as the beginning of a sentence; `None` if no file does.
    """
    for name, sha256 in digests.items():
        path = folder / name
        if is_renewed(path):
            continue
        if not path.is_file():
            return f"{path} is missing"
        if digest(path) != sha256:
            return f"{path} was changed or damaged (its SHA-256 is not the one recorded when it was written)"
    return None


# Weights of a checkpoint that are those of its model, where there are some.
MOVING_AVERAGE = "ema.safetensors"


def check_weights(folder: Path) -> bool:
    """
    Compares `model.safetensors`, or the moving average of a checkpoint, with the digest that its training recorded: in
    the `progress.json` of a checkpoint, or in the `test.json` beside the `model` folder of a run.

    Args:
        folder (`Path`): the folder that `from_pretrained` is about to load.

    Returns:
        `bool`: whether there is such a record, and the weights are those that the training wrote.

    Raises:
        ValueError: the weights differ from those that were written, or the record of the checkpoint is damaged.
    """
    digests: dict[str, str] = {}
    if (folder / "progress.json").is_file():
        noted = read_json(folder / "progress.json")
        digests = noted.get("files", {}) | noted.get("state", {})
    elif folder.name == "model" and (folder.parent / "test.json").is_file():
        # A damaged result says nothing about the weights, and the training command writes it again.
        with suppress(ValueError):
            digests = read_json(folder.parent / "test.json").get("files", {})
    weights = MOVING_AVERAGE if MOVING_AVERAGE in digests else "model.safetensors"
    damage = find_damage(folder, {weights: digests[weights]} if weights in digests else {})
    if damage is not None:
        raise ValueError(f"{damage}.")
    return weights in digests


def read_json(path: Path) -> dict[str, Any]:
    """
    Reads a JSON file that contains one object.

    Raises:
        ValueError: the file is missing, is not JSON, or contains something else.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    # Python raises a RecursionError if the JSON is nested too deeply.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object, but contains a {type(content).__name__}.")
    return content


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int | None]:
    """
    Reads a log with one JSON object per line, which may be truncated or damaged. A missing file is an empty log.

    Returns:
        `tuple`: the objects whose `step` is an integer (`list[dict[str, Any]]`), and the number of the first line
        without such an object (`int`), or `None`.
    """
    found: list[dict[str, Any]] = []
    first_damaged = None
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict) and type(content.get("step")) is int and "\ufffd" not in line:
            found.append(content)
        else:
            first_damaged = first_damaged or number
    return found, first_damaged


def read_lines(path: Path, most_bytes: int = -1) -> Iterator[str]:
    """
    Reads the lines of a UTF-8 text file, with their line endings. Files whose name ends in `.gz` are decompressed.

    Args:
        path (`Path`): the file.
        most_bytes (`int`): the longest line to accept, in bytes; -1 for no limit.

    Raises:
        ValueError: as in [`decode_lines`], or the compressed file is damaged.
    """
    with path.open("rb") as file:
        yield from lines_of(file, str(path), path.suffix == ".gz", most_bytes)


def lines_of(file: IO[bytes], name: str, is_compressed: bool, most_bytes: int = -1) -> Iterator[str]:
    """Reads the lines of an open file as [`read_lines`] does; `is_compressed` says whether it is a .gz file."""
    try:
        yield from decode_lines(
            cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_compressed else file, name, most_bytes
        )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name} cannot be read as gz: {error}") from error


def decode_lines(file: IO[bytes], name: str, most_bytes: int = -1) -> Iterator[str]:
    """
    Decodes the lines of an open UTF-8 file, with their line endings and without a byte order mark.

    Args:
        file (`IO[bytes]`): the file.
        name (`str`): its name in error messages.
        most_bytes (`int`): the longest line to accept, in bytes; -1 for no limit.

    Raises:
        ValueError: a line is not UTF-8, or is too long; the message has the line number.
    """
    number = 0
    while line := file.readline(most_bytes):
        number += 1
        if len(line) == most_bytes and not line.endswith(b"\n"):
            raise ValueError(f"{name}, line {number}, is longer than {most_bytes:,} bytes: is this a text file?")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}, is not UTF-8: {error.reason} at byte {error.start + 1}."
            ) from error


# Formats of rows of text, by the end of a file's name; all but Parquet also with .gz.
FORMATS = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}


# ---- The code of a model -----------------------------------------------------------------------------------------

# End of the names of the files that travel with a model, and the folder that has those of this version.
CODE = "_vaswani.py"
INSTALLED = Path(__file__).parent / "model"


def is_renewed(path: Path) -> bool:
    """Returns whether a file is code of a model, as this version has it, or absent like one that it no longer has."""
    if not path.name.endswith(CODE):
        return False
    installed = INSTALLED / path.name
    if not installed.is_file():
        return not path.exists()
    return path.is_file() and path.read_bytes() == installed.read_bytes()
