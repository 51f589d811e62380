"""Rows of text: columns of tables, JSON, Parquet and datasets, and line-aligned files; cached or streamed."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from ..extras import extra
from ..files import FORMATS, split_revision
from ..records import public, public_text
from .remote import file_name, is_url, opened, remote_size, text_lines

with extra("train"):
    import datasets
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet
    from datasets import Dataset, IterableDataset
    from datasets.exceptions import DatasetGenerationError

# Only Parquet is parsed by `datasets`. Its reader of tables takes "null" for a missing value and a missing column for
# an empty one; its reader of JSON accepts any bytes, and some of its errors name no file.
DELIMITERS = {".tsv": "\t", ".csv": ","}
JSON = tuple(suffix for suffix, name in FORMATS.items() if name == "jsonl")
KINDS = tuple(FORMATS)

# The types of text in Arrow, as `datasets` names them; it replaces a dictionary by the type of its entries.
TEXT = ("string", "large_string", "string_view")

# Longest field of a CSV file, in characters: an unclosed quotation mark makes one field of the rest of the file.
MAX_FIELD = 10_000_000
# A text may begin with one when files were concatenated.
BYTE_ORDER_MARK = "\ufeff"

SIDES = ("source", "target")
# Columns of running text: a line, and the name of its document.
LINE = ("text", "document")
# Columns that hold lists of words.
LISTS = ("words", "tags")
# The keys of a recipe that name columns, by what they hold.
KEYS = dict.fromkeys(("source", "text", "words"), "data.source_column") | {
    "target": "data.target_column",
    "document": "data.document_column",
    "pair": "data.pair_column",
    **dict.fromkeys(("label", "tags"), "data.label_column"),
}
EXPECTED = {"label": "text or a whole number, and not empty"}
CALLED = {"source": "source text", "target": "target text", "pair": "second text"}

# A column of a table: its name or, in a table without a header line, its number; by what it holds.
Columns = dict[str, int | str]

# Size and time of a file, which keep a changed one out of the cache.
Stamp = tuple[int | None, int]

# A row: text, or a list of words, by what it is.
Row = dict[str, Any]

T = TypeVar("T")


def shown(value: object) -> str:
    """Returns a value as messages show it: its `repr`, without its middle if that has more than 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:55]} ... {text[-20:]}"


def named_errors(rows: Iterable[T], names: Sequence[str]) -> Iterator[T]:
    """
    Adds file names to the errors of an iterable; those of `datasets` and pyarrow often have none.

    Args:
        rows (`Iterable`): rows of a dataset.
        names (`Sequence[str]`): their files, or their dataset.

    Yields:
        The rows.

    Raises:
        ValueError: the rows cannot be read.
    """
    try:
        yield from rows
    # Compression, the network and file formats have errors of many classes.
    except Exception as error:
        if isinstance(error, (ValueError, OSError)) and any(file_name(name) in str(error) for name in names):
            raise
        said = public_text(f"{type(error).__name__}: {error}")
        raise ValueError(f"{' and '.join(map(public, names))} cannot be read: {said}") from error


def _aligned_lines(paths: tuple[str, str], stamps: tuple[Stamp, ...], names: tuple[str, str] = SIDES) -> Iterator[Row]:
    """Pairs the lines of two files. `stamps` are their sizes and times, which keep a changed file out of the cache."""
    sides, called = [text_lines(path) for path in paths], public(paths)
    for number, (source, target) in enumerate(zip_longest(*sides), start=1):
        if source is None or target is None:
            counts = [number - 1 + (line is not None) for line in (source, target)]
            totals = [count + sum(1 for _ in side) for count, side in zip(counts, sides, strict=True)]
            raise ValueError(
                f"The two sides must have the same number of lines, but {called[0]} has {totals[0]} "
                f"and {called[1]} has {totals[1]}."
            )
        lines = zip(names, (source, target), called, strict=True)
        yield {
            name: _field(name, without_mark(line.rstrip("\r\n")), f"{file}, line {number},")
            for name, line, file in lines
        }


def without_mark(text: str) -> str:
    """Removes byte order marks from the beginning of a text."""
    return text.lstrip(BYTE_ORDER_MARK)


def aligned_files(
    files: dict[str, str], languages: tuple[str, str], streaming: bool, names: tuple[str, str] = SIDES
) -> Dataset | IterableDataset:
    """Reads two files whose lines belong together, by what they are for: `languages`; `names` are the columns."""
    if sorted(map(str, files)) != sorted(languages):
        raise ValueError(
            f"Line-aligned files are given for {' and '.join(sorted(map(str, files)))}, "
            f"but {'the languages are' if names == SIDES else 'are expected for'} {languages[0]} and {languages[1]}."
        )
    found = [place_of(files[language]) for language in languages]
    # Tuples, because `datasets` treats a list as shards, which it may read in parallel.
    arguments: dict[str, Any] = {
        "paths": tuple(path for path, _ in found),
        "stamps": tuple(stamp for _, stamp in found),
    }
    # Sentence pairs keep the place that they have in the cache of earlier versions.
    return generated(_aligned_lines, arguments | ({} if names == SIDES else {"names": names}), streaming, names)


def place_of(name: str | Path) -> tuple[str, Stamp]:
    """
    Looks for a file.

    Args:
        name (`str` or `Path`): a path, or a URL of fsspec.

    Returns:
        `tuple`: its absolute path or its URL, and its size and time. A URL has no time, because it is never cached.

    Raises:
        ValueError, FileNotFoundError: it is no file.
    """
    if is_url(name):
        return str(name), (remote_size(str(name)), 0)
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, but a text file is expected: name one of its files.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is a device or a pipe, but a text file is expected.")
    stat = path.stat()
    return str(path.resolve()), (stat.st_size, stat.st_mtime_ns)


def text_features(names: Iterable[str]) -> datasets.Features:
    """Returns the features of columns of text, by what they hold."""
    text = datasets.Value("string")
    return datasets.Features({name: datasets.List(text) if name in LISTS else text for name in names})


def generated(
    generator: Callable[..., Iterator[Row]],
    arguments: dict[str, Any],
    streaming: bool,
    names: Iterable[str] = SIDES,
) -> Dataset | IterableDataset:
    """Makes a dataset of the rows of a generator, cached on disk or streamed."""
    features = text_features(names)
    if streaming:
        return IterableDataset.from_generator(generator, features=features, gen_kwargs=arguments)
    if next(generator(**arguments), None) is None:
        # The error of `datasets` about a generator without rows names no file.
        return Dataset.from_dict({name: [] for name in features}, features=features)
    try:
        return Dataset.from_generator(generator, features=features, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None
        raise


def suffix_of(name: str | Path) -> str:
    """Returns the extension that tells the format of a file, before `.gz`."""
    return Path(file_name(name).removesuffix(".gz")).suffix.lower()


def column_file(
    name: str | Path, languages: tuple[str, str] | None, columns: Columns, streaming: bool
) -> Dataset | IterableDataset:
    """
    Reads columns of a file.

    Args:
        name (`str` or `Path`): a file of one of the `KINDS`; with `streaming`, also the URL of one.
        languages (`tuple[str, str]`, *optional*): keys of the two sides in a `translation`.
        columns (`Columns`): the columns by what they hold, whose names they get.
        streaming (`bool`): whether to read the rows on demand.

    Returns:
        `Dataset` with these columns.

    Raises:
        ValueError: the file cannot be read, or lacks a column or value.
        FileNotFoundError: it does not exist.
    """
    suffix, called = suffix_of(name), public(str(name))
    if suffix not in KINDS:
        raise ValueError(
            f"{called} has an unknown extension: give one of {', '.join(KINDS)} (all but the last also with .gz), or "
            "two line-aligned files as {en: FILE, de: FILE}."
        )
    path, stamp = place_of(name)
    if stamp[0] == 0:
        raise ValueError(f"{called} is empty.")
    arguments = {"path": path, "columns": columns, "stamp": stamp}
    if suffix in DELIMITERS:
        _check_different(columns, called)
        return generated(_table_rows, arguments | {"delimiter": DELIMITERS[suffix]}, streaming, columns)
    if suffix in JSON:
        return generated(_json_rows, arguments | {"languages": languages}, streaming, columns)
    if file_name(name).endswith(".gz"):
        raise ValueError(f"{called} is compressed twice, because Parquet is compressed already: unpack it.")
    try:
        # The error of `datasets` about a file that is not Parquet has several lines.
        with opened(path) if is_url(path) else open(path, "rb") as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            known, groups = parquet.schema_arrow.names, list(range(parquet.num_row_groups))
        # `datasets` would not ask again for a part of what is elsewhere.
        rows = None
        if not is_url(path) or not groups:
            rows = datasets.load_dataset("parquet", data_files=str(name), split="train", streaming=streaming)
    # The readers of `datasets` have many error classes; to the user, this file is wrong.
    except Exception as error:
        raise ValueError(
            f"{called} cannot be read as Parquet: {public_text(str(error.__cause__ or error))}"
        ) from error
    if rows is not None:
        return text_columns(rows, languages, columns, called)
    _names(known, languages, columns, called)
    # A list is one of shards: a stream that goes on begins with the row group that it had reached.
    return generated(_parquet_rows, arguments | {"languages": languages, "groups": groups}, streaming, columns)


def _parquet_rows(
    path: str, columns: Columns, languages: tuple[str, str] | None, groups: list[int], stamp: Stamp
) -> Iterator[Row]:
    """Reads columns of some row groups. `stamp` is as in [`_table_rows`]."""
    called = public(path)
    with opened(path) as file:
        parquet = pyarrow.parquet.ParquetFile(file)
        names = _names(parquet.schema_arrow.names, languages, columns, called)
        wanted = ["translation"] if _is_nested(parquet.schema_arrow.names, names) else list(names.values())
        for group in groups:
            first = 1 + sum(parquet.metadata.row_group(before).num_rows for before in range(group))
            batches = parquet.iter_batches(1000, row_groups=[group], columns=wanted)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=first):
                yield _text_fields(row, names, f"{called}: row {number}")


def _json_rows(path: str, columns: Columns, languages: tuple[str, str] | None, stamp: Stamp) -> Iterator[Row]:
    """Reads keys of JSON objects. `stamp` is as in [`_table_rows`]."""
    names: dict[str, str] = {}
    called = public(path)
    for where, row in _json_objects(path):
        if not isinstance(row, dict):
            raise ValueError(f"{called}, {where}, is not a JSON object like {{...}}.")
        names = names or _names(list(row), languages, columns, called)
        pair = _text_fields(row, names, f"{called}, {where}")
        try:
            "".join(chain.from_iterable(pair.values())).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{called}, {where}, has an unpaired UTF-16 surrogate.") from error
        yield pair


def _json_objects(path: str) -> Iterator[tuple[str, Any]]:
    """Reads the JSON values of a file, one per line or the items of one list, each with its place."""
    called = public(path)
    lines = ((number, line) for number, line in enumerate(text_lines(path), start=1) if line.strip())
    first = next(lines, (1, ""))
    if suffix_of(path) == ".json" and first[1].lstrip().startswith("["):
        rows = _parsed("".join(line for _, line in chain([first], lines)), called)
        yield from ((f"row {i}", row) for i, row in enumerate(rows, start=1))
        return
    for number, line in chain([first], lines):
        if line:
            yield f"line {number}", _parsed(line, f"{called}, line {number},")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}.") from error
    except RecursionError as error:
        raise ValueError(f"{where} is JSON that is nested too deeply to be read.") from error
    except ValueError as error:
        # A number with thousands of digits.
        raise ValueError(f"{where} cannot be read as JSON: {error}.") from error


def _table(path: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Reads the rows of a table, each with its line number. In CSV, quoted fields may have commas and line breaks."""
    lines = text_lines(path)
    if delimiter == "\t":
        for number, line in enumerate(lines, start=1):
            text = line.rstrip("\r\n")
            yield number, text.split("\t") if text else []
        return
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        while (row := _next_row(rows)) is not None:
            yield rows.line_num, row
    except csv.Error as error:
        raise ValueError(f"{public(path)}, line {rows.line_num}, cannot be read as a table: {error}.") from error


def _next_row(rows: Iterator[list[str]]) -> list[str] | None:
    # The limit is global to the process, so it is raised only while a row is read.
    before = csv.field_size_limit(MAX_FIELD)
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(before)


def _table_rows(path: str, columns: Columns, delimiter: str, stamp: Stamp) -> Iterator[Row]:
    """Reads columns of a table. `stamp` is its size and time, which keep a changed file out of the cache."""
    places: dict[str, int] = {}
    width, blank, called = 0, 0, public(path)
    for number, row in _table(path, delimiter):
        if not row:
            # Empty lines are allowed at the end of the file.
            blank = blank or number
            continue
        if blank:
            raise ValueError(f"{called}, line {blank}, is empty, but a row of the table is expected.")
        if not places:
            width, named = len(row), all(isinstance(column, str) for column in columns.values())
            names = row if named else [str(place) for place in range(width)]
            _check_columns(names, [str(column) for column in columns.values()], called, _advice(columns))
            places = {name: names.index(str(column)) for name, column in columns.items()}
            if named:
                continue
        if len(row) != width:
            raise ValueError(
                f"{called}, line {number}, has another number of columns ({len(row)}) than the first line ({width})."
            )
        where = f"{called}, line {number},"
        yield {name: _field(name, without_mark(row[place]), where) for name, place in places.items()}


def dataset_split(dataset: str, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    """Loads a split of a dataset: a folder or an id on the Hub; raises `ValueError` or `FileNotFoundError`."""
    folder = Path(dataset)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved = datasets.load_from_disk(dataset)
            # A dataset saved without splits is a training set only.
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            if split not in splits:
                raise ValueError(f"its splits are {', '.join(map(repr, splits))}")
            return splits[split].to_iterable_dataset() if streaming else splits[split]
        name, revision = split_revision(dataset)
        return datasets.load_dataset(name, config, split=split, streaming=streaming, revision=revision)
    # `datasets` does not check the files of a folder, so a damaged one raises errors of any class.
    except Exception as error:
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        reason = error if isinstance(error, (OSError, ValueError)) else error.__cause__ or repr(error)
        splits = "data.train_split, validation_split and test_split must name its splits, or be null."
        # The splits of a dataset that cannot be reached or found are not the problem.
        advice = "" if isinstance(error, OSError) else f" ({splits})"
        said = public_text(str(reason))
        raise kind(f"The dataset {public(dataset)!r}, split {split!r}, cannot be loaded: {said}{advice}") from error


def _check_columns(names: list[str], wanted: Sequence[str], where: str, advice: str) -> None:
    for column in wanted:
        if column not in names:
            raise ValueError(f"{where} has no column {column!r}; it has {shown(names)}. {advice}")


def _advice(columns: Columns) -> str:
    """Returns how to name columns."""
    *rest, last = [KEYS[name] for name in columns]
    named = f"Name the columns with {', '.join(rest)} and {last}" if rest else f"Name the column with {last}"
    return named + (", or with --columns." if tuple(columns) == SIDES else ".")


def _check_different(columns: Columns, where: str) -> None:
    """Refuses one column for two things; the lines of a text may be documents of their own."""
    if tuple(columns) == SIDES and columns["source"] == columns["target"]:
        raise ValueError(
            f"Source and target must be different columns of {where}, but both are {columns['source']!r}."
        )
    if tuple(columns) != LINE and len(set(columns.values())) < len(columns):
        names = " and ".join(columns)
        raise ValueError(f"{names} must be different columns of {where}, but they are {[*columns.values()]}.")


def _names(known: list[str], languages: tuple[str, str] | None, columns: Columns, where: str) -> dict[str, str]:
    """Returns the keys of a row, or of its `translation`, by what they hold."""
    names = {name: str(column) for name, column in columns.items()}
    if languages is not None and "translation" in known and "translation" not in names.values():
        return dict(zip(SIDES, languages, strict=True))
    _check_different(columns, where)
    _check_columns(known, list(names.values()), where, _advice(columns))
    return names


def text_columns(
    rows: Dataset | IterableDataset, languages: tuple[str, str] | None, columns: Columns, where: str
) -> Dataset | IterableDataset:
    """Renames columns of a dataset, or the values of its `translation`, to what they hold, and checks them."""
    known = rows.column_names or list(next(iter(rows), {}))
    names = _names(known, languages, columns, where)
    # Labels are read by the names of their classes, and a stream is checked as it comes.
    if isinstance(rows, IterableDataset) or not {"label", "tags"}.isdisjoint(names):
        features = rows.features
        return rows.map(
            lambda row, index: _text_fields(row, names, f"{where}: row {index + 1}", features),
            with_indices=True,
            remove_columns=known,
            features=text_features(names),
        )
    if _is_nested(known, names):
        rows = rows.select_columns("translation").flatten()
        names = {side: f"translation.{language}" for side, language in names.items()}
        advice = "The keys of `translation` are language codes."
        _check_columns(rows.column_names, list(names.values()), where, advice)
    rows = rows.select_columns(list(names.values())).rename_columns({column: name for name, column in names.items()})
    for name in names:
        kind = getattr(rows.features[name], "dtype", rows.features[name])
        if kind not in TEXT:
            raise ValueError(f"{where}: the {name} column must be text, but it is {kind}.")
        if kind == "string_view":
            # Arrow cannot compute with it as with the others.
            rows = rows.cast_column(name, datasets.Value("string"))
        if rows.data.column(name).null_count:
            missing = rows.with_format("arrow")[:][name].is_null().index(True).as_py()
            raise ValueError(f"{where}: row {missing + 1} has no {CALLED[name]}.")
    if any(pa.compute.any(pa.compute.starts_with(rows.data.column(name), BYTE_ORDER_MARK)).as_py() for name in names):
        rows = rows.map(lambda row: {name: without_mark(row[name]) for name in names})
    return rows


def _is_nested(known: Iterable[str], names: dict[str, str]) -> bool:
    """Returns whether the text of a row is in its `translation`."""
    return "translation" in known and tuple(names) == SIDES and "translation" not in names.values()


def _text_fields(row: Mapping[str, Any], names: dict[str, str], where: str, features: Any = None) -> Row:
    """Checks and renames the fields of a row; `features` are those of its columns, for the names of classes."""
    texts, found = row["translation"] if _is_nested(row, names) else row, dict[str, Any]()
    if not isinstance(texts, Mapping):
        texts = {}
    for name, column in names.items():
        value = texts.get(column)
        if value is None:
            raise ValueError(f"{where} has no {CALLED.get(name, name)} ({column!r}).")
        field = _field(name, value, where, features.get(column) if features else None)
        found[name] = without_mark(field) if isinstance(field, str) else field
    return found


def _field(name: str, value: Any, where: str, feature: Any = None) -> Any:
    """Returns a value as the column of this name holds it: text, or a list of words; refuses others."""
    field: Any = value if isinstance(value, str) else None
    if name in LISTS and isinstance(value, list):
        words = [_label(word, getattr(feature, "feature", None)) for word in value]
        field = None if None in words else words
    elif name in LISTS and isinstance(value, str):
        field = value.split()
    elif name == "label":
        field = _label(value, feature)
    if field is None:
        expected = "a list, or words with spaces between them" if name in LISTS else EXPECTED.get(name, "text")
        raise ValueError(f"{where} has {shown(value)} for its {CALLED.get(name, name)}, which must be {expected}.")
    return field


def _label(value: Any, feature: Any) -> str | None:
    """Returns a label as text: the name of a class, or a number as it is written; `None` for another value."""
    if isinstance(feature, datasets.ClassLabel) and isinstance(value, int):
        # Datasets whose labels are kept secret have -1.
        return feature.int2str(value) if value >= 0 else None
    if isinstance(value, int):
        return str(value)
    return (value.strip() or None) if isinstance(value, str) else None
