"""Files of a run truncated, emptied, deleted or with one bit flipped: the weights are still right, or it is an error.

A model folder alone cannot show that a bit of a weight was flipped, and `generation_config.json` is optional, so
`translate` is not tested with these two. The models of a run have digests, and are tested with every kind of damage.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.children import run
from tests.hub_server import Access, HubServer

from .judge import FULL, Campaign, broken_by
from .runs import difference, half_written, recipe, result, train
from .verbs import Fault, on_the_hub, verb

WAYS = ["truncated", "flipped", "emptied", "deleted"]
Attack = tuple[str, str]


def damage(path: Path, way: str, campaign: Campaign) -> str:
    """Damages a file, and describes the damage."""
    content, random = path.read_bytes(), campaign.random
    if way == "deleted":
        path.unlink()
    elif way == "emptied" or not content:
        path.write_bytes(b"")
    elif way == "truncated":
        path.write_bytes(content[: random.randrange(len(content))])
    else:
        place, bit = random.randrange(len(content)), random.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        return f"bit {bit} of byte {place:,} flipped"
    return f"{way} to {path.stat().st_size:,} bytes" if path.exists() else way


# Files of a run without a digest, of which a flipped bit may leave a value possible.
NOT_DIGESTED = re.compile(r"(.*/)?(progress\.json|test\.json|optimizer\.bin|scheduler\.bin|random_states_0\.pkl)")


def attacks_on(folder: Path) -> list[Attack]:
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    attacks = [(name, way) for name in files for way in WAYS]
    return [(name, way) for name, way in attacks if way != "flipped" or not NOT_DIGESTED.fullmatch(name)]


def copied(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def damaged(
    campaign: Campaign, folder: Path, to: Path, few: int, seconds: float, attacks: list[Attack] | None = None
) -> Iterator[tuple[str, str, str]]:
    """Copies a folder once for each attack, and yields the file that is damaged in it, the way, and a description."""
    attacks = attacks_on(folder) if attacks is None else attacks
    for name, way in campaign.drawn(attacks, few, seconds, by=lambda attack: attack[0]):
        yield name, way, f"{name}: {damage(copied(folder, to) / name, way, campaign)}"


@pytest.fixture(scope="module", params=["plain", "moving average", "adapters"] if FULL else ["moving average"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, Path]:
    """The command line of a run, the finished run, and the same run killed after two of its three checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    arguments, whole, half = recipe(folder, request.param), folder / "whole", folder / "half"
    assert train(arguments, whole, Fault("kill", whole, log=folder / "log")).code == 0
    accesses = (folder / "log").read_text().splitlines()
    third = accesses.index("os.mkdir /.checkpoint-6.writing")
    assert train(arguments, half, Fault("kill", half, third + 1)).code == -9
    return arguments, whole, half


@pytest.mark.parametrize("state", ["half", "whole"])
def test_the_same_command_ends_with_the_same_weights(campaign, tmp_path, runs, state) -> None:
    arguments, whole, half = runs
    before, folder = half if state == "half" else whole, tmp_path / "run"
    for name, way, attack in damaged(campaign, before, folder, 2, 57):
        end = train(arguments, folder)
        # Without its record a checkpoint is not touched by the run, because the user may have a copy: remove it here.
        if name.endswith("/progress.json") and way == "deleted":
            shutil.rmtree((folder / name).parent, ignore_errors=True)
        how = broken_by(end, result=difference(result(whole), result(folder))) or half_written(folder)
        campaign.note(f"{state} run, {attack}", how)


def test_an_average_is_right_or_none(campaign, tmp_path, runs) -> None:
    _, whole, _ = runs
    command = ["average", str(tmp_path / "run"), "--last", "2", "--output", str(tmp_path / "mean")]
    attacks = [(name, way) for name, way in attacks_on(whole) if not name.startswith("model/")]
    for _, _, attack in damaged(campaign, whole, tmp_path / "run", 1, 12, attacks):
        shutil.rmtree(tmp_path / "mean", ignore_errors=True)
        end = run(tmp_path / "out", verb, command)
        how = broken_by(end)
        if how is None and end.code == 0:
            how = None if _equal(tmp_path / "mean", whole / "model") else "another mean, and no word"
        elif how is None and (tmp_path / "mean").exists():
            how = "a folder in spite of the refusal"
        campaign.note(f"average, {attack}", how)


def _equal(one: Path, two: Path) -> bool:
    """Returns whether two models have the same weights, in any order in their files."""
    first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    return all((first[name] == second[name]).all() for name in first.keys() & second.keys())


def test_what_is_published_is_what_was_scored(campaign, tmp_path, runs) -> None:
    _, whole, _ = runs
    files = [path for path in (whole / "model").iterdir() if path.suffix not in (".md", ".png")]
    right = {path.name: path.read_bytes() for path in files}
    attacks = [each for each in attacks_on(whole) if "checkpoint-" not in each[0]]
    with HubServer(tokens={"hf_write": Access("alice", "write")}) as hub:
        folder, settings = tmp_path / "run", hub.environment(tmp_path / "home", "hf_write")
        for number, (_, _, attack) in enumerate(damaged(campaign, whole, folder, 1, 12, attacks)):
            repository = f"alice/m{number}"
            end = run(tmp_path / "out", on_the_hub, ["push", str(folder), "--repo-id", repository], settings)
            there = hub.files(repository) if repository in hub.repositories else {}
            wrong = [file for file in right if there.get(file) != right[file]]
            how = broken_by(end, result=f"another {', '.join(wrong)} on the Hub" if wrong else None)
            if how is None and end.code and set(there) - {".gitattributes"}:
                how = "files on the Hub in spite of the refusal"
            campaign.note(f"push, {attack}", how)


def test_a_damaged_model_translates_alike_or_is_refused(campaign, tmp_path, runs) -> None:
    _, whole, _ = runs
    text = whole.parent / "text.en"
    command = ["translate", "--model", str(tmp_path / "model"), str(text)]
    copied(whole / "model", tmp_path / "model")
    right = run(tmp_path / "out", verb, command)
    assert right.code == 0
    attacks = [each for each in attacks_on(whole / "model") if each != ("generation_config.json", "deleted")]
    for _, way, attack in damaged(campaign, whole / "model", tmp_path / "model", 2, 15, attacks):
        end = run(tmp_path / "out", verb, command)
        is_other = way != "flipped" and end.out != right.out
        campaign.note(f"translate, {attack}", broken_by(end, result="another text, and no word" if is_other else None))
