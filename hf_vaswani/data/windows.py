"""Training text encoded while the model trains, window by window, each of which is shuffled and batched in memory.

The windows are parts of an epoch over text on disk, whose rows are made anew each time, or of a stream.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from ..interruption import ignore_signals
from .augmentation import TextAugmenter
from .batching import Batch, BatchOrder, PairCollator, TokenBudgetBatchSampler, lengths_fingerprint
from .encoding import EncodedRows, encode_rows, pair_lengths
from .reading import Source
from .tables import named_errors

with extra("train"):
    from datasets import Dataset

logger = logging.getLogger(__name__)

# Calls a function in every process, and returns all results, in the order of the processes.
Exchange = Callable[[Callable[[], Any]], list[Any]]

# Pairs that are encoded at once, because the results of the tokenizer take far more memory than the ids.
ENCODE_BATCH = 1000


@dataclass
class WindowText:
    """
    Pairs of one source.

    Attributes:
        sources (`list[str]`), targets (`list[str]`): the two sides.
        numbers (`Sequence[int]`): number of each pair in the text.
        repetitions (`Sequence[int]`): how often each pair was taken before.
        source_prefix (`str`, *optional*): language tag or prefix in front of the source sentences, or both.
    """

    sources: list[str]
    targets: list[str]
    numbers: Sequence[int] | np.ndarray
    repetitions: Sequence[int] | np.ndarray
    source_prefix: str | None


@dataclass
class Window:
    """
    Pairs that are shuffled together.

    Attributes:
        index (`int`): number of the window since the start of the training.
        before (`dict[str, Any]`), after (`dict[str, Any]`): positions at its two ends, without `update`.
        pairs (`int`): number of pairs.
        passes (`tuple[int, int]`): complete passes over the text at its two ends.
        texts (`list[WindowText]`): the pairs, unless the encoder reads them.
        rows (`np.ndarray` of shape `(2, pairs)`): numbers and repetitions of the pairs that the encoder reads.
        share (`tuple[int, int]`): index of this process, and number of processes that encode the window together.
    """

    index: int
    before: dict[str, Any]
    after: dict[str, Any]
    pairs: int
    passes: tuple[int, int]
    texts: list[WindowText] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: np.empty((2, 0), dtype=np.int64))
    share: tuple[int, int] = (0, 1)

    def part(self, count: int) -> slice:
        """Returns the part of a number of rows that this process encodes."""
        index, processes = self.share
        return slice(count * index // processes, count * (index + 1) // processes)


@dataclass(eq=False)
class WindowEncoder(torch.utils.data.Dataset[tuple[Window, pa.Table]]):
    """
    A dataset that is indexed by windows and encodes their text.

    Attributes:
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        augmenter ([`TextAugmenter`], *optional*): alters the pairs.
        sources (`Sequence[Source]`): training text on disk, for windows that have only numbers. Pairs are numbered
            from 1 through all sources.
    """

    tokenizer: PreTrainedTokenizerBase
    augmenter: TextAugmenter | None = None
    sources: Sequence[Source] = ()

    def __getitem__(self, window: Window) -> tuple[Window, pa.Table]:
        tables, mine = [], window.part(window.pairs)
        for text in _cut(window.texts, mine) or self.read(*window.rows[:, mine]):
            for start in range(0, max(1, len(text.sources)), ENCODE_BATCH):
                part = slice(start, start + ENCODE_BATCH)
                tables.append(
                    encode_rows(
                        text.sources[part],
                        text.targets[part],
                        text.numbers[part],
                        self.tokenizer,
                        text.source_prefix,
                        self.augmenter,
                        text.repetitions[part],
                    )
                )
        return replace(window, texts=[], rows=window.rows[:, :0]), pa.concat_tables(tables)

    def read(self, numbers: np.ndarray, repetitions: np.ndarray) -> list[WindowText]:
        """Reads pairs from the disk, by their numbers, of shape `(pairs,)`."""
        texts, first = [], 1
        for source in self.sources:
            pairs = source.splits["train"]
            here = (numbers >= first) & (numbers < first + len(pairs))
            rows = pairs.with_format("arrow")[numbers[here] - first]
            ours, theirs = (rows[side].to_pylist() for side in ("source", "target"))
            texts.append(WindowText(ours, theirs, numbers[here], repetitions[here], source.source_prefix))
            first += len(pairs)
        return texts


def _cut(texts: Sequence[WindowText], part: slice) -> list[WindowText]:
    """Returns a part of the pairs of several sources."""
    found, first = [], 0
    for text in texts:
        here = slice(max(0, part.start - first), max(0, part.stop - first))
        numbers, repetitions = text.numbers[here], text.repetitions[here]
        found.append(WindowText(text.sources[here], text.targets[here], numbers, repetitions, text.source_prefix))
        first += len(text.sources)
    return found


@dataclass(kw_only=True)
class WindowUpdates:
    """
    [`Updates`] over text that comes in windows, which are batched like an epoch.

    Attributes:
        encoder (`torch.utils.data.Dataset`): encodes the windows by which it is indexed, such as [`WindowEncoder`].
        size (`int`): pairs of a window.
        order ([`BatchOrder`]): token budget, seed and processes.
        collator ([`PairCollator`]): pads the batches.
        num_workers (`int`): processes that encode windows ahead of the training; 0 encodes them in this process.
        exchange (`Exchange`, *optional*): lets the processes of `order` encode each window together, a part each; by
            default, each encodes all of it.
        start (`dict[str, Any]`), fingerprint (`dict[str, Any]`): see [`Updates`].
    """

    encoder: torch.utils.data.Dataset[tuple[Window, pa.Table]]
    size: int
    order: BatchOrder
    collator: PairCollator
    num_workers: int = 0
    exchange: Exchange | None = None
    start: dict[str, Any] = field(init=False)
    fingerprint: dict[str, Any] = field(init=False)

    def windows(self, position: dict[str, Any]) -> Iterator[Window]:
        """Yields the windows from a position on, without end."""
        raise NotImplementedError

    def after(self, position: dict[str, Any]) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
        """See [`Updates`]. A position is that before a window, and the number of the window's completed updates."""
        update, passes = position["update"], -1
        loader = DataLoader(
            self.encoder,
            sampler=self._shares(self.windows(position)),
            batch_size=None,
            collate_fn=_identity,
            num_workers=self.num_workers,
            prefetch_factor=1 if self.num_workers else None,
            worker_init_fn=_set_up_worker,
            # By default a loader draws from the generator of the dropout.
            generator=torch.Generator(),
        )
        complete, is_first = True, self.order.few_shapes and position == self.start
        for window, table in self._whole(iter(loader)):
            passes = window.passes[0] if passes < 0 else passes
            pairs = Dataset(table, fingerprint="window")
            lengths = pair_lengths(pairs)
            if complete:
                complete = self._is_complete(window, lengths)
            try:
                sampler = TokenBudgetBatchSampler(lengths, self.order)
            except ValueError:
                # No pair of this window fits. After a whole pass of such windows, no pair ever will.
                if window.passes[1] > passes + 1:
                    raise
                continue
            passes = window.passes[1]
            sampler.set_position(window.index)
            if is_first:
                sampler.report_padding()
                is_first = False
            rows, updates = EncodedRows(pairs), sampler.updates()
            for number, batches in enumerate(updates[update:], start=update + 1):
                reached = window.before | {"update": number}
                if number == len(updates):
                    reached = window.after | {"update": 0}
                yield [self.collator(rows.__getitems__(batch.tolist())) for batch in batches], reached
            update = 0

    def _shares(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yields windows with the part of each that this process encodes."""
        share = self.order.process_index, self.order.num_processes
        for window in windows:
            yield window if self.exchange is None else replace(window, share=share)

    def _whole(self, parts: Iterator[tuple[Window, pa.Table]]) -> Iterator[tuple[Window, pa.Table]]:
        """Yields windows with the rows that all processes have encoded, the same in each."""
        if self.exchange is None:
            yield from parts
            return
        while True:
            found = self.exchange(partial(next, parts))
            yield found[0][0], pa.concat_tables([table for _, table in found])

    def _is_complete(self, window: Window, lengths: np.ndarray) -> bool:
        """Returns whether no pair of a window is skipped; warns otherwise."""
        empty = window.pairs - len(lengths)
        skipped = int((lengths > self.order.longest_side).any(axis=1).sum())
        if empty or skipped:
            logger.warning(
                f"Skipped in window {window.index + 1} ({window.pairs:,} pairs): "
                f"{self.order.describe_skipped(empty, skipped)}; later windows skip such pairs without a warning"
            )
        return not (empty or skipped)


def _identity(window: Any) -> Any:
    return window


def _set_up_worker(worker: int) -> None:
    ignore_signals(worker)
    # The threads of a tokenizer do not survive a fork, which it warns about unless they are off.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


# ---- Epochs over text on disk ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RenewedUpdates(WindowUpdates):
    """
    [`Updates`] epoch after epoch, with the pairs of [`EpochUpdates`], but with new ids in each epoch.

    The lengths of an epoch are not known before it is encoded, and a long epoch is not encoded at once: it is
    shuffled, and cut into windows of at most `size` pairs, which are batched by their new lengths. A pair whose new
    ids are too long is skipped in that epoch.

    Attributes:
        numbers (`np.ndarray` of shape `(pairs,)`): number of each pair of the sampler in the text.
        sampler ([`TokenBudgetBatchSampler`]): the pairs with the lengths that they have unaltered, and their weights.
    """

    numbers: np.ndarray
    sampler: TokenBudgetBatchSampler

    def __post_init__(self) -> None:
        self.start = {"epoch": 0, "window": 0, "update": 0}
        self.fingerprint = lengths_fingerprint(self.sampler.lengths)

    def windows(self, position: dict[str, Any]) -> Iterator[Window]:
        """Yields the windows from a position on: an epoch, and the number of a window in it."""
        epoch, first = position["epoch"], position["window"]
        while True:
            # The orders inside the windows have the seeds of two numbers.
            random = np.random.default_rng((self.order.seed, epoch, 1))
            pairs, repetitions = self.sampler.taken(random)
            repetitions = repetitions + epoch * (int(repetitions.max()) + 1)
            count = -(-len(pairs) // self.size)
            parts = np.array_split(random.permutation(len(pairs)), count)
            for i in range(first, count):
                last = i == count - 1
                # In the order of the text, which is faster to read.
                part = parts[i][np.argsort(pairs[parts[i]], kind="stable")]
                after = {"epoch": epoch + last, "window": 0 if last else i + 1}
                yield Window(
                    index=epoch * count + i,
                    before={"epoch": epoch, "window": i},
                    after=after,
                    pairs=len(part),
                    passes=(epoch, epoch + last),
                    rows=np.stack([self.numbers[pairs[part]], repetitions[part]]),
                )
            epoch, first = epoch + 1, 0


# ---- Streams ------------------------------------------------------------------------------------------------------

# The start of a stream.
START: dict[str, Any] = {"passes": 0, "pairs": 0, "state": {}}

# Pairs are numbered from 1 in the first stream, from here in the second, from twice this number in the third, ...
NUMBERS = 10**12


class _Reader:
    """Reads the pairs of one stream, pass after pass, from a JSON `position` on; they follow number `first`."""

    def __init__(self, source: Source, columns: tuple[str, str], position: dict[str, Any], first: int) -> None:
        # An iterable dataset holds its own position, so it cannot be shared.
        self.rows = copy.deepcopy(source.splits["train"])
        self.source, self.columns, self.first = source, columns, first
        self._go_to(position)

    def _go_to(self, position: dict[str, Any]) -> None:
        self.position = position
        self.rows.load_state_dict(position["state"])
        self.iterator = named_errors(self.rows, self.source.origin("train"))
        self.lookahead = next(self.iterator, None)
        if self.lookahead is None:
            raise ValueError(f"The training text of {self.source.name} is empty.")

    def take(self, count: int) -> WindowText:
        """Reads the next `count` pairs, or the rest of this pass if it is shorter."""
        rows = list(chain([self.lookahead], islice(self.iterator, count - 1)))
        first, pairs = self.first + self.position["pairs"] + 1, self.position["pairs"] + len(rows)
        numbers, repetitions = range(first, first + len(rows)), [self.position["passes"]] * len(rows)
        sources, targets = ([row[column] for row in rows] for column in self.columns)
        text = WindowText(sources, targets, numbers, repetitions, self.source.source_prefix)
        self.position = self.position | {"pairs": pairs, "state": self.rows.state_dict()}
        # One row is read ahead to recognize the last pair of a pass.
        self.lookahead = next(self.iterator, None)
        if self.lookahead is None:
            self._go_to(START | {"passes": self.position["passes"] + 1})
        return text


@dataclass(kw_only=True)
class StreamUpdates(WindowUpdates):
    """
    [`Updates`] over text that is streamed instead of cached: window after window, pass after pass.

    A window has `size` pairs, which are batched like those of an epoch. The first stream sets the pass: a window ends
    where it ends, and a pass has each of its pairs exactly once. The other streams are mixed in by weight, and repeat
    independently of it. All processes read the same text.

    Attributes:
        sources (`Sequence[Source]`): sources of the text, whose training text is an `IterableDataset`.
        columns (`tuple[str, str]`): the two text columns; of running text, `text` and `document`.
    """

    sources: Sequence[Source]
    columns: tuple[str, str]

    def __post_init__(self) -> None:
        self.start = {"window": 0, "update": 0, "places": [START] * len(self.sources)}
        self.fingerprint = {"streams": [source.description() for source in self.sources]}

    def windows(self, position: dict[str, Any]) -> Iterator[Window]:
        """Yields the windows from a position on: the number of a window, and the positions of all streams."""
        # `places` is the name of the positions of streams in checkpoints.
        index, positions = position["window"], position["places"]
        first, *others = [
            _Reader(source, self.columns, reached, i * NUMBERS)
            for i, (source, reached) in enumerate(zip(self.sources, positions, strict=True))
        ]
        weights = [source.weight for source in self.sources]
        share = max(1, round(self.size * weights[0] / sum(weights)))
        while True:
            before = first.position["pairs"]
            texts = [first.take(share)]
            after = before + len(texts[0].sources)
            for reader, weight in zip(others, weights[1:], strict=True):
                # Counted from the start of the pass, so rounding errors do not accumulate.
                wanted = int(after * weight / weights[0]) - int(before * weight / weights[0])
                while wanted:
                    texts.append(reader.take(wanted))
                    wanted -= len(texts[-1].sources)
            reached = [reader.position for reader in (first, *others)]
            count = sum(len(text.sources) for text in texts)
            ends = {"window": index, "places": positions}, {"window": index + 1, "places": reached}
            yield Window(index, *ends, count, (positions[0]["passes"], reached[0]["passes"]), texts)
            index, positions = index + 1, reached
