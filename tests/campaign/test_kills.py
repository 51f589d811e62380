"""A run that is killed or stopped at any access to its folder ends with the same bits when the command is repeated.

A killed process leaves only what is on the disk, so the distinct places to kill it are its accesses to the disk. An
undisturbed run lists all of them, from the recipe to the card, and they are drawn from every part of the run in turn.
"""

import re
import signal

import pytest

from .judge import FULL, broken_by
from .runs import KINDS, outcome, recipe, train, wrong_outcome
from .verbs import Fault

CODES = {"term": 128 + signal.SIGTERM, "interrupt": 128 + signal.SIGINT}


def stage(access: str) -> str:
    """Returns the part of a run: `open /.checkpoint-4.writing/config.json` -> `.checkpoint-4.writing`."""
    found = re.search(r" /([^/]+)", access)
    # In a tree that is being removed, files have no folder.
    return found[1] if found else "removal"


@pytest.mark.parametrize("kind", KINDS if FULL else ["accumulation, workers", "moving average", "two processes"])
def test_killed_at_any_access_it_ends_alike(campaign, tmp_path, kind) -> None:
    processes = 2 if kind == "two processes" else 1
    arguments, whole = recipe(tmp_path, kind), tmp_path / "whole"
    log = Fault("kill", whole, log=tmp_path / "log")
    assert train(arguments, whole, log, processes).code == 0
    right = outcome(whole)
    accesses = (tmp_path / "log").read_text().splitlines()
    assert len(accesses) > 100
    for at in campaign.drawn(range(len(accesses)), 1, 65, by=lambda at: stage(accesses[at])):
        folder = tmp_path / f"run-{at}"
        how = campaign.random.choice(["kill", "kill", "term", "interrupt"]) if processes == 1 else "kill"
        attack = f"{kind}: {how} at access {at + 1}, {accesses[at]}"
        end = train(arguments, folder, Fault(how, folder, at + 1), processes)
        if how == "kill" and end.code != -signal.SIGKILL:
            campaign.note(attack, broken_by(end) or f"not reached, exit code {end.code}")
            continue
        if how != "kill" and campaign.note(attack, broken_by(end, [CODES[how]])):
            continue
        if campaign.random.random() < 0.3:
            # A second fault, during recovery.
            again = 1 + campaign.random.randrange(40)
            attack += f", kill at access {again} of the next start"
            train(arguments, folder, Fault("kill", folder, again), processes)
        end = train(arguments, folder, processes=processes)
        campaign.note(attack, broken_by(end, ()) or wrong_outcome(folder, right))
