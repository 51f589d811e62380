"""A finished run: complete, or made complete, and never trained anew."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hf_vaswani import VaswaniForConditionalGeneration

from ..conftest import dear
from .runs import DAMAGES, HALF, contents, flip, train


@pytest.fixture
def finished(tiny_run, tmp_path) -> Path:
    return shutil.copytree(tiny_run, tmp_path / "finished")


def moved(run: Path) -> None:
    """Nothing else changes: where it is now is where the model is."""


def without_older_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoint-8")


def without_checkpoints(run: Path) -> None:
    """They are what takes room on the disk; the model and its result are what the training was for."""
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def without_digests(run: Path) -> None:
    """As an earlier version noted none of the translations."""
    result = json.loads((run / "test.json").read_text())
    del result["translations"]
    (run / "test.json").write_text(json.dumps(result))


@pytest.mark.parametrize("change", [moved, without_older_checkpoints, without_checkpoints, without_digests])
def test_a_complete_run_shows_its_result_again_and_stays_as_it_is(finished, tiny_run, capsys, change) -> None:
    change(finished)
    before = contents(finished)
    assert train(tiny_run.parent, finished, scored=True) == 0
    said = capsys.readouterr().out
    assert "Test BLEU" in said and f"Model     {finished / 'model'}\n" in said
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"max_steps": 99}, "has the result of a training, but no checkpoint to resume from"),
        ({"warmup_steps": 3}, "training.warmup_steps is 10 there and 3 here"),
        ({}, "model.safetensors was changed or damaged.*, and there is no checkpoint to resume from"),
    ],
)
def test_a_complete_run_without_its_checkpoints_is_never_started_anew(
    finished, tiny_run, capsys, switches, words
) -> None:
    without_checkpoints(finished)
    if not switches:
        flip(finished / "model" / "model.safetensors")
    before = contents(finished)
    assert train(tiny_run.parent, finished, scored=True, **switches) == 2
    assert re.search(words, capsys.readouterr().err)
    assert contents(finished) == before


@pytest.mark.parametrize("kind", [kind if kind == "flipped" else dear(kind) for kind in DAMAGES])
def test_what_is_damaged_of_a_finished_run_is_made_again(tiny_run, tmp_path, capsys, caplog, kind) -> None:
    caplog.set_level("INFO", "hf_vaswani")
    for name in ("model/model.safetensors", "model/tokenizer.json", "test_translations.txt", "test.json"):
        if (kind, name) == ("flipped", "test.json"):
            # It has the digests of the others, and none of itself.
            continue
        run = tmp_path / name.replace("/", "-")
        shutil.copytree(tiny_run, run)
        DAMAGES[kind](run / name)
        caplog.clear()
        assert train(tiny_run.parent, run, scored=True) == 0
        assert "Test BLEU" in capsys.readouterr().out
        assert (kind, name) == ("deleted", "test.json") or f"{run / name} " in caplog.text.splitlines()[0]
        after = contents(run)
        for other in ("model/model.safetensors", "model/tokenizer.json", "test_translations.txt"):
            assert after[other] == (tiny_run / other).read_bytes(), other
        assert json.loads(after["test.json"])["files"] == json.loads((tiny_run / "test.json").read_text())["files"]
        caplog.clear()
        assert train(tiny_run.parent, run, scored=True) == 0 and "is complete" in caplog.text
        assert contents(run) == after


def test_what_a_finished_run_lacks_is_made(finished, tiny_run, caplog) -> None:
    """Killed between its result and its card, or tidied up by somebody."""
    before, gone = contents(finished), ("model/README.md", "model/curve.png", "environment.json", "recipe.yaml")
    for names in (*([name] for name in gone), gone):
        for name in names:
            (finished / name).unlink()
        caplog.clear()
        assert train(tiny_run.parent, finished, scored=True) == 0
        assert "was missing or damaged, and was written again" in caplog.text
    after = contents(finished)
    assert after.keys() == before.keys() and after["model/curve.png"] == before["model/curve.png"]
    assert all(after[name] == before[name] for name in before if name not in gone)


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", ["README.md", "test.json", "test_translations.txt", "model.safetensors"])
def test_a_full_disk_at_the_end_is_named_and_the_same_command_ends_it(half_run, tmp_path, capsys, name) -> None:
    from hf_vaswani import files

    run = tmp_path / "run"
    shutil.copytree(half_run, run)
    write_bytes, save_pretrained = Path.write_bytes, VaswaniForConditionalGeneration.save_pretrained

    def full(path: Path, content: bytes) -> int:
        if name in path.name:
            write_bytes(path, content[:3])
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    def full_folder(model, folder, **options):
        save_pretrained(model, folder, **options)
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Path, "write_bytes", full)
        if name == "model.safetensors":
            patch.setattr(VaswaniForConditionalGeneration, "save_pretrained", full_folder)
        assert train(half_run.parent, run, max_steps=8, **HALF) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ("model" if name == "model.safetensors" else name) in error and "No space left" in error
    assert not [path for path in run.rglob("*") if path.name.startswith(".")]
    assert train(half_run.parent, run, max_steps=8, **HALF) == 0
    assert (run / "model" / "README.md").is_file() and (run / "model" / "curve.png").is_file()


def test_a_model_that_is_replaced_takes_its_result_along(finished, tiny_run, monkeypatch) -> None:
    def fail(*_):
        raise OSError("no power")

    monkeypatch.setattr(VaswaniForConditionalGeneration, "save_pretrained", fail)
    assert train(tiny_run.parent, finished, scored=True, average_last=1) == 2
    assert (finished / "model").is_dir() and not (finished / "test.json").exists()


def test_checkpoints_that_were_not_kept_are_not_averaged(tmp_path, capsys) -> None:
    """More than there are is no reason to take others, nor to show the old result."""
    run = tmp_path / "run"
    assert train(tmp_path, run, scored=True, keep_last=1, average_last=1) == 0
    assert train(tmp_path, run, scored=True, keep_last=2, average_last=2) == 2
    assert "checkpoint-8 was deleted" in capsys.readouterr().err
    assert json.loads((run / "test.json").read_text())["averaged"] == ["checkpoint-12"]


def test_a_complete_run_is_averaged_anew_on_request(finished, tiny_run) -> None:
    assert train(tiny_run.parent, finished, scored=True, average_last=1) == 0
    assert json.loads((finished / "test.json").read_text())["averaged"] == ["checkpoint-12"]
