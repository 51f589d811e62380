"""Batches of pairs of similar length under a token budget, padded to one width (Section 5.1)."""

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..interruption import ignore_signals

logger = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]


def length_batches(lengths: np.ndarray, budget: int) -> list[slice]:
    """
    Cuts sentences that are sorted by length into batches of at most `budget` positions: rows times the longest row.

    Args:
        lengths (`np.ndarray` of shape `(sentences,)`): tokens of each, in ascending order.
        budget (`int`): positions of a batch, padding included. A longer sentence gets a batch of its own.

    Returns:
        `list[slice]`: the batches, in order.
    """
    batches, start = [], 0
    while start < len(lengths):
        rows = lengths[start : start + max(1, budget // int(lengths[start]))]
        # Positions of a batch that ends at each row, which is its longest.
        positions = rows * np.arange(1, 1 + len(rows))
        stop = start + max(1, int(np.searchsorted(positions, budget, side="right")))
        batches.append(slice(start, stop))
        start = stop
    return batches


def to_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """
    Copies batches to a device. To a CUDA GPU they are copied from pinned memory, for which this process does not wait:
    torch keeps that memory until it has been read.
    """
    if device.type != "cuda":
        return [{name: part.to(device) for name, part in batch.items()} for batch in batches]
    return [
        {name: part.pin_memory().to(device, non_blocking=True) for name, part in batch.items()} for batch in batches
    ]


def rounded_up(count: int, multiple: int = 1) -> int:
    """
    Rounds up to a multiple of a number that is one of few: there are eight between a power of two and the next one, so
    that at most an eighth is added, apart from what the multiple adds.
    """
    step = max(multiple, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step


@dataclass(frozen=True)
class BatchOrder:
    """
    Settings that decide which pairs make a batch, and which batches an update; and the shape to which it is padded.

    Args:
        tokens_per_batch (`int`): token budget of a batch: rows times the longest side, padding counted.
        seed (`int`): seed of the order.
        batches_per_update (`int`): batches that each process accumulates for one update.
        num_processes (`int`): number of processes that share the batches.
        process_index (`int`): index of this process.
        max_length (`int`, *optional*): longest side that the model accepts.
        few_shapes (`bool`): whether batches are padded to few shapes, for devices on which each new one costs time.
            The pairs of a batch are the same with and without it.
    """

    tokens_per_batch: int
    seed: int = 1
    batches_per_update: int = 1
    num_processes: int = 1
    process_index: int = 0
    max_length: int | None = None
    few_shapes: bool = False

    def padded_rows(self, rows: int) -> int:
        """Returns the rows to which a batch is filled up."""
        return rounded_up(rows) if self.few_shapes else rows

    def padded_width(self, longest: int) -> int:
        """Returns the width of a side whose longest sequence has this length: of few shapes, a multiple of 8."""
        if not self.few_shapes:
            return longest
        # Learned positions may end before it.
        return max(longest, min(rounded_up(longest, 8), self.max_length or 2**63))

    @property
    def longest_side(self) -> int:
        """Tokens that the longer side of a pair may have; longer pairs are skipped."""
        return self.tokens_per_batch if self.max_length is None else min(self.tokens_per_batch, self.max_length)

    @property
    def limiting_key(self) -> str:
        """Key of the recipe that sets `longest_side`."""
        limited_by_budget = self.longest_side == self.tokens_per_batch
        return "training.tokens_per_batch" if limited_by_budget else "model.max_position_embeddings"

    def describe_skipped(self, empty: int, too_long: int) -> str:
        """Counts the skipped pairs by reason, for a log line."""
        return (
            f"{empty:,} pairs with an empty side, {too_long:,} with a side above {self.longest_side} tokens "
            f"({self.limiting_key})"
        )


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """
    Puts the training pairs in an order that depends on the seed and the epoch only, in every process.

    An epoch has every pair exactly once, unless a weight says otherwise. Pairs of similar length share a batch of at
    most `tokens_per_batch` positions, padding counted. Batches come in random order, and every
    `batches_per_update * num_processes` consecutive batches make one update, of which each process takes its share.

    Args:
        lengths (`np.ndarray` of shape `(pairs, 2)`): source and target tokens of each pair.
        order ([`BatchOrder`]): token budget, seed and processes. Pairs with a side above `order.longest_side` are
            skipped and counted in `skipped`.
        weights (`Sequence[tuple[int, float]]`, *optional*): number of pairs and weight of each source of the text, in
            order. Weight 2 takes every pair twice per epoch, 0.5 a random half, which differs by epoch.

    Raises:
        ValueError: there are no pairs, or none fits the budget.
    """

    def __init__(
        self, lengths: np.ndarray, order: BatchOrder, weights: Sequence[tuple[int, float]] | None = None
    ) -> None:
        if len(lengths) == 0:
            raise ValueError("There is no pair with text on both sides, so the train set is empty.")
        self.longest = lengths.max(axis=1)
        self.skipped = int((self.longest > order.longest_side).sum())
        if self.skipped == len(lengths):
            raise ValueError(
                f"No training pair fits {order.limiting_key} {order.longest_side}: "
                f"the shortest has {self.longest.min()} tokens on its longer side."
            )
        self.lengths = lengths
        self.order = order
        self.weights = [(len(lengths), 1.0)] if weights is None else weights
        self.epoch, self.first_update = 0, 0
        self._batches: list[np.ndarray] | None = None

    @property
    def longest_source(self) -> int:
        """Tokens of the longest source that is not skipped."""
        return int(self.lengths[self.longest <= self.order.longest_side, 0].max())

    def set_position(self, epoch: int, update: int = 0) -> None:
        """Starts the next iteration after `update` updates of `epoch`, both counted from 0."""
        if epoch != self.epoch:
            self._batches = None
        self.epoch, self.first_update = epoch, update

    def batches(self) -> list[np.ndarray]:
        """Returns the batches of the current epoch in training order, as arrays of pair indices."""
        if self._batches is None:
            random = np.random.default_rng((self.order.seed, self.epoch))
            # A stable sort keeps the shuffled order of pairs of equal length, which makes batches differ by epoch.
            pairs = random.permutation(self.taken(random)[0])
            # Sorted by the longest side, then the target, then the source: one integer holds all three.
            key = self.longest[pairs].astype(np.int64)
            # An unlimited budget would overflow it.
            base = min(self.order.longest_side, int(self.longest.max())) + 1
            for side in (1, 0):
                key *= base
                key += self.lengths[pairs, side]
            pairs = pairs[np.argsort(key, kind="stable")]
            batches = [pairs[batch] for batch in length_batches(self.longest[pairs], self.order.tokens_per_batch)]
            self._batches = [batches[i] for i in random.permutation(len(batches))]
        return self._batches

    def report_padding(self) -> tuple[float, int]:
        """Logs and returns the share of padding among the positions of the current epoch, and the number of shapes."""
        shapes, tokens = list[tuple[int, ...]](), 0
        for batch in self.batches():
            sides = self.lengths[batch]
            tokens += int(sides.sum())
            widths = map(self.order.padded_width, sides.max(axis=0).tolist())
            shapes.append((self.order.padded_rows(len(batch)), *widths))
        positions = sum(rows * sum(widths) for rows, *widths in shapes)
        share, count = 1 - tokens / positions, len(set(shapes))
        logger.info(f"Batches have {count} shapes, and {share:.1%} of their positions are padding")
        return share, count

    def taken(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """
        Draws the pairs of an epoch: those that fit, repeated or sampled by the weight of their source.

        Args:
            random (`np.random.Generator`): source of the choices.

        Returns:
            `np.ndarray` and `np.ndarray` of shape `(taken,)`: the pairs, and how often each was taken before in this
            epoch.
        """
        parts, start, limit = [], 0, self.order.longest_side
        repetitions: list[int] = []
        for count, weight in self.weights:
            fitting = start + np.flatnonzero(self.longest[start : start + count] <= limit).astype(np.int32)
            whole, rest = int(weight), weight - int(weight)
            parts += [fitting] * whole
            if rest and len(fitting):
                parts.append(random.permutation(fitting)[: max(1, round(rest * len(fitting)))])
            repetitions += range(len(parts) - len(repetitions))
            start += count
        return np.concatenate(parts), np.repeat(repetitions, list(map(len, parts)))

    def updates(self) -> list[list[np.ndarray]]:
        """
        Returns this process's batches of the current epoch, grouped by update. Every process has the same number of
        batches in an update; one that would have fewer gets an empty batch.
        """
        batches, processes = self.batches(), self.order.num_processes
        per_update = self.order.batches_per_update * processes
        updates = []
        for start in range(0, len(batches), per_update):
            window = batches[start : start + per_update]
            window += [np.empty(0, dtype=np.int32)] * (-len(window) % processes)
            updates.append(window[self.order.process_index :: processes])
        return updates

    def __iter__(self) -> Iterator[list[int]]:
        for update in self.updates()[self.first_update :]:
            for batch in update:
                yield batch.tolist()


class Updates(Protocol):
    """An endless sequence of updates over the training pairs, which can be resumed at any position."""

    start: dict[str, Any]
    """The position before the first update."""
    fingerprint: dict[str, Any]
    """Identifies the training text, which must be the same when a run is resumed; JSON-serializable."""

    def after(self, position: dict[str, Any]) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
        """
        Args:
            position (`dict[str, Any]`): `start`, or the position that came with the last completed update.

        Yields:
            This process's batches of the next update, and the JSON-serializable position after it.
        """


def lengths_fingerprint(lengths: np.ndarray) -> dict[str, Any]:
    """Returns the [`Updates.fingerprint`] of a text whose pairs have these lengths, of shape `(pairs, 2)`."""
    source_tokens, target_tokens = lengths.sum(axis=0).tolist()
    return {
        "pairs": len(lengths),
        "source_tokens": source_tokens,
        "target_tokens": target_tokens,
        "crc32_of_lengths": zlib.crc32(lengths.tobytes()),
    }


class EpochUpdates:
    """
    [`Updates`] over text that is cached on disk as ids, epoch after epoch.

    Args:
        pairs (`Dataset`): rows for [`PairCollator`].
        sampler ([`TokenBudgetBatchSampler`]): order of the pairs.
        collator ([`PairCollator`]): pads the batches.
        num_workers (`int`): processes that prepare batches ahead of the training; 0 prepares them in this process.
    """

    start: dict[str, Any] = {"epoch": 0, "update": 0}

    def __init__(
        self,
        pairs: Dataset[Mapping[str, Any]],
        sampler: TokenBudgetBatchSampler,
        collator: "PairCollator",
        num_workers: int = 0,
    ) -> None:
        self.sampler = sampler
        self.loader = DataLoader(
            pairs,
            batch_sampler=sampler,
            collate_fn=collator,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=ignore_signals,
            # By default a loader draws from the generator of the dropout.
            generator=torch.Generator(),
        )
        self.fingerprint: dict[str, Any] = lengths_fingerprint(sampler.lengths)

    def after(self, position: dict[str, Any]) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
        """See [`Updates`]. A position is an epoch and the number of its completed updates."""
        epoch, update = position["epoch"], position["update"]
        while True:
            self.sampler.set_position(epoch, update)
            counts = [len(share) for share in self.sampler.updates()[update:]]
            batches = iter(self.loader)
            for number, count in enumerate(counts, start=update + 1):
                yield list(islice(batches, count)), {"epoch": epoch, "update": number}
            epoch, update = epoch + 1, 0


class PairCollator:
    """
    Pads each side of a batch to the length of its longest sequence, or further, where an order asks for few shapes.

    Args:
        pad_token_id (`int`): padding of the source. The target is padded with -100, which the loss ignores.
        columns (`Sequence[str]`): what the rows have besides both sides: `positions`, `segments`, `next_sentence`;
            `label` if the target is the label of the whole text.
        order ([`BatchOrder`], *optional*): decides about the shapes.
    """

    def __init__(self, pad_token_id: int, columns: Sequence[str] = (), order: BatchOrder | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.columns = columns
        self.order = BatchOrder(0) if order is None else order

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> Batch:
        """
        Args:
            pairs (`Sequence[Mapping[str, Any]]`): each with `source_ids` and `target_ids` (arrays or lists of ids) and
                its `number` in the text, and the other columns. An empty sequence gives one row of padding, for a
                process without a batch in an update.

        Returns:
            `input_ids` and `attention_mask` of shape `(batch, source)`, `labels` of shape `(batch, target)`, and
            `numbers` of shape `(pairs,)`. With `positions`, which tell the texts of a row apart, `position_ids` takes
            the place of the mask; `segments` are `token_type_ids`, both of the shape of `input_ids`; `next_sentence`
            is `next_sentence_label` of shape `(batch,)`. With `label`, `labels` has the shape `(batch,)`. Rows behind
            those of the pairs are padding without labels.
        """
        input_ids, attention_mask = self._padded([pair["source_ids"] for pair in pairs], self.pad_token_id)
        labels, _ = self._padded([pair["target_ids"] for pair in pairs], -100)
        numbers = torch.tensor([int(pair["number"]) for pair in pairs], dtype=torch.long)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "numbers": numbers}
        if "label" in self.columns:
            batch["labels"] = labels[:, 0]
        if "positions" in self.columns:
            # Padding behind a row is a text of its own at each position, because positions do not go on there.
            batch["position_ids"], _ = self._padded([pair["positions"] for pair in pairs], 0)
            del batch["attention_mask"]
        if "segments" in self.columns:
            batch["token_type_ids"], _ = self._padded([pair["segments"] for pair in pairs], 0)
        if "next_sentence" in self.columns:
            known = [int(pair["next_sentence"]) for pair in pairs]
            batch["next_sentence_label"] = torch.tensor(known + [-100] * (len(input_ids) - len(known)))
        return batch

    def _padded(self, rows: Sequence[Any], filling: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pads rows of ids; the mask is 1 for ids and 0 for padding, but for the first token of a row of padding."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        # A batch without pairs has one row of padding.
        count, longest = (len(rows), int(lengths.max())) if rows else (1, 1)
        shape = self.order.padded_rows(count), self.order.padded_width(longest)
        ids, mask = np.full(shape, filling, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        filled = np.arange(shape[1]) < lengths[:, None]
        if rows:
            ids[: len(rows)][filled] = np.concatenate(rows)
        mask[: len(rows)] = filled
        # Attention to nothing at all is not defined.
        mask[len(rows) :, 0] = 1
        return torch.from_numpy(ids), torch.from_numpy(mask)
