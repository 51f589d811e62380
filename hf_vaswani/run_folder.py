"""The folder of a run: its files read and written, and its checkpoints: listed, ranked, kept and resumed."""

import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from .files import (
    CODE,
    MOVING_AVERAGE,
    atomic_write_text,
    digest,
    find_damage,
    read_json,
    read_json_lines,
    temporary_name,
)
from .metrics import METRICS, measure_of
from .recipe import EvaluationSetRecipe, Recipe, SourceRecipe, TrainingRecipe, resume_marks
from .recipe_file import load_recipe
from .records import Environment, Progress, Result, Validation, from_json, public, to_json

WEIGHTS = "model.safetensors"
EMA_WEIGHTS = MOVING_AVERAGE
PROGRESS = "progress.json"
RECIPE = "recipe.yaml"
ENVIRONMENT = "environment.json"
MODEL = "model"
START = "start"
VALIDATIONS = "validations.jsonl"
NONFINITE = "nonfinite_updates.jsonl"
CURVE = "training.jsonl"
RESULT = "test.json"
TRANSLATIONS = "test_translations.txt"
START_TRANSLATIONS = "start_translations.txt"

# Where a source has its text. A resumed run may have it elsewhere, because the text itself is compared.
TEXT = tuple(part.name for part in fields(SourceRecipe) if part.metadata["resume"] == "place")

T = TypeVar("T")


# ---- Records ----------------------------------------------------------------------------------------------------


def _read_record(kind: type[T], path: Path) -> T:
    content = read_json(path)
    try:
        return from_json(kind, content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or of another version: {error}.") from error


def read_environment(run_dir: Path) -> Environment:
    """
    Reads the `environment.json` of a run.

    Raises:
        ValueError: it is missing or damaged.
    """
    return _read_record(Environment, run_dir / ENVIRONMENT)


def write_environment(run_dir: Path, environment: Environment) -> None:
    """
    Writes the `environment.json` of a run, without the secrets that a URL may have.

    Raises:
        OSError: the file cannot be written.
    """
    atomic_write_text(run_dir / ENVIRONMENT, json.dumps(to_json(public(environment)), indent=2) + "\n")


def read_result(run_dir: Path) -> Result:
    """
    Reads the `test.json` of a run.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = run_dir / RESULT
    result = _read_record(Result, path)
    unsigned = [METRICS[name].title for name in METRICS if name in result.scores.keys() - (result.signatures or {})]
    if unsigned:
        raise ValueError(f"{path} is damaged: it has a {unsigned[0]} without a signature.")
    return result


def write_result(run_dir: Path, result: Result) -> None:
    """
    Writes the `test.json` of a run.

    Raises:
        OSError: the file cannot be written.
    """
    atomic_write_text(run_dir / RESULT, json.dumps(to_json(result), indent=2, ensure_ascii=False) + "\n")


def translations_file(stem: str, name: str, sets: int) -> str:
    """Returns the file in a run folder with the translations of a test set; `stem` is `TRANSLATIONS`, for example."""
    return stem if sets == 1 else stem.replace(".", f".{name}.")


def read_translations(run_dir: Path, result: Result, stem: str, names: Sequence[str]) -> dict[str, list[str]] | None:
    """
    Reads the translations of the test sets.

    Args:
        run_dir (`Path`): folder of the run.
        result ([`Result`]): with the digests of the files.
        stem (`str`): `TRANSLATIONS`, or `START_TRANSLATIONS` for those of the model that the training started from.
        names (`Sequence[str]`): names of the test sets.

    Returns:
        `dict[str, list[str]]`: translations by set, or `None` if a file is missing or was changed.
    """
    found = {}
    for name in names:
        path = run_dir / translations_file(stem, name, len(names))
        if not path.is_file() or (result.translations or {}).get(path.name) != digest(path):
            return None
        found[name] = path.read_text("utf-8").removesuffix("\n").split("\n")
    return found


def read_progress(checkpoint: Path) -> Progress:
    """
    Reads the record of a checkpoint.

    Args:
        checkpoint (`Path`): its folder.

    Raises:
        ValueError: it is missing or damaged; the message says how to resume without it.
    """
    try:
        return _read_record(Progress, checkpoint / PROGRESS)
    except ValueError as error:
        raise ValueError(f"{error} {advice(checkpoint)}") from error


def write_progress(checkpoint: Path, progress: Progress) -> None:
    """Writes the record of a checkpoint, the last of its files."""
    (checkpoint / PROGRESS).write_text(json.dumps(to_json(progress)), encoding="utf-8")


# ---- Checkpoints -------------------------------------------------------------------------------------------------


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after `step` updates."""
    return run_dir / f"checkpoint-{step}"


def has_checkpoint_name(folder: Path) -> bool:
    """Returns whether a folder is named `checkpoint-N`."""
    return re.fullmatch(r"checkpoint-\d+", folder.name) is not None


def checkpoint_step(folder: Path) -> int:
    """Returns the number of updates before a checkpoint, the N of `checkpoint-N`."""
    return int(folder.name.removeprefix("checkpoint-"))


def checkpoint_folders(parent: Path) -> list[Path]:
    """Returns the folders `checkpoint-N` in another folder, lowest N first, complete or not."""
    return sorted(filter(has_checkpoint_name, parent.glob("checkpoint-*")), key=checkpoint_step)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, oldest first."""
    return [path for path in checkpoint_folders(run_dir) if (path / PROGRESS).is_file()]


def is_checkpoint(folder: Path) -> bool:
    """
    Returns whether a folder is a checkpoint with a record.

    Raises:
        ValueError: a checkpoint of a run has lost its record, without which none of its files can be trusted.
    """
    is_of_a_run = has_checkpoint_name(folder) and (folder.parent / RECIPE).is_file()
    if folder.is_dir() and is_of_a_run and not (folder / PROGRESS).is_file():
        raise ValueError(f"{folder} is not a complete checkpoint: {PROGRESS} is missing. Use another checkpoint.")
    return (folder / PROGRESS).is_file()


def digests(folder: Path) -> dict[str, str]:
    """
    Returns the SHA-256 of the files that make up a model (weights, config, tokenizer, code), without training state.

    Args:
        folder (`Path`): a model or a checkpoint. If it has a moving average, that is the model.

    Returns:
        `dict[str, str]`: hexadecimal digests by file name.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return {name: digest(folder / name) for name in sorted(names) if _is_of_the_model(name, EMA_WEIGHTS in names)}


def _is_of_the_model(name: str, has_average: bool) -> bool:
    is_other = name == PROGRESS or "/" in name or (has_average and name == WEIGHTS)
    return name.endswith((".json", ".safetensors", CODE)) and not is_other


def check_checkpoint(checkpoint: Path, progress: Progress) -> None:
    """
    Compares the files of a checkpoint with the digests in its record.

    Args:
        checkpoint (`Path`): its folder.
        progress ([`Progress`]): its record.

    Raises:
        ValueError: a file is missing or was changed; the message names the checkpoint before.
    """
    damage = find_damage(checkpoint, progress.digests)
    if damage is not None:
        raise ValueError(f"{damage}. {advice(checkpoint)}")


def advice(checkpoint: Path) -> str:
    """Says how to proceed without a damaged checkpoint: from the one before, if any."""
    run_dir = checkpoint.parent
    found = list_checkpoints(run_dir)
    if checkpoint.name not in {path.name for path in found} or not (run_dir / RECIPE).is_file():
        return "Use another checkpoint, or restore the file from a backup."
    i = [path.name for path in found].index(checkpoint.name)
    if i == 0:
        return f"No checkpoint is earlier: restore the file from a backup, or delete {run_dir} to start over."
    damaged = " and ".join(map(str, found[i:]))
    return f"Delete {damaged}: the same training command then resumes from {found[i - 1]}."


def remove_old_checkpoints(run_dir: Path, training: TrainingRecipe) -> None:
    """
    Deletes all checkpoints but the newest and the best, and the remains of those that were killed while written.

    A checkpoint between two multiples of `training.save_every`, written because the run was stopped there, is deleted
    as soon as there is a newer one: an uninterrupted run would not have it.

    Args:
        run_dir (`Path`): folder of the run.
        training ([`TrainingRecipe`]): how many to keep, and by what to rank.
    """
    checkpoints = {checkpoint_step(path): path for path in list_checkpoints(run_dir)}
    planned = [step for step in checkpoints if step % training.save_every == 0]
    newest = [step for step in checkpoints if step in planned or step == max(checkpoints)][-training.keep_last :]
    # A checkpoint in between will be deleted itself, so it must not displace one of the best.
    count = max(training.keep_best, training.average_best or 0)
    validations = known_validations(run_dir) if count else []
    best = [line.step for line in ranked(validations, training) if line.step in planned][:count]
    for step, checkpoint in checkpoints.items():
        if step not in (*newest, *best):
            shutil.rmtree(temporary_name(checkpoint), ignore_errors=True)
            # Half deleted, it must not pass for a complete one.
            checkpoint.rename(temporary_name(checkpoint))
    for leftover in run_dir.glob(temporary_name(Path("checkpoint-*")).name):
        shutil.rmtree(leftover, ignore_errors=True)


# ---- Validations -------------------------------------------------------------------------------------------------


def read_validations(run_dir: Path) -> list[Validation]:
    """
    Reads `validations.jsonl`, oldest validation first.

    Raises:
        ValueError: a line is damaged.
    """
    path = run_dir / VALIDATIONS
    lines, damaged = read_json_lines(path)
    found = _validations(lines)
    if damaged is None and None in found:
        damaged = found.index(None) + 1
    if damaged is not None:
        raise ValueError(f"{path} is damaged in line {damaged}. Delete that line to continue without it.")
    return [validation for validation in found if validation is not None]


def _validations(lines: Sequence[dict[str, Any]]) -> list[Validation | None]:
    """Returns a validation for each line, or `None` for a damaged one."""
    found: list[Validation | None] = []
    for line in lines:
        try:
            found.append(from_json(Validation, line))
        except ValueError:
            found.append(None)
    return found


def known_validations(run_dir: Path) -> list[Validation]:
    """
    Reads the validations of a run that may be over: those in the record of its newest checkpoint, which a digest
    protects, and later ones from `validations.jsonl`.

    Raises:
        ValueError: as in [`read_progress`] and [`read_validations`].
    """
    newest = find_resume(run_dir)
    if newest is None or newest.progress.validations is None:
        return read_validations(run_dir)
    lines = _validations(read_json_lines(run_dir / VALIDATIONS)[0])
    last = checkpoint_step(newest.checkpoint)
    return newest.progress.validations + [line for line in lines if line is not None and line.step > last]


def write_validations(run_dir: Path, validations: Sequence[Validation], training: TrainingRecipe) -> None:
    """Replaces `validations.jsonl` and marks the best validation."""
    best = ranked(validations, training)[:1]
    lines = [json.dumps(to_json(replace(line, best=line in best))) + "\n" for line in validations]
    atomic_write_text(run_dir / VALIDATIONS, "".join(lines))


def ranked(validations: Sequence[Validation], training: TrainingRecipe) -> list[Validation]:
    """
    Sorts validations, the best first: those with the lowest loss, or with the highest value of another measure. Of
    equals, the later one comes first.

    Args:
        validations (`Sequence[Validation]`): oldest first.
        training ([`TrainingRecipe`]): with `best_by`, and `best_set` if one validation set counts.

    Returns:
        `list[Validation]`.

    Raises:
        ValueError: a validation does not have that measure, or not of that set.
    """
    return sorted(validations, key=lambda line: (_badness(line, training), -line.step))


def _badness(validation: Validation, training: TrainingRecipe) -> float:
    """Less is better; a value that is not finite is the worst."""
    best_by, best_set = training.best_by, training.best_set
    scores = validation.scores
    # With a single set, its scores are those of the validation.
    if best_set is not None and validation.sets is not None:
        scores = validation.sets.get(best_set, {})
        if best_by not in scores:
            raise ValueError(
                f"{VALIDATIONS} has no {measure_of(best_by).title} of the validation set {best_set!r} for update "
                f"{validation.step}, perhaps because an earlier version wrote it; its sets are "
                f"{', '.join(validation.sets)}. Change training.best_set or training.best_by."
            )
    if best_by not in scores:
        raise ValueError(
            f"{VALIDATIONS} has no {measure_of(best_by).title} for update {validation.step}, only "
            f"{', '.join(measure_of(name).title for name in scores)}. Change training.best_by."
        )
    value = scores[best_by]
    if value is None or not math.isfinite(value):
        return math.inf
    return -value if measure_of(best_by).is_higher_better else value


def has_stalled(validations: Sequence[Validation], training: TrainingRecipe, patience: int | None) -> bool:
    """
    Returns whether the last `patience` validations in a row brought no new best; never without patience.

    Args:
        validations (`Sequence[Validation]`), training ([`TrainingRecipe`]): as in [`ranked`].
        patience (`int`, *optional*): number of validations.
    """
    if patience is None or len(validations) <= patience:
        return False
    values = [_badness(line, training) for line in validations]
    # A value that only equals an earlier one is no progress.
    return min(values[-patience:]) >= min(values[:-patience])


def checkpoints_to_average(run_dir: Path, training: TrainingRecipe) -> list[Path]:
    """
    Returns the last `average_last` checkpoints of a run, or those of its `average_best` best validations, whether or
    not they still exist. All of them, if the run has fewer; a checkpoint without a validation has no rank.

    Args:
        run_dir (`Path`): folder of the run.
        training ([`TrainingRecipe`]): the section `training` of its recipe.

    Returns:
        `list[Path]`: folders `checkpoint-N`, oldest first.
    """
    newest = max(map(checkpoint_step, list_checkpoints(run_dir)), default=0)
    earlier = range((newest - 1) // training.save_every * training.save_every, 0, -training.save_every)
    made = [newest, *earlier] if newest else []
    if training.average_best is None:
        steps = made[: training.average_last]
    else:
        validated = [line.step for line in ranked(known_validations(run_dir), training)]
        steps = [step for step in validated if step in made][: training.average_best]
    return [checkpoint_folder(run_dir, step) for step in sorted(steps)]


# ---- Resuming ----------------------------------------------------------------------------------------------------


def unchangeable(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings of a recipe that its results depend on, by dotted key, as JSON would return them."""
    kept = _fixed(recipe.flat())
    # A cosine has already come down as far as its end demands.
    if recipe.training.schedule == "cosine":
        kept["training.max_steps"] = recipe.training.max_steps
    if recipe.teacher.model is not None:
        # In one form, however they are written.
        names = recipe.teacher.model if isinstance(recipe.teacher.model, list) else [recipe.teacher.model]
        kept["teacher.model"] = [os.path.normpath(name) for name in names]
        kept["teacher.n_best"] = recipe.teacher.n_best or recipe.teacher.num_beams
    return cast(dict[str, Any], json.loads(json.dumps(kept)))


def _fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns those settings that a resumed run keeps, of the sources and validation sets, too."""
    marks = resume_marks()

    def kept(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if marks.get(f"{prefix}{name}") == "fixed"}

    sources = [kept("more_data.", source) for source in settings["more_data"]]
    sets = {name: kept("validation_sets.NAME.", part) for name, part in settings["validation_sets"].items()}
    return kept("", settings) | {"more_data": sources, "validation_sets": sets}


def places_of_text(recipe: Recipe) -> dict[str, Any]:
    """
    Returns where a recipe has its text, by dotted key, to compare it where the text itself is not read. The pairs of a
    teacher lie beside the run, and have a record of their own.
    """
    sources: dict[str, Any] = {"data": recipe.data, **recipe.validation_sets}
    sources |= {f"more_data.{i}": source for i, source in enumerate(recipe.more_data)}
    found = {f"{name}.{key}": getattr(part, key, None) for name, part in sources.items() for key in TEXT}
    return {
        key: value for key, value in found.items() if recipe.teacher.model is None or not key.endswith(".train_files")
    }


def read_recipe(run_dir: Path) -> Recipe:
    """
    Reads the `recipe.yaml` of a run.

    Raises:
        ValueError: it is missing or damaged, or contradicts the newest checkpoint.
    """
    path = run_dir / RECIPE
    if not path.is_file():
        raise ValueError(f"{run_dir} is not the folder of a run: it has no {RECIPE}.")
    way_out = "Give the training command again, which writes the file anew, or restore it from a backup."
    recipe = _load_recipe(path, "is damaged", way_out)
    newest = find_resume(run_dir)
    if newest is None or newest.progress.recipe is None:
        return recipe
    here, recorded = unchangeable(recipe), _completed(newest.progress.recipe)
    for key in here:
        if here[key] != recorded[key]:
            raise ValueError(
                f"{path} was changed or damaged: {key} is {here[key]!r}, but {newest.checkpoint} was trained with "
                f"{recorded[key]!r}. {way_out}"
            )
    return recipe


def _load_recipe(path: Path, problem: str, way_out: str) -> Recipe:
    try:
        return load_recipe([str(path)])
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path} {problem}: {' '.join(str(error).split())} {way_out}") from error


@dataclass(frozen=True)
class Resume:
    """
    The newest checkpoint of a run, from which a training goes on.

    Attributes:
        checkpoint (`Path`): its folder.
        progress ([`Progress`]): its record.
    """

    checkpoint: Path
    progress: Progress


def find_resume(run_dir: Path) -> Resume | None:
    """
    Finds the newest checkpoint of a run.

    Returns:
        [`Resume`], or `None` if the run has no checkpoint and starts anew.

    Raises:
        ValueError: the record of the checkpoint is damaged.
    """
    checkpoints = list_checkpoints(run_dir)
    return Resume(checkpoints[-1], read_progress(checkpoints[-1])) if checkpoints else None


def check_resume(recipe: Recipe, resume: Resume | None) -> None:
    """
    Checks that the run folder of a recipe belongs to this recipe.

    The settings in the checkpoint's record count; `recipe.yaml` is only read for a run without them.

    Args:
        recipe ([`Recipe`]): names the folder.
        resume ([`Resume`], *optional*): the newest checkpoint in it.

    Raises:
        ValueError: the folder is not that of a run, or belongs to another recipe; the message has the keys that
            differ.
    """
    run_dir = Path(recipe.run_dir)
    if not run_dir.exists():
        return
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    # A run that was killed while it wrote its recipe has nothing else yet.
    is_run = run_dir.is_dir() and (
        RECIPE in names or resume is not None or names <= {temporary_name(run_dir / RECIPE).name}
    )
    if not is_run:
        raise ValueError(f"{run_dir} is not the folder of a run: it has no {RECIPE}. Name another --run_dir.")
    if resume is None and RESULT not in names:
        return
    here = unchangeable(recipe)
    if resume is not None and resume.progress.recipe is not None:
        there = _completed(resume.progress.recipe)
    else:
        problem = "is missing or damaged, but only this file says which recipe the checkpoints belong to"
        whole = _load_recipe(run_dir / RECIPE, problem, "Restore it from a backup, or name another --run_dir.")
        there = unchangeable(whole)
        # Without a checkpoint, nothing tells what the text was.
        here, there = here | places_of_text(recipe), there | places_of_text(whole)
    different = [key for key in here if here[key] != there.get(key)]
    if different:
        keys = ", ".join(
            f"{key} is {_shown(there.get(key))} there and {_shown(here[key])} here" for key in different[:5]
        )
        keys += f" and {len(different) - 5} more" if different[5:] else ""
        marks = resume_marks()
        changeable = ", ".join(
            sorted(key for key in recipe.flat() if key not in {"run_dir", *here} and marks[key] != "unread")
        )
        raise ValueError(
            f"{run_dir} belongs to another recipe: {keys}. Name another --run_dir, or delete the folder to start "
            f"over. A resumed run may only change {changeable}."
        )


def _shown(value: Any) -> str:
    """Returns a value of a recipe for an error message, `null`, `true` and `false` as in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Adds the keys that an earlier version did not have: it did what their defaults do."""
    whole = cast(dict[str, Any], json.loads(json.dumps(Recipe().flat()))) | settings
    whole["more_data"] = [asdict(SourceRecipe()) | source for source in whole["more_data"]]
    sets = whole["validation_sets"].items()
    whole["validation_sets"] = {name: asdict(EvaluationSetRecipe()) | part for name, part in sets}
    return _fixed(whole) | {"training.max_steps": whole["training.max_steps"]}


def forget_after(
    run_dir: Path, step: int, training: TrainingRecipe, recorded: Sequence[Validation] | None = None
) -> None:
    """
    Removes from the logs of a run all lines later than the checkpoint it resumes from, because they will be written
    again. If the run now has more updates, the validation at its former end is removed as well.

    Args:
        run_dir (`Path`): folder of the run.
        step (`int`): updates to keep; 0 for a run that starts anew.
        training ([`TrainingRecipe`]): when to validate, and by what to rank.
        recorded (`Sequence[Validation]`, *optional*): the validations in the checkpoint's record, which override
            `validations.jsonl`.
    """
    if recorded is None:
        recorded = read_validations(run_dir) if step else []
    validations = [
        line
        for line in recorded
        if line.step <= step and (line.step % training.validate_every == 0 or line.step == training.max_steps)
    ]
    if validations:
        write_validations(run_dir, validations, training)
    else:
        (run_dir / VALIDATIONS).unlink(missing_ok=True)
    for path in (run_dir / NONFINITE, run_dir / CURVE):
        lines, damaged = read_json_lines(path)
        kept = [line for line in lines if line["step"] <= step]
        if not kept:
            path.unlink(missing_ok=True)
        elif damaged is not None or len(kept) < len(lines):
            atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
