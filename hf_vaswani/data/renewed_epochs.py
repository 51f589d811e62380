"""Epochs over text on disk whose pairs are altered and encoded anew each time."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from ..extras import extra
from .batching import PairCollator, TokenBudgetBatchSampler, lengths_fingerprint
from .renewal import Renewal
from .windows import Window, WindowEncoder, WindowText, WindowUpdates

with extra("train"):
    from datasets import Dataset


class RenewedUpdates(WindowUpdates):
    """
    [`Updates`] epoch after epoch, with the pairs of [`EpochUpdates`], but with new ids in each epoch.

    The lengths of an epoch are not known before it is encoded, and a long epoch is not encoded at once: it is
    shuffled, and cut into windows of at most `size` pairs, which are batched by their new lengths. A pair whose new
    ids are too long is skipped in that epoch.

    Args:
        encoder ([`RowEncoder`] or [`BlockEncoder`]): encodes the text.
        numbers (`np.ndarray` of shape `(pairs,)`): number of each pair of the sampler in the text.
        sampler ([`TokenBudgetBatchSampler`]): the pairs with the lengths that they have unaltered, and their weights.
        size (`int`): pairs of a window.
        collator, num_workers: as in [`WindowUpdates`].
    """

    start: dict[str, Any] = {"epoch": 0, "window": 0, "update": 0}

    def __init__(
        self,
        encoder: torch.utils.data.Dataset[tuple[Window, pa.Table]],
        numbers: np.ndarray,
        sampler: TokenBudgetBatchSampler,
        size: int,
        collator: PairCollator,
        num_workers: int = 0,
    ) -> None:
        super().__init__(encoder, sampler.order, collator, num_workers)
        self.numbers = numbers
        self.sampler = sampler
        self.size = size
        self.fingerprint = lengths_fingerprint(sampler.lengths)

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


class RowEncoder(WindowEncoder):
    """
    Reads the text of windows from the disk, and encodes it.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]), renewal ([`Renewal`]): as in [`WindowEncoder`].
        sources (`Sequence[tuple[Dataset, str | None]]`): text columns `source` and `target` of each source, and what
            is in front of its source sentences. Pairs are numbered from 1 through all sources.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renewal: Renewal,
        sources: Sequence[tuple[Dataset, str | None]],
    ) -> None:
        super().__init__(tokenizer, renewal)
        self.sources = sources

    def read(self, window: Window) -> list[WindowText]:
        """Reads the pairs of a window."""
        numbers, repetitions = window.rows
        texts, first = [], 1
        for pairs, front in self.sources:
            here = (numbers >= first) & (numbers < first + len(pairs))
            rows = pairs.with_format("arrow")[numbers[here] - first]
            source, target = rows["source"].to_pylist(), rows["target"].to_pylist()
            texts.append(WindowText(source, target, numbers[here], repetitions[here], front))
            first += len(pairs)
        return texts
