"""Section 5.3: Adam, and the learning rate that rises for the first updates and then falls with their square root."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
)

from ..recipe import Schedule


def noam(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """
    lrate = factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (Section 5.3, equation 3).

    Args:
        step (`int`): the update, counted from 1.
        d_model (`int`): the model's width.
        warmup_steps (`int`): updates during which the rate rises in a straight line.
        factor (`float`): 1 in the paper.

    Returns:
        `float`: the learning rate of that update.
    """
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


class MuonAndAdam(torch.optim.Optimizer):
    """
    Muon for some parameters and Adam for the others, to the outside one optimizer: one schedule, one state.

    Args:
        adam (`torch.optim.Adam`), muon (`torch.optim.Muon`): each with parameters of its own.
    """

    def __init__(self, adam: torch.optim.Optimizer, muon: torch.optim.Optimizer) -> None:
        self.parts = (adam, muon)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"adam": self.parts[0].state_dict(), "muon": self.parts[1].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        for part, name in zip(self.parts, ("adam", "muon"), strict=True):
            part.load_state_dict(state_dict[name])
        # The groups are new then; whoever changes their learning rate must find these.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    beta1: float = 0.9,
    beta2: float = 0.98,
    epsilon: float = 1e-9,
    weight_decay: float = 0.0,
    learning_rate: float = 1.0,
    matrices_of_layers: Iterable[torch.nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """
    Adam with the paper's constants (Section 5.3), or AdamW; or Muon beside it.

    Args:
        parameters (`Iterable[torch.nn.Parameter]`): what to train.
        beta1 (`float`), beta2 (`float`): decay of the running means of the gradient and of its square.
        epsilon (`float`): added to the root of the second.
        weight_decay (`float`): above 0, AdamW: each update also multiplies every matrix by 1 - learning rate *
            weight_decay, whatever its gradient. Embeddings are matrices, and one of them is the softmax's; vectors,
            which are the biases and LayerNorms, stay as they are.
        learning_rate (`float`): what a schedule multiplies: 1 for [`noam`], or the peak of another.
        matrices_of_layers (`Iterable[torch.nn.Parameter]`): those of `parameters` that Muon trains instead
            (https://kellerjordan.github.io/posts/muon): its step is the gradient's mean made orthogonal, times
            0.2 * sqrt(the longer side), and so about as long as a step of Adam (arXiv:2502.16982, Section 2.2).

    Returns:
        `torch.optim.Optimizer`: Adam, AdamW or [`MuonAndAdam`].
    """
    # In their order, by which a saved state is found again.
    inner = list(matrices_of_layers)
    if inner:
        orthogonal = set(inner)
        others = [parameter for parameter in parameters if parameter not in orthogonal]
        adam = build_optimizer(others, beta1, beta2, epsilon, weight_decay, learning_rate)
        muon = torch.optim.Muon(inner, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw")
        return MuonAndAdam(adam, muon)
    if weight_decay == 0:
        return torch.optim.Adam(parameters, lr=learning_rate, betas=(beta1, beta2), eps=epsilon, fused=True)
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=epsilon, fused=True)


def build_schedule(
    optimizer: torch.optim.Optimizer,
    kind: Schedule,
    d_model: int,
    warmup_steps: int,
    max_steps: int,
    factor: float = 1.0,
) -> LambdaLR:
    """
    The learning rate as a scheduler of torch: its n-th update has the rate of step n, so that none has rate 0.

    Args:
        optimizer (`torch.optim.Optimizer`): with learning rate 1 for `"noam"`, and the peak for the others.
        kind (`str`): after the warm-up, the rate of step n is

            - `"noam"`: equation 3, as [`noam`] says,
            - `"inverse_sqrt"`: peak * sqrt(warmup_steps / n), as in fairseq,
            - `"constant"`: the peak,
            - `"cosine"`: half a cosine from the peak to 0, which the step after `max_steps` would have.
        d_model (`int`): the model's width, for `"noam"`.
        warmup_steps (`int`): updates during which the rate rises in a straight line from 0.
        max_steps (`int`): updates in all, for `"cosine"`.
        factor (`float`): multiplies `"noam"`.

    Returns:
        `LambdaLR`; call `step()` after each update.
    """
    if kind == "noam":
        # torch counts updates from 0.
        return LambdaLR(optimizer, lambda update: noam(update + 1, d_model, warmup_steps, factor))
    # So does transformers, whose first rate is 0. Told that one step is behind it, it starts with step 1.
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    if kind == "inverse_sqrt":
        return get_inverse_sqrt_schedule(optimizer, warmup_steps, last_epoch=0)
    if kind == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup_steps, last_epoch=0)
    return get_cosine_schedule_with_warmup(optimizer, warmup_steps, max_steps + 1, last_epoch=0)
