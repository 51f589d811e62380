"""Reading of sentence pairs and of running text from files and datasets, cached on disk or streamed by `datasets`."""

import csv
import json
import re
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

# Only Parquet is parsed by `datasets`. Its reader of tables takes "null" for a missing value and a missing column for
# an empty one; its reader of JSON accepts any bytes, and some of its errors name no file.
DELIMITERS = {".tsv": "\t", ".csv": ","}
JSON = (".jsonl", ".json")
PARQUET = ".parquet"
KINDS = (*DELIMITERS, *JSON, PARQUET)

# Longest field of a CSV file, in characters: an unclosed quotation mark makes one field of the rest of the file.
LONGEST_FIELD = 10_000_000
# A text may begin with one when files were concatenated.
BYTE_ORDER_MARK = "\ufeff"

SIDES = ("source", "target")
# Columns of running text: a line, and the name of its document.
LINE = ("text", "document")
ADVICE = {
    SIDES: "Name the two sides with data.source_column and data.target_column, or with --columns.",
    LINE: "Name the column of the text with data.source_column, and that of its document with data.document_column.",
    LINE[:1]: "Name the column of the text with data.source_column.",
}
CALLED = {"source": "source text", "target": "target text", "text": "text", "document": "document"}

# A column of a table: its name or, in a table without a header line, its number; by what it holds.
Columns = dict[str, int | str]

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
    Reads the splits that the data section of a recipe names.

    Args:
        source_language (`str`), target_language (`str`): language codes, also the default names of the columns.
        dataset (`str`, *optional*): Hub id, local folder, or "pocket" for the built-in corpus, drawn by `seed`.
        dataset_config (`str`, *optional*): configuration of the Hub dataset.
        train_split, validation_split, test_split (`str`, *optional*): names of the splits in the dataset.
        train_files, validation_files, test_files (`dict[str, str]` or `str`, *optional*): two line-aligned files by
            language, or one file with columns; they override the split of the dataset.
        source_column, target_column (`int` or `str`, *optional*): names of the columns, or their numbers in a TSV or
            CSV file without a header line.
        seed (`int`): seed of the built-in corpus.
        streaming (`bool`): whether to read the training text on demand, without a cache.

    Returns:
        `dict[str, Dataset]`: "train", "validation" and "test", where they exist, each with the text columns `source`
        and `target`. With `streaming`, "train" is an `IterableDataset`, and errors in its text are raised on reading.

    Raises:
        ValueError: files have different numbers of lines, text is not UTF-8, or columns or values are missing; the
            message has file, line and expectation.
        FileNotFoundError: a file or dataset does not exist.
    """
    if source_language == target_language:
        raise ValueError(f"Source and target must be different languages, but both are {source_language!r}.")
    languages = (source_language, target_language)
    columns: Columns = {
        "source": source_language if source_column is None else source_column,
        "target": target_language if target_column is None else target_column,
    }
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


def load_texts(
    language: str,
    dataset: str | None = None,
    dataset_config: str | None = None,
    train_split: str | None = "train",
    validation_split: str | None = "validation",
    test_split: str | None = "test",
    train_files: Files = None,
    validation_files: Files = None,
    test_files: Files = None,
    text_column: int | str | None = None,
    document_column: int | str | None = None,
    seed: int = 1,
    streaming: bool = False,
) -> dict[str, Dataset | IterableDataset]:
    """
    Reads running text in one language: the splits that the data section of a recipe names.

    Args:
        language (`str`): language code, also the default name of the column.
        dataset, dataset_config, train_split, validation_split, test_split, seed, streaming: as in [`load_pairs`].
        train_files, validation_files, test_files (`str`, *optional*): a file with columns, or any other file with a
            sentence or paragraph on each line and blank lines between documents.
        text_column (`int` or `str`, *optional*): column of the text. The lines of a field are lines of the text.
        document_column (`int` or `str`, *optional*): column that names the document of each row; by default each row
            is a document.

    Returns:
        `dict[str, Dataset]`: "train", "validation" and "test", where they exist, each with the columns `text`, a line,
        and `document`, a name. Lines of one document follow each other; blank ones are left out.

    Raises:
        ValueError, FileNotFoundError: as in [`load_pairs`].
    """
    columns: Columns = {"text": language if text_column is None else text_column}
    if document_column is not None:
        columns["document"] = document_column
    names = {"train": train_split, "validation": validation_split, "test": test_split}
    files = {"train": train_files, "validation": validation_files, "test": test_files}
    texts: dict[str, Dataset | IterableDataset] = {}
    for split, name in names.items():
        file, as_stream = files[split], streaming and split == "train"
        if isinstance(file, dict):
            raise ValueError(
                f"data.{split}_files is {shown(file)}, but running text is in one language: name one file."
            )
        if file is not None and _suffix(Path(file)) not in KINDS:
            path = _existing(Path(file))
            arguments = {"path": str(path.resolve()), "stamp": _stamp(path)}
            texts[split] = _generated(_lines, arguments, as_stream, LINE)
        elif file is not None:
            texts[split] = _as_lines(_column_file(Path(file), None, columns, as_stream))
        elif dataset == "pocket" and name is not None:
            languages = (language, "en" if language == "de" else "de")
            side = _pocket_splits(languages, seed)[name].select_columns("source").rename_column("source", "text")
            texts[split] = _as_lines(side.to_iterable_dataset() if as_stream else side)
        elif dataset is not None and name is not None:
            rows = _dataset_split(dataset, dataset_config, name, as_stream)
            texts[split] = _as_lines(_text_columns(rows, None, columns, f"{dataset}, split {name}"))
    return texts


def _lines(path: str, stamp: tuple[int, int]) -> Iterator[dict[str, str]]:
    """Reads the lines of a file; a blank line ends a document. `stamp` is as in [`_table_rows`]."""
    document, is_open = 0, False
    for line in read_lines(Path(path)):
        text = _text(line.rstrip("\r\n"))
        if text.strip():
            is_open = True
            yield {"text": text, "document": str(document)}
        elif is_open:
            document, is_open = document + 1, False


def _as_lines(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Splits the fields of a table into their lines; without a column for it, each row is a document."""

    def split(batch: dict[str, list[str]], indices: list[int]) -> dict[str, list[str]]:
        documents = batch.get("document") or [str(index) for index in indices]
        lines = [
            (line, document)
            for text, document in zip(batch["text"], documents, strict=True)
            for line in re.split(r"[\r\n]+", text)
            if line.strip()
        ]
        return {"text": [line for line, _ in lines], "document": [document for _, document in lines]}

    known = rows.column_names or list(LINE)
    return rows.map(split, batched=True, with_indices=True, remove_columns=known, features=_features(LINE))


def _pocket_splits(languages: tuple[str, str], seed: int) -> dict[str, Dataset]:
    if sorted(languages) != ["de", "en"]:
        raise ValueError(
            f"The built-in corpus has the languages en and de, but the recipe asks for {' and '.join(languages)}."
        )
    english = languages.index("en")
    return {
        split: Dataset.from_dict(
            {"source": [pair[english] for pair in pairs], "target": [pair[1 - english] for pair in pairs]}
        )
        for split, pairs in pocket_corpus.draw_splits(seed=seed).items()
    }


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
        if isinstance(error, (ValueError, OSError)) and any(Path(name).name in str(error) for name in names):
            raise
        raise ValueError(f"{' and '.join(names)} cannot be read: {type(error).__name__}: {error}") from error


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, but a text file is expected: name one of its files.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is a device or a pipe, but a text file is expected.")
    return path


def _aligned_lines(paths: tuple[str, str], stamps: tuple[tuple[int, int], ...]) -> Iterator[dict[str, str]]:
    """Pairs the lines of two files. `stamps` are their sizes and times, which keep a changed file out of the cache."""
    sides = [read_lines(Path(path)) for path in paths]
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


def _aligned_files(files: dict[str, str], languages: tuple[str, str], streaming: bool) -> Dataset | IterableDataset:
    if sorted(map(str, files)) != sorted(languages):
        raise ValueError(
            f"Line-aligned files are given for {' and '.join(sorted(map(str, files)))}, "
            f"but the languages are {languages[0]} and {languages[1]}."
        )
    paths = [_existing(Path(files[language])) for language in languages]
    # Tuples, because `datasets` treats a list as shards, which it may read in parallel.
    arguments = {"paths": tuple(str(path.resolve()) for path in paths), "stamps": tuple(map(_stamp, paths))}
    return _generated(_aligned_lines, arguments, streaming)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _features(names: Iterable[str]) -> datasets.Features:
    return datasets.Features({name: datasets.Value("string") for name in names})


def _generated(
    generator: Callable[..., Iterator[dict[str, str]]],
    arguments: dict[str, Any],
    streaming: bool,
    names: Iterable[str] = SIDES,
) -> Dataset | IterableDataset:
    """Makes a dataset of the rows of a generator, cached on disk or streamed."""
    features = _features(names)
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


def _suffix(path: Path) -> str:
    """Returns the extension that tells the format of a file, before `.gz`."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def _column_file(
    path: Path, languages: tuple[str, str] | None, columns: Columns, streaming: bool
) -> Dataset | IterableDataset:
    suffix = _suffix(path)
    if suffix not in KINDS:
        raise ValueError(
            f"{path} has an unknown extension: give one of {', '.join(KINDS)} (all but the last also with .gz), or "
            "two line-aligned files as {en: FILE, de: FILE}."
        )
    if _existing(path).stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    arguments = {"path": str(path.resolve()), "columns": columns, "stamp": _stamp(path)}
    if suffix in DELIMITERS:
        _check_different(columns, str(path))
        return _generated(_table_rows, arguments | {"delimiter": DELIMITERS[suffix]}, streaming, columns)
    if suffix in JSON:
        return _generated(_json_rows, arguments | {"languages": languages}, streaming, columns)
    if path.suffix == ".gz":
        raise ValueError(f"{path} is compressed twice, because Parquet is compressed already: unpack it.")
    try:
        # The error of `datasets` about a file that is not Parquet has several lines.
        pyarrow.parquet.read_schema(path)
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=streaming)
    # The readers of `datasets` have many error classes; to the user, this file is wrong.
    except Exception as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error.__cause__ or error}") from error
    return _text_columns(rows, languages, columns, str(path))


def _json_rows(
    path: str, columns: Columns, languages: tuple[str, str] | None, stamp: tuple[int, int]
) -> Iterator[dict[str, str]]:
    """Reads keys of JSON objects. `stamp` is as in [`_table_rows`]."""
    names: dict[str, str] = {}
    for where, row in _json_objects(path):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {where}, is not a JSON object like {{...}}.")
        names = names or _names(list(row), languages, columns, path)
        pair = _text_fields(row, names, f"{path}, {where}")
        try:
            "".join(pair.values()).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}, {where}, has an unpaired UTF-16 surrogate.") from error
        yield pair


def _json_objects(path: str) -> Iterator[tuple[str, Any]]:
    """Reads the JSON values of a file, one per line or the items of one list, each with its place."""
    lines = ((number, line) for number, line in enumerate(read_lines(Path(path)), start=1) if line.strip())
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
        # A number with thousands of digits.
        raise ValueError(f"{where} cannot be read as JSON: {error}.") from error


def _table(path: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Reads the rows of a table, each with its line number. In CSV, quoted fields may have commas and line breaks."""
    lines = read_lines(Path(path))
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
    # The limit is global to the process, so it is raised only while a row is read.
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(before)


def _table_rows(path: str, columns: Columns, delimiter: str, stamp: tuple[int, int]) -> Iterator[dict[str, str]]:
    """Reads columns of a table. `stamp` is its size and time, which keep a changed file out of the cache."""
    places: dict[str, int] = {}
    width = blank = 0
    for number, row in _table(path, delimiter):
        if not row:
            # Empty lines are allowed at the end of the file.
            blank = blank or number
            continue
        if blank:
            raise ValueError(f"{path}, line {blank}, is empty, but a row of the table is expected.")
        if not places:
            width, named = len(row), all(isinstance(column, str) for column in columns.values())
            names = row if named else [str(place) for place in range(width)]
            _check_columns(names, [str(column) for column in columns.values()], path, ADVICE[tuple(columns)])
            places = {name: names.index(str(column)) for name, column in columns.items()}
            if named:
                continue
        if len(row) != width:
            raise ValueError(
                f"{path}, line {number}, has another number of columns ({len(row)}) than the first line ({width})."
            )
        yield {name: _text(row[place]) for name, place in places.items()}


def _dataset_split(dataset: str, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    folder = Path(dataset)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved = datasets.load_from_disk(dataset)
            # A dataset saved without splits is a training set only.
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            if split not in splits:
                raise ValueError(f"its splits are {', '.join(map(repr, splits))}")
            return splits[split].to_iterable_dataset() if streaming else splits[split]
        return datasets.load_dataset(dataset, config, split=split, streaming=streaming)
    # `datasets` does not check the files of a folder, so a damaged one raises errors of any class.
    except Exception as error:
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        reason = error if isinstance(error, (OSError, ValueError)) else error.__cause__ or repr(error)
        splits = "data.train_split, validation_split and test_split must name its splits, or be null."
        # The splits of a dataset that cannot be reached or found are not the problem.
        advice = "" if isinstance(error, OSError) else f" ({splits})"
        raise kind(f"The dataset {dataset!r}, split {split!r}, cannot be loaded: {reason}{advice}") from error


def _check_columns(names: list[str], wanted: Sequence[str], where: str, advice: str) -> None:
    for column in wanted:
        if column not in names:
            raise ValueError(f"{where} has no column {column!r}; it has {shown(names)}. {advice}")


def _check_different(columns: Columns, where: str) -> None:
    """Refuses one column for both sides; the lines of a text may be documents of their own."""
    if tuple(columns) == SIDES and columns["source"] == columns["target"]:
        raise ValueError(
            f"Source and target must be different columns of {where}, but both are {columns['source']!r}."
        )


def _names(known: list[str], languages: tuple[str, str] | None, columns: Columns, where: str) -> dict[str, str]:
    """Returns the keys of a row, or of its `translation`, by what they hold."""
    names = {name: str(column) for name, column in columns.items()}
    if languages is not None and "translation" in known and "translation" not in names.values():
        return dict(zip(SIDES, languages, strict=True))
    _check_different(columns, where)
    _check_columns(known, list(names.values()), where, ADVICE[tuple(columns)])
    return names


def _text_columns(
    rows: Dataset | IterableDataset, languages: tuple[str, str] | None, columns: Columns, where: str
) -> Dataset | IterableDataset:
    """Renames columns of a dataset, or the values of its `translation`, to what they hold."""
    known = rows.column_names or list(next(iter(rows), {}))
    names = _names(known, languages, columns, where)
    if isinstance(rows, IterableDataset):
        return rows.map(
            lambda row, index: _text_fields(row, names, f"{where}: row {index + 1}"),
            with_indices=True,
            remove_columns=known,
            features=_features(names),
        )
    if _is_nested(known, names):
        rows = rows.select_columns("translation").flatten()
        names = {side: f"translation.{language}" for side, language in names.items()}
        advice = "The keys of `translation` are language codes."
        _check_columns(rows.column_names, list(names.values()), where, advice)
    rows = rows.select_columns(list(names.values())).rename_columns({column: name for name, column in names.items()})
    for name in names:
        kind = getattr(rows.features[name], "dtype", rows.features[name])
        if kind not in ("string", "large_string"):
            raise ValueError(f"{where}: the {name} column must be text, but it is {kind}.")
        if rows.data.column(name).null_count:
            missing = rows.with_format("arrow")[:][name].is_null().index(True).as_py()
            raise ValueError(f"{where}: row {missing + 1} has no {CALLED[name]}.")
    if any(pa.compute.any(pa.compute.starts_with(rows.data.column(name), BYTE_ORDER_MARK)).as_py() for name in names):
        rows = rows.map(lambda row: {name: _text(row[name]) for name in names})
    return rows


def _is_nested(known: Iterable[str], names: dict[str, str]) -> bool:
    """Returns whether the text of a row is in its `translation`."""
    return "translation" in known and tuple(names) == SIDES and "translation" not in names.values()


def _text_fields(row: dict[str, Any], names: dict[str, str], where: str) -> dict[str, str]:
    """Checks and renames the text of a row."""
    texts, found = row["translation"] if _is_nested(row, names) else row, {}
    if not isinstance(texts, dict):
        texts = {}
    for name, column in names.items():
        text = texts.get(column)
        if not isinstance(text, str):
            called = CALLED[name]
            what = f"no {called} ({column!r})" if text is None else f"{shown(text)} for its {called}"
            raise ValueError(f"{where} has {what}.")
        found[name] = _text(text)
    return found
