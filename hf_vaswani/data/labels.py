"""Labelled text, from all sources of a run: its labels, and the rows of ids that classifiers learn from."""

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from .blocks import plain_tokenizer
from .encoding import EncodedRows, as_lists, cached, pair_lengths
from .objectives import SPACES
from .reading import Source
from .task_data import EvaluationSet, TaskData, TrainingRows
from .tokenizer import Frame, put_special_tokens

with extra("train"):
    import datasets
    from datasets import Dataset, concatenate_datasets

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LabelledData(TaskData):
    """
    Text with labels: one for a text or a pair of texts, or one for each word.

    Attributes:
        task (`str`): `"classification"` or `"tagging"`.
        frame ([`Frame`]): the special tokens around a text.
        block_length (`int`): most tokens of a text, which is cut there.
        has_segments (`bool`): whether a new model tells the two texts of a pair apart by segments.
    """

    task: str
    frame: Frame
    block_length: int
    has_segments: bool = False

    @property
    def longest_row(self) -> int:
        """Most tokens of a text."""
        return self.block_length

    def check_split(self, source: Source, split: str) -> None:
        """Raises a `ValueError` if a sentence has another number of tags than words."""
        rows = source.splits[split]
        if "words" not in rows.column_names:
            return
        lengths = (rows.data.column(name).combine_chunks().value_lengths() for name in ("words", "tags"))
        for number, (words, tags) in enumerate(zip(*(each.to_pylist() for each in lengths), strict=True), start=1):
            if words != tags:
                where = " and ".join(source.origin(split))
                raise ValueError(f"{where}, row {number}, has {words} words but {tags} tags: each word needs one tag.")

    def label_names(self, sources: Sequence[Source]) -> list[str]:
        """Collects the labels of the training text: numbers in their order, other labels in that of the alphabet."""
        names = {name for source in sources for row in _labels(source.splits["train"]) for name in row}
        return sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))

    def check(
        self, sources: Sequence[Source], labels: Sequence[str], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Checks that the model has two labels or more, and each of the text among them."""
        check_labels(labels, sources)
        ids = {name: i for i, name in enumerate(labels)}
        for source in sources:
            for split, rows in source.splits.items():
                where = " and ".join(source.origin(split))
                for number, names in enumerate(_labels(rows), start=1):
                    check_known(names, ids, f"{where}, row {number},")

    def set_up_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Puts `<s>` in front of a text and `</s>` behind it, and behind the second text of a pair."""
        put_special_tokens(tokenizer, self.frame, self.has_segments)

    def sentences(self, source: Source, batch: Mapping[str, list[Any]]) -> Iterator[str]:
        """Returns texts, both of a pair."""
        return chain.from_iterable(_texts(batch))

    def row_columns(self, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
        """Returns the columns of rows besides both sides; `label` stands for the label of a whole text."""
        return [*_segments(tokenizer), *(["label"] if self.task == "classification" else [])]

    def encode_training(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], seed: int
    ) -> TrainingRows:
        """Encodes the training text, see [`TaskData.encode_training`]."""
        check_labels(labels, sources)
        parts: list[Dataset] = []
        for source in sources:
            rows, where = source.splits["train"], " and ".join(source.origin("train"))
            first = 1 + sum(map(len, parts))
            parts.append(encode_labelled(rows, tokenizer, labels, self.block_length, where, first, self.num_proc))
            _report_cut(parts[-1], rows, self.block_length, f"training text of {source.name}")
        encoded = concatenate_datasets(parts)
        lengths, crc = pair_lengths(encoded), 0
        logger.info(f"{len(encoded):,} labelled texts, {int(lengths[:, 0].sum()):,} tokens, {len(labels)} labels")
        for batch in encoded.data.to_batches():
            crc = zlib.crc32(batch.column("target_ids").values.to_numpy().tobytes(), crc)
        fingerprint = {"labels": list(labels), "crc32_of_labels": crc}
        return TrainingRows(lengths, list(map(len, parts)), EncodedRows(encoded), fingerprint=fingerprint)

    def encode_set(
        self, source: Source, split: str, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]
    ) -> EvaluationSet:
        """Encodes a set; its `source` has the texts, and its `target` the labels."""
        rows, where = source.splits[split], " and ".join(source.origin(split))
        # All words count: their sentences are cut only where the model cannot read on.
        longest = self.max_length if self.task == "tagging" else self.block_length
        encoded = encode_labelled(rows, tokenizer, labels, longest, where)
        _report_cut(encoded, rows, longest, f"{split} text of {source.name}")
        texts, names = ["\t".join(each) for each in _texts(rows)], [" ".join(each) for each in _labels(rows)]
        columns = self.row_columns(tokenizer)
        return EvaluationSet(source.name, texts, names, None, None, source.source_language, encoded, columns)


def check_labels(labels: Sequence[str], sources: Sequence[Source]) -> None:
    """Raises a `ValueError` if a model of these labels would have nothing to choose from."""
    if len(labels) < 2:
        origin = " and ".join(
            name for source in sources if "train" in source.splits for name in source.origin("train")
        )
        found = f"only {labels[0]!r}" if labels else "none"
        raise ValueError(f"A classifier needs two labels or more, but the training text has {found}: {origin}.")


def check_known(names: Sequence[str], ids: Mapping[str, int], where: str) -> None:
    """Raises a `ValueError` that begins with `where` unless each name is a label of the model, a key of `ids`."""
    if unknown := [name for name in names if name not in ids]:
        raise ValueError(
            f"{where} has the label {unknown[0]!r}, but the model has only {', '.join(map(repr, list(ids)[:20]))}"
            f"{' and more' if len(ids) > 20 else ''}: each label must be in the training text."
        )


def _labels(rows: Any) -> list[list[str]]:
    """Returns the labels of each row, one or, of words, several."""
    return rows["tags"][:] if "tags" in rows.column_names else [[label] for label in rows["label"]]


def _segments(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the column of segments, if a tokenizer has them."""
    return ["segments"] if "token_type_ids" in tokenizer.model_input_names else []


def _texts(rows: Any) -> list[tuple[str, ...]]:
    """Returns the text of each row of a dataset or a batch, or both texts of a pair."""
    names = list(rows) if isinstance(rows, Mapping) else rows.column_names
    if "words" in names:
        return [(" ".join(words),) for words in rows["words"]]
    return list(zip(*(rows[name] for name in ("text", "pair") if name in names), strict=True))


def encode_labelled(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    longest: int | None,
    where: str,
    first_number: int = 1,
    num_proc: int | None = None,
) -> Dataset:
    """
    Encodes labelled text as ids. The result is cached on disk under the fingerprints of the text and the tokenizer.

    Args:
        rows (`Dataset`): columns `text`, perhaps `pair`, and `label`; or the lists `words` and `tags`.
        tokenizer ([`PreTrainedTokenizerBase`]): a fast tokenizer.
        labels (`Sequence[str]`): names of the labels, by id.
        longest (`int`, *optional*): most tokens of a text or a pair of texts, special tokens included; longer ones are
            cut.
        where (`str`): name of the text, for error messages.
        first_number (`int`), num_proc (`int`, *optional*): as in [`encode_pairs`].

    Returns:
        `Dataset` with the columns `number`, `source_ids`, `target_ids` and, if the tokenizer has them, `segments`. The
        target of a text is its label; that of a tagged sentence has the label of each word at its first token, and
        -100 elsewhere.

    Raises:
        ValueError: a label is not one of `labels`.
    """
    plain, lists = plain_tokenizer(tokenizer), ["source_ids", "target_ids", *_segments(tokenizer)]
    if longest is not None:
        plain.enable_truncation(longest)
    encode = _LabelEncoder(plain, lists, {name: i for i, name in enumerate(labels)}, where, first_number)
    numbers = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"number": datasets.Value("int64")} | dict.fromkeys(lists, numbers))
    return cached(rows, encode, features, [plain.to_str(), lists, list(labels), first_number], num_proc)


@dataclass
class _LabelEncoder:
    """Encodes the rows of a table; `lists` are the columns to make, and `ids` those of the labels."""

    plain: Tokenizer
    lists: Sequence[str]
    ids: Mapping[str, int]
    where: str
    first_number: int

    def __call__(self, table: pa.Table, indices: list[int]) -> pa.Table:
        # Another process receives the tokenizer without it.
        self.plain.encode_special_tokens = True
        batch = table.to_pydict()
        is_tagged = "words" in batch
        names = batch["tags"] if is_tagged else [[label] for label in batch["label"]]
        texts = [each if len(each) > 1 else each[0] for each in _texts(batch)]
        found: dict[str, list[Any]] = {name: [] for name in self.lists}
        for row, (encoding, tags) in enumerate(zip(self.plain.encode_batch(texts), names, strict=True)):
            check_known(tags, self.ids, f"{self.where}, row {indices[row] + 1},")
            target = [self.ids[name] for name in tags]
            if is_tagged:
                target = tag_places(encoding, batch["words"][row], target)
            values = {"source_ids": encoding.ids, "target_ids": target, "segments": encoding.type_ids}
            for name in self.lists:
                found[name].append(values[name])
        columns = {name: as_lists(values) for name, values in found.items()}
        return pa.table({"number": pa.array([self.first_number + index for index in indices]), **columns})


def tag_places(encoding: Encoding, words: Sequence[str], tags: Sequence[int]) -> list[int]:
    """
    Puts the tag of each word at its first token.

    Args:
        encoding (`tokenizers.Encoding`): the words, joined by spaces.
        words (`Sequence[str]`), tags (`Sequence[int]`): the words, and an id for each.

    Returns:
        `list[int]`: a tag or -100 for each token. A word without tokens, or beyond the last one, has none.
    """
    found = [-100] * len(encoding.ids)
    place, start = 0, 0
    for word, tag in zip(words, tags, strict=True):
        # A piece may begin with the space in front of its word, or be that space.
        while place < len(found) and (
            encoding.special_tokens_mask[place]
            or encoding.offsets[place][1] <= start
            or encoding.tokens[place] in SPACES
        ):
            place += 1
        end = start + len(word)
        if place < len(found) and encoding.offsets[place][0] < end:
            found[place] = tag
            place += 1
        start = end + 1
    return found


def _report_cut(encoded: Dataset, rows: Dataset, longest: int | None, what: str) -> None:
    """Logs how many texts are cut, and warns of words whose tags are not scored."""
    if longest is not None and (cut := int((pair_lengths(encoded)[:, 0] == longest).sum())):
        logger.info(f"{cut:,} texts of the {what} have {longest} tokens: what was longer is cut")
    if "tags" in rows.column_names:
        words = sum(map(len, rows["tags"]))
        known = sum(tag != -100 for row in encoded["target_ids"] for tag in row)
        if known < words:
            logger.warning(f"{words - known:,} words of the {what} have no token in their text, and do not count")
