"""Optimizers and learning-rate schedules: Adam and the warm-up schedule of Section 5.3, AdamW, Muon, and others."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
)

from ..recipe import Schedule
from ..translation.quantization import has_bfloat16

# Elements of the matrices that are orthogonalized together: more of them leave the cache of a CPU.
MAX_ELEMENTS, MAX_ELEMENTS_ON_ACCELERATORS = 2**20, 2**24


def noam(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """
    Computes factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (Section 5.3, equation 3).

    Args:
        step (`int`): number of the update, from 1.
        d_model (`int`): width of the model.
        warmup_steps (`int`): updates of the linear warm-up.
        factor (`float`): 1 in the paper.

    Returns:
        `float`: learning rate of the update.
    """
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


class Muon(torch.optim.Muon):
    """
    Muon of torch, computed for all matrices of one shape together: fewer and larger operations, and the same steps.
    Where a device has no instructions for bfloat16, the iterations are in float32, which is many times as fast there
    and closer to the exact result.

    Takes the arguments of `torch.optim.Muon`, and has the same state. Parameters need the dtype of their gradients. As
    with torch's fused optimizers, a step does nothing if the tensor `found_inf`, an attribute, is 1.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes a step."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            for weight in weights:
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
            buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
            if (skipped := getattr(self, "found_inf", None)) is not None:
                # By a momentum of themselves, which stays as it is, and a rate of 0.
                pairs = zip(buffers, gradients, strict=True)
                gradients = [torch.where(skipped != 0, buffer, gradient) for buffer, gradient in pairs]
            rate, momentum = group["lr"], group["momentum"]
            rate = rate if skipped is None else rate * (1 - skipped)
            torch._foreach_lerp_(buffers, gradients, 1 - momentum)
            updates = torch._foreach_lerp(gradients, buffers, momentum) if group["nesterov"] else buffers
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            for numbers in _stacks(updates):
                # The size of AdamW's steps (arXiv:2502.16982, Section 2.2).
                size = 0.2 * max(updates[numbers[0]].shape) ** 0.5
                turned = orthogonalized(
                    [updates[number] for number in numbers],
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                    -rate * size,
                )
                torch._foreach_add_([weights[number] for number in numbers], turned)


def _stacks(matrices: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the numbers of matrices that are orthogonalized together: of one shape, and those transposed."""
    by_shape: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number in sorted(range(len(matrices)), key=lambda number: _is_tall(matrices[number])):
        by_shape[tuple(sorted(matrices[number].shape))].append(number)
    most = MAX_ELEMENTS if matrices[0].device.type == "cpu" else MAX_ELEMENTS_ON_ACCELERATORS
    return [
        numbers[start : start + rows]
        for (short, long), numbers in by_shape.items()
        for rows in [max(1, most // (short * long))]
        for start in range(0, len(numbers), rows)
    ]


def _is_tall(matrix: torch.Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def orthogonalized(
    matrices: Sequence[torch.Tensor],
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    scale: torch.Tensor | float = 1.0,
) -> list[torch.Tensor]:
    """
    Replaces the singular values of matrices by about `scale`, with the iterations of Newton and Schulz
    (https://kellerjordan.github.io/posts/muon): X <- a X + (b G + c G^2) X for G = X X^T.

    Args:
        matrices (`Sequence[torch.Tensor]` of shape `(rows, columns)`): matrices of one shape, and behind them those
            with more rows than columns, whose shape is its transpose.
        coefficients (`tuple[float, float, float]`): a, b and c.
        steps (`int`): number of iterations.
        eps (`float`): least norm by which a matrix is divided.
        scale (`torch.Tensor` or `float`): factor of the results.

    Returns:
        `list[torch.Tensor]`, each of the shape and type of its matrix.
    """
    a, b, c = coefficients
    tall = [matrix.mT for matrix in matrices if _is_tall(matrix)]
    wide = matrices[: len(matrices) - len(tall)]
    first = matrices[0]
    dtype = torch.bfloat16 if has_bfloat16(first.device) else torch.float32
    stack = torch.stack([*wide, *tall]).to(dtype)  # [matrices, rows, columns], no more rows than columns
    stack /= stack.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = stack @ stack.mT
        stack = torch.baddbmm(stack, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), stack, beta=a)
    stack = stack.to(first.dtype).mul_(scale)
    # In the layout of the weights, to which they are added together.
    return [*stack[: len(wide)].unbind(), *stack[len(wide) :].mT.contiguous().unbind()]


class MuonAndAdam(torch.optim.Optimizer):
    """
    Muon for some parameters and Adam for the others, with one schedule and one state.

    Args:
        adam (`torch.optim.Adam`), muon ([`Muon`]): optimizers of disjoint parameters.
    """

    def __init__(self, adam: torch.optim.Optimizer, muon: torch.optim.Optimizer) -> None:
        self.parts = (adam, muon)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes a step of both optimizers."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of both optimizers."""
        return {"adam": self.parts[0].state_dict(), "muon": self.parts[1].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the states of both optimizers."""
        for part, name in zip(self.parts, ("adam", "muon"), strict=True):
            part.load_state_dict(state_dict[name])
        # Loading replaces the groups: a schedule must change the learning rates of the new ones.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def adam(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    learning_rate: float,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.98,
    adam_epsilon: float = 1e-9,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """
    Builds Adam with the paper's constants (Section 5.3). With `weight_decay`, it is AdamW: each update also multiplies
    every matrix, embeddings included, by 1 - learning rate * weight_decay. Vectors (biases, LayerNorms) do not decay.
    """
    trained = [parameter for _, parameter in parameters]
    betas = (adam_beta1, adam_beta2)
    if weight_decay == 0:
        return torch.optim.Adam(trained, lr=learning_rate, betas=betas, eps=adam_epsilon, fused=True)
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=adam_epsilon, fused=True)


def muon(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    learning_rate: float,
    weight_decay: float = 0.0,
    **keywords: float,
) -> torch.optim.Optimizer:
    """
    Builds Muon (https://kellerjordan.github.io/posts/muon) for the matrices of the layers, and [`adam`] for the other
    parameters. A step is the orthogonalized mean gradient, times 0.2 * sqrt(longer side) to match the size of Adam's
    (arXiv:2502.16982, Section 2.2).
    """
    named = dict(parameters)
    matrices = {name: part for name, part in named.items() if ".layers." in name and part.dim() == 2}
    others = [(name, part) for name, part in named.items() if name not in matrices]
    rest = adam(others, learning_rate, weight_decay=weight_decay, **keywords)
    if not matrices:
        return rest
    inner = Muon(matrices.values(), learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw")
    return MuonAndAdam(rest, inner)


ADAM_KEYS = ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
# The function that builds each optimizer, and the keys of `training` that are its keywords.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    "adam": (adam, ADAM_KEYS),
    "muon": (muon, ADAM_KEYS),
}


def build_optimizer(
    name: str, parameters: Iterable[tuple[str, torch.nn.Parameter]], learning_rate: float = 1.0, **keywords: float
) -> torch.optim.Optimizer:
    """
    Builds an optimizer.

    Args:
        name (`str`): one of `OPTIMIZERS`.
        parameters (`Iterable[tuple[str, torch.nn.Parameter]]`): `model.named_parameters()`; those that require no
            gradient are left out. A saved state refers to their order.
        learning_rate (`float`): factor of the schedule: 1 for [`noam`], the peak for the others.
        keywords (`float`): values of the keys that the optimizer has in `OPTIMIZERS`.
    """
    build, _ = OPTIMIZERS[name]
    return build([pair for pair in parameters if pair[1].requires_grad], learning_rate, **keywords)


def build_schedule(
    optimizer: torch.optim.Optimizer,
    kind: Schedule,
    d_model: int,
    warmup_steps: int,
    max_steps: int,
    factor: float = 1.0,
) -> LambdaLR:
    """
    Builds a learning-rate schedule whose n-th update has the rate of step n; no update has rate 0.

    Args:
        optimizer (`torch.optim.Optimizer`): its learning rate is 1 for `"noam"`, and the peak for the others.
        kind (`str`): learning rate of step n after the warm-up:

            - `"noam"`: equation 3, as in [`noam`],
            - `"inverse_sqrt"`: peak * sqrt(warmup_steps / n), as in fairseq,
            - `"constant"`: the peak,
            - `"cosine"`: half a cosine from the peak to 0, reached one step after `max_steps`.
        d_model (`int`): width of the model, for `"noam"`.
        warmup_steps (`int`): updates of the linear warm-up from 0.
        max_steps (`int`): total updates, for `"cosine"`.
        factor (`float`): factor of `"noam"`.

    Returns:
        `LambdaLR`; call `step()` after each update.
    """
    if kind == "noam":
        # torch counts updates from 0.
        return LambdaLR(optimizer, lambda update: noam(update + 1, d_model, warmup_steps, factor))
    # So does transformers, whose first rate would be 0: `last_epoch=0` makes it start with step 1.
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    if kind == "inverse_sqrt":
        return get_inverse_sqrt_schedule(optimizer, warmup_steps, last_epoch=0)
    if kind == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup_steps, last_epoch=0)
    return get_cosine_schedule_with_warmup(optimizer, warmup_steps, max_steps + 1, last_epoch=0)
