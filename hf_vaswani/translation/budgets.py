"""
How much text a device works on at a time. A CPU takes a few thousand tokens, which would leave a GPU idle; but a batch
must fit into its memory.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..model.sentences_vaswani import MAX_POSITIONS, TIMES, TIMES_ON_OTHERS, batch_limits

logger = logging.getLogger(__name__)

# Bytes of a logit of a step, with copies in float32: log-probabilities, scores of candidates, and what sorts them.
BYTES_OF_A_LOGIT = 16
# Parts of the memory of a GPU that all of them have at most: of the whole, and of what is free.
OF_ALL, OF_FREE = 8, 2
# In bytes, for them on a device that does not say how much memory it has.
USUAL_MEMORY = 2**30
# How accelerators and cuBLAS say that memory has run out, some of them by a plain RuntimeError.
OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED", re.IGNORECASE)
# For each model, the positions of the smallest batch for which the memory of its device was too small.
TOO_LARGE: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

T = TypeVar("T")


def times_on(device: torch.device) -> int:
    """Returns how many times as much text as on a CPU is worked on at a time: enough to fill the device."""
    return TIMES.get(device.type, TIMES_ON_OTHERS)


def tokens_on(device: torch.device) -> int:
    """Returns the token budget of a batch: rows times longest source."""
    return MAX_POSITIONS * times_on(device)


def most_positions(device: torch.device, logits: int) -> int | None:
    """
    Returns the most positions whose logits an accelerator holds at a time. Unless something else has most of the
    memory, that depends on its size alone: the same text has the same batches.

    Args:
        device (`torch.device`): the device.
        logits (`int`): how many each position has: the size of the vocabulary, for each beam of a search.

    Returns:
        `int`, or `None` on a CPU, whose memory is that of the machine.
    """
    if device.type == "cpu":
        return None
    memory = USUAL_MEMORY
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        # Torch keeps what it has freed.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        memory = min(whole // OF_ALL, free // OF_FREE)
    return max(1, memory // (BYTES_OF_A_LOGIT * logits))


def vocab_size(model: Any) -> int:
    """Returns the number of logits that a model computes for a position."""
    return getattr(model.config, "vocab_size", None) or len(model.get_output_embeddings().weight)


def return_unused_memory() -> None:
    """Returns the memory that torch keeps for later to the accelerator, if there is one that can take it."""
    if torch.accelerator.is_available():
        # Not every kind has an allocator that is asked in this way.
        with suppress(RuntimeError):
            torch.accelerator.empty_cache()


def search_limits(
    model: Any, num_beams: int, usual: int, tokens_per_batch: int | None = None, processes: int = 1
) -> tuple[int, int, int | None]:
    """
    Returns the limits of a batch of a pipeline, as [`length_groups`] takes them: those of [`batch_limits`], and the
    most rows whose logits the device holds.

    Args:
        model ([`PreTrainedModel`]): the model.
        num_beams (`int`), usual (`int`): beam size of the search, and that of most searches.
        tokens_per_batch (`int`, *optional*): most positions, in place of those of the device.
        processes (`int`): how many share the device, each with a model of its own.
    """
    most, padded = batch_limits(model, num_beams, usual)
    if tokens_per_batch is not None:
        most, padded = tokens_per_batch, min(padded, tokens_per_batch)
    return most, padded, most_positions(model.device, processes * num_beams * vocab_size(model))


def in_memory(
    model: Any, batches: list[list[int]], lengths: Sequence[int], compute: Callable[[list[int]], T]
) -> Iterator[tuple[list[int], T]]:
    """
    Computes batches. One that does not fit into the memory of a GPU is computed in halves, and so are later ones that
    are as large.

    Args:
        model ([`PreTrainedModel`]): the model.
        batches (`list[list[int]]`): numbers of the sentences of each batch, the longest first.
        lengths (`Sequence[int]`): tokens of each sentence.
        compute (`Callable`): computes a batch.

    Yields:
        `tuple`: a batch, or a part of one, and what is computed of it.

    Raises:
        RuntimeError: a single sentence does not fit, or something else is wrong.
    """
    pending = batches[::-1]
    while pending:
        batch = pending.pop()
        size, middle = len(batch) * lengths[batch[0]], len(batch) // 2
        if not middle or size < TOO_LARGE.get(model, math.inf):
            try:
                found = compute(batch)
            except RuntimeError as error:
                if not middle or not OUT_OF_MEMORY.search(str(error)):
                    raise
            else:
                yield batch, found
                continue
            # Here, without the error, nothing holds the tensors of the computation any more.
            return_unused_memory()
            if model not in TOO_LARGE:
                logger.warning(
                    f"A batch of {size:,} tokens does not fit into the memory of this GPU: it is computed in halves. "
                    "With a smaller --tokens-per-batch, no time is lost."
                )
            TOO_LARGE[model] = size
        pending += [batch[middle:], batch[:middle]]
