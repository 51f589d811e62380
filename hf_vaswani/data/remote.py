"""Text on other file systems: a copy on this machine, made once for each version of a file, or read where it is."""

import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from filelock import FileLock

from ..extras import extra
from ..files import lines_of, read_lines
from ..records import public, public_text

with extra("train"):
    from datasets import config
    from fsspec.core import url_to_fs

logger = logging.getLogger(__name__)

# The files of a split: one, or two by what they are for.
Files = dict[str, str] | str | None

URL = re.compile(r"\w[\w+.-]*(::|://)")
# Waits in seconds before a part of a file is asked for again: a stream is read for days.
WAITS = (1, 4, 16, 64)
# Bytes that are asked for at once.
PART = 2**20


def is_url(name: str | Path) -> bool:
    """Returns whether a name is a URL of fsspec, and not a local path."""
    return URL.match(str(name)) is not None


def file_name(name: str | Path) -> str:
    """Returns the name of a file without its folder, and without the query of a URL."""
    if not is_url(name):
        return Path(name).name
    # A chain of file systems has several, as in zip://train.en::s3://bucket/corpus.zip.
    url = next((part for part in str(name).split("::") if "://" in part), str(name))
    return PurePosixPath(url.partition("?")[0]).name


def local_files(files: Files, streaming: bool = False) -> Files:
    """Returns the files of a split with local copies in place of URLs; with `streaming`, as they are."""
    if streaming or files is None:
        return files
    if isinstance(files, dict):
        return {side: local_copy(name) for side, name in files.items()}
    return local_copy(files)


def local_copy(name: str) -> str:
    """
    Copies a file from another file system to the cache of `datasets`, unless this version of it is there.

    Args:
        name (`str`): a URL of fsspec, such as `s3://bucket/train.en.gz`; or a local path, which stays what it is.

    Returns:
        `str`: the local path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or a package for its file system is missing.
    """
    if not is_url(name):
        return name
    with _named_errors(name):
        fs, path = url_to_fs(name)
        version = hashlib.sha256(f"{name}\n{fs.size(path)}\n{_version(fs, path)}".encode()).hexdigest()
        folder = Path(config.HF_DATASETS_CACHE) / "hf_vaswani" / version[:32]
        file = folder / file_name(name)
        folder.mkdir(parents=True, exist_ok=True)
        # The processes of a training ask at the same time.
        with FileLock(folder / ".lock"):
            if not file.is_file():
                fs.get_file(path, str(folder / ".writing"))
                os.replace(folder / ".writing", file)
    return str(file)


def remote_size(url: str) -> int | None:
    """
    Returns the size of a file on another file system in bytes, or `None` if its file system does not say.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, or it cannot be read.
    """
    with _named_errors(url):
        fs, path = url_to_fs(url)
        info = fs.info(path)
    if info["type"] != "file":
        raise ValueError(f"{public(url)!r} is a folder, but a text file is expected: name one of its files.")
    return None if info.get("size") is None else int(info["size"])


@contextmanager
def opened(url: str) -> Iterator[IO[bytes]]:
    """
    Opens a file on another file system, to read it without a copy. A part of it that fails to come is asked for again.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read.
    """
    with _named_errors(url):
        fs, path = url_to_fs(url)
        file = fs.open(path, "rb")
    with file, io.BufferedReader(_Parts(file, url), PART) as parts:
        yield parts


def text_lines(name: str) -> Iterator[str]:
    """Reads the lines of a local file, or of a URL without a copy; see [`read_lines`]."""
    if not is_url(name):
        yield from read_lines(Path(name))
        return
    with opened(name) as file:
        yield from lines_of(file, public(name), file_name(name).endswith(".gz"))


class _Parts(io.RawIOBase):
    """The bytes of an open file, each part asked for again if it fails to come, unless it comes as a whole only."""

    def __init__(self, file: Any, url: str) -> None:
        self.file, self.url = file, url

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True if another place of the file can be asked for."""
        return bool(self.file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to another place."""
        return int(self.file.seek(offset, whence))

    def tell(self) -> int:
        """Returns the place of the next part."""
        return int(self.file.tell())

    def readinto(self, buffer: Any) -> int:
        """Reads the next part; 0 at the end."""
        place = self.file.tell() if self.seekable() else None
        for wait in (*(WAITS if self.seekable() else ()), None):
            try:
                part = self.file.read(len(buffer))
                break
            # Each file system has error classes of its own.
            except Exception as error:
                said = public_text(f"{type(error).__name__}: {error}")
                if wait is None:
                    raise ValueError(f"{public(self.url)} cannot be read: {said}") from error
                logger.warning(f"{public(self.url)} is read again in {wait} s: {said}")
                time.sleep(wait)
                self.file.seek(place)
        buffer[: len(part)] = part
        return len(part)


@contextmanager
def _named_errors(url: str) -> Iterator[None]:
    try:
        yield
    # Each file system has error classes of its own.
    except Exception as error:
        cause = error
        if isinstance(error, FileNotFoundError):
            # fsspec's HTTP client raises this error whatever the server answers.
            if getattr(error.__cause__, "status", 404) == 404:
                raise FileNotFoundError(f"There is no file {public(url)!r}.") from error
            cause = cast(Exception, error.__cause__)
        said = public_text(f"{type(cause).__name__}: {cause}")
        raise ValueError(f"{public(url)} cannot be read: {said}") from error


def _version(fs: Any, path: str) -> str:
    """Returns what changes when a file changes: its digest or time, as far as the file system has one."""
    info = fs.info(path)
    return str([info.get(key) for key in ("ETag", "etag", "md5", "sha256", "LastModified", "mtime", "created")])
