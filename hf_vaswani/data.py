"""Where sentence pairs come from, and how they become ids: everything is read, mapped and cached by `datasets`."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from . import pocket_corpus

try:
    import datasets
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError
    from datasets.fingerprint import Hasher
except ImportError as error:
    raise ImportError(f"Reading training text needs {error.name}: pip install 'hf_vaswani[train]'") from error

Files = dict[str, str] | str | None

# How `datasets` reads each kind of file. Its CSV reader takes "null" and "NA" for missing values, and quotation marks
# in a TSV for the start of a quoted field; both are plain words in parallel text.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".tsv": ("csv", {"delimiter": "\t", "quoting": 3, "keep_default_na": False}),
    ".csv": ("csv", {"keep_default_na": False}),
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".parquet": ("parquet", {}),
}


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
) -> dict[str, Dataset]:
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

    Returns:
        `dict[str, Dataset]`: "train", "validation" and "test" as far as they exist, each with the text columns
        `source` and `target`.

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
    pairs: dict[str, Dataset] = {}
    for split, name in names.items():
        split_files = files[split]
        if isinstance(split_files, dict):
            pairs[split] = _aligned_files(split_files, languages)
        elif split_files is not None:
            pairs[split] = _text_columns(_column_file(Path(split_files), columns), languages, columns, split_files)
        elif split in pocket:
            pairs[split] = pocket[split]
        elif dataset is not None and name is not None:
            where = f"{dataset}, split {name}"
            pairs[split] = _text_columns(_dataset_split(dataset, dataset_config, name), languages, columns, where)
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


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    return path


def _aligned_lines(paths: tuple[str, str], stamps: tuple[tuple[int, int], ...]) -> Iterator[dict[str, str]]:
    """Pairs of lines. `stamps` are sizes and times of the files: a changed file is not answered from the cache."""
    counts = [0, 0]
    with open(paths[0], "rb") as source_file, open(paths[1], "rb") as target_file:
        while True:
            lines = [source_file.readline(), target_file.readline()]
            if not any(lines):
                return
            counts = [count + bool(line) for count, line in zip(counts, lines, strict=True)]
            if not all(lines):
                rest = [sum(1 for _ in file) for file in (source_file, target_file)]
                totals = [count + more for count, more in zip(counts, rest, strict=True)]
                raise ValueError(
                    f"The two sides must have the same number of lines, but {paths[0]} has {totals[0]} "
                    f"and {paths[1]} has {totals[1]}."
                )
            source, target = (_decode(lines[side], paths[side], counts[side]) for side in (0, 1))
            yield {"source": source, "target": target}


def _decode(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}, is not UTF-8: {error.reason} at byte {error.start + 1}.") from error


def _aligned_files(files: dict[str, str], languages: tuple[str, str]) -> Dataset:
    if sorted(files) != sorted(languages):
        raise ValueError(
            f"Line-aligned files are given by language, here {languages[0]!r} and {languages[1]!r}, "
            f"but these are for {sorted(files)}."
        )
    paths = [_existing(Path(files[language])) for language in languages]
    stats = [path.stat() for path in paths]
    # Tuples, because `datasets` takes a list for shards that it may read in parallel.
    arguments = {
        "paths": tuple(str(path.resolve()) for path in paths),
        "stamps": tuple((stat.st_size, stat.st_mtime_ns) for stat in stats),
    }
    features = datasets.Features({"source": datasets.Value("string"), "target": datasets.Value("string")})
    try:
        return Dataset.from_generator(_aligned_lines, features=features, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None
        raise


def _column_file(path: Path, columns: tuple[int | str, int | str]) -> Dataset:
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if suffix not in READERS:
        raise ValueError(
            f"{path} is of a kind that cannot be read by its name; known are {', '.join(READERS)} (also .gz), "
            "and two line-aligned files as {en: FILE, de: FILE}."
        )
    if columns[0] == columns[1]:
        raise ValueError(f"Source and target are to be different columns of {path}, but both are {columns[0]!r}.")
    reader, options = READERS[suffix]
    if _existing(path).stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    if reader == "json":
        # Its reader lets any bytes pass, and they would come to light far from here.
        _check_utf8(path)
    if reader == "csv":
        header = "infer" if all(isinstance(column, str) for column in columns) else None
        # With a converter, a column that looks like numbers stays text.
        options = options | {"header": header, "converters": dict.fromkeys(columns, str)}
    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train", **options)
    # The readers of `datasets` have an error class for everything; for the person it is one thing: this file.
    except Exception as error:
        if reader == "csv":
            _check_utf8(path)
        raise ValueError(f"{path} cannot be read as {suffix[1:]}: {error.__cause__ or error}") from error


def _check_utf8(path: Path) -> None:
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            _decode(line, str(path), number)


def _dataset_split(dataset: str, config: str | None, split: str) -> Dataset:
    folder = Path(dataset)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved = datasets.load_from_disk(dataset)
            # What was saved without a split is a training set; it must not stand in for the others as well.
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            if split not in splits:
                raise ValueError(f"it has the splits {list(splits)}.")
            return splits[split]
        return datasets.load_dataset(dataset, config, split=split)
    except (OSError, ValueError, DatasetGenerationError) as error:
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(f"The dataset {dataset!r}, split {split!r}, cannot be loaded: {error}") from error


def _text_columns(
    rows: Dataset, languages: tuple[str, str], columns: tuple[int | str, int | str], where: str
) -> Dataset:
    """The columns `source` and `target` of a dataset that has them by other names, or as a `translation` feature."""
    source, target = (str(column) for column in columns)
    advice = "Name the two sides with data.source_column and data.target_column."
    if "translation" in rows.column_names:
        rows = rows.select_columns("translation").flatten()
        source, target = (f"translation.{language}" for language in languages)
        advice = "A `translation` holds the text of each language under its code."
    for column in (source, target):
        if column not in rows.column_names:
            raise ValueError(f"{where} has no column {column!r}; it has {rows.column_names}. {advice}")
    rows = rows.select_columns([source, target]).rename_columns({source: "source", target: "target"})
    for side in ("source", "target"):
        kind = getattr(rows.features[side], "dtype", rows.features[side])
        if kind not in ("string", "large_string"):
            raise ValueError(f"{where}: the {side} column must be text, but it is {kind}.")
        if rows.data.column(side).null_count:
            missing = rows.with_format("arrow")[:][side].is_null().index(True).as_py()
            raise ValueError(f"{where}: row {missing + 1} has no {side} text.")
    return rows


def encode_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """
    Turns text into ids, once: the result is cached on disk under the text's and the tokenizer's own fingerprints.

    Args:
        pairs (`Dataset`): text columns `source` and `target`.
        tokenizer ([`PreTrainedTokenizerBase`]): ends each sentence with `</s>`.

    Returns:
        `Dataset` with the columns `source_ids` and `target_ids`. Pairs with an empty side are left out.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        kept = [(s, t) for s, t in zip(batch["source"], batch["target"], strict=True) if s.strip() and t.strip()]
        if not kept:
            return {"source_ids": [], "target_ids": []}
        sources, targets = (list(side) for side in zip(*kept, strict=True))
        return {"source_ids": tokenizer(sources)["input_ids"], "target_ids": tokenizer(targets)["input_ids"]}

    ids = datasets.List(datasets.Value("int32"))
    return pairs.map(
        encode,
        batched=True,
        remove_columns=pairs.column_names,
        features=datasets.Features({"source_ids": ids, "target_ids": ids}),
        # A fast tokenizer's pickle changes when it is used, so that `datasets` would not find its own cache again.
        new_fingerprint=Hasher.hash([pairs._fingerprint, tokenizer.backend_tokenizer.to_str()]),
        desc="Encoding",
    )


def pair_lengths(encoded: Dataset) -> np.ndarray:
    """
    Tokens of each side of each pair.

    Args:
        encoded (`Dataset`): what `encode_pairs` returned.

    Returns:
        `np.ndarray` of shape `(pairs, 2)`: source and target tokens, `</s>` counted.
    """
    table = encoded.with_format("arrow")[:]
    sides = [table[side].combine_chunks() for side in ("source_ids", "target_ids")]
    return np.stack([np.diff(side.offsets.to_numpy()) for side in sides], axis=1)
