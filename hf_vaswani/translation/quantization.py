"""Dynamic int8 quantization by torch, for translating on a CPU."""

import copy
import warnings
from typing import Any

import torch
from torch import nn

# Smallest matrix that is faster in int8, where rounding the activations takes time as well.
ENTRIES_WORTH_IT = 2**16


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
            if type(module) is nn.Linear and module.weight.numel() >= ENTRIES_WORTH_IT
        }
        if not large:
            return model
        small = quantize_dynamic(model, large)
    small.save_pretrained = _refuse_to_save
    return small


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ValueError("An int8 model cannot be saved: save the original model.")
