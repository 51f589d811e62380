"""Streamed training text: read in windows, each of which is shuffled, encoded and batched in memory."""

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ..interruption import ignore_signals
from .batching import (
    Batch,
    BatchOrder,
    PairCollator,
    TokenBudgetBatchSampler,
)
from .encoding import EncodedPairs, encode_rows, pair_lengths
from .reading import named_errors

try:
    from datasets import Dataset, IterableDataset
except ImportError as error:
    raise ImportError(f"Reading training text needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

# The start of a stream.
START: dict[str, Any] = {"passes": 0, "pairs": 0, "state": {}}

# Pairs are numbered from 1 in the first stream, from here in the second, from twice this number in the third, ...
NUMBERS = 10**12


@dataclass
class Stream:
    """
    A source of text of unknown length, repeated without end.

    Args:
        rows (`IterableDataset`): text columns `source` and `target`.
        name (`str`): direction, as in en-de.
        weight (`float`): mixing ratio among the streams.
        tag (`str`, *optional*): language tag in front of the source sentences.
        description (`dict[str, Any]`): identifies the text when a run is resumed; JSON-serializable.
        origin (`Sequence[str]`): files or dataset, for error messages.
    """

    rows: IterableDataset
    name: str
    weight: float
    tag: str | None
    description: dict[str, Any]
    origin: Sequence[str] = ()


class _Reader:
    """Reads the pairs of one stream, pass after pass, from a JSON-serializable `place`."""

    def __init__(self, stream: Stream, place: dict[str, Any]) -> None:
        # An iterable dataset holds its own position, so it cannot be shared.
        self.rows = copy.deepcopy(stream.rows)
        self.name = stream.name
        self.origin = stream.origin or [stream.name]
        self._go_to(place)

    def _go_to(self, place: dict[str, Any]) -> None:
        self.place = place
        self.rows.load_state_dict(place["state"])
        self.iterator = named_errors(self.rows, self.origin)
        self.ahead = next(self.iterator, None)
        if self.ahead is None:
            raise ValueError(f"The training text of {self.name} is empty.")

    def take(self, count: int) -> "_Text":
        """Reads the next `count` pairs, or the rest of this pass if it is shorter."""
        text = _Text([], [], self.place["pairs"] + 1)
        for row in chain([self.ahead], islice(self.iterator, count - 1)):
            text.sources.append(row["source"])
            text.targets.append(row["target"])
        pairs = self.place["pairs"] + len(text.sources)
        self.place = self.place | {"pairs": pairs, "state": self.rows.state_dict()}
        # One row is read ahead to recognize the last pair of a pass.
        self.ahead = next(self.iterator, None)
        if self.ahead is None:
            self._go_to(START | {"passes": self.place["passes"] + 1})
        return text


@dataclass
class _Text:
    """Consecutive pairs of a stream, numbered from `first`."""

    sources: list[str]
    targets: list[str]
    first: int


@dataclass
class _Window:
    """Pairs that are shuffled together, with the places of all streams before and after them."""

    index: int
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    pairs: int
    # The text of each stream.
    texts: list[list[_Text]]


class StreamUpdates:
    """
    [`Updates`] over text that is streamed instead of cached: window after window, pass after pass.

    A window has `size` pairs, which are batched like those of an epoch. The first stream sets the pass: a window ends
    where it ends, and a pass has each of its pairs exactly once. The other streams are mixed in by weight, and repeat
    independently of it. All processes read the same text.

    Args:
        streams (`Sequence[Stream]`): sources of the text.
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        size (`int`): pairs of a window, all streams together.
        order ([`BatchOrder`]): token budget, seed and processes.
        collator ([`PairCollator`]): pads the batches.
        num_workers (`int`): processes that encode windows ahead of the training; 0 encodes them in this process.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        tokenizer: PreTrainedTokenizerBase,
        size: int,
        order: BatchOrder,
        collator: PairCollator,
        num_workers: int = 0,
    ) -> None:
        self.streams = streams
        self.encoder = _Encoder(tokenizer, [stream.tag for stream in streams])
        self.size = size
        self.order = order
        self.collator = collator
        self.num_workers = num_workers
        self.start: dict[str, Any] = {"window": 0, "update": 0, "places": [START] * len(streams)}
        self.fingerprint: dict[str, Any] = {"streams": [stream.description for stream in streams]}

    def after(self, position: dict[str, Any]) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
        """See [`Updates`]. A position is the places of all streams before a window and its completed updates."""
        update, passes = position["update"], position["places"][0]["passes"]
        loader = DataLoader(
            self.encoder,
            sampler=self._windows(position["window"], position["places"]),
            batch_size=None,
            collate_fn=_identity,
            num_workers=self.num_workers,
            prefetch_factor=1 if self.num_workers else None,
            worker_init_fn=_set_up_worker,
            # By default a loader draws from the generator of the dropout.
            generator=torch.Generator(),
        )
        complete = True
        for window, table in loader:
            pairs = Dataset(table, fingerprint="window")
            lengths = pair_lengths(pairs)
            if complete:
                complete = self._is_complete(window, lengths)
            try:
                sampler = TokenBudgetBatchSampler(lengths, self.order)
            except ValueError:
                # No pair of this window fits. After a whole pass of such windows, no pair ever will.
                if window.after[0]["passes"] > passes + 1:
                    raise
                continue
            passes = window.after[0]["passes"]
            sampler.set_position(window.index)
            rows, updates = EncodedPairs(pairs), sampler.updates()
            for number, batches in enumerate(updates[update:], start=update + 1):
                reached = {"window": window.index, "update": number, "places": window.before}
                if number == len(updates):
                    reached = {"window": window.index + 1, "update": 0, "places": window.after}
                yield [self.collator(rows.__getitems__(batch.tolist())) for batch in batches], reached
            update = 0

    def _is_complete(self, window: _Window, lengths: np.ndarray) -> bool:
        """Returns whether no pair of a window is skipped; warns otherwise."""
        empty = window.pairs - len(lengths)
        skipped = int((lengths > self.order.longest_side).any(axis=1).sum())
        if empty or skipped:
            logger.warning(
                f"Skipped in window {window.index + 1} ({window.pairs:,} pairs): "
                f"{self.order.describe_skipped(empty, skipped)}; later windows skip such pairs without a warning"
            )
        return not (empty or skipped)

    def _windows(self, index: int, places: list[dict[str, Any]]) -> Iterator[_Window]:
        first, *others = [_Reader(stream, place) for stream, place in zip(self.streams, places, strict=True)]
        weights = [stream.weight for stream in self.streams]
        share = max(1, round(self.size * weights[0] / sum(weights)))
        while True:
            before = first.place["pairs"]
            texts = [[first.take(share)]]
            after = before + len(texts[0][0].sources)
            for reader, weight in zip(others, weights[1:], strict=True):
                # Counted from the start of the pass, so rounding errors do not accumulate.
                wanted = int(after * weight / weights[0]) - int(before * weight / weights[0])
                texts.append([])
                while wanted:
                    texts[-1].append(reader.take(wanted))
                    wanted -= len(texts[-1][-1].sources)
            reached = [reader.place for reader in (first, *others)]
            count = sum(len(text.sources) for parts in texts for text in parts)
            yield _Window(index, places, reached, count, texts)
            index, places = index + 1, reached


class _Encoder(torch.utils.data.Dataset[tuple[_Window, pa.Table]]):
    """A dataset that is indexed by windows and encodes them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: list[str | None]) -> None:
        self.tokenizer = tokenizer
        self.tags = tags

    def __getitem__(self, window: _Window) -> tuple[_Window, pa.Table]:
        tables = []
        for i, (texts, tag) in enumerate(zip(window.texts, self.tags, strict=True)):
            for text in texts:
                # In parts, because the results of the tokenizer take far more memory than the ids.
                for start in range(0, len(text.sources), 1000):
                    part = slice(start, start + 1000)
                    sources, targets = text.sources[part], text.targets[part]
                    number = i * NUMBERS + text.first + start
                    numbers = range(number, number + len(sources))
                    tables.append(encode_rows(sources, targets, numbers, self.tokenizer, tag))
        return replace(window, texts=[]), pa.concat_tables(tables)


def _identity(window: Any) -> Any:
    return window


def _set_up_worker(worker: int) -> None:
    ignore_signals(worker)
    # The threads of a tokenizer do not survive a fork, which it warns about unless they are off.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
