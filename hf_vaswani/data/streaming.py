"""Training text beyond the disk: read in windows, each shuffled, tokenised and put into batches in memory."""

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

# The place where a stream begins.
START: dict[str, Any] = {"passes": 0, "pairs": 0, "state": {}}

# The numbers of the pairs of the second stream begin above this one, those of the third above twice as much, ...
NUMBERS = 10**12


@dataclass
class Stream:
    """
    A source of text without end or length: `rows` with the columns `source` and `target`.

    `weight` is its proportion among the streams, `tag` goes in front of its source sentences, `description` says what
    it is, in what JSON can hold, and `origin` names its files or its dataset.
    """

    rows: IterableDataset
    name: str
    weight: float
    tag: str | None
    description: dict[str, Any]
    origin: Sequence[str] = ()


class _Reader:
    """The pairs of one stream, pass after pass. `place` is where it stands, in what JSON can hold."""

    def __init__(self, stream: Stream, place: dict[str, Any]) -> None:
        # A dataset of this kind holds its own position, so nobody else may have it.
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
        """The next `count` pairs, or what is left of this pass."""
        text = _Text([], [], self.place["pairs"] + 1)
        for row in chain([self.ahead], islice(self.iterator, count - 1)):
            text.sources.append(row["source"])
            text.targets.append(row["target"])
        pairs = self.place["pairs"] + len(text.sources)
        self.place = self.place | {"pairs": pairs, "state": self.rows.state_dict()}
        # One row is read ahead, so that the last pair of a pass is known as such.
        self.ahead = next(self.iterator, None)
        if self.ahead is None:
            self._go_to(START | {"passes": self.place["passes"] + 1})
        return text


@dataclass
class _Text:
    """Some pairs of a stream in a row, the first of which has the number `first`."""

    sources: list[str]
    targets: list[str]
    first: int


@dataclass
class _Window:
    """The pairs that are shuffled together, and where all the streams stand before and after it."""

    index: int
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    # How many they are, and for each stream, what was read of it.
    pairs: int
    texts: list[list[_Text]]


class StreamUpdates:
    """
    [`Updates`] of text that is neither counted nor copied: window after window, pass after pass.

    A window has `size` pairs, which are put into batches as those of an epoch are. It ends where the first stream
    ends, so that a pass has each of its pairs exactly once. The others keep pace in the proportion of the weights, and
    begin anew by themselves. All processes read the same.

    Args:
        streams (`Sequence[Stream]`): the sources of the text.
        tokenizer ([`PreTrainedTokenizerBase`]): makes the ids.
        size (`int`): pairs of a window, all streams together.
        order ([`BatchOrder`]): as in [`TokenBudgetBatchSampler`].
        collator ([`PairCollator`]): makes batches.
        num_workers (`int`): processes that make ids ahead of the training; with 0, this process makes those of a
            window when it is asked for.
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
        """As in [`Updates`]. A position is where all streams stood before a window, and its updates that are done."""
        update, passes = position["update"], position["places"][0]["passes"]
        loader = DataLoader(
            self.encoder,
            sampler=self._windows(position["window"], position["places"]),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            prefetch_factor=1 if self.num_workers else None,
            worker_init_fn=_in_a_worker,
            # Its own generator: without one, a loader draws from the generator that the dropout uses.
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
                # No pair of this window fits; that of no other fits either when a whole pass was like this.
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
        """Whether all pairs of a window can be trained on; says so if not."""
        empty = window.pairs - len(lengths)
        skipped = int((lengths > self.order.longest_side).any(axis=1).sum())
        if empty or skipped:
            logger.warning(
                f"Of the {window.pairs:,} pairs of window {window.index + 1} were left out, as they will be of later "
                f"windows: {self.order.describe_skipped(empty, skipped)}"
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
                # As many of each pass as the first has had, times the ratio: rounding does not add up.
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
    """Makes ids of windows, so to speak the rows of a data set whose indices they are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: list[str | None]) -> None:
        self.tokenizer = tokenizer
        self.tags = tags

    def __getitem__(self, window: _Window) -> tuple[_Window, pa.Table]:
        tables = []
        for i, (texts, tag) in enumerate(zip(window.texts, self.tags, strict=True)):
            for text in texts:
                # In parts, because the tokenizer's own results take far more memory than the ids.
                for start in range(0, len(text.sources), 1000):
                    part = slice(start, start + 1000)
                    sources, targets = text.sources[part], text.targets[part]
                    number = i * NUMBERS + text.first + start
                    numbers = range(number, number + len(sources))
                    tables.append(encode_rows(sources, targets, numbers, self.tokenizer, tag))
        return replace(window, texts=[]), pa.concat_tables(tables)


def _as_it_is(window: Any) -> Any:
    return window


def _in_a_worker(worker: int) -> None:
    ignore_signals(worker)
    # A tokenizer's threads are lost where a process is forked, and it says so unless it is told to do without.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
