"""Text on other file systems: a copy on this machine, made once for each version of a file."""

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from ..recipe import Files
from ..records import public, public_text

try:
    from datasets import config
    from fsspec.core import url_to_fs
except ImportError as error:
    raise ImportError(f"Reading text needs {error.name}: pip install 'hf_vaswani[train]'") from error

URL = re.compile(r"\w[\w+.-]*(::|://)")


def local_files(files: Files) -> Files:
    """Returns the files of a split with local copies in place of URLs."""
    if isinstance(files, dict):
        return {side: local_copy(name) for side, name in files.items()}
    return None if files is None else local_copy(files)


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
    if not URL.match(str(name)):
        return name
    try:
        fs, path = url_to_fs(name)
        version = hashlib.sha256(f"{name}\n{fs.size(path)}\n{_version(fs, path)}".encode()).hexdigest()
        folder = Path(config.HF_DATASETS_CACHE) / "hf_vaswani" / version[:32]
        file = folder / PurePosixPath(path.partition("?")[0]).name
        folder.mkdir(parents=True, exist_ok=True)
        # The processes of a training ask at the same time.
        with FileLock(folder / ".lock"):
            if not file.is_file():
                fs.get_file(path, str(folder / ".writing"))
                os.replace(folder / ".writing", file)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {public(name)!r}.") from error
    # Each file system has error classes of its own.
    except Exception as error:
        said = public_text(f"{type(error).__name__}: {error}")
        raise ValueError(f"{public(name)} cannot be read: {said}") from error
    return str(file)


def _version(fs: Any, path: str) -> str:
    """Returns what changes when a file changes: its digest or time, as far as the file system has one."""
    info = fs.info(path)
    return str([info.get(key) for key in ("ETag", "etag", "md5", "sha256", "LastModified", "mtime", "created")])
