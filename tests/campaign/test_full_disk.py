"""On a disk that is full from the n-th write on, a command reports it, leaves no partial files, and can be repeated.

Two disks are tried: one on which the n-th file cannot be begun, and one on which files end in the middle.
"""

from pathlib import Path

import pytest

from tests.children import End, run

from .judge import Campaign, broken_by
from .runs import difference, half_written, outcome, recipe, sha, train, wrong_outcome
from .verbs import Fault, verb, verb_with_small_files


def refusal(end: End, named: Path) -> str | None:
    """Judges an outcome; an error must also name the file or its folder."""
    how = broken_by(end)
    if how is None and end.code == 2 and str(named) not in end.sentence:
        return f"names no file: {end.sentence}"
    return how


@pytest.fixture
def finished(tmp_path) -> tuple[list[str], Path, list[str]]:
    """The command line of a run, its folder, and its write accesses."""
    # Marian has a fixed epsilon.
    arguments = [*recipe(tmp_path, "moving average"), "--model.layer_norm_eps=1e-5"]
    whole = tmp_path / "whole"
    assert train(arguments, whole, Fault("full", whole, log=tmp_path / "log")).code == 0
    return arguments, whole, (tmp_path / "log").read_text().splitlines()


Disk = tuple[str, int]


def disks(writes: list[str], folder: Path, campaign: Campaign, count: int) -> list[Disk]:
    """Returns disks that are full at a write, and others on which some files of a folder are too large."""
    found = sorted({path.stat().st_size for path in folder.rglob("*") if path.is_file()})
    limits = [campaign.random.randrange(1, campaign.random.choice(found)) for _ in range(count)]
    return [("the write", at) for at in range(1, len(writes) + 1)] + [("files of bytes", most) for most in limits]


def run_on(disk: Disk, outputs: Path, command: list[str], place: Path, writes: list[str]) -> tuple[End, str]:
    """Runs a command on a disk; returns the outcome and the name of the attack."""
    what, at = disk
    if what == "the write":
        return run(outputs, verb, command, Fault("full", place, at)), f"full at write {at}, {writes[at - 1]}"
    return run(outputs, verb_with_small_files, command, at), f"no file with more than {at} bytes"


def test_a_training_goes_on_when_there_is_room_again(campaign, tmp_path, finished) -> None:
    arguments, whole, writes = finished
    right = outcome(whole)
    attacks = disks(writes, whole, campaign, len(writes))
    for number, disk in enumerate(campaign.drawn(attacks, 3, 90, by=lambda attack: attack[0])):
        folder = tmp_path / f"run-{number}"
        command = [*arguments, "--run_dir", str(folder)]
        end, attack = run_on(disk, tmp_path / f"out-{number}", command, folder, writes)
        if campaign.note(attack, refusal(end, tmp_path) or (half_written(folder) if folder.exists() else None)):
            continue
        again = train(arguments, folder)
        campaign.note(f"{attack}; then with room", broken_by(again, ()) or wrong_outcome(folder, right))


@pytest.mark.parametrize("name", ["average", "convert to marian", "convert to vaswani"])
def test_a_model_is_written_whole_or_not_at_all(campaign, tmp_path, finished, name) -> None:
    _, whole, _ = finished
    place = tmp_path / "place"
    place.mkdir()
    commands = {
        "average": ["average", str(whole), "--last", "2", "--output"],
        "convert to marian": ["convert", str(whole / "model"), "--to", "marian"],
        "convert to vaswani": ["convert", str(tmp_path / "marian"), "--to", "vaswani"],
    }
    if name == "convert to vaswani":
        assert run(tmp_path / "o", verb, [*commands["convert to marian"], str(tmp_path / "marian")]).code == 0
    command, folder = commands[name], place / "model"
    end = run(tmp_path / "o", verb, [*command, str(folder)], Fault("full", place, log=tmp_path / "log"))
    assert end.code == 0, end.err
    writes, right = (tmp_path / "log").read_text().splitlines(), {path.name: sha(path) for path in folder.iterdir()}
    attacks = disks(writes, folder, campaign, 20)
    for number, disk in enumerate(campaign.drawn(attacks, 1, 20, by=lambda attack: attack[0])):
        place = tmp_path / f"place-{number}"
        place.mkdir()
        end, attack = run_on(disk, tmp_path / "o", [*command, str(place / "model")], place, writes)
        how = refusal(end, tmp_path)
        if how is None and end.code == 0:
            how = difference(right, {path.name: sha(path) for path in (place / "model").iterdir()})
        elif how is None:
            how = half_written(place) or ("left something" if any(place.iterdir()) else None)
        campaign.note(f"{name}: {attack}", how)


def test_translations_are_kept_line_by_line(campaign, tmp_path, finished) -> None:
    _, whole, _ = finished
    command = ["translate", "--model", str(whole / "model"), str(tmp_path / "text.en"), "--output"]
    assert run(tmp_path / "o", verb, [*command, str(tmp_path / "right")]).code == 0
    right = (tmp_path / "right").read_bytes()
    for most in campaign.drawn(range(len(right)), 2, 15):
        output, attack = tmp_path / f"output-{most}", f"translate: full after {most} bytes"
        end = run(tmp_path / "o", verb_with_small_files, [*command, str(output)], most)
        if campaign.note(attack, refusal(end, output)):
            continue
        end = run(tmp_path / "o", verb, [*command, str(output), "--resume"])
        other = None if output.read_bytes() == right else "completed to another text"
        campaign.note(attack, broken_by(end, (), other))
    end = run(tmp_path / "o", verb, [*command, "/dev/full"])
    how = refusal(end, Path("/dev/full")) or (None if end.code else "exit code 0")
    campaign.note("translate --output /dev/full", how)
