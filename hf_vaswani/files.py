"""Files: written whole or not at all, with their digests; lines and JSON read with one kind of error."""

import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast


def temporary_name(path: Path) -> Path:
    """Where a file or folder is written before it gets its name: beside it, so that renaming cannot fail halfway."""
    return path.with_name(f".{path.name}.writing")


@contextmanager
def written_whole(folder: Path, first: bool = True) -> Iterator[Path]:
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


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one act: a reader sees the old one or the new one."""
    temporary = temporary_name(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    # What is nested too deep is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have one JSON object, but it has a {type(content).__name__}.")
    return content


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
