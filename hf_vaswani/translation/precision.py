"""
The number format of matrix products: where bfloat16 is faster than float32.

bfloat16 is meant by `torch.autocast`: products have factors in bfloat16 and sums in float32; weights, norms, residual
connections, probabilities and scores stay in float32.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Widths of models for whose products a processor with the instructions was measured to be 1.2 and 1.3 times as fast.
# A step of a search has fewer rows than an update.
TRANSLATION, TRAINING = 256, 128


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


def fastest_translation(model: Any) -> tuple[torch.dtype, str]:
    """
    Chooses the number format of a model's products for translation in batches.

    Args:
        model ([`PreTrainedModel`]): the model.

    Returns:
        `tuple[torch.dtype, str]`: bfloat16 or float32, or the type of weights that are no float32, and why, in words
            that follow "because".
    """
    if model.dtype != torch.float32:
        return model.dtype, f"the weights are in {str(model.dtype).removeprefix('torch.')}"
    return _fastest(model.device, getattr(model.config, "hidden_size", 0), TRANSLATION)


def fastest_training(device: torch.device, d_model: int) -> tuple[torch.dtype, str]:
    """Chooses the number format of the products of a training; returns the same as [`fastest_translation`]."""
    return _fastest(device, d_model, TRAINING)


def _fastest(device: torch.device, d_model: int, least: int) -> tuple[torch.dtype, str]:
    if not has_bfloat16(device):
        return torch.float32, f"the {device.type} of this machine has no instructions for bfloat16"
    if device.type == "cpu" and d_model < least:
        return torch.float32, f"d_model is {d_model}, and bfloat16 is faster from {least} on"
    return torch.bfloat16, f"the {device.type} of this machine has instructions for bfloat16"
