"""The folder of a run and its checkpoints: written whole or not at all, found again, averaged (Section 6.1)."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .recipe import Recipe, load_recipe

WEIGHTS = "model.safetensors"
PROGRESS = "progress.json"
RECIPE = "recipe.yaml"
VALIDATIONS = "validations.jsonl"

# What a run may change when it is resumed: nothing that its results so far depend on.
CHANGEABLE = {
    "run_dir",
    "training.max_steps",
    "training.keep_last",
    "training.average_last",
    "training.cpu_threads",
    "training.trackers",
}


def temporary_name(path: Path) -> Path:
    """Where a file or folder is written before it gets its name: beside it, so that renaming cannot fail halfway."""
    return path.with_name(f".{path.name}.writing")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """
    A folder that appears under its name only when everything in it is on disk, in the place of an earlier one.

    Args:
        folder (`Path`): the name it gets.

    Yields:
        `Path`: the temporary folder beside it to write into; removed again if writing fails.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    temporary, old = temporary_name(folder), folder.with_name(f".{folder.name}.old")
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors and torch report a full disk as errors of their own, in words of their own.
        if isinstance(error, OSError) or re.search("os error|file write failed|inline_container", str(error)):
            raise OSError(f"{folder} could not be written, and nothing of it is left: {error}") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one act: a reader sees the old one or the new one."""
    temporary = temporary_name(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def list_checkpoints(run_dir: Path) -> list[Path]:
    """
    The complete checkpoints of a run.

    Args:
        run_dir (`Path`): the run's folder.

    Returns:
        `list[Path]`: the folders `checkpoint-N`, oldest first.
    """
    named = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    found = [path for path in named if (path / PROGRESS).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: `step`, `epoch`, `update` within the epoch (all finished ones), `data`."""
    path = checkpoint / PROGRESS
    try:
        progress: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {key: progress[key] for key in ("step", "epoch", "update", "data")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; delete {checkpoint} to go on from the one before.") from error


def read_validations(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has validated so far, oldest first: `step`, `loss`, `bleu`, `signature`, `best`."""
    path = run_dir / VALIDATIONS
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Delete it to go on without the earlier lines.") from error


def best_checkpoints(run_dir: Path, count: int) -> list[Path]:
    """
    The complete checkpoints of the highest validation BLEU. One that was not validated has no rank.

    Args:
        run_dir (`Path`): the run's folder.
        count (`int`): how many at most; of equals, the later ones.

    Returns:
        `list[Path]`: the folders `checkpoint-N`, oldest first.
    """
    bleu = {f"checkpoint-{line['step']}": line["bleu"] for line in read_validations(run_dir)}
    validated = [checkpoint for checkpoint in list_checkpoints(run_dir) if checkpoint.name in bleu]
    ranked = sorted(validated, key=lambda checkpoint: bleu[checkpoint.name])
    best = ranked[::-1][:count]
    return [checkpoint for checkpoint in validated if checkpoint in best]


def checkpoint_to_resume(recipe: Recipe) -> Path | None:
    """
    The newest checkpoint of a recipe's run folder, once it is clear that the folder is this recipe's.

    Args:
        recipe ([`Recipe`]): names the folder.

    Returns:
        `Path`, or `None` where there is no checkpoint yet: such a run starts anew.

    Raises:
        ValueError: the folder holds something else, or checkpoints of another recipe; names the keys that differ.
    """
    run_dir = Path(recipe.run_dir)
    if not run_dir.exists():
        return None
    if not run_dir.is_dir() or (any(run_dir.iterdir()) and not (run_dir / RECIPE).is_file()):
        raise ValueError(f"{run_dir} is not the folder of a run, because it has no {RECIPE}; name another --run_dir.")
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        return None
    here, there = recipe.flat(), load_recipe([str(run_dir / RECIPE)]).flat()
    # A cosine has come down by then as far as its end demands.
    changeable = CHANGEABLE - ({"training.max_steps"} if recipe.training.schedule == "cosine" else set())
    different = [key for key in here if here[key] != there[key] and key not in changeable]
    if different:
        keys = ", ".join(f"{key} is {there[key]!r} there and {here[key]!r} here" for key in different)
        raise ValueError(
            f"{run_dir} belongs to another recipe: {keys}. Name another --run_dir, or delete the folder to start anew."
        )
    return checkpoints[-1]


def remove_old_checkpoints(run_dir: Path, keep_last: int, keep_best: int = 0) -> None:
    """
    Deletes all checkpoints but the newest and the best, and what is left of one that was killed while it was written.

    Args:
        run_dir (`Path`): the run's folder.
        keep_last (`int`): how many of the newest stay.
        keep_best (`int`): how many of the best stay, as [`best_checkpoints`] ranks them.
    """
    checkpoints = list_checkpoints(run_dir)
    kept = {*checkpoints[-keep_last:], *best_checkpoints(run_dir, keep_best)}
    leftovers = run_dir.glob(temporary_name(Path("checkpoint-*")).name)
    for folder in (*(checkpoint for checkpoint in checkpoints if checkpoint not in kept), *leftovers):
        shutil.rmtree(folder)


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, torch.Tensor]:
    """
    The mean of the weights of several checkpoints of one model (Section 6.1).

    Args:
        checkpoints (`Sequence[Path]`): folders with a `model.safetensors` each.

    Returns:
        `dict[str, torch.Tensor]`: every weight by name, in the type of the first checkpoint. The mean is taken in
        float64, one checkpoint in memory at a time.

    Raises:
        ValueError: no checkpoints, or their weights have different names or shapes.
    """
    if not checkpoints:
        raise ValueError("There is no checkpoint to average.")
    first = _load_weights(checkpoints[0])
    total = {name: weight.double() for name, weight in first.items()}
    for checkpoint in checkpoints[1:]:
        weights = _load_weights(checkpoint)
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


def _load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(checkpoint / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{checkpoint / WEIGHTS} cannot be read: {error}") from error
