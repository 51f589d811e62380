"""Averages the weights of checkpoints (Section 6.1)."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .files import atomic_folder, find_damage
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


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, torch.Tensor]:
    """
    The mean of the weights of several checkpoints of one model (Section 6.1).

    Args:
        checkpoints (`Sequence[Path]`): folders with a `model.safetensors` each. Where there is an `ema.safetensors`
            as well, which is a run's moving average, that is taken instead.

    Returns:
        `dict[str, torch.Tensor]`: every weight by name, in the type of the first checkpoint. The mean is taken in
        float64, one checkpoint in memory at a time.

    Raises:
        ValueError: no checkpoints, or a file of one is not as it was written, or their weights have different names or
            shapes, or cannot be read.
    """
    if not checkpoints:
        raise ValueError("There is no checkpoint to average.")
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
    Writes a model whose weights are the mean of several checkpoints.

    Args:
        checkpoints (`Sequence[Path]`): as in [`average_checkpoints`]. Config, generation config, tokenizer and code
            are those of the last.
        folder (`Path`): what `from_pretrained` then loads; it must not exist yet.

    Raises:
        ValueError: as in [`average_checkpoints`], or the folder exists.
        OSError: the disk is full, or cannot be written.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; name a folder that does not.")
    weights = average_checkpoints(checkpoints)
    with atomic_folder(folder) as temporary:
        for path in sorted(checkpoints[-1].iterdir()):
            if path.suffix in (".json", ".py") and path.name != PROGRESS:
                shutil.copyfile(path, temporary / path.name)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """
    The weights that a checkpoint stands for: its moving average where it has one.

    Raises:
        ValueError: there are none, or they cannot be read.
    """
    if not checkpoint.is_dir():
        raise ValueError(
            f"{checkpoint} is not there any more: training.keep_last, training.keep_best and training.average_best "
            "say how many stay."
        )
    # By its record: a moving average that was lost is not to be replaced by what it is the average of.
    names = read_progress(checkpoint).files if is_checkpoint(checkpoint) else [p.name for p in checkpoint.iterdir()]
    path = checkpoint / (EMA_WEIGHTS if EMA_WEIGHTS in names else WEIGHTS)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _check_files(folder: Path) -> None:
    """
    Compares the files of a model with the digests that its run has noted, if it has noted any.

    Args:
        folder (`Path`): a checkpoint, the `model` of a run, or any other model, of which nothing is known.

    Raises:
        ValueError: a file is missing or not as it was written.
    """
    if is_checkpoint(folder):
        damage = find_damage(folder, read_progress(folder).files)
        if damage is not None:
            raise ValueError(f"{damage}. {advice(folder)}")
    elif folder.name == MODEL and (folder.parent / RESULT).is_file() and (folder.parent / RECIPE).is_file():
        damage = find_damage(folder, read_result(folder.parent).files or {})
        if damage is not None:
            raise ValueError(f"{damage}. The command of the training makes it again from the checkpoints.")
