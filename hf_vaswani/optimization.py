"""Section 5.3: Adam, and the learning rate that rises for the first updates and then falls with their square root."""

from collections.abc import Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR


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


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], beta1: float = 0.9, beta2: float = 0.98, epsilon: float = 1e-9
) -> torch.optim.Adam:
    """
    Adam with the paper's constants (Section 5.3) and no weight decay.

    Args:
        parameters (`Iterable[torch.nn.Parameter]`): what to train.
        beta1 (`float`), beta2 (`float`): decay of the running means of the gradient and of its square.
        epsilon (`float`): added to the root of the second.

    Returns:
        `torch.optim.Adam` with learning rate 1, which a schedule multiplies.
    """
    return torch.optim.Adam(parameters, lr=1.0, betas=(beta1, beta2), eps=epsilon, fused=True)


def build_schedule(optimizer: torch.optim.Optimizer, d_model: int, warmup_steps: int, factor: float = 1.0) -> LambdaLR:
    """
    [`noam`] as a scheduler of torch: its n-th update has the rate of step n. Arguments as there.

    Args:
        optimizer (`torch.optim.Optimizer`): with learning rate 1.

    Returns:
        `LambdaLR`; call `step()` after each update.
    """
    # torch counts updates from 0.
    return LambdaLR(optimizer, lambda update: noam(update + 1, d_model, warmup_steps, factor))
