"""A translator without a model, and tables for it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hf_vaswani.scale.manifest import Manifest, Settings
from hf_vaswani.scale.shards import cut, describe
from hf_vaswani.scale.worker import TextTranslator


def upper(lines: list[str]) -> list[list[tuple[float, str]]]:
    """Translates into capitals, with a second best in small letters; fails at the word `poison`."""
    if any("poison" in line for line in lines):
        raise RuntimeError("no kernel for\nthis")
    return [[(-0.123456, line.upper()), (-2.0, line.lower())] for line in lines]


def load() -> TextTranslator:
    return TextTranslator(upper)


def settings(**values) -> Settings:
    plain = {"column": "en", "to_column": "de", "format": "jsonl", "shard_rows": 4, "max_characters": 50}
    return Settings(**(plain | {"translation": {}} | values))


def manifest(path: Path, **values) -> Manifest:
    sources, of_table = [describe(str(path))], settings(**values)
    return Manifest(sources, of_table, cut(sources, of_table.shard_rows, of_table.column, of_table.added))


def write_rows(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_output(folder: Path) -> list[dict]:
    """Returns the rows of all files of translations, in order."""
    found = []
    for path in sorted((folder / "data").iterdir()):
        if path.suffix == ".parquet":
            found += pq.read_table(path).to_pylist()
        else:
            found += [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    return found


def read_rejected(folder: Path) -> list[dict]:
    paths = sorted((folder / "rejected").iterdir()) if (folder / "rejected").is_dir() else []
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").split("\n")[:-1]]
