"""The folder of a run: its files, its records, and its checkpoints: listed, ranked, kept, resumed."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from .files import (
    atomic_write_text,
    digest,
    find_damage,
    read_json_lines,
    read_sealed,
    temporary_name,
)
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
    SHA-256 of the files that make up the model (weights, config, tokenizer, code), without the training's state.

    Args:
        folder (`Path`): of a model or a checkpoint. Where there is a moving average, that is the model.

    Returns:
        `dict[str, str]`: hexadecimal digits by the name of the file.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return {name: digest(folder / name) for name in sorted(names) if _is_of_the_model(name, EMA_WEIGHTS in names)}


def checkpoint_digests(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """
    SHA-256 of everything in a checkpoint that has no `progress.json` yet.

    Args:
        folder (`Path`): of the checkpoint, in which all processes have written what is theirs.

    Returns:
        Two `dict[str, str]`: [`digests`] of the model, and those of the rest, which only a resume reads: states of
        optimizer, schedule and random numbers of each process, shards, and the weights behind a moving average.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    found = {name: digest(folder / name) for name in names}
    files = {name: found[name] for name in names if _is_of_the_model(name, EMA_WEIGHTS in names)}
    return files, {name: found[name] for name in names if name not in files}


def _is_of_the_model(name: str, has_average: bool) -> bool:
    is_other = name == PROGRESS or "/" in name or (has_average and name == WEIGHTS)
    return name.endswith((".json", ".safetensors", "_vaswani.py")) and not is_other


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after `step` updates."""
    return run_dir / f"checkpoint-{step}"


def has_checkpoint_name(folder: Path) -> bool:
    """Returns whether a folder is named `checkpoint-N`."""
    return re.fullmatch(r"checkpoint-\d+", folder.name) is not None


def checkpoint_step(folder: Path) -> int:
    """Returns the updates before a checkpoint, the N of `checkpoint-N`."""
    return int(folder.name.removeprefix("checkpoint-"))


def checkpoint_folders(parent: Path) -> list[Path]:
    """Returns the folders `checkpoint-N` in another, lowest N first, complete or not."""
    return sorted(filter(has_checkpoint_name, parent.glob("checkpoint-*")), key=checkpoint_step)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """
    The complete checkpoints of a run.

    Args:
        run_dir (`Path`): the run's folder.

    Returns:
        `list[Path]`: the folders `checkpoint-N`, oldest first.
    """
    return [path for path in checkpoint_folders(run_dir) if (path / PROGRESS).is_file()]


# Keys of `progress.json` and their types: those of all versions, and those that earlier versions did not write.
NOTED: dict[str, Any] = {
    "step": int,
    "position": dict,
    "data": dict,
    "launch": dict,
    "nonfinite": int,
    "seconds": (int, float),
    "files": dict,
}
NOTED_LATER: dict[str, Any] = {"state": dict, "recipe": dict, "validations": list}


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """
    Reads the record of a checkpoint.

    Args:
        checkpoint (`Path`): its folder.

    Returns:
        `dict[str, Any]`: `step`, the `position` in the data, `data`, which text that was, `launch`, how many
        processes of which kind, how many updates in a row were left out last (`nonfinite`), how long the training
        took so far (`seconds`), the digests of the model's `files` and of the `state` beside it, the settings of the
        `recipe` that a resume may not change, and the `validations` so far. The last three are `None` where an
        earlier version has written the checkpoint.

    Raises:
        ValueError: it is missing or damaged; says how to go on.
    """
    path = checkpoint / PROGRESS
    try:
        progress = read_sealed(path)
        for key, kind in (NOTED | NOTED_LATER).items():
            if not isinstance(progress.get(key), kind) and (key in NOTED or key in progress):
                raise ValueError(
                    f"{path} is damaged, or of another version: {key} is {str(progress.get(key))[:80]!r}."
                )
        return {key: progress.get(key) for key in NOTED | NOTED_LATER}
    except ValueError as error:
        raise ValueError(f"{error} {advice(checkpoint)}") from error


def check_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """
    Compares every file of a checkpoint with its digest.

    Args:
        checkpoint (`Path`): its folder.

    Returns:
        `dict[str, Any]`: its record, as [`read_progress`] gives it.

    Raises:
        ValueError: a file is missing or not as it was written; names it, and the newest earlier checkpoint that is
            whole.
    """
    progress = read_progress(checkpoint)
    damage = find_damage(checkpoint, progress["files"] | (progress["state"] or {}))
    if damage is not None:
        raise ValueError(f"{damage}. {advice(checkpoint)}")
    return progress


def advice(checkpoint: Path) -> str:
    """Says how to go on without a damaged checkpoint: from the newest earlier one that is whole, if there is one."""
    run_dir = checkpoint.parent
    found = list_checkpoints(run_dir)
    if checkpoint.name not in {path.name for path in found} or not (run_dir / RECIPE).is_file():
        return "It cannot be used as it is."
    for earlier in [path for path in found if checkpoint_step(path) < checkpoint_step(checkpoint)][::-1]:
        if _is_whole(earlier):
            gone = " and ".join(str(path) for path in found if checkpoint_step(path) > checkpoint_step(earlier))
            return f"Delete {gone}: the command of the training then goes on from {earlier}, which is whole."
    return f"No earlier checkpoint is whole: put the file back from a copy, or delete {run_dir} to train anew."


def _is_whole(checkpoint: Path) -> bool:
    try:
        progress = read_sealed(checkpoint / PROGRESS)
        return find_damage(checkpoint, progress["files"] | progress.get("state", {})) is None
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def read_validations(run_dir: Path) -> list[dict[str, Any]]:
    """
    Reads `validations.jsonl`: what a training has validated so far, oldest first: `step`, `loss`, `bleu` and the other
    scores, `best`.

    Raises:
        ValueError: a line is damaged.
    """
    path = run_dir / VALIDATIONS
    lines, damaged = read_json_lines(path)
    for line in lines:
        if not _is_validation(line):
            damaged = damaged or lines.index(line) + 1
    if damaged is not None:
        raise ValueError(f"{path} is damaged in line {damaged}. Delete that line to go on without it.")
    return lines


def known_validations(run_dir: Path) -> list[dict[str, Any]]:
    """
    The validations of a run whose training may be over: as its newest checkpoint has noted them, which is protected
    by a digest, and later ones from `validations.jsonl`. Errors as in [`read_validations`] and [`read_progress`].
    """
    checkpoints = list_checkpoints(run_dir)
    noted: list[dict[str, Any]] | None = read_progress(checkpoints[-1])["validations"] if checkpoints else None
    if noted is None:
        return read_validations(run_dir)
    later = [
        line for line in read_json_lines(run_dir / VALIDATIONS)[0] if line["step"] > checkpoint_step(checkpoints[-1])
    ]
    return noted + [line for line in later if _is_validation(line)]


def _is_validation(line: dict[str, Any]) -> bool:
    loss = line.get("loss")
    return (loss is None or type(loss) in (int, float)) and type(line.get("bleu")) in (int, float)


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
    newest = max(map(checkpoint_step, list_checkpoints(run_dir)), default=0)
    made = [newest, *range((newest - 1) // save_every * save_every, 0, -save_every)] if newest else []
    if best is not None:
        validated = [line["step"] for line in ranked(known_validations(run_dir), best_by)]
        made = [step for step in validated if step in made]
    steps = made[: last if best is None else best]
    return [checkpoint_folder(run_dir, step) for step in sorted(steps)]


def write_validations(run_dir: Path, validations: Sequence[dict[str, Any]], best_by: Literal["bleu", "loss"]) -> None:
    """Replaces `validations.jsonl`, the best one marked; arguments as in [`ranked`]."""
    best = ranked(validations, best_by)[:1]
    lines = [json.dumps(line | {"best": line in best}) + "\n" for line in validations]
    atomic_write_text(run_dir / VALIDATIONS, "".join(lines))


def forget_after(
    run_dir: Path, step: int, training: TrainingRecipe, noted: Sequence[dict[str, Any]] | None = None
) -> None:
    """
    Drops what a run noted later than the checkpoint that it goes on from: it will come by there again. The validation
    at what was once its end goes, too, if the run has got more updates since.

    Args:
        run_dir (`Path`): the run's folder.
        step (`int`): updates that are kept; 0 for a run that starts anew.
        training ([`TrainingRecipe`]): when to validate, and what is best.
        noted (`Sequence[dict[str, Any]]`, *optional*): the validations as the checkpoint has them, which then take the
            place of `validations.jsonl`, whatever has become of that.
    """
    if noted is None:
        noted = read_validations(run_dir) if step else []
    validations = [
        line
        for line in noted
        if line["step"] <= step and (line["step"] % training.validate_every == 0 or line["step"] == training.max_steps)
    ]
    if validations:
        write_validations(run_dir, validations, training.best_by)
    else:
        (run_dir / VALIDATIONS).unlink(missing_ok=True)
    for path in (run_dir / NONFINITE, run_dir / CURVE):
        lines, damaged = read_json_lines(path)
        kept = [line for line in lines if line["step"] <= step]
        if not kept:
            path.unlink(missing_ok=True)
        elif damaged is not None or len(kept) < len(lines):
            atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def unchangeable(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe that its results depend on, with their values as JSON gives them back."""
    # A cosine has come down by then as far as its end demands.
    changeable = CHANGEABLE - ({"training.max_steps"} if recipe.training.schedule == "cosine" else set())
    kept = {key: value for key, value in recipe.flat().items() if key not in changeable}
    return cast(dict[str, Any], json.loads(json.dumps(kept)))


def read_recipe(run_dir: Path) -> Recipe:
    """
    Reads the `recipe.yaml` of a run.

    Raises:
        ValueError: it is missing or damaged, or its settings are not those that the newest checkpoint has noted.
    """
    path = run_dir / RECIPE
    if not path.is_file():
        raise ValueError(f"{run_dir} is not the folder of a run, because it has no {RECIPE}.")
    way_out = "The command of the training writes it anew, or put it back from a copy."
    try:
        recipe = load_recipe([str(path)])
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())} {way_out}") from error
    checkpoints = list_checkpoints(run_dir)
    here = unchangeable(recipe)
    noted = (read_progress(checkpoints[-1])["recipe"] if checkpoints else None) or here
    for key in here:
        if here[key] != noted.get(key, here[key]):
            raise ValueError(
                f"{path} was changed or damaged: {key} is {here[key]!r}, but {checkpoints[-1]} was trained with "
                f"{noted[key]!r}. {way_out}"
            )
    return recipe


def _settings_of(path: Path) -> dict[str, Any]:
    """The keys of a `recipe.yaml` that nothing else says."""
    try:
        recipe = load_recipe([str(path)])
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{path} is missing or damaged, so that it is not known whose checkpoints these are: "
            f"{' '.join(str(error).split())} Put it back from a copy, or name another --run_dir."
        ) from error
    return cast(dict[str, Any], json.loads(json.dumps(recipe.flat())))


def checkpoint_to_resume(recipe: Recipe) -> Path | None:
    """
    The newest checkpoint of a recipe's run folder, once it is clear that the folder is this recipe's. What the
    checkpoint has noted of the recipe counts; `recipe.yaml` is only read where there is no such note.

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
    checkpoints = list_checkpoints(run_dir) if run_dir.is_dir() else []
    # A run that was killed while it wrote its recipe has nothing else yet.
    has_recipe = RECIPE in names or bool(checkpoints)
    if not run_dir.is_dir() or (not has_recipe and names - {temporary_name(run_dir / RECIPE).name}):
        raise ValueError(f"{run_dir} is not the folder of a run, because it has no {RECIPE}; name another --run_dir.")
    if not checkpoints and RESULT not in names:
        return None
    here = unchangeable(recipe)
    there = read_progress(checkpoints[-1])["recipe"] if checkpoints else None
    if there is None:
        there = _settings_of(run_dir / RECIPE)
    different = [key for key in here if here[key] != there.get(key, here[key])]
    if different:
        keys = ", ".join(f"{key} is {there[key]!r} there and {here[key]!r} here" for key in different[:5])
        keys += f" and {len(different) - 5} more" if different[5:] else ""
        changeable = ", ".join(sorted(key for key in recipe.flat() if key not in here and key != "run_dir"))
        raise ValueError(
            f"{run_dir} belongs to another recipe: {keys}. Name another --run_dir, or delete the folder to start "
            f"anew. A run that goes on may change {changeable}."
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
    planned = [checkpoint_step(path) for path in checkpoints if checkpoint_step(path) % save_every == 0]
    newest = [
        checkpoint_step(path) for path in checkpoints if checkpoint_step(path) in planned or path == checkpoints[-1]
    ][-keep_last:]
    # One in between goes again itself, so it must not push out a best one for good.
    validations = known_validations(run_dir) if keep_best else []
    best = [line["step"] for line in ranked(validations, best_by) if line["step"] in planned][:keep_best]
    for checkpoint in checkpoints:
        if checkpoint_step(checkpoint) not in (*newest, *best):
            shutil.rmtree(temporary_name(checkpoint), ignore_errors=True)
            # Half deleted, it must not pass for a whole one.
            checkpoint.rename(temporary_name(checkpoint))
    for leftover in run_dir.glob(temporary_name(Path("checkpoint-*")).name):
        shutil.rmtree(leftover, ignore_errors=True)


def is_checkpoint(folder: Path) -> bool:
    """
    Returns whether a folder is a checkpoint with a record.

    Raises:
        ValueError: a checkpoint of a run has lost its record, without which none of its files can be trusted.
    """
    is_of_a_run = has_checkpoint_name(folder) and (folder.parent / RECIPE).is_file()
    if folder.is_dir() and is_of_a_run and not (folder / PROGRESS).is_file():
        raise ValueError(f"{folder} is not a whole checkpoint: {PROGRESS} is missing.")
    return (folder / PROGRESS).is_file()


def read_result(run_dir: Path) -> dict[str, Any]:
    """
    Reads the `test.json` of a run.

    Returns:
        `dict[str, Any]`: `step`, `averaged` (names of checkpoints), `files` (digests of the model, unless an earlier
        version has written it) and, with a test set, `bleu`, `chrf`, `ter` and `signatures`.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = run_dir / RESULT
    result = read_sealed(path)
    kinds: dict[str, Any] = {"step": int, "averaged": list, "files": dict, "translations": dict, "samples": list}
    if "bleu" in result:
        kinds |= {"bleu": (int, float), "chrf": (int, float), "ter": (int, float), "signatures": dict}
    for key, kind in kinds.items():
        # Earlier versions did not write all of them.
        if not isinstance(result.get(key), kind) and (key in result or key in ("step", "averaged")):
            raise ValueError(f"{path} is damaged: {key} is {str(result.get(key))[:80]!r}.")
    return result
