"""A run with a damaged checkpoint goes on from one that is whole, or says what is damaged."""

import json
import shutil
from pathlib import Path

import pytest

from hf_vaswani.cli import main
from hf_vaswani.run_folder import check_checkpoint, read_progress

from ..conftest import dear
from .runs import DAMAGES, HALF, flip, same_weights, train

DAMAGED = [("flipped", "ema.safetensors"), ("deleted", "config.json"), ("truncated", "progress.json")]


def same_end(one: Path, two: Path) -> bool:
    checkpoints = [f"checkpoint-{step}/{name}.safetensors" for step in (8, 12) for name in ("model", "ema")]
    if not all(same_weights(one, two, name) for name in ("model/model.safetensors", *checkpoints)):
        return False
    names = ["validations.jsonl", "training.jsonl", "test_translations.txt", "tokenizer/tokenizer.json"]
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_a_model_in_a_checkpoint_is_named(half_run, run, kind) -> None:
    checkpoint = run / "checkpoint-8"
    progress = read_progress(checkpoint)
    expected = {"model.safetensors", "ema.safetensors", "tokenizer.json", "config.json", "modeling_vaswani.py"}
    assert expected <= set(progress.digests)
    way_out = f"Delete {checkpoint}: the same training command then resumes from {run / 'checkpoint-4'}"
    for name in progress.digests:
        before = (checkpoint / name).read_bytes()
        DAMAGES[kind](checkpoint / name)
        with pytest.raises(ValueError) as error:
            check_checkpoint(checkpoint, progress)
        assert str(checkpoint / name) in str(error.value) and way_out in str(error.value)
        (checkpoint / name).write_bytes(before)
    check_checkpoint(checkpoint, progress)
    flip(run / "checkpoint-4" / "ema.safetensors")
    with pytest.raises(ValueError, match="No checkpoint is earlier: restore the file from a backup"):
        check_checkpoint(run / "checkpoint-4", read_progress(run / "checkpoint-4"))
    DAMAGES["truncated"](checkpoint / "progress.json")
    with pytest.raises(ValueError, match="checkpoint-8/progress.json is not JSON"):
        read_progress(checkpoint)


@pytest.mark.variants(2)
@pytest.mark.parametrize(("kind", "name"), DAMAGED)
def test_a_training_loads_nothing_that_is_damaged_and_the_way_out_works(
    half_run, run, whole_run, capsys, kind, name
) -> None:
    path = run / "checkpoint-8" / name
    DAMAGES[kind](path)
    assert train(half_run.parent, run, max_steps=12, **HALF) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(path) in error and f"Delete {path.parent}: the same training command then resumes" in error
    shutil.rmtree(path.parent)
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    assert same_end(run, whole_run)


def test_a_checkpoint_without_its_record_is_none(half_run, run, whole_run) -> None:
    (run / "checkpoint-8" / "progress.json").unlink()
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    assert same_end(run, whole_run)


@pytest.mark.parametrize(
    ("kind", "name"), [("empty", "optimizer.bin"), ("truncated", "scheduler.bin"), ("deleted", "random_states_0.pkl")]
)
def test_a_damaged_pickle_is_refused(half_run, run, capsys, kind, name) -> None:
    DAMAGES[kind](run / "checkpoint-8" / name)
    assert train(half_run.parent, run, max_steps=12, **HALF) == 2
    assert "checkpoint-8 could not be loaded" in capsys.readouterr().err


# All that read them pass over what is no record, whatever it is.
@pytest.mark.parametrize(
    "noise", [None, dear(bytes(range(256))), dear(b'{"step": "4", "loss": "x"}\n'), b"[" * 20_000]
)
def test_what_lies_beside_the_checkpoints_does_not_count(half_run, run, whole_run, noise) -> None:
    """A resume reads the newest checkpoint and the recipe that it is given, and writes the rest anew."""
    for name in ("recipe.yaml", "environment.json", "validations.jsonl", "tokenizer/tokenizer.json"):
        if noise is None:
            (run / name).unlink()
        else:
            (run / name).write_bytes(noise)
    # That is for the curve alone, which then lacks some points.
    log = (run / "training.jsonl").read_bytes()
    for name in ("training.jsonl", "nonfinite_updates.jsonl"):
        (run / name).write_bytes(log + (noise or b""))
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    (run / "nonfinite_updates.jsonl").unlink()
    assert same_end(run, whole_run)
    assert json.loads((run / "environment.json").read_text())["processes"] == 1
    assert (run / "model" / "README.md").is_file() and (run / "model" / "curve.png").is_file()


def test_a_flipped_validation_averages_no_other_checkpoint(tmp_path) -> None:
    """A single digit would make another the best."""
    switches = {"average_best": 1, "validate_every": 4, "keep_best": 3}
    assert train(tmp_path, tmp_path / "run", scored=True, max_steps=8, best_by="loss", **switches) == 0
    path = tmp_path / "run" / "validations.jsonl"
    (best,) = json.loads((tmp_path / "run" / "test.json").read_text())["averaged"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["loss"] = 9.0 if f"checkpoint-{line['step']}" == best else 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(tmp_path, tmp_path / "run", scored=True, max_steps=8, best_by="loss", **switches) == 0
    assert json.loads((tmp_path / "run" / "test.json").read_text())["averaged"] == [best]
    arguments = ["average", str(tmp_path / "run"), "--best", "1", "--output", str(tmp_path / "mean")]
    assert main(arguments) == 0
    assert same_weights(tmp_path / "mean", tmp_path / "run" / best)


@pytest.mark.parametrize(("kind", "name"), DAMAGED)
def test_a_damaged_checkpoint_is_not_averaged(half_run, run, tmp_path, capsys, kind, name) -> None:
    DAMAGES[kind](run / "checkpoint-4" / name)
    folders = [str(run / f"checkpoint-{step}") for step in (4, 8)]
    for what in (folders, [str(run), "--last", "2"]):
        assert main(["average", *what, "--output", str(tmp_path / "mean")]) == 2
        assert name in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()
    assert main(["average", folders[1], "--output", str(tmp_path / "mean")]) == 0
    # Nor at the end of a training.
    assert train(half_run.parent, run, max_steps=8, **HALF | {"average_last": 2}) == 2
    assert f"checkpoint-4/{name}" in capsys.readouterr().err or name == "progress.json"
    assert not (run / "model").exists() and not (run / "test.json").exists()


@pytest.mark.parametrize("name", ["checkpoint-8", "model"])
def test_weights_that_are_not_those_of_the_run_do_not_translate(tiny_run, tmp_path, capsys, name) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (tmp_path / "in.txt").write_text("one two\n")
    command = ["translate", "--model", str(run / name), str(tmp_path / "in.txt")]
    assert main(command) == 0
    flip(run / name / "model.safetensors")
    assert main(command) == 2
    assert f"{run / name / 'model.safetensors'} was changed or damaged" in capsys.readouterr().err


def test_a_recipe_that_was_changed_averages_nothing(run, tmp_path, capsys) -> None:
    """Another `save_every` would leave checkpoints out."""
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("save_every: 4", "save_every: 8"))
    assert main(["average", str(run), "--last", "2", "--output", str(tmp_path / "mean")]) == 2
    assert "recipe.yaml was changed or damaged: training.save_every is 8" in capsys.readouterr().err
