"""The files of a table, and the shards that they are cut into."""

import csv
import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from ..files import FORMATS, split_revision

# Rows that are read, sorted by length, translated and written together.
BLOCK = 8192
# The types of the columns are those of so many rows of JSON.
ROWS_OF_SCHEMA = 10_000
# A cell of CSV may be as long as a document.
MAX_CELL = 2**31 - 1

# Python has fewer dates than Parquet, which does not check that text is UTF-8 either.
UNKNOWN_TO_PYTHON = (OverflowError, ValueError)

# Rows of JSON or CSV. One that cannot be read is its text and the reason.
Rows = list[dict[str, Any] | tuple[str, str]]


@dataclass(frozen=True)
class Source:
    """
    One file of a table.

    Attributes:
        url (`str`): its path or URL.
        size (`int`): in bytes.
        digest (`str`): SHA-256 of a local file; for others, the key by which their file system tells versions apart.
    """

    url: str
    size: int
    digest: str

    @property
    def kind(self) -> str:
        """`"parquet"`, `"jsonl"`, `"csv"` or `"tsv"`."""
        return FORMATS[suffix_of(self.url)]

    @property
    def is_compressed(self) -> bool:
        """True for a .gz file."""
        return _name_of(self.url).endswith(".gz")

    def open(self) -> Any:
        """Opens the bytes of the file."""
        fs, path = open_url(self.url)
        return fs.open(path, "rb")


@dataclass(frozen=True)
class Shard:
    """
    Consecutive rows of a file.

    Attributes:
        source (`int`): number of the file.
        start (`int`): where they begin: a row of Parquet, a byte of JSON or CSV.
        first (`int`): number of the first row, counted from 1.
        rows (`int`, *optional*): number of rows; `None` for the whole of a compressed file.
    """

    source: int
    start: int
    first: int
    rows: int | None


@dataclass(frozen=True)
class Block:
    """
    Rows of a shard.

    Attributes:
        first (`int`): number of the first row in its file, counted from 1.
        rows (`pyarrow.RecordBatch` or `list`): the rows, of Parquet or of JSON and CSV.
    """

    first: int
    rows: pa.RecordBatch | Rows

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        """Returns the values of a column; `None` where a row has none or cannot be read."""
        if isinstance(self.rows, pa.RecordBatch):
            column = self.rows.column(name)
            try:
                return list(column.to_pylist())
            except UnicodeDecodeError:
                return list(map(_text, column))
        return [row.get(name) if isinstance(row, dict) else None for row in self.rows]

    def row(self, place: int) -> Any:
        """Returns a row as a dictionary; one that cannot be read, as it is written."""
        if isinstance(self.rows, pa.RecordBatch):
            return self.rows.slice(place, 1).to_pylist()[0]
        row = self.rows[place]
        return row if isinstance(row, dict) else row[0]

    def shown(self, place: int) -> Any:
        """Returns a row for people, with a note in place of a value that Python does not have."""
        if not isinstance(self.rows, pa.RecordBatch):
            return self.row(place)
        found = {}
        for column in self.rows.schema.names:
            try:
                found[column] = self.rows.column(column)[place].as_py()
            except UNKNOWN_TO_PYTHON as error:
                found[column] = f"cannot be shown: {error}"
        return found

    def reason(self, place: int) -> str | None:
        """Returns why a row cannot be read, or `None`."""
        row = None if isinstance(self.rows, pa.RecordBatch) else self.rows[place]
        return row[1] if isinstance(row, tuple) else None


def _text(cell: Any) -> str | bytes | None:
    """Returns a cell of text, or its bytes where they are not UTF-8."""
    try:
        return cast("str | None", cell.as_py())
    except UnicodeDecodeError:
        text = cell.value if isinstance(cell, pa.DictionaryScalar) else cell
        return cast(bytes, text.as_buffer().to_pybytes())


def suffix_of(url: str) -> str:
    """Returns the end of a file's name that tells its format, before `.gz`."""
    return Path(_name_of(url).removesuffix(".gz")).suffix.lower()


def _name_of(url: str) -> str:
    """Returns a path or a URL without its query."""
    return url.partition("?")[0] if "://" in url else url


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


# ---- Files -------------------------------------------------------------------------------------------------------


def find_files(table: str, config: str | None = None, split: str = "train") -> list[str]:
    """
    Finds the files of a table.

    Args:
        table (`str`): a file, a folder, a URL of either, which may have `*`, or the id of a dataset on the Hub.
        config (`str`, *optional*), split (`str`): configuration and split of a dataset on the Hub.

    Returns:
        `list[str]`: their paths or URLs, sorted by name.

    Raises:
        ValueError: there is no such table, or its files have no known format or several.
    """
    if not table:
        raise ValueError("--table is empty: name a file, a folder, a URL or a dataset.")
    is_url = "://" in table
    if not is_url and not os.path.exists(table) and "*" not in table:
        return _checked(_files_on_hub(table, config, split), table)
    for option, is_given in (("--table-config", config is not None), ("--table-split", split != "train")):
        if is_given:
            raise ValueError(f"{option} is for datasets on the Hub, but --table is {table}.")
    fs, path = open_url(table)
    try:
        if "*" in path:
            found = fs.glob(path)
        elif fs.isdir(path):
            found = [each for each in fs.find(path) if not _is_hidden(each[len(path) :])]
        else:
            found = [path] if fs.exists(path) else []
    except (OSError, ValueError) as error:
        raise ValueError(f"--table {table} cannot be read: {error}") from error
    return _checked(sorted(fs.unstrip_protocol(each) if is_url else each for each in found), table)


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _checked(files: list[str], table: str) -> list[str]:
    known = [file for file in files if suffix_of(file) in FORMATS]
    expected = f"{', '.join(FORMATS)}, all but the last also with .gz"
    if not known:
        why = f"has no file with a known extension ({expected})" if files else "does not exist, or is empty"
        raise ValueError(f"--table {table} {why}.")
    kinds = {FORMATS[suffix_of(file)] for file in known}
    if len(kinds) > 1:
        raise ValueError(f"--table {table} has files of several formats ({', '.join(sorted(kinds))}): name one by *.")
    for file in known:
        if _name_of(file).endswith(".parquet.gz"):
            raise ValueError(f"{file} is compressed twice, because Parquet is compressed already: unpack it.")
    return known


def _files_on_hub(name: str, config: str | None, split: str) -> list[str]:
    """Returns the URLs of the files of a dataset on the Hub, of the revision that it names, or its latest commit."""
    repository, revision = split_revision(name)
    if not name or Path(name).is_absolute() or len(Path(repository).parts) > 2:
        raise ValueError(f"--table {name} does not exist; a dataset on the Hub has an id such as user/name.")
    import datasets

    try:
        found = datasets.load_dataset_builder(repository, config, revision=revision).config.data_files
    # `datasets` raises errors of any class, some of many lines.
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"--table {name} is neither a local path nor a dataset that can be read: {said}") from error
    if not found or split not in found:
        raise ValueError(f"--table-split {split} is not among the splits of {name}: {', '.join(found or ['none'])}.")
    return sorted(map(str, found[split]))


def describe(url: str) -> Source:
    """
    Returns size and digest of a file.

    Raises:
        ValueError: it cannot be read.
    """
    fs, path = open_url(url)
    try:
        if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return Source(url, file.tell(), f"SHA-256 {digest}")
        return Source(url, int(fs.size(path) or 0), f"{fs.ukey(path)}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{url} cannot be read: {error}") from error


# ---- Shards ------------------------------------------------------------------------------------------------------


def cut(sources: list[Source], rows: int, column: str, added: Sequence[str]) -> list[Shard]:
    """
    Cuts files into shards.

    Args:
        sources (`list[Source]`): the files.
        rows (`int`): most rows of a shard.
        column (`str`), added (`Sequence[str]`): column that every file must have, and columns that none may have.

    Returns:
        `list[Shard]`: the shards, in the order of the text. A compressed file is one shard, because it can be read
        from its beginning only.

    Raises:
        ValueError: a file is damaged, or lacks the column, or has one of those that are added.
    """
    found = []
    for number, source in enumerate(sources):
        _check_columns(source, column, added)
        if source.is_compressed:
            found.append(Shard(number, 0, 1, None))
            continue
        for start, first, count in _parts(source, rows):
            found.append(Shard(number, start, first, count))
    return found


def _check_columns(source: Source, column: str, added: Sequence[str]) -> None:
    names = _names(source)
    if names is None:
        return
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{source.url} has the column {twice[0]!r} twice: rename one.")
    if column not in names:
        raise ValueError(f"{source.url} has no column {column!r}; it has {', '.join(map(repr, names))}.")
    if source.kind == "parquet":
        kind = schema_of([source]).field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise ValueError(f"{source.url}: the column {column!r} must be text, but it is {kind}.")
    for name in added:
        if name in names:
            raise ValueError(f"{source.url} has a column {name!r} already: choose another --to-column.")


def _names(source: Source) -> list[str] | None:
    """Returns the names of the columns, by the first row of JSON; `None` for a file without rows."""
    if source.kind == "parquet":
        return list(schema_of([source]).names)
    if source.kind == "jsonl":
        for row in next(iter(_blocks(source, Shard(0, 0, 1, None), 1)), Block(1, [])).rows:
            if isinstance(row, tuple):
                raise ValueError(f"{source.url}, line 1, {row[1]}: each line must be one JSON object.")
            return list(row)
        return None
    with _lines(source, 0) as lines:
        return next(_cells(source, lines), None)


@contextmanager
def _parquet(source: Source) -> Iterator[pq.ParquetFile]:
    with source.open() as opened:
        try:
            file = pq.ParquetFile(opened)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{source.url} cannot be read as Parquet: {error}") from error
        yield file


def _parts(source: Source, most: int) -> Iterator[tuple[int, int, int]]:
    """Yields start, first row and number of rows of the parts of a file."""
    if source.kind == "parquet":
        with _parquet(source) as file:
            total = file.metadata.num_rows
        yield from ((start, start + 1, min(most, total - start)) for start in range(0, total, most))
        return
    with _lines(source, 0) as lines:
        rows: Iterator[Any] = _not_blank(lines)
        if source.kind != "jsonl":
            rows = _cells(source, lines)
            next(rows, None)
        start, first, place, count = lines.place, 1, lines.place, 0
        for _ in rows:
            if count == most:
                yield start, first, count
                start, first, count = place, first + count, 0
            count, place = count + 1, lines.place
        if count:
            yield start, first, count


class _Lines:
    """The lines of a file, decoded; `place` is the number of bytes that were read."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        self.file, self.place = file, start

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self.file.readline()
        if not line:
            raise StopIteration
        at_start, self.place = self.place == 0, self.place + len(line)
        if at_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
        # Bytes that are not UTF-8 become surrogates, which mark the row as unreadable.
        return line.decode("utf-8", errors="surrogateescape")


def _lines(source: Source, start: int) -> _Lines:
    file = source.open()
    if source.is_compressed:
        file = gzip.GzipFile(fileobj=file)
    elif start:
        file.seek(start)
    return _Lines(file, start)


def _not_blank(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.strip())


def _cells(source: Source, lines: Iterable[str]) -> Iterator[list[str]]:
    """Yields the cells of the rows of CSV, whose quoted cells may have line ends, or of TSV."""
    if source.kind == "tsv":
        # A line of white space is a row, an empty one is not.
        texts = (line.rstrip("\r\n") for line in lines)
        yield from (text.split("\t") for text in texts if text)
        return
    csv.field_size_limit(MAX_CELL)
    rows = csv.reader(lines, strict=True)
    try:
        for row in rows:
            # An empty line is no row.
            if row:
                yield row
    except csv.Error as error:
        raise ValueError(f"{source.url}, line {rows.line_num}, cannot be read as CSV: {error}.") from error


# ---- Rows --------------------------------------------------------------------------------------------------------


def blocks(source: Source, shard: Shard) -> Iterator[Block]:
    """
    Reads the rows of a shard.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        yield from _blocks(source, shard, BLOCK)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise ValueError(f"{source.url} cannot be read: {error}") from error


def _blocks(source: Source, shard: Shard, size: int) -> Iterator[Block]:
    if source.kind == "parquet":
        for first, batch in _batches(source, shard.start, shard.start + (shard.rows or 0), size):
            yield Block(first + 1, batch)
        return
    # A later part of CSV has no names.
    names = _names(source) if shard.start else None
    with _lines(source, shard.start) as lines:
        rows = islice(_rows(source, lines, names), shard.rows)
        first = shard.first
        while found := list(islice(rows, size)):
            yield Block(first, found)
            first += len(found)


def _batches(source: Source, start: int, stop: int, size: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields rows of Parquet from `start` to `stop`, counted from 0, from the row groups that have them."""
    with _parquet(source) as file:
        group_start, groups, before = 0, [], 0
        for number in range(file.num_row_groups):
            count = file.metadata.row_group(number).num_rows
            if group_start + count <= start:
                before = group_start + count
            elif group_start < stop:
                groups.append(number)
            group_start += count
        place = before
        for batch in file.iter_batches(batch_size=size, row_groups=groups):
            low, high = max(start - place, 0), min(stop - place, len(batch))
            if low < high:
                yield place + low, batch.slice(low, high - low)
            place += len(batch)
            if place >= stop:
                return


def _rows(source: Source, lines: _Lines, names: list[str] | None) -> Iterator[dict[str, Any] | tuple[str, str]]:
    if source.kind == "jsonl":
        yield from map(_json_row, _not_blank(lines))
        return
    names = names or next(_cells(source, lines), [])
    for cells in _cells(source, lines):
        if len(cells) != len(names):
            yield "\t".join(cells), f"has {len(cells)} cells, but there are {len(names)} columns"
        else:
            row = dict(zip(names, cells, strict=True))
            yield row if _is_text("".join(cells)) else (repr(cells), "is not UTF-8")


def _json_row(line: str) -> dict[str, Any] | tuple[str, str]:
    line = line.rstrip("\r\n")
    if not _is_text(line):
        return repr(line), "is not UTF-8"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return line, f"is not JSON: {error}"
    if not isinstance(row, dict):
        return line, "is not a JSON object"
    return row if _is_text(json.dumps(row, ensure_ascii=False)) else (line, "has an unpaired UTF-16 surrogate")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def schema_of(sources: Sequence[Source]) -> pa.Schema:
    """
    Returns the types of the columns of files: of JSON, those of the first rows; of CSV, text.

    Raises:
        ValueError: rows of JSON have values of different types in a column.
    """
    source = sources[0]
    if source.kind == "parquet":
        with _parquet(source) as file:
            return file.schema_arrow
    if source.kind != "jsonl":
        return pa.schema([(name, pa.string()) for name in _names(source) or []])
    beginning, rows = Shard(0, 0, 1, ROWS_OF_SCHEMA), list[dict[str, Any]]()
    for source in sources:
        rows = [row for block in _blocks(source, beginning, BLOCK) for row in block.rows if isinstance(row, dict)]
        if rows:
            break
    fields = []
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            kind = pa.array([row.get(name) for row in rows]).type
        except (pa.ArrowException, OverflowError) as error:
            raise ValueError(
                f"The values of {name!r} in {source.url} have no common type for Parquet ({error}): use --format "
                "jsonl."
            ) from error
        # A column without values may have text later.
        fields.append(pa.field(name, pa.string() if kind == pa.null() else kind))
    return pa.schema(fields)
