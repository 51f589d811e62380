"""The record of a translated table: what is translated, how, and which shards are done."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..records import from_json, public, to_json
from .shards import Shard, Source
from .storage import Folder

MANIFEST, SUMMARY = "manifest.json", "summary.json"
# Folders of the results.
DATA, REJECTED, RECORDS = "data", "rejected", "shards"


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
            try:
                record = from_json(ShardRecord, json.loads(content))
            except ValueError as error:
                raise ValueError(
                    f"{folder.at(name)} is damaged ({error}): delete it, and its shard is done anew."
                ) from error
            rows = self.shards[number].rows
            if rows is not None and record.rows != rows:
                raise ValueError(
                    f"{folder.at(name)} is damaged (rows is {record.rows}, but the shard has {rows}): delete it, and "
                    "its shard is done anew."
                )
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
        ValueError: it was not; names the first difference.
    """
    begun, now = _flat(to_json(before.settings)), _flat(to_json(settings))
    begun["number of files"], now["number of files"] = len(before.sources), len(sources)
    for old, new in zip(before.sources, sources, strict=False):
        # A file may have been moved; its text counts.
        begun[f"digest of {new.url}"], now[f"digest of {new.url}"] = old.digest, new.digest
        # Some file systems have no digest that depends on the text.
        begun[f"size of {new.url}"], now[f"size of {new.url}"] = old.size, new.size
    # Settings of a beam that one search lacks follow from its size, which is named first.
    for key in sorted(begun | now, key=lambda key: None in (begun.get(key), now.get(key))):
        if begun.get(key) != now.get(key):
            raise ValueError(
                f"--output {folder.url} was begun with another {key} ({begun.get(key)}, now {now.get(key)}): give the "
                "same table, models and options, or name another folder."
            )


def _flat(content: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Returns nested settings by names such as `search.num_beams`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= _flat(value, f"{key}.") if isinstance(value, dict) else {front + key: value}
    return found
