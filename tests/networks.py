"""Small models with random weights, and batches for them, for tests that need a network but no training."""

import math

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration


def tiny_config(**fields) -> VaswaniConfig:
    sizes = {"vocab_size": 40, "d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    return VaswaniConfig(**(sizes | fields))


def tiny_model(
    seed: int = 0, eos: float | None = None, kind: type = VaswaniForConditionalGeneration, **fields
) -> VaswaniForConditionalGeneration:
    """
    A random model in evaluation mode.

    Args:
        seed (`int`): seed of the weights.
        eos (`float`, *optional*): gives the output layer a random bias and adds this number to that of `</s>`: the
            translations vary in length, `inf` ends them at once and `-inf` never.
        kind (`type`): class of the model, which has an `lm_head`.
        fields: fields of the config.
    """
    torch.manual_seed(seed)
    if eos is not None:
        fields["lm_head_bias"] = True
    model = kind(tiny_config(**fields)).eval()
    with torch.no_grad():
        # The output of a freshly initialised post-norm model hardly depends on its input; larger matrices make it.
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not model.lm_head:
                module.weight.mul_(2)
        if eos is not None:
            model.lm_head.bias.normal_()
            model.lm_head.bias[model.config.eos_token_id] += eos
    return model


def batch(rows: int = 3, source: int = 7, target: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(4, 40, (rows, source), generator=generator),
        "attention_mask": torch.ones(rows, source, dtype=torch.long),
        "decoder_input_ids": torch.randint(4, 40, (rows, target), generator=generator),
    }


def with_labels() -> dict[str, torch.Tensor]:
    """Returns a batch with positions that have no label, and with padding in the source."""
    data = batch()
    data["labels"] = data.pop("decoder_input_ids")
    data["labels"][0, 3:] = data["labels"][2, 1] = -100
    data["input_ids"][0, 5:] = 0
    data["attention_mask"][0, 5:] = 0
    return data


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


class Sizes(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


# Widths that divide nothing.
SIZES = {"vocab_size": 51, "d_model": 24, "d_ff": 37, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}


def random_model(seed: int = 0, max_length_offset: int = 10, **fields: object) -> VaswaniForConditionalGeneration:
    """Returns a model whose translations vary, including in length; every weight is random, biases and norms too."""
    model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES | fields)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() > 1:
            weight.copy_(noise * (2 if "layers" in name else 1) / math.sqrt(weight.shape[-1]))
        else:
            weight.copy_(0.3 * noise + name.endswith("norm.weight"))
    for matrix in {model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight}:
        if model.config.pad_token_id is not None:
            matrix[model.config.pad_token_id] = 0
    # A larger weight makes </s> frequent enough for short translations.
    model.lm_head.weight[model.config.eos_token_id] *= 1.5
    model.generation_config.max_length_offset = max_length_offset
    return model


def random_batch(
    source_ids: range,
    target_ids: range,
    shape: tuple[int, int, int] = (5, 9, 8),
    start: int | None = None,
    pad: int = 0,
    left: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Returns source ids, their mask and decoder ids for a shape of `(batch, source, target)`.

    The first sentence has no padding, the second has it on the right, the third on the left (with `left=False` also on
    the right), and so on. Decoder ids begin with `start`, if it is given.
    """
    batch, source, target = shape
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(source_ids.start, source_ids.stop, (batch, source), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::3, 1 + source // 2 :] = 0
    mask[2::3, slice(source // 2) if left else slice(1 + source // 4, None)] = 0
    decoder_ids = torch.randint(target_ids.start, target_ids.stop, (batch, target), generator=generator)
    if start is not None:
        decoder_ids[:, 0] = start
    return ids.masked_fill(mask == 0, pad), mask, decoder_ids
