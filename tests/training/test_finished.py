"""A finished run: complete, or made complete, and never trained anew."""

import json
import shutil
from pathlib import Path

import pytest

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.cli import main

from ..conftest import dear, tiny_recipe
from .runs import DAMAGES, HALF, contents, flip, train


def test_a_complete_run_shows_its_result_again(tiny_run, capsys) -> None:
    before = (tiny_run / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(tiny_run.parent, tiny_run, scored=True) == 0
    assert "Test BLEU" in capsys.readouterr().out
    assert (tiny_run / "model" / "model.safetensors").stat().st_mtime_ns == before


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


def test_what_cannot_be_made_again_is_said(tiny_run, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    flip(run / "model" / "model.safetensors")
    assert train(tiny_run.parent, run, scored=True) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        f"{run / 'model' / 'model.safetensors'} was changed or damaged" in error
        and "no checkpoint to resume from" in error
    )


def test_a_result_of_an_earlier_version_counts(tiny_run, tmp_path, caplog) -> None:
    """It noted no digest of the translations."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    result = json.loads((run / "test.json").read_text())
    del result["translations"]
    (run / "test.json").write_text(json.dumps(result))
    before = contents(run)
    caplog.set_level("INFO", "hf_vaswani")
    assert train(tiny_run.parent, run, scored=True) == 0
    assert [record.getMessage() for record in caplog.records if "complete" in record.getMessage()]
    assert contents(run) == before


def test_what_a_finished_run_lacks_is_made(tiny_run, tmp_path, caplog) -> None:
    """Killed between its result and its card, or tidied up by somebody."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    before = contents(run)
    gone = ("model/README.md", "model/curve.png", "environment.json", "recipe.yaml")
    for name in gone:
        (run / name).unlink()
        caplog.clear()
        assert train(tiny_run.parent, run, scored=True) == 0
        assert caplog.text.count("was missing or damaged, and was written again") == 1
        assert (run / name).is_file() and not list(run.rglob(".*"))
    for name in gone:
        (run / name).unlink()
    assert train(tiny_run.parent, run, scored=True) == 0
    after = contents(run)
    assert after.keys() == before.keys() and after["model/curve.png"] == before["model/curve.png"]
    assert all(after[name] == before[name] for name in before if name not in (*gone, "run.lock"))


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


def test_a_complete_run_without_its_checkpoints_is_complete_and_never_started_anew(tiny_run, tmp_path, capsys) -> None:
    """They are what takes room on the disk; the model and its result are what the training was for."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert train(tiny_run.parent, run, scored=True) == 0
    assert "Test BLEU" in capsys.readouterr().out
    for switches, words in (
        ({"max_steps": 99}, "has the result of a training, but no checkpoint to resume from"),
        ({"warmup_steps": 3}, "training.warmup_steps is 10 there and 3 here"),
    ):
        assert train(tiny_run.parent, run, scored=True, **switches) == 2
        assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_model_that_is_replaced_takes_its_result_along(tiny_run, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)

    def fail(*_):
        raise OSError("no power")

    monkeypatch.setattr(VaswaniForConditionalGeneration, "save_pretrained", fail)
    assert train(tiny_run.parent, run, scored=True, average_last=1) == 2
    assert (run / "model").is_dir() and not (run / "test.json").exists()


def test_a_run_that_was_moved_names_its_model_where_it_is(tiny_run, tmp_path, capsys) -> None:
    shutil.copytree(tiny_run, tmp_path / "moved")
    assert train(tiny_run.parent, tmp_path / "moved", scored=True) == 0
    assert f"Model     {tmp_path / 'moved' / 'model'}\n" in capsys.readouterr().out


def test_checkpoints_that_were_not_kept_are_not_averaged(tmp_path, capsys) -> None:
    """More than there are is no reason to take others, nor to show the old result."""
    run = tmp_path / "run"
    assert train(tmp_path, run, scored=True, keep_last=1, average_last=1) == 0
    assert train(tmp_path, run, scored=True, keep_last=2, average_last=2) == 2
    assert "checkpoint-8 was deleted" in capsys.readouterr().err
    assert json.loads((run / "test.json").read_text())["averaged"] == ["checkpoint-12"]


def test_a_complete_run_stays_complete_without_its_older_checkpoints(tiny_run, tmp_path, capsys) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    assert train(tiny_run.parent, tmp_path / "run", scored=True) == 0
    assert "Test BLEU" in capsys.readouterr().out


def test_a_complete_run_is_averaged_anew_on_request(tiny_run, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for count, names in ((2, ["checkpoint-8", "checkpoint-12"]), (1, ["checkpoint-12"])):
        arguments = tiny_recipe(tiny_run.parent, scored=True, average_last=count)
        assert main(["train", *arguments, "--run_dir", str(run)]) == 0
        assert json.loads((run / "test.json").read_text())["averaged"] == names
