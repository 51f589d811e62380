"""A folder on a local disk or on any file system of fsspec, whose files appear whole or not at all."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ..files import put_in_place, temporary_name

# End of the name of a file on another file system until it is whole.
WRITING = ".writing"


class Folder:
    """
    A folder to write results to.

    Args:
        url (`str`): a local path, or a URL that fsspec knows, such as `s3://bucket/folder`.

    Attributes:
        local (`Path`, *optional*): the folder, if it is on a local disk.

    Raises:
        ValueError: fsspec does not know the protocol, or needs a package for it that is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.path = open_url(url)
        self.local = Path(self.path) if isinstance(self.fs, LocalFileSystem) else None

    def at(self, name: str) -> str:
        """Returns the path of a file on the file system of the folder."""
        return f"{self.path.rstrip('/')}/{name}"

    def sizes(self, part: str = "") -> dict[str, int]:
        """Returns the sizes in bytes of the finished files in the folder, or in one of its parts, by name."""
        path = self.at(part) if part else self.path
        # A listing that was kept would hide what other machines have written since.
        self.fs.invalidate_cache()
        if not self.fs.isdir(path):
            return {}
        found = {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry for entry in self.fs.ls(path, detail=True)}
        finished = (name for name in found if not (name.startswith(".") or name.endswith(WRITING)))
        return {name: int(found[name]["size"] or 0) for name in finished}

    def size(self, name: str) -> int:
        """Returns the size of a file in bytes."""
        return int(self.fs.size(self.at(name)))

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        if self.fs.exists(self.at(name)):
            self.fs.rm_file(self.at(name))

    def read_json(self, name: str) -> Any:
        """
        Reads a JSON file.

        Raises:
            ValueError: it is not JSON.
        """
        try:
            return json.loads(self.fs.cat_file(self.at(name)))
        except ValueError as error:
            raise ValueError(f"{self.at(name)} is damaged: {error}.") from error

    def read_all(self, part: str) -> dict[str, bytes]:
        """Returns the contents of the finished files in a part of the folder, by name."""
        paths = [self.at(f"{part}/{name}") for name in self.sizes(part)]
        # Together, because each takes a round trip.
        found = self.fs.cat(paths) if paths else {}
        return {path.rpartition("/")[2]: content for path, content in found.items()}

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file."""
        with self.writing(name) as file:
            file.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """
        Writes a file that appears under its name when it is complete.

        Args:
            name (`str`): its name in the folder.

        Yields:
            `Path`: a local file to write, which is moved or uploaded afterwards. If writing fails, it is removed.
        """
        if self.local is None:
            with tempfile.TemporaryDirectory() as temporary:
                file = Path(temporary) / "file"
                yield file
                final = self.at(name)
                self.fs.makedirs(final.rsplit("/", 1)[0], exist_ok=True)
                # Some file systems show an upload while it is going on.
                self.fs.put_file(str(file), final + WRITING)
                self.fs.mv(final + WRITING, final)
            return
        path = Path(self.at(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary_name(path)
        try:
            yield file
            put_in_place(file, path)
        finally:
            file.unlink(missing_ok=True)


def open_url(url: str) -> tuple[Any, str]:
    """
    Returns the file system of a path or URL, and the path on it.

    Raises:
        ValueError: fsspec does not know the protocol, or needs a package for it that is not installed.
    """
    try:
        fs, path = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{url} cannot be reached: {error}") from error
    return fs, path
