"""Training text that is encoded window by window, each of which is shuffled and batched in memory."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from ..interruption import ignore_signals
from .batching import Batch, BatchOrder, PairCollator, TokenBudgetBatchSampler
from .encoding import EncodedRows, encode_rows, pair_lengths
from .renewal import Renewal

with extra("train"):
    from datasets import Dataset

logger = logging.getLogger(__name__)

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
        front (`str`, *optional*): language tag or prefix in front of the source sentences, or both.
    """

    sources: list[str]
    targets: list[str]
    numbers: Sequence[int]
    repetitions: Sequence[int]
    front: str | None


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
    """

    index: int
    before: dict[str, Any]
    after: dict[str, Any]
    pairs: int
    passes: tuple[int, int]
    texts: list[WindowText] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: np.empty((2, 0), dtype=np.int64))


class WindowEncoder(torch.utils.data.Dataset[tuple[Window, pa.Table]]):
    """
    A dataset that is indexed by windows and encodes them.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        renewal ([`Renewal`], *optional*): alters the pairs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renewal: Renewal | None = None) -> None:
        self.tokenizer = tokenizer
        self.renewal = renewal

    def __getitem__(self, window: Window) -> tuple[Window, pa.Table]:
        tables = []
        for text in self.read(window):
            for start in range(0, len(text.sources), ENCODE_BATCH):
                part = slice(start, start + ENCODE_BATCH)
                sources, targets, numbers = text.sources[part], text.targets[part], text.numbers[part]
                tables.append(
                    encode_rows(
                        sources, targets, numbers, self.tokenizer, text.front, self.renewal, text.repetitions[part]
                    )
                )
        return replace(window, texts=[], rows=window.rows[:, :0]), pa.concat_tables(tables)

    def read(self, window: Window) -> Sequence[WindowText]:
        """Returns the text of a window."""
        return window.texts


class WindowUpdates:
    """
    [`Updates`] over text that comes in windows, which are batched like an epoch.

    Args:
        encoder (`torch.utils.data.Dataset`): encodes the windows by which it is indexed, such as [`WindowEncoder`].
        order ([`BatchOrder`]): token budget, seed and processes.
        collator ([`PairCollator`]): pads the batches.
        num_workers (`int`): processes that encode windows ahead of the training; 0 encodes them in this process.
    """

    start: dict[str, Any]
    fingerprint: dict[str, Any]

    def __init__(
        self,
        encoder: torch.utils.data.Dataset[tuple[Window, pa.Table]],
        order: BatchOrder,
        collator: PairCollator,
        num_workers: int = 0,
    ) -> None:
        self.encoder = encoder
        self.order = order
        self.collator = collator
        self.num_workers = num_workers

    def windows(self, position: dict[str, Any]) -> Iterator[Window]:
        """Yields the windows from a position on, without end."""
        raise NotImplementedError

    def after(self, position: dict[str, Any]) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
        """See [`Updates`]. A position is that before a window, and the number of the window's completed updates."""
        update, passes = position["update"], -1
        loader = DataLoader(
            self.encoder,
            sampler=self.windows(position),
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
            rows, updates = EncodedRows(pairs), sampler.updates()
            for number, batches in enumerate(updates[update:], start=update + 1):
                reached = window.before | {"update": number}
                if number == len(updates):
                    reached = window.after | {"update": 0}
                yield [self.collator(rows.__getitems__(batch.tolist())) for batch in batches], reached
            update = 0

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
