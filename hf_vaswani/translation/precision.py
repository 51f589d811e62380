"""
The number format of matrix products: whether bfloat16 is faster than float32 on a device, by instructions and by a
measurement.

bfloat16 is meant by `torch.autocast`: products have factors in bfloat16 and sums in float32; weights, norms, residual
connections, probabilities and scores stay in float32.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# In seconds.
MEASUREMENT = 1.0
# The least speedup for which products are rounded.
WORTHWHILE = 1.15


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether a device has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which products are in bfloat16; any other format leaves them as they are."""
    return torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else nullcontext()


def speedup_of_bfloat16(work: Callable[[], Any], device: torch.device) -> float:
    """
    Measures a work in float32 and with autocast to bfloat16, in turns, for about a second.

    Args:
        work (`Callable`): the work; its result is ignored.
        device (`torch.device`): where it computes.

    Returns:
        `float`: median time in float32 over median time in bfloat16.
    """
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    end = None
    while end is None or time.perf_counter() < end or len(seconds[torch.float32]) < 3:
        for dtype, found in seconds.items():
            with autocast_to(dtype, device):
                start = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            found.append(time.perf_counter() - start)
        if end is None:
            # The first round allocates memory and fills caches.
            end = time.perf_counter() + MEASUREMENT
            for found in seconds.values():
                found.clear()
    return statistics.median(seconds[torch.float32]) / statistics.median(seconds[torch.bfloat16])


@torch.inference_mode()
def fastest_translation(model: Any) -> tuple[torch.dtype, str]:
    """
    Chooses the number format of a model's products for translation in batches.

    Args:
        model ([`PreTrainedModel`]): a model that generates, in evaluation mode. It translates made-up sentences.

    Returns:
        `tuple[torch.dtype, str]`: bfloat16 or float32, or the type of weights that are no float32, and why, in words
            that follow "because".
    """
    device = model.device
    if model.dtype != torch.float32:
        return model.dtype, f"the weights are in {str(model.dtype).removeprefix('torch.')}"
    if not has_bfloat16(device):
        return torch.float32, "the processor has no instructions for bfloat16"
    # Any entries but the special ones; the caller's random numbers stay as they are.
    first = min(10, model.config.vocab_size - 1)
    ids = (first + torch.arange(32 * 16, device=device) % (model.config.vocab_size - first)).view(32, 16)
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": False}
    found = speedup_of_bfloat16(lambda: model.generate(ids, attention_mask=mask, **settings), device)
    return _choice(found)


def _choice(speedup: float) -> tuple[torch.dtype, str]:
    why = f"bfloat16 is {speedup:.2f} times as fast"
    if speedup >= WORTHWHILE:
        return torch.bfloat16, why
    return torch.float32, f"{why}, and {WORTHWHILE} are needed"


def fastest_training(device: torch.device, rows: int, d_model: int, d_ff: int) -> tuple[torch.dtype, str]:
    """
    Chooses the number format of the products of a training.

    Args:
        device (`torch.device`): where it computes.
        rows (`int`): positions of a batch.
        d_model (`int`), d_ff (`int`): widths of the feed-forward networks, whose products are measured.

    Returns:
        `tuple[torch.dtype, str]`: as in [`fastest_translation`].
    """
    if not has_bfloat16(device):
        return torch.float32, "the processor has no instructions for bfloat16"
    shapes = ((d_ff, d_model), (d_model, d_ff))
    fc1, fc2 = (torch.full(shape, 0.01, device=device, requires_grad=True) for shape in shapes)
    states, linear = torch.ones(min(rows, 4096), d_model, device=device), torch.nn.functional.linear
    found = speedup_of_bfloat16(lambda: linear(linear(states, fc1).relu(), fc2).sum().backward(), device)
    return _choice(found)
