"""The folder of a run and its checkpoints: found, ranked, averaged (Section 6.1)."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .files import digest, temporary_name, write_text, written_whole
from .recipe import Recipe, TrainingRecipe, load_recipe

WEIGHTS = "model.safetensors"
EMA_WEIGHTS = "ema.safetensors"
PROGRESS = "progress.json"
RECIPE = "recipe.yaml"
ENVIRONMENT = "environment.json"
MODEL = "model"
VALIDATIONS = "validations.jsonl"
NONFINITE = "nonfinite_updates.jsonl"
CURVE = "training.jsonl"
RESULT = "test.json"

# What a run may change when it is resumed: nothing that its results so far depend on.
CHANGEABLE = {
    "run_dir",
    "data.num_proc",
    "training.max_steps",
    "training.keep_last",
    "training.keep_best",
    "training.average_last",
    "training.average_best",
    "training.best_by",
    "training.patience",
    "training.max_nonfinite_updates",
    "training.data_workers",
    "training.cpu_threads",
    "training.trackers",
    "data.license",
    "hub.repo_id",
    "hub.min_bleu",
    "hub.private",
    "hub.revision",
    "hub.every_n_checkpoints",
    "hub.license",
}


def digests(folder: Path) -> dict[str, str]:
    """
    What a folder holds that is a model, as it was just written; of a checkpoint not what it goes on from.

    Args:
        folder (`Path`): weights, config, tokenizer and code. Where there is a moving average, that is the model.

    Returns:
        `dict[str, str]`: SHA-256, in hexadecimal digits, by the name of the file.
    """
    endings, other = (".json", ".safetensors", "_vaswani.py"), {PROGRESS}
    if (folder / EMA_WEIGHTS).is_file():
        other.add(WEIGHTS)
    paths = [path for path in folder.iterdir() if path.name.endswith(endings) and path.name not in other]
    return {path.name: digest(path) for path in sorted(paths)}


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
    return sorted(found, key=_step)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """
    What a checkpoint says of itself: `step`, the `position` in the data, `data`, which text that was, `launch`, how
    many processes of which kind, how many updates in a row were left out last (`nonfinite`), how long the training
    took so far (`seconds`), and the digests of its `files`.
    """
    path = checkpoint / PROGRESS
    try:
        progress: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {key: progress[key] for key in ("step", "position", "data", "launch", "nonfinite", "seconds", "files")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged, or of another version; delete {checkpoint} to go on from the one before."
        ) from error


def read_validations(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has validated so far, oldest first: `step`, `loss`, `bleu` and the other scores, `best`."""
    path = run_dir / VALIDATIONS
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Delete it to go on without the earlier lines.") from error


def ranked(validations: Sequence[dict[str, Any]], best_by: Literal["bleu", "loss"]) -> list[dict[str, Any]]:
    """
    Validations, the best first.

    Args:
        validations (`Sequence[dict[str, Any]]`): lines as [`read_validations`] gives them, oldest first.
        best_by (`str`): `"bleu"`, of which more is better, or `"loss"`, of which less is. Of equals the later one is
            first.

    Returns:
        `list[dict[str, Any]]`.
    """
    return sorted(validations, key=lambda line: (_badness(line, best_by), -line["step"]))


def _badness(validation: dict[str, Any], best_by: Literal["bleu", "loss"]) -> float:
    """Less is better. A loss that is no finite number is written as null, and is the worst."""
    value = validation[best_by]
    return math.inf if value is None else value if best_by == "loss" else -value


def has_stalled(validations: Sequence[dict[str, Any]], best_by: Literal["bleu", "loss"], patience: int) -> bool:
    """
    Whether the training may stop early.

    Args:
        validations (`Sequence[dict[str, Any]]`), best_by (`str`): as in [`ranked`].
        patience (`int`): validations in a row without a new best, after which it may.

    Returns:
        `bool`.
    """
    values = [_badness(line, best_by) for line in validations]
    # A value that only equals an earlier one is no progress.
    return len(values) > patience and min(values[-patience:]) >= min(values[:-patience])


def checkpoints_to_average(
    run_dir: Path,
    save_every: int,
    last: int | None = None,
    best: int | None = None,
    best_by: Literal["bleu", "loss"] = "bleu",
) -> list[Path]:
    """
    The last checkpoints of a run, or those of its best validations, be they there or deleted.

    Args:
        run_dir (`Path`): the run's folder.
        save_every (`int`): updates between two checkpoints, as the run's recipe has it.
        last (`int`, *optional*): how many of the newest, or all if the run made no more.
        best (`int`, *optional*): how many of the best, instead; of equals, the later ones. A checkpoint that was not
            validated has no rank.
        best_by (`str`): `"bleu"` or `"loss"`.

    Returns:
        `list[Path]`: the folders `checkpoint-N`, oldest first.
    """
    newest = max(map(_step, list_checkpoints(run_dir)), default=0)
    made = [newest, *range((newest - 1) // save_every * save_every, 0, -save_every)] if newest else []
    if best is not None:
        validated = [line["step"] for line in ranked(read_validations(run_dir), best_by)]
        made = [step for step in validated if step in made]
    steps = made[: last if best is None else best]
    return [run_dir / f"checkpoint-{step}" for step in sorted(steps)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def write_validations(run_dir: Path, validations: Sequence[dict[str, Any]], best_by: Literal["bleu", "loss"]) -> None:
    """Replaces `validations.jsonl`, the best one marked; arguments as in [`ranked`]."""
    best = ranked(validations, best_by)[:1]
    lines = [json.dumps(line | {"best": line in best}) + "\n" for line in validations]
    write_text(run_dir / VALIDATIONS, "".join(lines))


def forget_after(run_dir: Path, step: int, training: TrainingRecipe) -> None:
    """
    Drops what a run noted later than the checkpoint that it goes on from: it will come by there again. The validation
    at what was once its end goes, too, if the run has got more updates since.

    Args:
        run_dir (`Path`): the run's folder.
        step (`int`): updates that are kept; 0 for a run that starts anew.
        training ([`TrainingRecipe`]): when to validate, and what is best.
    """
    validations = [
        line
        for line in read_validations(run_dir)
        if line["step"] <= step and (line["step"] % training.validate_every == 0 or line["step"] == training.max_steps)
    ]
    if validations:
        write_validations(run_dir, validations, training.best_by)
    else:
        (run_dir / VALIDATIONS).unlink(missing_ok=True)
    for path in (run_dir / NONFINITE, run_dir / CURVE):
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
        kept = [line for line in lines if _noted_by(line, step)]
        if not kept:
            path.unlink(missing_ok=True)
        elif len(kept) < len(lines):
            write_text(path, "".join(kept))


def _noted_by(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        # Cut short, as the last one is when a run is killed.
        return False


def checkpoint_to_resume(recipe: Recipe) -> Path | None:
    """
    The newest checkpoint of a recipe's run folder, once it is clear that the folder is this recipe's.

    Args:
        recipe ([`Recipe`]): names the folder.

    Returns:
        `Path`, or `None` where there is no checkpoint yet: such a run starts anew.

    Raises:
        ValueError: the folder holds something else, or checkpoints or a result of another recipe; names the keys that
            differ.
    """
    run_dir = Path(recipe.run_dir)
    if not run_dir.exists():
        return None
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    # A run that was killed while it wrote its recipe has nothing else yet.
    if not run_dir.is_dir() or (RECIPE not in names and names - {temporary_name(run_dir / RECIPE).name}):
        raise ValueError(f"{run_dir} is not the folder of a run, because it has no {RECIPE}; name another --run_dir.")
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints and RESULT not in names:
        return None
    here, there = recipe.flat(), load_recipe([str(run_dir / RECIPE)]).flat()
    # A cosine has come down by then as far as its end demands.
    changeable = CHANGEABLE - ({"training.max_steps"} if recipe.training.schedule == "cosine" else set())
    different = [key for key in here if here[key] != there[key] and key not in changeable]
    if different:
        keys = ", ".join(f"{key} is {there[key]!r} there and {here[key]!r} here" for key in different)
        raise ValueError(
            f"{run_dir} belongs to another recipe: {keys}. Name another --run_dir, or delete the folder to start "
            f"anew. A run that goes on may change {', '.join(sorted(changeable - {'run_dir'}))}."
        )
    return checkpoints[-1] if checkpoints else None


def remove_old_checkpoints(
    run_dir: Path, save_every: int, keep_last: int, keep_best: int = 0, best_by: Literal["bleu", "loss"] = "bleu"
) -> None:
    """
    Deletes all checkpoints but the newest and the best, and what is left of one that was killed while it was written.

    Args:
        run_dir (`Path`): the run's folder.
        save_every (`int`): updates between two checkpoints. One that was written in between, because the run was
            stopped there, goes when a newer one is there: the run would not have it, had it not been stopped.
        keep_last (`int`): how many of the newest stay.
        keep_best (`int`): how many of the best stay, as [`ranked`] has them.
        best_by (`str`): `"bleu"` or `"loss"`.
    """
    checkpoints = list_checkpoints(run_dir)
    planned = [_step(path) for path in checkpoints if _step(path) % save_every == 0]
    newest = [_step(path) for path in checkpoints if _step(path) in planned or path == checkpoints[-1]][-keep_last:]
    # One in between goes again itself, so it must not push out a best one for good.
    best = [line["step"] for line in ranked(read_validations(run_dir), best_by) if line["step"] in planned][:keep_best]
    for checkpoint in checkpoints:
        if _step(checkpoint) not in (*newest, *best):
            # Half deleted, it must not pass for a whole one.
            checkpoint.rename(temporary_name(checkpoint))
    for leftover in run_dir.glob(temporary_name(Path("checkpoint-*")).name):
        shutil.rmtree(leftover, ignore_errors=True)


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
        ValueError: no checkpoints, or their weights have different names or shapes, or cannot be read.
    """
    if not checkpoints:
        raise ValueError("There is no checkpoint to average.")
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
    with written_whole(folder) as temporary:
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
    path = checkpoint / (EMA_WEIGHTS if (checkpoint / EMA_WEIGHTS).is_file() else WEIGHTS)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
