"""Sentence pairs as ids: encoded once, cached in Arrow files by `datasets`, and memory-mapped from there."""

import random
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from .augmentation import BpeDropout, TextAugmenter
from .tokenizer import backend

with extra("train"):
    import datasets
    import pyarrow as pa
    from datasets import Dataset
    from datasets.fingerprint import Hasher

ENCODED = datasets.Features(
    {
        "number": datasets.Value("int64"),
        "source_ids": datasets.List(datasets.Value("int32")),
        "target_ids": datasets.List(datasets.Value("int32")),
    }
)


def encode_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    source_prefix: str | None = None,
    first_number: int = 1,
    num_proc: int | None = None,
) -> Dataset:
    """
    Encodes text as ids. The result is cached on disk under the fingerprints of the text and the tokenizer.

    Args:
        pairs (`Dataset`): text columns `source` and `target`.
        tokenizer ([`PreTrainedTokenizerBase`]): a fast tokenizer that ends each sentence with `</s>`.
        source_prefix (`str`, *optional*): language tag or prefix in front of every source sentence, or both.
        first_number (`int`): number of the first pair; the following pairs count up from it.
        num_proc (`int`, *optional*): number of processes; by default one, with the tokenizer's threads.

    Returns:
        `Dataset` with the columns `number`, `source_ids` and `target_ids`. Pairs with an empty side are skipped.

    Raises:
        OSError: the cache cannot be written.
        ValueError: a sentence has an unpaired UTF-16 surrogate.
    """

    def encode(rows: pa.Table, indices: list[int]) -> pa.Table:
        numbers = [first_number + index for index in indices]
        return encode_rows(rows["source"].to_pylist(), rows["target"].to_pylist(), numbers, tokenizer, source_prefix)

    backends = [backend(tokenizer, is_target).to_str() for is_target in (False, True)]
    settings = [*backends, tokenizer.split_special_tokens, source_prefix, first_number]
    return cached(pairs, encode, ENCODED, settings, num_proc)


def cached(
    rows: Dataset,
    encode: Callable[[pa.Table, list[int]], pa.Table],
    features: datasets.Features,
    settings: Sequence[Any],
    num_proc: int | None,
) -> Dataset:
    """
    Encodes a dataset in parts, cached on disk.

    Args:
        rows (`Dataset`): the text.
        encode (`Callable`): encodes a part of it, which comes with the places of its rows.
        features (`datasets.Features`): columns of the result.
        settings (`Sequence[Any]`): what the result depends on besides the text. The tokenizer itself would not do:
            using a fast one changes its pickle, with which `datasets` would not find the cache again.
        num_proc (`int`, *optional*): number of processes; by default one, with the tokenizer's threads.

    Returns:
        `Dataset` with these columns.

    Raises:
        OSError: the cache cannot be written.
    """
    try:
        encoded = rows.with_format("arrow").map(
            encode,
            batched=True,
            with_indices=True,
            remove_columns=rows.column_names,
            features=features,
            num_proc=num_proc,
            new_fingerprint=Hasher.hash([rows._fingerprint, *settings]),
            desc="Encoding",
        )
    except (OSError, ValueError) as error:
        # On a full disk `datasets` raises a second error, about the file that the first one closed.
        full = error if isinstance(error, OSError) else error.__context__
        if not isinstance(full, OSError):
            raise
        cache = datasets.config.HF_DATASETS_CACHE
        raise OSError(f"The ids cannot be written to the cache {str(cache)!r}: {full}") from error
    return encoded.with_format(None)


def encode_rows(
    sources: list[str],
    targets: list[str],
    numbers: Sequence[int] | np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    source_prefix: str | None = None,
    augmenter: TextAugmenter | None = None,
    repetitions: Sequence[int] | np.ndarray = (),
) -> pa.Table:
    """
    Encodes pairs in memory.

    Args:
        sources (`list[str]`), targets (`list[str]`): the two sides.
        numbers (`Sequence[int]`): number of each pair in the text.
        tokenizer ([`PreTrainedTokenizerBase`]), source_prefix (`str`, *optional*): as in [`encode_pairs`].
        augmenter ([`TextAugmenter`], *optional*): alters the pairs, and skips merges.
        repetitions (`Sequence[int]`): how often each pair was taken before; only the augmenter needs it.

    Returns:
        `pa.Table` with the columns `number`, `source_ids` and `target_ids`. Pairs with an empty side are skipped.

    Raises:
        ValueError: a sentence has an unpaired UTF-16 surrogate.
    """
    filled = [i for i in range(len(sources)) if sources[i].strip() and targets[i].strip()]
    kept, dropout = [(sources[i], targets[i]) for i in filled], None
    rngs: list[random.Random] = []
    if augmenter is not None:
        dropout = augmenter.dropout
        rngs = [augmenter.rng(int(numbers[i]), int(repetitions[i])) for i in filled]
        kept = [augmenter.altered(*pair, rng) for pair, rng in zip(kept, rngs, strict=True)]
    before = "" if source_prefix is None else f"{source_prefix} "
    return pa.table(
        {
            "number": pa.array([numbers[i] for i in filled], pa.int64()),
            "source_ids": id_lists([before + source for source, _ in kept], backend(tokenizer, False), dropout, rngs),
            "target_ids": id_lists([target for _, target in kept], backend(tokenizer, True), dropout, rngs),
        }
    )


def id_lists(
    sentences: list[str],
    tokenizer: Tokenizer,
    dropout: BpeDropout | None = None,
    rngs: Sequence[random.Random] = (),
    add_special_tokens: bool = True,
) -> pa.ListArray:
    """
    Encodes sentences without a Python list for each.

    Args:
        sentences (`list[str]`): the text.
        tokenizer (`tokenizers.Tokenizer`): encodes it.
        dropout ([`BpeDropout`], *optional*), rngs (`Sequence[random.Random]`): skips merges, by the random
            numbers of each sentence.
        add_special_tokens (`bool`): whether to add the special tokens of a sentence, such as `</s>`.

    Returns:
        `pa.ListArray`: ids of each sentence.

    Raises:
        ValueError: a sentence has an unpaired UTF-16 surrogate.
    """
    # `encode_batch_fast` does not compute the words and offsets of the tokens.
    encode = tokenizer.encode_batch_fast if dropout is None else tokenizer.encode_batch
    try:
        encodings = encode(sentences, add_special_tokens=add_special_tokens)
    except TypeError as error:
        # The error of tokenizers does not name the sentence.
        broken = [sentence for sentence in sentences if re.search("[\ud800-\udfff]", sentence)]
        if not broken:
            raise
        raise ValueError(f"A sentence has an unpaired UTF-16 surrogate: {broken[0][:80]!r}.") from error
    if dropout is None:
        ids = [encoding.ids for encoding in encodings]
    else:
        ids = [dropout(encoding, rng) for encoding, rng in zip(encodings, rngs, strict=True)]
    return as_lists(ids)


def as_lists(rows: Sequence[Sequence[int]]) -> pa.ListArray:
    """Returns lists of ids as an Arrow array."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(list(map(len, rows)), out=offsets[1:])
    values = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


class EncodedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """
    Encoded text, such as the pairs of [`encode_pairs`], without copies: the ids are views of the memory-mapped Arrow
    buffers.

    Args:
        encoded (`Dataset`): columns of numbers and of lists of numbers.
    """

    def __init__(self, encoded: Dataset) -> None:
        self.encoded = encoded
        self._open()

    def _open(self) -> None:
        batches = [batch for batch in self.encoded.data.to_batches() if batch.num_rows]
        self.starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.numbers, self.lists = {}, {}
        for field in self.encoded.data.schema:
            columns = [batch.column(field.name) for batch in batches]
            if pa.types.is_list(field.type):
                self.lists[field.name] = [(column.offsets.to_numpy(), column.values.to_numpy()) for column in columns]
            else:
                self.numbers[field.name] = [column.to_numpy() for column in columns]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Returns several rows; a `DataLoader` asks for a batch in this way."""
        batches = np.searchsorted(self.starts, rows, side="right") - 1
        places = np.asarray(rows, dtype=np.int64) - self.starts[batches]
        return [self._row(batch, place) for batch, place in zip(batches.tolist(), places.tolist(), strict=True)]

    def _row(self, batch: int, place: int) -> dict[str, Any]:
        row = {name: batches[batch][place] for name, batches in self.numbers.items()}
        for name, batches in self.lists.items():
            offsets, values = batches[batch]
            row[name] = values[offsets[place] : offsets[place + 1]]
        return row

    def __getstate__(self) -> dict[str, Any]:
        # A process that is not forked maps the file itself; pickled views would be copies.
        return {"encoded": self.encoded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.encoded = state["encoded"]
        self._open()


def pair_lengths(encoded: Dataset) -> np.ndarray:
    """
    Counts the tokens of each side of each pair.

    Args:
        encoded (`Dataset`): result of [`encode_pairs`].

    Returns:
        `np.ndarray` of shape `(pairs, 2)`: source and target tokens, `</s>` included.
    """
    return np.stack([list_lengths(encoded, name) for name in ("source_ids", "target_ids")], axis=1)


def list_lengths(encoded: Dataset, column: str) -> np.ndarray:
    """Returns the lengths of the lists in a column, of shape `(rows,)`."""
    parts = [np.diff(batch.column(column).offsets.to_numpy()) for batch in encoded.data.to_batches()]
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
