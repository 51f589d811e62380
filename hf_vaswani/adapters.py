"""Checkpoints of low-rank adapters: their files, and the weights that they make of the model they were trained on."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .files import find_damage, read_json

# PEFT's names.
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
PREFIX = "base_model.model."


def has_adapter(folder: Path) -> bool:
    """Returns whether a folder has an adapter in place of weights."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "model.safetensors").is_file()


def base_folder(checkpoint: Path) -> Path:
    """
    Returns the model that the adapter of a checkpoint belongs to, after comparing its files with the digests in
    the checkpoint's record.

    Args:
        checkpoint (`Path`): a checkpoint of a run, which has the model beside it.

    Raises:
        ValueError: the model is missing or was changed since the adapter was trained.
    """
    # Only the name counts: the run folder may have been moved.
    base = checkpoint.parent / Path(str(read_json(checkpoint / ADAPTER_CONFIG).get("base_model_name_or_path"))).name
    digests = read_json(checkpoint / "progress.json").get("start")
    if not base.is_dir() or not digests:
        raise ValueError(
            f"{checkpoint} has only adapters, and the model that they belong to, {base}, is missing: keep it beside "
            "the checkpoint."
        )
    damage = find_damage(base, digests)
    if damage is not None:
        raise ValueError(f"{damage}, but the adapters in {checkpoint} belong to it: restore it from a backup.")
    return base


def merged_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """
    Merges the adapter of a checkpoint into the weights that it was trained on: W + alpha / rank * B A (LoRA, Hu et
    al., 2021, Section 4.1).

    Args:
        checkpoint (`Path`): a checkpoint of a run with `training.adapter`.

    Returns:
        `dict[str, torch.Tensor]`: weights by name, as in the `model.safetensors` of a plain model.

    Raises:
        ValueError: a file is missing, damaged or unreadable, or the model was changed since.
    """
    base = base_folder(checkpoint)
    recorded = read_json(checkpoint / "progress.json").get("files", {})
    damage = find_damage(checkpoint, {name: recorded[name] for name in recorded if name in FILES})
    if damage is not None:
        raise ValueError(f"{damage}. Use another checkpoint, or restore the file from a backup.")
    settings: dict[str, Any] = read_json(checkpoint / ADAPTER_CONFIG)
    # The adapter was trained on float32 weights.
    weights = {name: weight.float() for name, weight in read_weights(base / "model.safetensors").items()}
    factors = read_weights(checkpoint / ADAPTER_WEIGHTS)
    for name, down in factors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        up = factors[name.replace(".lora_A.", ".lora_B.")]
        target = name.removeprefix(PREFIX).replace(".lora_A.", ".")
        weights[target] = weights[target] + (up @ down) * (settings["lora_alpha"] / settings["r"])
    return weights


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Reads a safetensors file; raises a `ValueError` with its path if it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
