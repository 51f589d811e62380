"""hf-vaswani diversify: models of both directions, their translations, and a model that learns all of it."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from hf_vaswani.cli import diversify, main
from hf_vaswani.files import atomic_write_text
from hf_vaswani.run_folder import read_recipe

from ..campaign.verbs import verb
from ..children import Child
from ..conftest import tiny_recipe


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A command that trains two models of each direction, and the one of the recipe."""
    arguments = tiny_recipe(tmp_path, scored=True, max_steps=40, schedule="constant", peak_learning_rate=0.01)
    arguments += ["--diversification.models=2", "--diversification.num_beams=1", "--evaluation.num_beams=1"]
    return ["diversify", *arguments, "--run_dir", str(tmp_path / "run")]


@pytest.fixture
def in_this_process(monkeypatch) -> list[str]:
    """Runs the verbs without starting Python, and lists them."""
    verbs = []

    def run(launcher, verb, recipe, path, result) -> None:
        atomic_write_text(path, recipe.as_yaml())
        verbs.append(f"{verb} {path.name}")
        assert main([verb, str(path)]) == 0 and result.is_file()

    monkeypatch.setattr(diversify, "_run", run)
    return verbs


@pytest.mark.slow
def test_a_model_learns_the_translations_of_both_directions(command, in_this_process, tmp_path, capsys) -> None:
    assert main(command) == 0
    names = ["forward.1", "forward.2", "backward.1", "backward.2"]
    expected = [step for name in names for step in (f"train {name}.yaml", f"backtranslate {name}.translation.yaml")]
    assert in_this_process == [*expected, "train final.yaml"]
    said = capsys.readouterr().out
    assert re.findall(r"^(\S+) +\d+\.\d\d +\d+\.\d\d +\S+model$", said, re.MULTILINE) == [*names, "diversified"]
    folder = tmp_path / "run.diversified"
    weights = [(folder / name / "model" / "model.safetensors").read_bytes() for name in names]
    assert len(set(weights)) == 4
    # All numbers of the text, each once.
    assert all((folder / f"{name}.tsv").read_text().count("\n") == 101 for name in names)
    final = read_recipe(tmp_path / "run")
    assert [part.train_files for part in final.more_data] == [str(folder / f"{name}.tsv") for name in names]
    # Done once: the same command finds everything.
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == times
    # Other settings would make other models of those that have translated already.
    capsys.readouterr()
    for more, key in (
        ("--training.max_steps=60", "training.max_steps"),
        ("--diversification.num_beams=2", "backtrans"),
    ):
        assert main([*command, more]) == 2
        said = capsys.readouterr().err
        assert "are those of other settings: " in said and key in said and said.count("\n") == 1
        assert said.endswith("Name another diversification.folder.\n")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == times
    assert main([*command, "--training.cpu_threads=1", "--training.keep_last=9"]) == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--diversification.launcher=nosuchcommand -n 2"], "diversification.launcher is 'nosuchcommand -n 2', which"),
        (["--diversification.models=0"], "diversification.models must be at least 1"),
        (["--task=text_to_text"], "Diversification needs task 'translation'"),
        (
            ["--diversification.launcher='"],
            'diversification.launcher is "\'", which is no command: No closing quotation',
        ),
        (["--data.train_files=nowhere.tsv"], "There is no file 'nowhere.tsv'"),
        (["--data.test_files=nowhere.tsv"], "nowhere.tsv"),
        (["--model.d_model=9"], "d_model"),
        (["--diversification.folder=train.tsv"], "diversification.folder train.tsv cannot be made: File exists"),
        (["--diversification.folder=here", "--run_dir=here"], "diversification.folder here is the folder of the run"),
    ],
)
def test_what_cannot_be_is_refused(command, in_this_process, tmp_path, monkeypatch, capsys, more, words) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.tsv").touch()
    before = sorted(tmp_path.iterdir())
    assert main([*command, *more]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not in_this_process
    assert sorted(tmp_path.iterdir()) == before


def test_a_launcher_around_it_is_refused(command, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 2
    assert "start it without a launcher, and name the launcher in diversification.launcher" in capsys.readouterr().err


LAUNCHER = """
import signal, sys, time
from pathlib import Path
log = Path(sys.argv[1])
def stop(number, frame):
    log.write_text(log.read_text() + f"signal {number}\\n")
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
log.write_text(f"{sys.argv[3:]}\\n")
if "backtranslate" in sys.argv:
    sys.exit(3)
if sys.argv[2] == "x":
    run = Path(sys.argv[-1]).with_suffix("")
    run.mkdir(exist_ok=True)
    (run / "test.json").touch()
if len(sys.argv[2]) > 1:
    time.sleep(60)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> list[str]:
    """A command in place of a launcher: it logs its arguments, and fails with the second verb."""
    (tmp_path / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    return [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "log")]


def test_the_launcher_starts_each_verb_and_its_failure_ends_the_work(command, launcher, tmp_path, capsys) -> None:
    assert main([*command, f"--diversification.launcher={' '.join([*launcher, 'x'])}"]) == 2
    recipe = tmp_path / "run.diversified" / "forward.1.translation.yaml"
    assert (tmp_path / "log").read_text() == f"{['-m', 'hf_vaswani.cli', 'backtranslate', str(recipe)]}\n"
    said = capsys.readouterr().err
    assert f"hf-vaswani backtranslate {recipe} ended with exit code 3: see its own message" in said


def test_a_launcher_that_does_nothing_is_noticed(command, launcher, capsys) -> None:
    assert main([*command, f"--diversification.launcher={' '.join([*launcher, 'y'])}"]) == 2
    said = capsys.readouterr().err
    assert "ended without an error, and without " in said and "does diversification.launcher" in said


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_training_that_runs(command, launcher, tmp_path, number) -> None:
    arguments = [*command, f"--diversification.launcher={' '.join([*launcher, 'wait'])}"]
    child = Child(tmp_path / "outputs", verb, arguments)
    until = time.monotonic() + 120
    while not (tmp_path / "log").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(child.process.pid or 0, number)
    end = child.end()
    assert end.code == 128 + number and "stopped. The same command goes on." in end.err
    assert (tmp_path / "log").read_text().endswith(f"signal {int(signal.SIGTERM)}\n")
