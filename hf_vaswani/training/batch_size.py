"""The batch that fits the memory of an accelerator, for `training.tokens_per_batch: auto`: tried on a second model."""

import gc
import logging

import numpy as np
import torch

from ..data.batching import PairCollator, to_device
from ..model.heads_vaswani import VaswaniClassifier
from ..recipe import TOKENS_PER_BATCH
from .consistency import TwoPasses
from .preparation import Run, task_data
from .state import build_network, optimizer_of

logger = logging.getLogger(__name__)

# Share of the memory that a batch may fill. Padding to few shapes makes batches of short sentences up to twice as
# large, and validations, captured updates and fragments of free memory need theirs.
SHARE = 0.5
# Tokens a side of the first batch that is tried, and of its rows, where the text is not cut into blocks.
FIRST, WIDTH = 1024, 128


class Memory:
    """
    The memory of an accelerator.

    Args:
        device (`torch.device`): the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capacity(self) -> int:
        """Returns the bytes that this process may use: those that it has, and those that nobody has."""
        free, _ = torch.accelerator.get_memory_info(self.device)
        return free + torch.accelerator.memory_reserved(self.device)

    def peak(self) -> int:
        """Returns the most bytes that tensors have taken at a time since the last call."""
        torch.accelerator.synchronize(self.device)
        found = torch.accelerator.max_memory_allocated(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return int(found)


def tokens_that_fit(run: Run, memory: Memory | None = None) -> int:
    """
    Measures how many tokens a side a batch of this process may have. Updates of a second model on made-up text, with
    its optimizer, grow until they are those of the recipe or fill a good part of the memory; what larger ones need is
    extrapolated. The random numbers of the training stay as they are.

    Args:
        run ([`Run`]): the run, which needs no text yet.
        memory ([`Memory`], *optional*): by default that of the accelerator.

    Returns:
        `int`: at most the tokens of this process in an update.

    Raises:
        ValueError: not even a small batch fits.
    """
    device, needed = run.accelerator.device, tokens_needed(run)
    memory = Memory(device) if memory is None else memory
    try:
        limit = SHARE * memory.capacity()
    # An accelerator that does not tell: torch has various errors for it.
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        logger.warning(f"training.tokens_per_batch auto is that of a CPU, because {device} tells no memory: {error}")
        return TOKENS_PER_BATCH
    with torch.random.fork_rng([] if device.type == "cpu" else [device.index or 0]):
        width, peaks = _peaks(run, memory, limit, needed)
    if device.type != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()
    found = _extrapolated(peaks, limit)
    if found < width:
        raise ValueError(
            f"training.tokens_per_batch auto finds no batch for the memory of {device}: {width} tokens a side do not "
            "fit. Set training.gradient_checkpointing, or make the model smaller."
        )
    return min(needed, found)


def tokens_needed(run: Run) -> int:
    """Returns the tokens a side of each process in an update."""
    return run.recipe.training.batches(run.accelerator.num_processes, at_once=10**12)[0]


def _extrapolated(peaks: list[tuple[int, int]], limit: float) -> int:
    """Returns the tokens with which the memory is filled up to a limit, by the last two that were measured."""
    if len(peaks) < 2:
        return 0
    (fewer, less), (tokens, peak) = peaks[-2:]
    slope = max(1.0, (peak - less) / (tokens - fewer))
    return int(tokens + (limit - peak) / slope)


def _peaks(run: Run, memory: Memory, limit: float, needed: int) -> tuple[int, list[tuple[int, int]]]:
    """Returns the tokens of a row, and the tokens of ever larger updates, each with its peak in bytes."""
    trial, peaks = _Trial(run), list[tuple[int, int]]()
    try:
        # With the first step, the optimizer gets its state, and each weight a gradient.
        trial.update(FIRST)
        memory.peak()
        size = FIRST
        while True:
            tokens = trial.update(size)
            peaks.append((tokens, memory.peak() + trial.bytes_beside))
            if len(peaks) > 1 and (tokens >= needed or peaks[-1][1] > limit / 2):
                break
            size = 2 * tokens
    except torch.OutOfMemoryError:
        # The peaks measured so far are enough to go by; without any, no batch fits.
        pass
    return trial.width, peaks


class _Trial:
    """
    A second model in training, as [`build_state`] builds the first.

    Attributes:
        width (`int`): tokens of a row.
        bytes_beside (`int`): bytes of copies of the weights that it does not have: the moving average, and what
            several processes exchange.
    """

    def __init__(self, run: Run) -> None:
        training, data = run.recipe.training, task_data(run.recipe)
        self.run, self.device = run, run.accelerator.device
        model, _ = build_network(run)
        self.model = model.to(self.device).train()
        self.optimizer = optimizer_of(training, model)
        self.passes = TwoPasses(training, run.recipe.seed, model)
        width = data.longest_row or WIDTH
        self.width = width if data.max_length is None else min(width, data.max_length)
        self.collator = PairCollator(run.tokenizer.pad_token_id, data.row_columns(run.tokenizer))
        trained = sum(part.numel() * part.element_size() for part in model.parameters() if part.requires_grad)
        copies = (training.ema_decay is not None) + (run.accelerator.num_processes > 1)
        self.bytes_beside = copies * trained

    def update(self, tokens: int) -> int:
        """Makes an update of about so many tokens a side, and returns how many it had."""
        rows = max(1, tokens // self.width)
        batch = self.collator([self._row(number) for number in range(1, rows + 1)])
        numbers = batch.pop("numbers")
        (inputs,) = to_device([self.passes(batch, numbers, 0)], self.device)
        more = {"num_texts_in_batch": rows} if "next_sentence_label" in inputs else {}
        with self.passes.loss(), self.run.accelerator.autocast():
            loss = self.model(**inputs, **more, num_items_in_batch=rows * self.width, loss_only=True).loss
        loss.backward()
        self.optimizer.step()
        # Gradients stay allocated from update to update.
        self.optimizer.zero_grad(set_to_none=False)
        return rows * self.width

    def _row(self, number: int) -> dict[str, object]:
        """Returns a row with all columns that a task may have, all of whose tokens have labels."""
        places = np.arange(self.width)
        config = self.model.config
        kinds = config.num_labels if isinstance(self.model, VaswaniClassifier) else config.vocab_size
        columns = {"positions": places, "segments": 0 * places, "next_sentence": 0}
        return columns | {
            "source_ids": (number + places) % config.vocab_size,
            "target_ids": (number + places) % kinds,
            "number": number,
        }
