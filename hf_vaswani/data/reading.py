"""Sources of text: where the splits of each are, and how sentence pairs, running text and labelled text are read."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..extras import extra
from ..records import public
from .pocket_corpus import SPLITS, read_pocket_corpus
from .remote import Files, file_name, local_files, text_lines
from .tables import (
    KINDS,
    LINE,
    SIDES,
    Columns,
    Stamp,
    aligned_files,
    column_file,
    dataset_split,
    generated,
    named_errors,
    place_of,
    shown,
    suffix_of,
    text_columns,
    text_features,
    without_mark,
)

with extra("train"):
    from datasets import Dataset, IterableDataset


@dataclass(frozen=True)
class Source:
    """
    A source of text.

    Attributes:
        source_language (`str`): language of the text; of pairs, that of the source sentences.
        target_language (`str`, *optional*): language of the target sentences; text in one language has none.
        columns (`dict[str, int | str]`): columns by what they hold, as numbers in a TSV or CSV file without a header
            line: `source` and `target`; `text` and, of running text, perhaps `document`; `text`, perhaps `pair`, and
            `label`; or `words` and `tags`.
        dataset (`str`, *optional*): Hub id, local folder, or "pocket" for the built-in corpus.
        dataset_config (`str`, *optional*): configuration of the Hub dataset.
        dataset_splits (`dict[str, str]`): names in the dataset of "train", "validation" and "test".
        files (`dict[str, dict[str, str] | str]`): the files of a split, which replace that of the dataset: two
            line-aligned files by language, or by language and `label`; or one file with columns or, of running text,
            with a sentence or paragraph on each line and blank lines between documents.
        tag (`str`, *optional*), prefix (`str`, *optional*): language tag and other text in front of source sentences.
        weight (`float`): repetitions of each row in an epoch; of streams, the mixing ratio.
        set_name (`str`, *optional*): name in `validation_sets`.
        splits (`dict[str, Dataset | IterableDataset]`): the text by split, once it is read.
    """

    source_language: str
    target_language: str | None = None
    columns: Columns = field(default_factory=dict)
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_splits: Mapping[str, str | None] = field(default_factory=lambda: {split: split for split in SPLITS})
    files: Mapping[str, Files] = field(default_factory=dict)
    tag: str | None = None
    prefix: str | None = None
    weight: float = 1.0
    set_name: str | None = None
    splits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def languages(self) -> tuple[str, str] | None:
        """Source and target language, if there are two."""
        return None if self.target_language is None else (self.source_language, self.target_language)

    @property
    def name(self) -> str:
        """Name in `validation_sets`; otherwise direction, as in en-de, or language."""
        return self.set_name or "-".join(self.languages or (self.source_language,))

    @property
    def source_prefix(self) -> str | None:
        """Text in front of each source sentence: the language tag, then the prefix."""
        return " ".join(text for text in (self.tag, self.prefix) if text is not None) or None

    def file_names(self, split: str) -> list[str]:
        """Returns the files of a split, if it has some."""
        files = self.files.get(split)
        return [] if files is None else [files] if isinstance(files, str) else list(files.values())

    def origin(self, split: str) -> list[str]:
        """Returns the files of a split, or the dataset, for error messages, without the secrets of URLs."""
        return public(self.file_names(split) or [str(self.dataset)])

    def description(self) -> dict[str, Any]:
        """Describes the training text without reading it, as JSON: names, and the sizes of files."""
        if files := self.file_names("train"):
            return {"files": [[file_name(file), place_of(file)[1][0]] for file in files]}
        return {"dataset": self.dataset, "config": self.dataset_config, "split": self.dataset_splits.get("train")}

    def only(self, *splits: str) -> "Source":
        """Returns this source without its other splits."""
        names = {split: name for split, name in self.dataset_splits.items() if split in splits}
        return replace(self, dataset_splits=names, files={split: self.files.get(split) for split in splits})

    def batches(self, split: str) -> Iterator[dict[str, list[Any]]]:
        """Reads a split in parts of 1000 rows; an error names the file."""
        return named_errors(self.splits[split].iter(1000), self.origin(split))


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
    streaming: bool = False,
) -> dict[str, Dataset | IterableDataset]:
    """
    Reads sentence pairs, with the keys of the data section of a recipe.

    Args:
        source_language (`str`), target_language (`str`): language codes, also the default names of the columns.
        dataset (`str`, *optional*): Hub id, local folder, or "pocket" for the built-in corpus.
        dataset_config (`str`, *optional*): configuration of the Hub dataset.
        train_split, validation_split, test_split (`str`, *optional*): names of the splits in the dataset.
        train_files, validation_files, test_files (`dict[str, str]` or `str`, *optional*): two line-aligned files by
            language, or one file with columns; they override the split of the dataset.
        source_column, target_column (`int` or `str`, *optional*): names of the columns, or their numbers in a TSV or
            CSV file without a header line.
        streaming (`bool`): whether to read the training text on demand, without a cache.

    Returns:
        `dict[str, Dataset]`: "train", "validation" and "test", where they exist, each with the text columns `source`
        and `target`. With `streaming`, "train" is an `IterableDataset`, and errors in its text are raised on reading.

    Raises:
        ValueError: files have different numbers of lines, text is not UTF-8, or columns or values are missing; the
            message has file, line and expectation.
        FileNotFoundError: a file or dataset does not exist.
    """
    source = Source(
        source_language,
        target_language,
        {
            "source": source_language if source_column is None else source_column,
            "target": target_language if target_column is None else target_column,
        },
        dataset,
        dataset_config,
        {"train": train_split, "validation": validation_split, "test": test_split},
        {"train": train_files, "validation": validation_files, "test": test_files},
    )
    return load_splits(source, streaming)


def load_splits(source: Source, streaming: bool = False) -> dict[str, Dataset | IterableDataset]:
    """
    Reads the splits of a source of any text.

    Args:
        source ([`Source`]): names the splits.
        streaming (`bool`): whether to read the training text on demand, without a cache.

    Returns:
        `dict[str, Dataset]`: "train", "validation" and "test", where they exist, each with the columns of the source.
        Running text has the columns `text`, a line, and `document`, a name; lines of one document follow each other,
        and blank ones are left out. In tables without a column for it, each row is a document.

    Raises:
        ValueError, FileNotFoundError: as in [`load_pairs`].
    """
    if source.source_language == source.target_language:
        raise ValueError(f"Source and target must be different languages, but both are {source.source_language!r}.")
    files = {split: local_files(given, streaming and split == "train") for split, given in source.files.items()}
    splits: dict[str, Dataset | IterableDataset] = {}
    for split in SPLITS:
        given, name, as_stream = files.get(split), source.dataset_splits.get(split), streaming and split == "train"
        if given is not None:
            splits[split] = _read_files(source, split, given, as_stream)
        elif source.dataset == "pocket" and name is not None:
            pocket = _pocket_split(source, name)
            splits[split] = _as_lines(source, pocket.to_iterable_dataset() if as_stream else pocket)
        elif source.dataset is not None and name is not None:
            rows = dataset_split(source.dataset, source.dataset_config, name, as_stream)
            where = f"{source.dataset}, split {name}"
            splits[split] = _as_lines(source, text_columns(rows, source.languages, source.columns, where))
    return splits


def _read_files(source: Source, split: str, files: dict[str, str] | str, streaming: bool) -> Any:
    columns, is_running = source.columns, _is_running(source.columns)
    if isinstance(files, str):
        if is_running and suffix_of(files) not in KINDS:
            path, stamp = place_of(files)
            return generated(_lines, {"path": path, "stamp": stamp}, streaming, LINE)
        return _as_lines(source, column_file(files, source.languages, columns, streaming))
    if is_running or "pair" in columns:
        advice = (
            "running text is in one language: name one file"
            if is_running
            else "data.pair_column needs a file with columns"
        )
        raise ValueError(f"data.{split}_files is {shown(public(files))}, but {advice}.")
    first, second = columns
    return aligned_files(files, source.languages or (source.source_language, "label"), streaming, (first, second))


def _is_running(columns: Iterable[str]) -> bool:
    return set(columns) <= set(LINE)


def _lines(path: str, stamp: Stamp) -> Iterator[dict[str, str]]:
    """Reads the lines of a file; a blank line ends a document. `stamp` keeps a changed file out of the cache."""
    document, is_open = 0, False
    for line in text_lines(path):
        text = without_mark(line.rstrip("\r\n"))
        if text.strip():
            is_open = True
            yield {"text": text, "document": str(document)}
        elif is_open:
            document, is_open = document + 1, False


def _as_lines(source: Source, rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Splits the fields of running text into their lines; without a column for it, each row is a document."""
    if not _is_running(source.columns):
        return rows

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
    return rows.map(split, batched=True, with_indices=True, remove_columns=known, features=text_features(LINE))


def _pocket_split(source: Source, name: str) -> Dataset:
    """Returns a split of the built-in corpus: pairs, or the text of one language."""
    is_running = _is_running(source.columns)
    if not is_running and tuple(source.columns) != SIDES:
        raise ValueError("The built-in corpus 'pocket' has no labels: name files or another dataset.")
    language = source.source_language
    languages = source.languages or (language, "en" if language == "de" else "de")
    if sorted(languages) != ["de", "en"]:
        raise ValueError(
            f"The built-in corpus has the languages en and de, but the recipe asks for {' and '.join(languages)}."
        )
    if name not in SPLITS:
        raise ValueError(f"The built-in corpus has no split {name!r}; it has {', '.join(SPLITS)}.")
    english, pairs = languages.index("en"), read_pocket_corpus()[name]
    first = [pair[english] for pair in pairs]
    if is_running:
        return Dataset.from_dict({"text": first})
    return Dataset.from_dict({"source": first, "target": [pair[1 - english] for pair in pairs]})
