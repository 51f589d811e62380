"""The run folder: checkpoints are listed, ranked, kept and resumed; nothing good is lost."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_vaswani.averaging import average_checkpoints
from hf_vaswani.files import temporary_name
from hf_vaswani.recipe import EvaluationSetRecipe, Recipe, SourceRecipe, TrainingRecipe
from hf_vaswani.records import Environment, Progress, Result, Validation
from hf_vaswani.run_folder import (
    check_resume,
    checkpoint_folder,
    checkpoint_folders,
    checkpoint_step,
    checkpoints_to_average,
    digests,
    find_resume,
    forget_after,
    has_stalled,
    list_checkpoints,
    ranked,
    read_environment,
    read_progress,
    read_result,
    read_validations,
    remove_old_checkpoints,
    unchangeable,
    write_environment,
    write_progress,
    write_result,
    write_validations,
)


def checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"w": torch.full((2,), float(step))}, folder / "model.safetensors")
    if complete:
        seal(folder, step)
    return folder


def seal(folder: Path, step: int, **more: Any) -> None:
    """Writes the record of a checkpoint, with the digests of what it has now."""
    (folder / "progress.json").unlink(missing_ok=True)
    files, state = digests(folder), {"optimizer.bin": "0"}
    record = {"step": step, "position": {}, "data": {}, "launch": {}, "nonfinite": 0, "seconds": 1.0, "files": files}
    (folder / "progress.json").write_text(json.dumps(record | {"state": state} | more))


def validate(run: Path, bleu: dict[int, float]) -> None:
    """Writes validations with this BLEU by their updates."""
    lines = [json.dumps({"step": step, "loss": 1.0, "bleu": value}) + "\n" for step, value in bleu.items()]
    (run / "validations.jsonl").write_text("".join(lines))


def kept(**training: Any) -> TrainingRecipe:
    """Returns a recipe that saves a checkpoint at each update, and averages and keeps one."""
    return TrainingRecipe(**{"save_every": 1, "average_last": 1, "keep_last": 1} | training)


def steps(folder: Path) -> list[int]:
    return [checkpoint_step(path) for path in list_checkpoints(folder)]


def to_average(folder: Path, **training: Any) -> list[int]:
    return [checkpoint_step(path) for path in checkpoints_to_average(folder, kept(**training))]


def test_checkpoints_are_found_by_number_and_only_when_complete(tmp_path) -> None:
    for step in (5, 100, 20):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 300, complete=False)
    for name in ("checkpoint-old", "checkpoint-", ".checkpoint-4.writing", "model"):
        (tmp_path / name).mkdir()
    temporary_name(tmp_path / "checkpoint-400").mkdir()
    assert [checkpoint_step(path) for path in checkpoint_folders(tmp_path)] == [5, 20, 100, 300]
    assert steps(tmp_path) == [5, 20, 100]
    remove_old_checkpoints(tmp_path, kept(save_every=5, keep_last=2))
    assert not temporary_name(tmp_path / "checkpoint-400").exists()
    assert steps(tmp_path) == [20, 100]


def test_the_best_checkpoints_stay_beside_the_last_and_are_averaged(tmp_path) -> None:
    """By validation BLEU; of equals the later; one without a validation has no rank."""
    for step in (1, 2, 3, 4, 5, 6):
        checkpoint(tmp_path, step)
    assert to_average(tmp_path, average_best=3) == []
    validate(tmp_path, {1: 30.0, 2: 50.0, 3: 30.0, 5: 10.0, 7: 99.0})
    assert to_average(tmp_path, average_best=2) == [2, 3]
    assert to_average(tmp_path, average_best=9) == [1, 2, 3, 5]
    remove_old_checkpoints(tmp_path, kept(keep_best=2))
    assert steps(tmp_path) == [2, 3, 6]
    assert to_average(tmp_path, average_best=3) == [1, 2, 3]
    with pytest.raises(ValueError, match="checkpoint-1 was deleted: training.keep_last"):
        average_checkpoints(checkpoints_to_average(tmp_path, kept(average_best=3)))
    remove_old_checkpoints(tmp_path, kept())
    assert steps(tmp_path) == [6]
    (tmp_path / "validations.jsonl").write_text("{")
    with pytest.raises(ValueError, match="validations.jsonl is damaged"):
        to_average(tmp_path, average_best=2)


@pytest.mark.parametrize(
    ("best_by", "best_set", "best"),
    [
        ("bleu", None, 2),
        ("bleu", "law", 1),
        ("bleu", "web", 3),
        ("loss", None, 3),
        ("loss", "law", 2),
        ("f1", "web", 1),
    ],
)
def test_the_best_has_the_lowest_loss_or_the_highest_measure_of_all_sets_or_one(
    tmp_path, best_by, best_set, best
) -> None:
    law, web = {1: (9.0, 2.0), 2: (8.0, 1.0), 3: (1.0, None)}, {1: (1.0, 1.0), 2: (5.0, 3.0), 3: (7.0, 2.0)}
    validations = [
        Validation(step, {"loss": 4.0 - step, "bleu": (law[step][0] + web[step][0]) / 2, "f1": 0.5}, sets={
            name: {"bleu": bleu, "loss": loss, "f1": 1 / step}
            for name, (bleu, loss) in (("law", law[step]), ("web", web[step]))
        })
        for step in (1, 2, 3)
    ]  # fmt: skip
    training = kept(best_by=best_by, best_set=best_set, average_best=1)
    write_validations(tmp_path, validations, training)
    assert [line.step for line in read_validations(tmp_path) if line.best] == [best]
    assert [replace(line, best=False) for line in read_validations(tmp_path)] == validations
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    assert checkpoints_to_average(tmp_path, training) == [checkpoint_folder(tmp_path, best)]
    assert has_stalled(validations, training, 1) is (best != 3)
    remove_old_checkpoints(tmp_path, training)
    assert steps(tmp_path) == sorted({best, 3})


def test_a_measure_that_is_not_finite_is_the_worst() -> None:
    values, by = {1: None, 2: 0.1, 3: math.nan, 4: 0.2}, kept(best_by="accuracy")
    validations = [Validation(step, {"loss": 1.0, "accuracy": value}) for step, value in values.items()]
    assert [line.step for line in ranked(validations, by)] == [4, 2, 3, 1]
    assert has_stalled(validations[:3], by, 1) and not has_stalled(validations, by, 1)
    assert not has_stalled(validations[:3], by, None)


@pytest.mark.parametrize(
    ("validation", "best_by", "best_set", "words"),
    [
        (Validation(7, {"loss": 1.0, "word_perplexity": 9.0}), "f1", None, "F1 for update 7, only loss, word"),
        (Validation(7, {"loss": 1.0, "f1": 0.5}), "bleu", None, "BLEU for update 7"),
        (
            Validation(7, {"loss": 1.0, "bleu": 3.0}),
            "accuracy",
            None,
            "accuracy for update 7, only loss, BLEU. Change",
        ),
        # Earlier versions wrote no loss for each set.
        (
            Validation(7, {"loss": 1.0, "bleu": 5.0}, sets={"law": {"bleu": 9.0}, "web": {"bleu": 1.0}}),
            "loss",
            "law",
            "loss of the validation set 'law' for update 7.*sets are law, web",
        ),
    ],
)
def test_a_measure_that_was_not_made_is_named(validation, best_by, best_set, words) -> None:
    with pytest.raises(ValueError, match=f"no {words}"):
        ranked([validation], kept(best_by=best_by, best_set=best_set))
    # With a single set, its scores are those of the validation.
    assert ranked([replace(validation, sets=None)], kept(best_by="loss", best_set="law"))


def test_no_other_checkpoint_is_averaged_in_the_place_of_a_deleted_one(tmp_path) -> None:
    """Saved every 4 updates, and at the end; that of update 6 was made by a stop, and is none of the run's own."""
    assert to_average(tmp_path, save_every=4, average_last=2) == []
    for step in (4, 6, 8, 12, 14):
        checkpoint(tmp_path, step)
    assert to_average(tmp_path, save_every=4, average_last=9) == [4, 8, 12, 14]
    shutil.rmtree(tmp_path / "checkpoint-8")
    assert to_average(tmp_path, save_every=4, average_last=3) == [8, 12, 14]


def resumed(recipe: Recipe) -> Path | None:
    """Returns the checkpoint that a training of this recipe resumes from."""
    resume = find_resume(Path(recipe.run_dir))
    check_resume(recipe, resume)
    return None if resume is None else resume.checkpoint


def test_which_run_is_resumed(tmp_path) -> None:
    recipe = Recipe(run_dir=str(tmp_path / "run"))
    assert resumed(recipe) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.as_yaml(), "utf-8")
    assert resumed(Recipe(run_dir=recipe.run_dir, seed=9)) is None
    newest = checkpoint(tmp_path / "run", 7)
    assert resumed(recipe) == newest
    longer = Recipe(run_dir=recipe.run_dir, training=TrainingRecipe(max_steps=200_000))
    assert resumed(longer) == newest
    other = Recipe(run_dir=recipe.run_dir, seed=9, training=TrainingRecipe(warmup_steps=5))
    with pytest.raises(
        ValueError, match=r"another recipe: seed is 1 there and 9 here, training\.warmup_steps is 4000"
    ):
        resumed(other)
    other = Recipe(run_dir=recipe.run_dir, training=TrainingRecipe(clip_norm=1.0))
    with pytest.raises(ValueError, match=r"training\.clip_norm is null there and 1\.0 here"):
        resumed(other)


def test_a_cosine_is_not_prolonged(tmp_path) -> None:
    """What it has done so far depends on its end."""
    cosine = {"schedule": "cosine", "peak_learning_rate": 0.1}
    recipe = Recipe(run_dir=str(tmp_path), training=TrainingRecipe(**cosine))
    (tmp_path / "recipe.yaml").write_text(recipe.as_yaml(), "utf-8")
    newest = checkpoint(tmp_path, 7)
    assert resumed(recipe) == newest
    with pytest.raises(ValueError, match="max_steps is 100000 there and 9 here"):
        resumed(Recipe(run_dir=str(tmp_path), training=TrainingRecipe(**cosine, max_steps=9)))


def test_a_folder_that_is_no_run_is_refused(tmp_path) -> None:
    # What is left of a run that was killed while it wrote its recipe.
    temporary_name(tmp_path / "recipe.yaml").write_text("da")
    assert resumed(Recipe(run_dir=str(tmp_path))) is None
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="not the folder of a run"):
        resumed(Recipe(run_dir=str(tmp_path)))


def test_what_was_noted_later_is_forgotten_and_no_more(tmp_path) -> None:
    """The line of the very update stays; one that was cut short goes, and one that a crash left empty."""
    files = ("validations.jsonl", "nonfinite_updates.jsonl", "training.jsonl")
    validate(tmp_path, {2: 1.0, 4: 1.0, 6: 1.0})
    for name in files[1:]:
        shutil.copyfile(tmp_path / files[0], tmp_path / name)
    with open(tmp_path / "nonfinite_updates.jsonl", "a") as file:
        file.write('\0\0\n{"step": 7, "lo')
    forget_after(tmp_path, 4, TrainingRecipe(validate_every=2))
    for name in files:
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [2, 4]
    forget_after(tmp_path, 0, TrainingRecipe(validate_every=2))
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_in_between_goes_and_takes_no_other_along(tmp_path) -> None:
    """Stopped at update 6, which was the best so far: afterwards all is as if it had not been."""
    validate(tmp_path, {2: 1.0, 4: 5.0, 6: 7.0, 8: 3.0})
    for step, left in ((4, [4]), (6, [4, 6]), (8, [4, 8])):
        checkpoint(tmp_path, step)
        remove_old_checkpoints(tmp_path, kept(save_every=4, keep_best=1))
        assert steps(tmp_path) == left


def test_a_record_is_read_as_it_was_written(tmp_path) -> None:
    validation = Validation(4, {"loss": None, "bleu": 12.5, "chrf": 30.0, "ter": 80.0}, {"bleu": "nrefs:1"}, best=True)
    progress = Progress(
        4, {"epoch": 1}, {}, {"fsdp": False}, 0, 1.5, {"w": "0"}, {"o": "1"}, {"seed": 1}, [validation]
    )
    write_progress(tmp_path, progress)
    assert read_progress(tmp_path) == progress
    line = json.loads((tmp_path / "progress.json").read_text())["validations"][0]
    # A loss that is not finite is null; what there is not is not written.
    assert list(line) == ["step", "loss", "bleu", "chrf", "ter", "signatures", "best"] and line["loss"] is None
    write_validations(
        tmp_path, [validation, replace(validation, step=8, scores={"loss": 1.0, "bleu": 20.0})], TrainingRecipe()
    )
    assert [(line.step, line.best) for line in read_validations(tmp_path)] == [(4, False), (8, True)]
    result = Result(4, averaged=["checkpoint-4"], files={}, samples=[{"source": "ä"}])
    write_result(tmp_path, result)
    assert read_result(tmp_path) == result


def test_an_environment_is_written_without_the_secrets_of_urls(tmp_path) -> None:
    command = ["train.py", "https://me:SECRET@host/a.yaml?SECRET"]
    environment = Environment(
        python="3", packages={}, processes=1, cpu_threads=1, mixed_precision="no", seed=1, command=command
    )
    write_environment(tmp_path, environment)
    assert read_environment(tmp_path) == replace(environment, command=["train.py", "https://host/a.yaml"])


def test_records_of_other_versions_are_read(tmp_path) -> None:
    """Keys that are not known are ignored, and those that came later may be absent."""
    newer = {"step": 1, "averaged": [], "mood": "good"}
    (tmp_path / "test.json").write_text(json.dumps(newer))
    assert read_result(tmp_path) == Result(1, averaged=[])
    folder = checkpoint(tmp_path, 3)
    older = json.loads((folder / "progress.json").read_text())
    del older["state"]
    (folder / "progress.json").write_text(json.dumps(older))
    progress = read_progress(folder)
    assert (progress.state, progress.recipe, progress.validations) == (None, None, None)
    assert progress.digests == progress.files


def test_a_record_with_a_bad_value_is_named(tmp_path) -> None:
    folder = checkpoint(tmp_path, 3)
    record = json.loads((folder / "progress.json").read_text()) | {"validations": [{"step": 1}]}
    (folder / "progress.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="progress.json is damaged, or of another version: .*loss is missing"):
        read_progress(folder)


def test_a_checkpoint_knows_nothing_of_keys_that_came_later(tmp_path) -> None:
    sources, sets = [SourceRecipe(weight=2)], {"web": EvaluationSetRecipe(test_files="a.tsv")}
    recipe = Recipe(run_dir=str(tmp_path / "run"), more_data=sources, validation_sets=sets)
    recorded = unchangeable(recipe)
    assert not any(key.startswith(("backtranslation.", "hub.")) for key in recorded)
    for part in (recorded["more_data"][0], recorded["validation_sets"]["web"]):
        del part["prefix"]
    del recorded["data.prefix"]
    folder = checkpoint(tmp_path / "run", 5)
    seal(folder, 5, recipe=recorded)
    assert resumed(recipe) == folder
    recipe.more_data[0].prefix = "<bt>"
    with pytest.raises(ValueError, match=r"belongs to another recipe: more_data is \["):
        resumed(recipe)
