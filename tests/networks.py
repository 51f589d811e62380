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
