"""Reads the weights of checkpoints, averages them (Section 6.1), and loads them by name."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .adapters import ADAPTER_CONFIG, has_adapter, merged_weights, read_weights
from .files import atomic_folder, find_damage, read_json
from .run_folder import (
    EMA_WEIGHTS,
    MODEL,
    PROGRESS,
    RECIPE,
    RESULT,
    WEIGHTS,
    advice,
    is_checkpoint,
    read_progress,
    read_result,
)

TOKENIZER = "tokenizer.json"


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, torch.Tensor]:
    """
    Averages the weights of several checkpoints of one model (Section 6.1).

    Args:
        checkpoints (`Sequence[Path]`): folders with a `model.safetensors` each. An `ema.safetensors`, the moving
            average of a run, overrides it. Adapters are merged first.

    Returns:
        `dict[str, torch.Tensor]`: weights by name, in the type of the first checkpoint. The mean is computed in
        float64, with one checkpoint in memory at a time.

    Raises:
        ValueError: there are no checkpoints, a file is missing, damaged or unreadable, or the weights have different
            names or shapes.
    """
    if not checkpoints:
        raise ValueError("There is no checkpoint to average: give at least one.")
    for checkpoint in checkpoints:
        _check_files(checkpoint)
    first = load_weights(checkpoints[0])
    total = {name: weight.double() for name, weight in first.items()}
    for checkpoint in checkpoints[1:]:
        weights = load_weights(checkpoint)
        if set(weights) != set(total):
            different = sorted(set(weights) ^ set(total))
            raise ValueError(f"{checkpoint} and {checkpoints[0]} do not have the same weights: {different[0]}.")
        for name, weight in weights.items():
            if weight.shape != total[name].shape:
                raise ValueError(
                    f"{name} has the shape {tuple(weight.shape)} in {checkpoint}, "
                    f"but {tuple(total[name].shape)} in {checkpoints[0]}."
                )
            total[name] += weight.double()
    return {name: (weight / len(checkpoints)).to(first[name].dtype) for name, weight in total.items()}


def save_average(checkpoints: Sequence[Path], folder: Path) -> None:
    """
    Averages several checkpoints and saves the mean as a model.

    Args:
        checkpoints (`Sequence[Path]`): as in [`average_checkpoints`]. Config, generation config, tokenizer and code
            are copied from the last one.
        folder (`Path`): folder for `from_pretrained`, which must not exist yet.

    Raises:
        ValueError: as in [`average_checkpoints`], or the folder exists, or the vocabularies differ.
        OSError: the model cannot be written.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already: name a new folder.")
    weights = average_checkpoints(checkpoints)
    _check_vocabularies(checkpoints)
    with atomic_folder(folder) as temporary:
        for path in sorted(checkpoints[-1].iterdir()):
            if path.suffix in (".json", ".py") and path.name not in (PROGRESS, ADAPTER_CONFIG):
                shutil.copyfile(path, temporary / path.name)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})


def _check_vocabularies(checkpoints: Sequence[Path]) -> None:
    """Raises a `ValueError` if the rows of the embeddings belong to different tokens."""
    paths = [folder / TOKENIZER for folder in checkpoints if (folder / TOKENIZER).is_file()]
    vocabularies = [[read_json(path).get(key) for key in ("model", "added_tokens")] for path in paths]
    for path, vocabulary in zip(paths, vocabularies, strict=True):
        if vocabulary != vocabularies[0]:
            raise ValueError(
                f"{path.parent} and {paths[0].parent} have different vocabularies and cannot be averaged: "
                "give checkpoints of one run, or of runs with the same tokenizer."
            )


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """
    Loads the weights of a checkpoint, or its moving average if it has one. Adapters are merged into the
    weights that they were trained on.

    Raises:
        ValueError: the checkpoint was deleted, or its weights cannot be read.
    """
    if not checkpoint.is_dir():
        raise ValueError(
            f"{checkpoint} was deleted: training.keep_last, training.keep_best and training.average_best say how many "
            "checkpoints are kept."
        )
    # The record counts: a moving average that was lost must not be replaced by the weights behind it.
    names = read_progress(checkpoint).files if is_checkpoint(checkpoint) else [p.name for p in checkpoint.iterdir()]
    if has_adapter(checkpoint):
        return merged_weights(checkpoint)
    return read_weights(checkpoint / (EMA_WEIGHTS if EMA_WEIGHTS in names else WEIGHTS))


def load_stored(model: Any, weights: Mapping[str, Any], is_new: Callable[[str], bool] = lambda name: False) -> None:
    """
    Loads weights into a model by their names. A matrix that is tied to another may be named once.

    Args:
        model (`nn.Module`): the model.
        weights (`Mapping[str, torch.Tensor]`): weights by name.
        is_new (`Callable[[str], bool]`): whether a weight of the model keeps its value if it is not among them.

    Raises:
        ValueError: the model lacks one of the weights, or they lack one of the model.
    """
    own = model.state_dict(keep_vars=True)
    named = {id(weight) for name, weight in own.items() if name in weights}
    missing = [name for name, weight in own.items() if id(weight) not in named and not is_new(name)]
    kinds = {"missing": missing, "unexpected": weights.keys() - own.keys()}
    found = [f"{len(names)} {kind} (first: {min(names)})" for kind, names in kinds.items() if names]
    if found:
        raise ValueError(f"Weights do not fit to the {type(model).__name__}: {', '.join(found)}.")
    model.load_state_dict(weights, strict=False)


def _check_files(folder: Path) -> None:
    """
    Compares the files of a model with the digests in the records of its run, if it is part of one.

    Args:
        folder (`Path`): a checkpoint, the `model` of a run, or another model, which has no digests.

    Raises:
        ValueError: a file is missing or was changed.
    """
    if is_checkpoint(folder):
        damage = find_damage(folder, read_progress(folder).files)
        if damage is not None:
            raise ValueError(f"{damage}. {advice(folder)}")
    elif folder.name == MODEL and (folder.parent / RESULT).is_file() and (folder.parent / RECIPE).is_file():
        damage = find_damage(folder, read_result(folder.parent).files or {})
        if damage is not None:
            raise ValueError(f"{damage}. The same training command writes it again from the checkpoints.")
