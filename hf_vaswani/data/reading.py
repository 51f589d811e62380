"""Where sentence pairs come from: everything is read by `datasets`, onto the disk or as a stream."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from ..files import read_lines
from ..recipe import Files, shown
from . import pocket_corpus

try:
    import datasets
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet
    from datasets import Dataset, IterableDataset
    from datasets.exceptions import DatasetGenerationError
except ImportError as error:
    raise ImportError(f"Reading training text needs {error.name}: pip install 'hf_vaswani[train]'") from error

# How each kind of file is read: tables by their delimiter, JSON in lines or as one list, Parquet by `datasets`. Its
# reader of tables would take "null" for a missing value, and a row that lacks a column for one with an empty one; its
# reader of JSON lets any bytes pass, and some of its errors name no file.
DELIMITERS = {".tsv": "\t", ".csv": ","}
JSON = (".jsonl", ".json")
PARQUET = ".parquet"
KINDS = (*DELIMITERS, *JSON, PARQUET)

# Longest field of a CSV file, in characters: an open quotation mark would take the rest of the file for one.
LONGEST_FIELD = 10_000_000
# In front of a text it is what is left of a file that began there.
BYTE_ORDER_MARK = "\ufeff"

SIDES = ("source", "target")
ADVICE = "Name the two sides with data.source_column and data.target_column, or with --columns of evaluate."
TEXT = datasets.Features({side: datasets.Value("string") for side in SIDES})

T = TypeVar("T")


def load_pairs(
    source_language: str,
    target_language: str,
    dataset: str | None = None,
    dataset_config: str | None = None,
    train_split: str | None = "train",
    validation_split: str | None = "validation",
    test_split: str | None = "test",
    train_files: Files = None,
    validation_files: Files = None,
    test_files: Files = None,
    source_column: int | str | None = None,
    target_column: int | str | None = None,
    seed: int = 1,
    streaming: bool = False,
) -> dict[str, Dataset | IterableDataset]:
    """
    Reads the splits that a recipe's data section names.

    Args:
        source_language (`str`), target_language (`str`): language codes, which are also the columns' default names.
        dataset (`str`, *optional*): Hub id, local folder, or "pocket" for the built-in corpus, drawn by `seed`.
        dataset_config (`str`, *optional*): the Hub dataset's configuration.
        train_split, validation_split, test_split (`str`, *optional*): the dataset's names of the splits.
        train_files, validation_files, test_files (`dict[str, str]` or `str`, *optional*): two line-aligned files by
            language, or one file of columns; they take the place of the dataset's split.
        source_column, target_column (`int` or `str`, *optional*): names of the columns, or their numbers in a TSV or
            CSV file without a header line.
        seed (`int`): of the built-in corpus.
        streaming (`bool`): whether the training text is read as it is needed, and neither counted nor copied.

    Returns:
        `dict[str, Dataset]`: "train", "validation" and "test" as far as they exist, each with the text columns
        `source` and `target`; with `streaming`, "train" is an `IterableDataset`, and what is wrong with its text
        shows when it is read.

    Raises:
        ValueError: files of different line counts, text that is not UTF-8, missing columns or values: with the file,
            the line and what was expected.
        FileNotFoundError: a file or dataset that does not exist.
    """
    if source_language == target_language:
        raise ValueError(f"Source and target are to be different languages, but both are {source_language!r}.")
    languages = (source_language, target_language)
    columns = (
        source_language if source_column is None else source_column,
        target_language if target_column is None else target_column,
    )
    names = {"train": train_split, "validation": validation_split, "test": test_split}
    files = {"train": train_files, "validation": validation_files, "test": test_files}
    pocket = _pocket_splits(languages, seed) if dataset == "pocket" else {}
    pairs: dict[str, Dataset | IterableDataset] = {}
    for split, name in names.items():
        split_files, as_stream = files[split], streaming and split == "train"
        if isinstance(split_files, dict):
            pairs[split] = _aligned_files(split_files, languages, as_stream)
        elif split_files is not None:
            pairs[split] = _column_file(Path(split_files), languages, columns, as_stream)
        elif dataset == "pocket" and name is not None:
            if name not in pocket:
                raise ValueError(f"The built-in corpus has no split {name!r}; it has {', '.join(pocket)}.")
            pairs[split] = pocket[name].to_iterable_dataset() if as_stream else pocket[name]
        elif dataset is not None and name is not None:
            rows = _dataset_split(dataset, dataset_config, name, as_stream)
            pairs[split] = _text_columns(rows, languages, columns, f"{dataset}, split {name}")
    return pairs


def _pocket_splits(languages: tuple[str, str], seed: int) -> dict[str, Dataset]:
    if sorted(languages) != ["de", "en"]:
        raise ValueError(f"The built-in corpus is English and German (en, de), but the recipe asks for {languages}.")
    english = languages.index("en")
    return {
        split: Dataset.from_dict(
            {"source": [pair[english] for pair in pairs], "target": [pair[1 - english] for pair in pairs]}
        )
        for split, pairs in pocket_corpus.draw_splits(seed=seed).items()
    }


def named_errors(rows: Iterable[T], names: Sequence[str]) -> Iterator[T]:
    """
    Rows whose errors name where they come from: those of `datasets` and of pyarrow often do not.

    Args:
        rows (`Iterable`): the rows.
        names (`Sequence[str]`): their files or dataset.

    Returns:
        `Iterator`: the rows.

    Raises:
        ValueError: they cannot be read.
    """
    try:
        yield from rows
    # The source may raise any error: of compression, of the network, of a format.
    except Exception as error:
        if isinstance(error, (ValueError, OSError)) and any(Path(name).name in str(error) for name in names):
            raise
        raise ValueError(f"{' and '.join(names)} cannot be read: {type(error).__name__}: {error}") from error


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, where a file of text should be: name one of its files.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is a device or a pipe, where a file of text should be.")
    return path


def _aligned_lines(paths: tuple[str, str], stamps: tuple[tuple[int, int], ...]) -> Iterator[dict[str, str]]:
    """Pairs of lines. `stamps` are sizes and times of the files: a changed file is not answered from the cache."""
    sides = [_lines(path) for path in paths]
    for number, (source, target) in enumerate(zip_longest(*sides), start=1):
        if source is None or target is None:
            counts = [number - 1 + (line is not None) for line in (source, target)]
            totals = [count + sum(1 for _ in side) for count, side in zip(counts, sides, strict=True)]
            raise ValueError(
                f"The two sides must have the same number of lines, but {paths[0]} has {totals[0]} "
                f"and {paths[1]} has {totals[1]}."
            )
        yield {"source": _text(source.rstrip("\r\n")), "target": _text(target.rstrip("\r\n"))}


def _text(text: str) -> str:
    return text.lstrip(BYTE_ORDER_MARK)


def _lines(path: str) -> Iterator[str]:
    """Lines with their ends, of a file that may be compressed."""
    return read_lines(Path(path))


def _aligned_files(files: dict[str, str], languages: tuple[str, str], streaming: bool) -> Dataset | IterableDataset:
    if sorted(map(str, files)) != sorted(languages):
        raise ValueError(
            f"Line-aligned files are given by language, here {languages[0]!r} and {languages[1]!r}, "
            f"but these are for {sorted(map(str, files))}."
        )
    paths = [_existing(Path(files[language])) for language in languages]
    # Tuples, because `datasets` takes a list for shards that it may read in parallel.
    arguments = {"paths": tuple(str(path.resolve()) for path in paths), "stamps": tuple(map(_stamp, paths))}
    return _generated(_aligned_lines, arguments, streaming)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _generated(
    generator: Callable[..., Iterator[dict[str, str]]], arguments: dict[str, Any], streaming: bool
) -> Dataset | IterableDataset:
    """What a generator yields, on disk or as a stream."""
    if streaming:
        return IterableDataset.from_generator(generator, features=TEXT, gen_kwargs=arguments)
    if next(generator(**arguments), None) is None:
        # What `datasets` says of a generator without rows names no file.
        return Dataset.from_dict({"source": [], "target": []}, features=TEXT)
    try:
        return Dataset.from_generator(generator, features=TEXT, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None
        raise


def _column_file(
    path: Path, languages: tuple[str, str], columns: tuple[int | str, int | str], streaming: bool
) -> Dataset | IterableDataset:
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if suffix not in KINDS:
        raise ValueError(
            f"{path} is of a kind that cannot be read by its name; known are {', '.join(KINDS)} (all but the last "
            "also .gz), and two line-aligned files as {en: FILE, de: FILE}."
        )
    if _existing(path).stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    arguments = {"path": str(path.resolve()), "columns": columns, "stamp": _stamp(path)}
    if suffix in DELIMITERS:
        _check_different(columns, str(path))
        return _generated(_table_rows, arguments | {"delimiter": DELIMITERS[suffix]}, streaming)
    if suffix in JSON:
        return _generated(_json_rows, arguments | {"languages": languages}, streaming)
    if path.suffix == ".gz":
        raise ValueError(f"{path} is compressed twice, as Parquet compresses by itself: unpack it.")
    try:
        # `datasets` tells of another kind of file in several lines.
        pyarrow.parquet.read_schema(path)
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=streaming)
    # The readers of `datasets` have an error class for everything; for the person it is one thing: this file.
    except Exception as error:
        raise ValueError(f"{path} cannot be read as parquet: {error.__cause__ or error}") from error
    return _text_columns(rows, languages, columns, str(path))


def _json_rows(
    path: str, columns: tuple[int | str, int | str], languages: tuple[str, str], stamp: tuple[int, int]
) -> Iterator[dict[str, str]]:
    """Two columns of objects of JSON. `stamp` is the file's size and time, as that of [`_table_rows`]."""
    names: list[str] = []
    for where, row in _json_objects(path):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {where}, is not an object of JSON, as {{...}}.")
        names = names or _names(list(row), languages, columns, path)
        pair = _text_pair(row, names, f"{path}, {where}")
        try:
            "".join(pair.values()).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}, {where}, has half a character of UTF-16 and not the other.") from error
        yield pair


def _json_objects(path: str) -> Iterator[tuple[str, Any]]:
    """The values of a file, each with its place: one in each line, or those of a list over the whole file."""
    lines = ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    first = next(lines, (1, ""))
    if Path(path.removesuffix(".gz")).suffix.lower() == ".json" and first[1].lstrip().startswith("["):
        rows = _parsed("".join(line for _, line in chain([first], lines)), path)
        yield from ((f"row {i}", row) for i, row in enumerate(rows, start=1))
        return
    for number, line in chain([first], lines):
        if line:
            yield f"line {number}", _parsed(line, f"{path}, line {number},")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}.") from error
    except RecursionError as error:
        raise ValueError(f"{where} is JSON that is nested too deeply to be read.") from error
    except ValueError as error:
        # A number of thousands of digits.
        raise ValueError(f"{where} cannot be read as JSON: {error}.") from error


def _table(path: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table, each with its line. In a CSV file a quoted field may hold commas and line ends."""
    lines = _lines(path)
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
        raise ValueError(f"{path}, line {rows.line_num}, cannot be read as a table: {error}.") from error


def _next_row(rows: Iterator[list[str]]) -> list[str] | None:
    # The limit is the whole process's, and is only lifted while a row is read here.
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(before)


def _table_rows(
    path: str, columns: tuple[int | str, int | str], delimiter: str, stamp: tuple[int, int]
) -> Iterator[dict[str, str]]:
    """Two columns of a table. `stamp` is the file's size and time: a changed file is not answered from the cache."""
    places: list[int] = []
    width = blank = 0
    for number, row in _table(path, delimiter):
        if not row:
            # At the end of a file it does no harm.
            blank = blank or number
            continue
        if blank:
            raise ValueError(f"{path}, line {blank}, is empty, where a row of the table should be.")
        if not places:
            width, named = len(row), all(isinstance(column, str) for column in columns)
            names = row if named else [str(place) for place in range(width)]
            _check_columns(names, [str(column) for column in columns], path, ADVICE)
            places = [names.index(str(column)) for column in columns]
            if named:
                continue
        if len(row) != width:
            raise ValueError(f"{path}, line {number}, has {len(row)} columns, but the first line has {width}.")
        yield {"source": _text(row[places[0]]), "target": _text(row[places[1]])}


def _dataset_split(dataset: str, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    folder = Path(dataset)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved = datasets.load_from_disk(dataset)
            # What was saved without a split is a training set; it must not stand in for the others as well.
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            if split not in splits:
                raise ValueError(f"it has the splits {list(splits)}.")
            return splits[split].to_iterable_dataset() if streaming else splits[split]
        return datasets.load_dataset(dataset, config, split=split, streaming=streaming)
    # A damaged folder makes errors of any class: what `datasets` expects in its files, it does not check.
    except Exception as error:
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        reason = error if isinstance(error, (OSError, ValueError)) else error.__cause__ or repr(error)
        raise kind(
            f"The dataset {dataset!r}, split {split!r}, cannot be loaded: {reason} (data.train_split, "
            "validation_split and test_split name its splits, null for none.)"
        ) from error


def _check_columns(names: list[str], wanted: Sequence[str], where: str, advice: str) -> None:
    for column in wanted:
        if column not in names:
            raise ValueError(f"{where} has no column {column!r}; it has {shown(names)}. {advice}")


def _check_different(columns: Sequence[int | str], where: str) -> None:
    if columns[0] == columns[1]:
        raise ValueError(f"Source and target are to be different columns of {where}, but both are {columns[0]!r}.")


def _names(
    known: list[str], languages: tuple[str, str], columns: tuple[int | str, int | str], where: str
) -> list[str]:
    """Under which names a row has the two sides, in itself or in its `translation`."""
    names = [str(column) for column in columns]
    if "translation" in known and "translation" not in names:
        return list(languages)
    _check_different(names, where)
    _check_columns(known, names, where, ADVICE)
    return names


def _text_columns(
    rows: Dataset | IterableDataset, languages: tuple[str, str], columns: tuple[int | str, int | str], where: str
) -> Dataset | IterableDataset:
    """The columns `source` and `target` of a dataset that has them by other names, or as a `translation` feature."""
    known = rows.column_names or list(next(iter(rows), {}))
    names = _names(known, languages, columns, where)
    if isinstance(rows, IterableDataset):
        return rows.map(
            lambda row, index: _text_pair(row, names, f"{where}: row {index + 1}"),
            with_indices=True,
            remove_columns=known,
            features=TEXT,
        )
    if "translation" in known and "translation" not in names:
        rows = rows.select_columns("translation").flatten()
        names = [f"translation.{language}" for language in languages]
        advice = "A `translation` holds the text of each language under its code."
        _check_columns(rows.column_names, names, where, advice)
    rows = rows.select_columns(names).rename_columns(dict(zip(names, SIDES, strict=True)))
    for side in SIDES:
        kind = getattr(rows.features[side], "dtype", rows.features[side])
        if kind not in ("string", "large_string"):
            raise ValueError(f"{where}: the {side} column must be text, but it is {kind}.")
        if rows.data.column(side).null_count:
            missing = rows.with_format("arrow")[:][side].is_null().index(True).as_py()
            raise ValueError(f"{where}: row {missing + 1} has no {side} text.")
    if any(pa.compute.any(pa.compute.starts_with(rows.data.column(side), BYTE_ORDER_MARK)).as_py() for side in SIDES):
        rows = rows.map(lambda row: {side: _text(row[side]) for side in SIDES})
    return rows


def _text_pair(row: dict[str, Any], names: list[str], where: str) -> dict[str, str]:
    """A row whose values nobody has looked at before."""
    inside = "translation" in row and "translation" not in names
    texts, pair = row["translation"] if inside else row, {}
    if not isinstance(texts, dict):
        texts = {}
    for side, name in zip(SIDES, names, strict=True):
        text = texts.get(name)
        if not isinstance(text, str):
            what = f"no {side} text ({name!r})" if text is None else f"{shown(text)} for its {side} text"
            raise ValueError(f"{where} has {what}.")
        pair[side] = _text(text)
    return pair
