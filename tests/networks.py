"""Small models with random weights, for tests that need a network but no training."""

import torch
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration


def tiny_config(**fields) -> VaswaniConfig:
    sizes = {"vocab_size": 40, "d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    return VaswaniConfig(**(sizes | fields))


def tiny_model(seed: int = 0, eos: float | None = None, **fields) -> VaswaniForConditionalGeneration:
    """
    A random model in evaluation mode.

    Args:
        seed (`int`): seed of the weights.
        eos (`float`, *optional*): gives the output layer a random bias and adds this number to that of `</s>`: the
            translations vary in length, `inf` ends them at once and `-inf` never.
        fields: fields of the config.
    """
    torch.manual_seed(seed)
    if eos is not None:
        fields["lm_head_bias"] = True
    model = VaswaniForConditionalGeneration(tiny_config(**fields)).eval()
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
