"""The folder of a translated table, on any file system, and its record: what is translated, how, and what is done."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ..files import replacing
from ..records import from_json, public, to_json
from ..translation.growing_file import different_settings
from .shards import Shard, Source, open_url

MANIFEST, SUMMARY = "manifest.json", "summary.json"
# Folders of the results.
DATA, REJECTED, RECORDS = "data", "rejected", "shards"
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
        with replacing(path) as file:
            yield file


@dataclass(frozen=True)
class Settings:
    """
    How a table is translated.

    Attributes:
        column (`str`), to_column (`str`): columns of the text and of its translation.
        format (`str`): `"parquet"` or `"jsonl"`.
        shard_rows (`int`): most rows of a shard.
        max_characters (`int`): longest text that is translated.
        translation (`dict[str, Any]`): digests of the models, their search, and all that changes what they write.
        score (`bool`): whether there is a column with the score.
        n_best (`int`, *optional*): translations in the column of n-best lists, if there is one.
    """

    column: str
    to_column: str
    format: str
    shard_rows: int
    max_characters: int
    translation: dict[str, Any]
    score: bool = False
    n_best: int | None = None

    @property
    def added(self) -> list[str]:
        """Names of the columns that are added to the table."""
        name = self.to_column
        scores = [f"{name}_score"] if self.score else []
        return [name, *scores, *([f"{name}_n_best", f"{name}_n_best_scores"] if self.n_best else [])]


@dataclass(frozen=True)
class ShardRecord:
    """
    A shard that is done.

    Attributes:
        rows (`int`): rows that were read.
        rejected (`dict[str, int]`): rows that have no translation, by reason.
        split (`int`): texts that were longer than the model accepts, and translated in pieces.
        seconds (`float`): time that it took.
        bytes (`int`): size of the file with the translations.
    """

    rows: int
    rejected: dict[str, int]
    split: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """
    A table and its shards.

    Attributes:
        sources (`list` of [`Source`]): its files.
        settings ([`Settings`]): how it is translated.
        shards (`list` of [`Shard`]): its shards, in the order of the text.
    """

    sources: list[Source]
    settings: Settings
    shards: list[Shard]

    def data_file(self, number: int) -> str:
        """Returns the name of the file with the translations of a shard."""
        return f"{DATA}/part-{number:05}.{self.settings.format}"

    def rejected_file(self, number: int) -> str:
        """Returns the name of the file with the rows of a shard that could not be translated."""
        return f"{REJECTED}/part-{number:05}.jsonl"

    def record_file(self, number: int) -> str:
        """Returns the name of the record of a shard."""
        return f"{RECORDS}/{number:05}.json"

    def records(self, folder: Folder) -> dict[int, ShardRecord]:
        """
        Reads the records of the shards that are done: whose file is there, too, as it was written.

        Raises:
            ValueError: a record is damaged.
        """
        contents, sizes, rejected = folder.read_all(RECORDS), folder.sizes(DATA), folder.sizes(REJECTED)
        found = {}
        for number in range(len(self.shards)):
            name = self.record_file(number)
            content = contents.get(name.rpartition("/")[2])
            if content is None:
                continue
            rows = self.shards[number].rows
            try:
                record = from_json(ShardRecord, json.loads(content))
                if rows not in (None, record.rows):
                    raise ValueError(f"rows is {record.rows}, but the shard has {rows}")
            except ValueError as error:
                raise ValueError(
                    f"{folder.at(name)} is damaged ({error}): delete it, and its shard is done anew."
                ) from error
            is_there = not record.rejected or self.rejected_file(number).rpartition("/")[2] in rejected
            if is_there and sizes.get(self.data_file(number).rpartition("/")[2]) == record.bytes:
                found[number] = record
        return found

    def summary(self, records: Iterable[ShardRecord]) -> dict[str, Any]:
        """Adds up the records of shards."""
        records = list(records)
        rejected: Counter[str] = Counter()
        for record in records:
            rejected.update(record.rejected)
        rows = sum(record.rows for record in records)
        return {
            "rows": rows,
            "translated": rows - sum(rejected.values()),
            "rejected": dict(sorted(rejected.items())),
            "split": sum(record.split for record in records),
            "shards": len(records),
            "seconds": round(sum(record.seconds for record in records), 3),
        }


def read_manifest(folder: Folder) -> Manifest | None:
    """
    Reads the manifest of a folder; returns `None` if the folder is empty.

    Raises:
        ValueError: the folder has other files, or the manifest is damaged.
    """
    names = folder.sizes()
    if MANIFEST not in names:
        if names:
            raise ValueError(
                f"--output {folder.url} has files, but no {MANIFEST} of a translated table: name a new folder."
            )
        return None
    content = folder.read_json(MANIFEST)
    try:
        return from_json(Manifest, content)
    except ValueError as error:
        raise ValueError(f"{folder.at(MANIFEST)} is damaged: {error}.") from error


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Writes the manifest of a folder, without the secrets of URLs: the same command names them again."""
    folder.write_json(MANIFEST, to_json(replace(manifest, sources=public(manifest.sources))))


def check_same(folder: Folder, before: Manifest, sources: list[Source], settings: Settings) -> None:
    """
    Checks that a folder was begun with the same table, models and settings.

    Raises:
        ValueError: it was not; names the differences.
    """
    begun, now = (
        {"number of files": len(table)} | to_json(each)
        for table, each in ((before.sources, before.settings), (sources, settings))
    )
    for old, new in zip(before.sources, sources, strict=False):
        # A file may have been moved; its text counts. Some file systems have no digest that depends on the text.
        for key in ("digest", "size"):
            begun[f"{key} of {new.url}"], now[f"{key} of {new.url}"] = getattr(old, key), getattr(new, key)
    if changes := different_settings(begun, now):
        raise ValueError(
            f"--output {folder.url} was begun with other settings: {changes}. Give the same table, models and "
            "options, or name another folder."
        )
