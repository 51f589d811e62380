"""Files: written whole or not at all, with their digests; lines and JSON read with one kind of error."""

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
    """Where a file or folder is written before it gets its name: beside it, so that renaming cannot fail halfway."""
    return path.with_name(f".{path.name}.writing")


@contextmanager
def atomic_folder(folder: Path, first: bool = True) -> Iterator[Path]:
    """
    A folder that appears under its name only when everything in it is on disk, in the place of an earlier one.

    Args:
        folder (`Path`): the name it gets.
        first (`bool`): whether this is the process that makes it and gives it its name. Others only write into it, and
            wait for the first one before and after that.

    Yields:
        `Path`: the temporary folder beside it to write into; removed again if writing fails.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    try:
        if first:
            with _renamed_at_the_end(folder) as temporary:
                yield temporary
        else:
            yield temporary_name(folder)
    except Exception as error:
        # safetensors and torch report a full disk as errors of their own, in words of their own.
        if isinstance(error, OSError) or re.search("os error|file write failed|inline_container", str(error)):
            raise OSError(f"{folder} could not be written, and nothing of it is left: {error}") from error
        raise


@contextmanager
def _renamed_at_the_end(folder: Path) -> Iterator[Path]:
    temporary, old = temporary_name(folder), folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        # Killed between the two renamings below: this is the only one there is until the new one is written.
        old.rename(folder)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    # The folders that are made on the way, the innermost first.
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            for parent in parents:
                parent.rmdir()
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """Replaces a text file in one act; arguments and errors as those of [`atomic_write_bytes`]."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """
    Replaces a file in one act: a reader sees the old one or the new one.

    Args:
        path (`Path`): the file.
        content (`bytes`): all of it.

    Raises:
        OSError: the disk is full, or cannot be written; names the file, which is as it was.
    """
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"{path} could not be written, and is as it was: {error}") from error
        raise


def append_line(path: Path, line: str) -> None:
    """
    Adds a line to a text file.

    Raises:
        OSError: the disk is full, or cannot be written; names the file.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(folder: Path, digests: Mapping[str, str]) -> str | None:
    """
    Compares the files of a folder with what was noted when they were written.

    Args:
        folder (`Path`): where they are.
        digests (`Mapping[str, str]`): SHA-256 by the name of the file; other files do not matter.

    Returns:
        `str`: the first file that is not as it was, and what is wrong with it, as the beginning of a sentence. `None`
        if all are.
    """
    for name, sha256 in digests.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if digest(path) != sha256:
            return f"{path} was changed or damaged (its SHA-256 is not the one noted when it was written)"
    return None


def check_weights(folder: Path) -> None:
    """
    Compares `model.safetensors` with the digest that its training has noted: in `progress.json` of a checkpoint, or in
    the `test.json` beside the `model` of a run. Of any other model nothing is known.

    Args:
        folder (`Path`): what `from_pretrained` is about to load.

    Raises:
        ValueError: the weights are not those that were written, or the record of a checkpoint is damaged.
    """
    weights = "model.safetensors"
    digests: dict[str, str] = {}
    if (folder / "progress.json").is_file():
        noted = read_sealed(folder / "progress.json")
        digests = noted.get("files", {}) | noted.get("state", {})
    elif folder.name == "model" and (folder.parent / "test.json").is_file():
        # A result that is damaged says nothing of the weights, and the training's command makes it again.
        with suppress(ValueError):
            digests = read_sealed(folder.parent / "test.json").get("files", {})
    damage = find_damage(folder, {weights: digests[weights]} if weights in digests else {})
    if damage is not None:
        raise ValueError(f"{damage}.")


SEAL = "digest"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Adds the digest of a JSON object to it, under `digest`; [`read_sealed`] compares it."""
    return content | {SEAL: _digest_of_content(content)}


def _digest_of_content(content: dict[str, Any]) -> str:
    # Written and read again, as it will be when the digest is compared.
    plain = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


def read_sealed(path: Path) -> dict[str, Any]:
    """
    A JSON file that [`sealed`] made, or an earlier version without a digest.

    Raises:
        ValueError: it is not there, has no object, or is not as it was written.
    """
    content = read_json(path)
    noted = content.pop(SEAL, None)
    if noted is not None and noted != _digest_of_content(content):
        raise ValueError(f"{path} was changed or damaged: its content does not have the digest noted in it.")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """
    A JSON file that has one object.

    Raises:
        ValueError: it is not there, or has something else.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    # JSON that is nested too deep is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have one JSON object, but it has a {type(content).__name__}.")
    return content


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int | None]:
    """
    A file with a JSON object on each line, which may have been cut short or damaged.

    Returns:
        The objects that have a whole number as `step`, and the number of the first line without such an object.
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
    Reads the lines of a text file, with their ends; one whose name ends in .gz is decompressed.

    Args:
        path (`Path`): the file.
        most_bytes (`int`): longest line that is read; -1 for any.

    Raises:
        ValueError: as in [`decode_lines`], or the file is not compressed as its name says.
    """
    with cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from decode_lines(file, str(path), most_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} cannot be read as gz: {error}") from error


def decode_lines(file: IO[bytes], name: str, most_bytes: int = -1) -> Iterator[str]:
    """
    Decodes the lines of an open file, with their ends and without a byte order mark.

    Args:
        file (`IO[bytes]`): what is read.
        name (`str`): what errors call it.
        most_bytes (`int`): longest line that is read; -1 for any.

    Raises:
        ValueError: a line is not UTF-8 or too long; the message has its number.
    """
    number = 0
    while line := file.readline(most_bytes):
        number += 1
        if len(line) == most_bytes and not line.endswith(b"\n"):
            raise ValueError(f"{name}, line {number}, is longer than {most_bytes:,} bytes: is it a text?")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}, is not UTF-8: {error.reason} at byte {error.start + 1}."
            ) from error
