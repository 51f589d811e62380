"""Low-rank adapters (LoRA, Hu et al., 2021) in a training, on PEFT: attached, saved and loaded again."""

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..adapters import ADAPTER_WEIGHTS
from ..extras import extra
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipe import AdapterRecipe

# Matrices of a sub-layer, by the words of `training.adapter.target`.
SUBLAYERS = {"attention": ["q_proj", "k_proj", "v_proj", "out_proj"], "feed_forward": ["fc1", "fc2"]}


def check_peft() -> None:
    """Raises an `ImportError` with the command that installs PEFT, if it is missing."""
    with extra("adapt", "training.adapter"):
        import peft  # noqa: F401


def target_modules(model: VaswaniForConditionalGeneration, words: list[str]) -> list[str]:
    """
    Returns the names of modules that `training.adapter.target` asks for, as PEFT matches them.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, without adapters.
        words (`list[str]`): `attention`, `feed_forward`, or names of linear layers, whole or their last parts.

    Raises:
        ValueError: a word matches no linear layer of encoder or decoder, or there is no word.
    """
    linear = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]
    existing = [*SUBLAYERS, *dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear)]
    found: dict[str, None] = {}
    for word in words:
        names = SUBLAYERS.get(word, [word])
        if not any(f".{name}".endswith(f".{last}") for name in linear for last in names):
            raise ValueError(f"training.adapter.target has {word!r}, but the model has only {', '.join(existing)}.")
        found |= dict.fromkeys(names)
    if not found:
        raise ValueError(f"training.adapter.target is empty: name some of {', '.join(existing)}.")
    return list(found)


def attach_adapters(model: VaswaniForConditionalGeneration, adapter: AdapterRecipe, start: Path) -> Any:
    """
    Puts adapters into a model, in place, and freezes its own weights.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, with the weights of `start`.
        adapter ([`AdapterRecipe`]): rank, scale, dropout and place of the adapters.
        start (`Path`): folder of the model, to which the saved adapters will refer.

    Returns:
        `peft.PeftModel` around the same model.
    """
    check_peft()
    import peft

    settings = peft.LoraConfig(
        task_type="SEQ_2_SEQ_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=target_modules(model, adapter.target),
    )
    with warnings.catch_warnings():
        # PEFT asks for an attribute that transformers is about to rename.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapters = peft.get_peft_model(model, settings)
    # PEFT would take the name from the config of the model, which has none in a training.
    settings.base_model_name_or_path = str(start)
    return adapters


def save_adapters(adapters: Any, folder: Path) -> None:
    """Writes adapters as PEFT does, so that `PeftModel.from_pretrained` loads them, but without a model card."""
    import peft

    weights = {name: weight.contiguous() for name, weight in peft.get_peft_model_state_dict(adapters).items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    adapters.peft_config["default"].save_pretrained(folder)


def load_adapters(adapters: Any, folder: Path) -> None:
    """Loads what [`save_adapters`] has written."""
    import peft

    peft.set_peft_model_state_dict(adapters, load_file(folder / ADAPTER_WEIGHTS))
