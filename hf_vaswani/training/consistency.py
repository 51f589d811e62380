"""
Losses of an update: two passes over each training pair, whose predictions are to agree, for SimCut and R-Drop; and on
a GPU losses that do not wait until the number of labels is known.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..data.batching import Batch
from ..model.kernels_vaswani import (
    LinearCrossEntropy,
    SmoothedLinearCrossEntropy,
    is_plain_linear,
    positions_at_once,
    share_of_others,
    type_of_products,
)
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, smoothed_cross_entropy
from ..recipe import TrainingRecipe


class Consistency(NamedTuple):
    """
    Weights of a loss over two passes of the same pairs, which predict the distributions P1 and P2:

        (1 - second) * CE(P1) + second * CE(P2) + forward * KL(P1 || P2) + backward * KL(P2 || P1)

    A batch has the first passes of its pairs in its first half, the second passes in its second half, in the same
    order.

    Attributes:
        second (`float`): weight of the second pass's cross-entropy.
        forward (`float`), backward (`float`): weights of the divergences.
    """

    second: float
    forward: float
    backward: float


class TwoPasses:
    """
    Makes batches that have every pair twice, and computes the loss of `training.simcut` or `training.r_drop`.

    Args:
        training ([`TrainingRecipe`]): with `simcut` or `r_drop`, or neither.
        seed (`int`): seed of the run, from which tokens are cut off.
        model ([`VaswaniForConditionalGeneration`]): the model, not wrapped.
    """

    def __init__(self, training: TrainingRecipe, seed: int, model: VaswaniForConditionalGeneration) -> None:
        self.seed, self.simcut, self.model = seed, training.simcut, model
        self.consistency: Consistency | None = None
        if training.simcut is not None:
            # Gao et al. (2022), equation 6: the second pass is that of the pairs with embeddings cut off.
            self.consistency = Consistency(0.0, training.simcut.alpha, 0.0)
        elif training.r_drop is not None:
            # Wu et al. (2021), equation 4, divided by 2, which makes it a loss per target token as well: the passes
            # differ by their dropout.
            self.consistency = Consistency(0.5, training.r_drop.alpha / 4, training.r_drop.alpha / 4)

    def __call__(self, batch: Batch, numbers: torch.Tensor, step: int) -> Batch:
        """
        Doubles a batch.

        Args:
            batch (`dict[str, torch.Tensor]`): as [`PairCollator`] makes it.
            numbers (`torch.LongTensor` of shape `(pairs,)`): number of each pair in the text.
            step (`int`): updates so far.

        Returns:
            `dict[str, torch.Tensor]`: arguments of the model; the batch itself, if the recipe asks for one pass.
        """
        if self.consistency is None:
            return batch
        source, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        target = self.model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[arg-type]
        return {
            "input_ids": torch.cat([source, self._cut(source, numbers, step, 0)]),
            "attention_mask": mask.repeat(2, 1),
            "decoder_input_ids": torch.cat([target, self._cut(target, numbers, step, 1)]),
            "labels": labels,
        }

    @contextmanager
    def loss(self) -> Iterator[None]:
        """
        Gives the model the loss of doubled batches for the length of a block, if the recipe asks for two passes, and
        on a GPU the loss of single ones that waits for nothing.

        The model is called as ever, through whatever wraps it: gradients are reduced, shards gathered and products
        rounded as for one pass.
        """
        loss: Any
        if self.consistency is not None:
            loss = partial(loss_of_two_passes, self.model, self.consistency)
        elif isinstance(self.model, VaswaniForConditionalGeneration) and not selects_labels(self.model.device):
            loss = partial(loss_of_all_positions, self.model)
        else:
            yield
            return
        self.model.logits_and_loss = loss  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.model.logits_and_loss

    def _cut(self, ids: torch.Tensor, numbers: torch.Tensor, step: int, side: int) -> torch.Tensor:
        """
        Replaces tokens at random by padding, whose embedding is zero: to a model that is given the mask, padding is
        otherwise a token like any other.
        """
        if self.simcut is None:
            return ids
        # Rows of padding, behind the others, have no number.
        pairs, padding = ids[: len(numbers)], ids[len(numbers) :]
        draws = uniform(self.seed, step, side, numbers, ids.shape[1])
        return torch.cat([torch.where(draws < self.simcut.p, self.model.config.pad_token_id or 0, pairs), padding])


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


def loss_of_two_passes(
    model: VaswaniForConditionalGeneration,
    consistency: Consistency,
    hidden_states: torch.Tensor,
    labels: torch.LongTensor,
    epsilon_ls: float,
    num_items_in_batch: torch.Tensor | int,
    loss_only: bool = True,
) -> tuple[None, torch.Tensor]:
    """
    Computes the loss that [`Consistency`] defines, in place of [`VaswaniForConditionalGeneration.logits_and_loss`].

    Args:
        hidden_states (`torch.Tensor` of shape `(batch, target, d_model)`): the decoder's output for the first passes
            of the pairs, followed by that for the second passes.
        labels (`torch.LongTensor` of shape `(batch / 2, target)`): true tokens of the pairs, or -100 where there is no
            label.
        epsilon_ls (`float`), num_items_in_batch (`int`): as in [`VaswaniForConditionalGeneration.forward`].

    Returns:
        `None` in place of logits, and the loss, a `torch.Tensor` in float32. Its `backward` can run once only.
    """
    if is_plain_linear(model.lm_head, hidden_states):
        states = hidden_states.reshape(2, -1, hidden_states.shape[-1])  # [2, positions, d_model]
        states, targets, others = _labelled(states, labels.flatten())
        weight = model.lm_head.weight
        settings = (consistency, epsilon_ls, model.frozen_row, torch.is_grad_enabled())
        total = _ConsistentLinearCrossEntropy.apply(states, weight, targets, *settings)
        return None, (total - others * math.log(len(weight))) / num_items_in_batch
    logits, _ = VaswaniForConditionalGeneration.logits_and_loss(model, hidden_states, None, 0.0, None, False)
    halves = cast(torch.Tensor, logits).chunk(2)
    first, second = (smoothed_cross_entropy(half, labels, epsilon_ls, num_items_in_batch) for half in halves)
    loss = (1 - consistency.second) * first + consistency.second * second
    p, q = (half.float().log_softmax(dim=-1) for half in halves)  # [batch / 2, target, vocab_size]
    for factor, log, other in ((consistency.forward, p, q), (consistency.backward, q, p)):
        if factor:
            divergence = nn.functional.kl_div(other, log, reduction="none", log_target=True).sum(dim=-1)
            loss = loss + factor * (divergence * (labels != -100)).sum() / num_items_in_batch
    return None, loss


def loss_of_all_positions(
    model: VaswaniForConditionalGeneration,
    hidden_states: torch.Tensor,
    labels: torch.LongTensor,
    epsilon_ls: float,
    num_items_in_batch: torch.Tensor | int,
    loss_only: bool = True,
) -> tuple[None, torch.Tensor | None]:
    """
    Computes [`VaswaniForConditionalGeneration.logits_and_loss`] without waiting until the number of labels is known;
    arguments as there.
    """
    if not is_plain_linear(model.lm_head, hidden_states):
        call = VaswaniForConditionalGeneration.logits_and_loss
        return None, call(model, hidden_states, labels, epsilon_ls, num_items_in_batch, loss_only)[1]
    weight = model.lm_head.weight
    states, targets, others = _labelled(hidden_states.flatten(0, 1), labels.flatten())
    settings = (epsilon_ls, model.frozen_row, torch.is_grad_enabled())
    total = SmoothedLinearCrossEntropy.apply(states, weight, targets, *settings)
    return None, (total - others * math.log(len(weight))) / num_items_in_batch


def selects_labels(device: torch.device) -> bool:
    """Returns whether positions without a label are left out. A GPU would wait until it knows how many remain."""
    return device.type == "cpu"


def _labelled(states: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]:
    """
    Selects states of shape `(..., positions, d_model)` and labels of shape `(positions,)` where there is a label.
    On a GPU, returns all of them, and how many have none: their states are zeros, which predict every token alike, so
    that the loss of each is log(V), whatever its label, and they have no gradient.
    """
    is_label = labels != -100
    if selects_labels(labels.device):
        places = is_label.nonzero()[:, 0]
        return states[..., places, :], labels[places], 0
    return states.masked_fill(~is_label[:, None], 0), labels.clamp(min=0), (~is_label).sum()


class _ConsistentLinearCrossEntropy(LinearCrossEntropy):
    """
    The sum over positions, and its gradients in the same pass. With the logits z and y of the two passes, which become
    the distributions p and q, and with d = log(p) - log(q):

        KL(p || q) = sum(p * d)    d / dz = p * (d - KL(p || q))    d / dy = q - p.

    KL(q || p) is the same with the passes exchanged. The cross-entropies are those of
    [`SmoothedLinearCrossEntropy`], in terms of log(p) and of log(sum(exp(z))).
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        consistency: Consistency,
        epsilon_ls: float,
        frozen_row: int | None,
        with_gradients: bool,
    ) -> torch.Tensor:
        vocab_size, dtype = weight.shape[0], type_of_products(weight)
        share = share_of_others(epsilon_ls, vocab_size)
        rest = 1 - share * vocab_size
        matrix, inputs = weight.to(dtype), states.to(dtype)
        # The weights of the two cross-entropies.
        factors = torch.full((2, 1, 1), consistency.second, device=states.device)
        factors[0].fill_(1 - consistency.second)
        sum_of_rows = weight.sum(dim=0, dtype=torch.float32)  # [d_model]
        sum_of_states = (factors * states).sum(dim=(0, 1), dtype=torch.float32)  # [d_model]
        total = -share * sum_of_states.dot(sum_of_rows)
        needs_state_grad, needs_weight_grad = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
        state_grad = torch.empty_like(inputs) if needs_state_grad else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad else None
        size = positions_at_once(weight)
        # On a CPU, all work of the size of the vocabulary is done while a few positions are in its cache.
        rows = max(1, 2**18 // vocab_size) if states.device.type == "cpu" else size
        for start in range(0, len(labels), size):
            part, true = inputs[:, start : start + size], labels[start : start + size, None].expand(2, -1, -1)
            logits = part @ matrix.T  # [2, positions, vocab_size]
            for block, true_block in zip(logits.split(rows, dim=1), true.split(rows, dim=1), strict=True):
                true_logits, largest = block.gather(2, true_block).float(), block.amax(dim=2, keepdim=True).float()
                probabilities = torch.softmax(block, dim=2, dtype=torch.float32)
                # log(sum(exp(z))): the largest probability is exp(largest z) over that sum.
                normalizers = largest - probabilities.amax(dim=2, keepdim=True).log()
                total += (factors * (normalizers - rest * true_logits)).sum()
                difference = torch.sub(*block.float()).sub_(normalizers[0] - normalizers[1])
                total += _divergence(probabilities, difference, consistency)
                block.copy_(probabilities.scatter_add_(2, true_block, (-rest * factors).expand(true_block.shape)))
            if state_grad is not None:
                state_grad[:, start : start + size] = logits @ matrix
            if weight_grad is not None:
                weight_grad += logits.flatten(0, 1).T @ part.flatten(0, 1)
        if state_grad is not None:
            state_grad = state_grad.to(states.dtype).sub_(factors * share * sum_of_rows)
        if weight_grad is not None:
            weight_grad = weight_grad.sub_(share * sum_of_states).to(weight.dtype)
            if frozen_row is not None:
                weight_grad[frozen_row] = 0
        ctx.save_for_backward(state_grad, weight_grad)
        return total


def _divergence(probabilities: torch.Tensor, difference: torch.Tensor, consistency: Consistency) -> torch.Tensor:
    """
    Computes the divergences between two passes.

    Args:
        probabilities (`torch.Tensor` of shape `(2, positions, vocab_size)`): distributions p and q. They become the
            gradients of the divergences and of the cross-entropies' normalizers by the logits.
        difference (`torch.Tensor` of shape `(positions, vocab_size)`): log(p) - log(q), which is overwritten.
        consistency ([`Consistency`]): weights.

    Returns:
        `torch.Tensor`, the weighted sum of the divergences.
    """
    second, forward, backward = consistency
    p, q = probabilities
    p_to_q = torch.linalg.vecdot(p, difference)[:, None]
    total = forward * p_to_q.sum()
    if not backward:
        q.mul_(second + forward).sub_(p, alpha=forward)
        p.mul_(difference.sub_(p_to_q).mul_(forward).add_(1 - second))
        return total
    q_to_p = -torch.linalg.vecdot(q, difference)[:, None]
    by_second = q * (second + forward - backward * (difference + q_to_p)) - forward * p
    p.mul_(difference.sub_(p_to_q).mul_(forward).add_(1 - second + backward)).sub_(q, alpha=backward)
    q.copy_(by_second)
    return total + backward * q_to_p.sum()
