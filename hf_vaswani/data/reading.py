"""Reading of sentence pairs, running text and labelled text: the splits that a recipe names."""

import re
from collections.abc import Iterator

from ..extras import extra
from ..recipe import Files, shown
from ..records import public
from .pocket_corpus import SPLITS, read_pocket_corpus
from .remote import local_files, text_lines
from .tables import (
    KINDS,
    LABELLED,
    LINE,
    TAGGED,
    Columns,
    Stamp,
    aligned_files,
    column_file,
    dataset_split,
    generated,
    place_of,
    suffix_of,
    text_columns,
    text_features,
    without_mark,
)

with extra("train"):
    from datasets import Dataset, IterableDataset


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
    Reads the splits that the data section of a recipe names.

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
    if source_language == target_language:
        raise ValueError(f"Source and target must be different languages, but both are {source_language!r}.")
    languages = (source_language, target_language)
    columns: Columns = {
        "source": source_language if source_column is None else source_column,
        "target": target_language if target_column is None else target_column,
    }
    names = {"train": train_split, "validation": validation_split, "test": test_split}
    given = {"train": train_files, "validation": validation_files, "test": test_files}
    files = {split: local_files(each, streaming and split == "train") for split, each in given.items()}
    pairs: dict[str, Dataset | IterableDataset] = {}
    for split, name in names.items():
        split_files, as_stream = files[split], streaming and split == "train"
        if isinstance(split_files, dict):
            pairs[split] = aligned_files(split_files, languages, as_stream)
        elif split_files is not None:
            pairs[split] = column_file(split_files, languages, columns, as_stream)
        elif dataset == "pocket" and name is not None:
            pocket = _pocket_split(languages, name)
            pairs[split] = pocket.to_iterable_dataset() if as_stream else pocket
        elif dataset is not None and name is not None:
            rows = dataset_split(dataset, dataset_config, name, as_stream)
            pairs[split] = text_columns(rows, languages, columns, f"{dataset}, split {name}")
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
    streaming: bool = False,
) -> dict[str, Dataset | IterableDataset]:
    """
    Reads running text in one language: the splits that the data section of a recipe names.

    Args:
        language (`str`): language code, also the default name of the column.
        dataset, dataset_config, train_split, validation_split, test_split, streaming: as in [`load_pairs`].
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
    given = {"train": train_files, "validation": validation_files, "test": test_files}
    files = {split: local_files(each, streaming and split == "train") for split, each in given.items()}
    texts: dict[str, Dataset | IterableDataset] = {}
    for split, name in names.items():
        file, as_stream = files[split], streaming and split == "train"
        if isinstance(file, dict):
            raise ValueError(
                f"data.{split}_files is {shown(public(file))}, but running text is in one language: name one file."
            )
        if file is not None and suffix_of(file) not in KINDS:
            path, stamp = place_of(file)
            arguments = {"path": path, "stamp": stamp}
            texts[split] = generated(_lines, arguments, as_stream, LINE)
        elif file is not None:
            texts[split] = _as_lines(column_file(file, None, columns, as_stream))
        elif dataset == "pocket" and name is not None:
            languages = (language, "en" if language == "de" else "de")
            side = _pocket_split(languages, name).select_columns("source").rename_column("source", "text")
            texts[split] = _as_lines(side.to_iterable_dataset() if as_stream else side)
        elif dataset is not None and name is not None:
            rows = dataset_split(dataset, dataset_config, name, as_stream)
            texts[split] = _as_lines(text_columns(rows, None, columns, f"{dataset}, split {name}"))
    return texts


def load_labelled(
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
    pair_column: int | str | None = None,
    label_column: int | str | None = None,
    is_tagged: bool = False,
) -> dict[str, Dataset]:
    """
    Reads text with labels: the splits that the data section of a recipe names.

    Args:
        language (`str`): language code, also the default name of the text's column.
        dataset, dataset_config, train_split, validation_split, test_split: as in [`load_pairs`].
        train_files, validation_files, test_files (`dict[str, str]` or `str`, *optional*): as in [`load_pairs`]; two
            line-aligned files are given by `language` and `"label"`.
        text_column, pair_column, label_column (`int` or `str`, *optional*): columns of the text, of the second text of
            a pair, and of the label, `label` by default.
        is_tagged (`bool`): whether each word has a label. Words and tags are lists or separated by spaces.

    Returns:
        `dict[str, Dataset]`: "train", "validation" and "test", where they exist, each with the columns `text` and
        `label` and, for pairs of texts, `pair`; with `is_tagged`, with the lists `words` and `tags`.

    Raises:
        ValueError, FileNotFoundError: as in [`load_pairs`].
    """
    columns: Columns = {
        "words" if is_tagged else "text": language if text_column is None else text_column,
        **({} if pair_column is None else {"pair": pair_column}),
        "tags" if is_tagged else "label": "label" if label_column is None else label_column,
    }
    names = {"train": train_split, "validation": validation_split, "test": test_split}
    given = {"train": train_files, "validation": validation_files, "test": test_files}
    files = {split: local_files(each) for split, each in given.items()}
    found: dict[str, Dataset] = {}
    for split, name in names.items():
        file = files[split]
        if isinstance(file, dict):
            if pair_column is not None:
                raise ValueError(
                    f"data.{split}_files is {shown(public(file))}, but data.pair_column needs a file with columns."
                )
            found[split] = aligned_files(file, (language, "label"), False, TAGGED if is_tagged else LABELLED)
        elif file is not None:
            found[split] = column_file(file, None, columns, False)
        elif dataset == "pocket":
            raise ValueError("The built-in corpus 'pocket' has no labels: name files or another dataset.")
        elif dataset is not None and name is not None:
            rows = dataset_split(dataset, dataset_config, name, False)
            found[split] = text_columns(rows, None, columns, f"{dataset}, split {name}")
    return found


def _lines(path: str, stamp: Stamp) -> Iterator[dict[str, str]]:
    """Reads the lines of a file; a blank line ends a document. `stamp` is as in [`_table_rows`]."""
    document, is_open = 0, False
    for line in text_lines(path):
        text = without_mark(line.rstrip("\r\n"))
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
    return rows.map(split, batched=True, with_indices=True, remove_columns=known, features=text_features(LINE))


def _pocket_split(languages: tuple[str, str], name: str) -> Dataset:
    if sorted(languages) != ["de", "en"]:
        raise ValueError(
            f"The built-in corpus has the languages en and de, but the recipe asks for {' and '.join(languages)}."
        )
    if name not in SPLITS:
        raise ValueError(f"The built-in corpus has no split {name!r}; it has {', '.join(SPLITS)}.")
    english, pairs = languages.index("en"), read_pocket_corpus()[name]
    return Dataset.from_dict(
        {"source": [pair[english] for pair in pairs], "target": [pair[1 - english] for pair in pairs]}
    )
