"""
Number formats that are faster than float32: products in bfloat16, and weights in int8 on a CPU.

bfloat16 is meant by `torch.autocast`: products have factors in bfloat16 and sums in float32; weights, norms, residual
connections, probabilities and scores stay in float32.
"""

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

# Widths of models for whose products a processor with the instructions was measured to be 1.2 and 1.3 times as fast.
# A step of a search has fewer rows than an update.
TRANSLATION, TRAINING = 256, 128
# Smallest matrix that is faster in int8, where rounding the activations takes time as well.
MIN_INT8_ENTRIES = 2**16


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether a device has instructions for bfloat16."""
    if device.type in ("cuda", "xpu"):
        return bool(getattr(torch, device.type).is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    # oneDNN, which multiplies, can be limited to older instructions, and emulates the others then.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if limit not in ("", "ALL", "DEFAULT") and not any(part in limit for part in ("BF16", "FP16", "AMX", "AVX10")):
        return False
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which products are in bfloat16; any other format leaves them as they are."""
    return torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else nullcontext()


@contextmanager
def float32_products(precision: str, device: torch.device) -> Iterator[None]:
    """
    Computes products in float32 within its block as `training.matmul_precision` says, if the device is an NVIDIA GPU.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


def to_int8(model: Any) -> Any:
    """
    Quantizes the large matrices of a model to int8, with one scale per row; their inputs are quantized on the fly,
    with one scale per call. The result is faster on a CPU, and translates slightly differently. Embeddings and norms
    stay in float32.

    Args:
        model ([`PreTrainedModel`]): float32 model; not changed.

    Returns:
        [`PreTrainedModel`] of the same class, for `generate()`, on the CPU: only there torch computes in int8. It
        cannot be trained, and its `save_pretrained` raises a `ValueError`: save the original model instead.

    Raises:
        ValueError: `model` has another data type.
    """
    if model.dtype != torch.float32:
        raise ValueError(
            f"int8 quantization needs a float32 model on the CPU, but this one is {model.dtype} on {model.device}."
        )
    if model.device.type != "cpu":
        model = copy.deepcopy(model).cpu()
    with warnings.catch_warnings():
        # torch deprecates this for torchao, whose int8 is slower on a CPU than float32.
        warnings.simplefilter("ignore")
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

        large = {
            name: per_channel_dynamic_qconfig
            for name, module in model.named_modules()
            if type(module) is nn.Linear and module.weight.numel() >= MIN_INT8_ENTRIES
        }
        if not large:
            return model
        small = quantize_dynamic(model, large)
    small.save_pretrained = _refuse_to_save
    return small


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ValueError("An int8 model cannot be saved: save the original model.")
