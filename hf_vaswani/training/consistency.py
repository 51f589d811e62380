"""Two passes over each training pair, whose predictions are to agree: SimCut and R-Drop."""

from typing import Any

import torch

from ..data.batching import Batch
from ..model.kernels_vaswani import Consistency
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipe import Recipe


class TwoPasses:
    """
    Makes batches that have every pair twice, for the loss of `training.simcut` or `training.r_drop`.

    Args:
        recipe ([`Recipe`]): the experiment.
        model ([`VaswaniForConditionalGeneration`]): the model, not wrapped.
    """

    def __init__(self, recipe: Recipe, model: VaswaniForConditionalGeneration) -> None:
        training = recipe.training
        self.seed, self.simcut, self.model = recipe.seed, training.simcut, model
        self.consistency: Consistency | None = None
        if training.simcut is not None:
            self.consistency = Consistency.simcut(training.simcut.alpha)
        elif training.r_drop is not None:
            self.consistency = Consistency.r_drop(training.r_drop.alpha)

    def __call__(self, batch: Batch, numbers: torch.Tensor, step: int) -> dict[str, Any]:
        """
        Doubles a batch.

        Args:
            batch (`dict[str, torch.Tensor]`): as [`PairCollator`] makes it.
            numbers (`torch.LongTensor` of shape `(pairs,)`): number of each pair in the text.
            step (`int`): updates so far.

        Returns:
            `dict[str, Any]`: arguments of the model; the batch itself, if the recipe asks for one pass.
        """
        if self.consistency is None:
            return dict(batch)
        source, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        target = self.model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[arg-type]
        return {
            "input_ids": torch.cat([source, self._cut(source, numbers, step, 0)]),
            "attention_mask": mask.repeat(2, 1),
            "decoder_input_ids": torch.cat([target, self._cut(target, numbers, step, 1)]),
            "labels": labels,
            "consistency": self.consistency,
        }

    def _cut(self, ids: torch.Tensor, numbers: torch.Tensor, step: int, side: int) -> torch.Tensor:
        """
        Replaces tokens at random by padding, whose embedding is zero: to a model that is given the mask, padding is
        otherwise a token like any other.
        """
        # The row that stands for a missing batch has no number.
        if self.simcut is None or len(numbers) != len(ids):
            return ids
        draws = uniform(self.seed, step, side, numbers, ids.shape[1])
        return torch.where(draws < self.simcut.p, self.model.config.pad_token_id or 0, ids)


def check_padding(model: VaswaniForConditionalGeneration) -> None:
    """
    Raises a `ValueError` if the embedding of padding, which takes the place of those that are cut off, is not zero.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, before it is sharded.
    """
    pad = model.config.pad_token_id
    for stack in (model.model.encoder, model.model.decoder):
        if stack.embed_tokens.weight[pad].any():
            raise ValueError(
                f"training.simcut needs a padding token whose embedding is zero, but that of id {pad} is not: set "
                "training.simcut to null; training.r_drop has no such condition."
            )


def uniform(seed: int, step: int, side: int, numbers: torch.Tensor, length: int) -> torch.Tensor:
    """
    Draws a random number for each position of a sentence. It depends on nothing but the arguments, so that it does not
    matter which process computes a pair, and in which batch (SplitMix64, Steele et al., 2014).

    Args:
        seed (`int`), step (`int`), side (`int`): seed of the run, updates so far, and 0 for source and 1 for target.
        numbers (`torch.LongTensor` of shape `(pairs,)`): number of each pair in the text.
        length (`int`): positions.

    Returns:
        `torch.Tensor` of shape `(pairs, length)`, from 0 to 1.
    """
    state = _mixed(torch.tensor(seed))
    for value in (torch.tensor(2 * step + side), numbers[:, None], torch.arange(length)):
        state = _mixed(state + value)
    return (state & (2**24 - 1)).float() / 2**24


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """Returns the output of SplitMix64 for a state of int64, whose products wrap around."""
    state = state + -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts an int64 to the right as if it had no sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)
