"""From ids to batches: pairs of like length together, under a budget of tokens (Section 5.1), padded to one width."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """
    The order of the training data: a function of (seed, epoch) alone, the same for every process.

    An epoch has every pair exactly once. Pairs of like length make a batch of at most `tokens_per_batch` positions,
    padding counted: rows times the longest side. Batches come in random order, and `batches_per_update * processes`
    of them in a row make one update, of which each process takes its share.

    Args:
        lengths (`np.ndarray` of shape `(pairs, 2)`): source and target tokens of each pair.
        tokens_per_batch (`int`): the budget. A pair with a longer side never fits; see `skipped`.
        seed (`int`): of the order.
        batches_per_update (`int`): batches that each process adds up for one update.
        num_processes (`int`), process_index (`int`): who shares the batches, and which of them asks.
        max_length (`int`, *optional*): longest side that the model takes; pairs with a longer one are left out too.

    Raises:
        ValueError: there is no pair at all, or none within the budget.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        tokens_per_batch: int,
        seed: int = 1,
        batches_per_update: int = 1,
        num_processes: int = 1,
        process_index: int = 0,
        max_length: int | None = None,
    ) -> None:
        if len(lengths) == 0:
            raise ValueError("There is no pair with text on both sides, so the train set is empty.")
        longest = lengths.max(axis=1)
        self.limit = tokens_per_batch if max_length is None else min(tokens_per_batch, max_length)
        self.skipped = int((longest > self.limit).sum())
        if self.skipped == len(lengths):
            key = "training.tokens_per_batch" if self.limit == tokens_per_batch else "model.max_position_embeddings"
            raise ValueError(
                f"No training pair fits {key} {self.limit}: "
                f"the shortest has {longest.min()} tokens on its longer side."
            )
        self.lengths = lengths
        self.longest = longest
        self.tokens_per_batch = tokens_per_batch
        self.seed = seed
        self.batches_per_update = batches_per_update
        self.num_processes = num_processes
        self.process_index = process_index
        self.epoch = 0
        self.first_update = 0

    def set_position(self, epoch: int, update: int = 0) -> None:
        """Where the next iteration starts: after `update` updates of `epoch`, both counted from 0."""
        self.epoch = epoch
        self.first_update = update

    def batches(self) -> list[np.ndarray]:
        """All batches of the current epoch, as arrays of pair indices, in the order in which they are trained on."""
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(np.flatnonzero(self.longest <= self.limit))
        # The shuffle before a stable sort decides among pairs of equal lengths, so that batches differ by epoch.
        source, target = self.lengths[order].T
        order = order[np.lexsort((source, target, self.longest[order]))]
        bounds = [0]
        for end, width in enumerate(self.longest[order]):
            if (end + 1 - bounds[-1]) * width > self.tokens_per_batch:
                bounds.append(end)
        batches = np.split(order, bounds[1:])
        return [batches[i] for i in random.permutation(len(batches))]

    def updates(self) -> list[list[list[int]]]:
        """
        The current epoch as this process sees it: for each update, its batches, for each batch, its pairs. Every
        process has the same number of batches in an update; one that would have fewer gets an empty batch.
        """
        batches = [batch.tolist() for batch in self.batches()]
        per_update = self.batches_per_update * self.num_processes
        updates = []
        for start in range(0, len(batches), per_update):
            window = batches[start : start + per_update]
            window += [[]] * (-len(window) % self.num_processes)
            updates.append(window[self.process_index :: self.num_processes])
        return updates

    def batches_of_updates(self) -> list[int]:
        """How many batches this process takes for each update of the current epoch."""
        return [len(batches) for batches in self.updates()]

    def __iter__(self) -> Iterator[list[int]]:
        for update in self.updates()[self.first_update :]:
            yield from update


class PairCollator:
    """
    Pads the pairs of a batch to one width a side.

    Args:
        pad_token_id (`int`): fills the source; the target is filled with -100, which the loss leaves out.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, pairs: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """
        Args:
            pairs (`Sequence[dict[str, list[int]]]`): each with `source_ids` and `target_ids`; none at all gives one
                row with nothing to learn, for a process that has no batch where the others have one.

        Returns:
            `input_ids` and `attention_mask` of shape `(batch, source)`, `labels` of shape `(batch, target)`.
        """
        sources = [pair["source_ids"] for pair in pairs] or [[self.pad_token_id]]
        targets = [pair["target_ids"] for pair in pairs] or [[-100]]
        return {
            "input_ids": _padded(sources, self.pad_token_id),
            "attention_mask": _padded([[1] * len(ids) for ids in sources], 0),
            "labels": _padded(targets, -100),
        }


def _padded(rows: Sequence[list[int]], filling: int) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [filling] * (width - len(row)) for row in rows])
