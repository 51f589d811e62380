"""Weights of 8 bits for translating on a CPU, by torch's own dynamic quantization."""

import warnings
from typing import Any

import torch
from torch import nn

# Entries from which on a matrix is multiplied faster in 8 bits: rounding what it multiplies takes time as well.
ENTRIES_WORTH_IT = 2**16


def to_int8(model: Any) -> Any:
    """
    Makes a model of which the large matrices have integers of 8 bits, with a scale for each row; what they multiply is
    rounded to 8 bits as well, with a scale for each call. It is faster on a CPU, and its translations are a little
    different. Embeddings and norms stay as they are.

    Args:
        model ([`PreTrainedModel`]): on a CPU, in float32. It is not changed.

    Returns:
        [`PreTrainedModel`] of the same class, for `generate()`. It cannot be trained, and `save_pretrained` raises a
        `ValueError`: save the model that it was made of.

    Raises:
        ValueError: `model` is on another device, or of another type.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise ValueError(f"Weights of 8 bits are for float32 on a CPU, but this is {model.dtype} on {model.device}.")
    with warnings.catch_warnings():
        # torch means to move this to torchao, whose integers are slower on a CPU than float32.
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
    raise ValueError("A model with weights of 8 bits cannot be saved: save the model that it was made of.")
