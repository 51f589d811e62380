"""Programs stopped after a given time, from before their first import to after their last file."""

import os
import signal
import subprocess
import sys
from itertools import product

from tests.children import LIMIT
from tests.conftest import ROOT

from .judge import broken_by
from .runs import outcome, recipe, train, wrong_outcome

PROGRAMS = {"train.py": [sys.executable, str(ROOT / "train.py")]}
PROGRAMS["python -m"] = [sys.executable, "-m", "hf_vaswani.cli", "train"]
# Tenths of a second; within the first one, Python itself starts.
MOMENTS = range(2, 120)


def test_stopped_at_any_moment_there_is_no_traceback(campaign, tmp_path) -> None:
    """During its imports, a program may end without a message, because it has not done anything."""
    arguments, whole = recipe(tmp_path, "plain"), tmp_path / "whole"
    assert train(arguments, whole).code == 0
    right = outcome(whole)
    attacks = list(product(PROGRAMS, (signal.SIGINT, signal.SIGTERM), MOMENTS))
    for program, number, moment in campaign.drawn(attacks, 1, 60, by=lambda attack: attack[:2]):
        folder = tmp_path / f"{program}-{number}-{moment}"
        command = [*PROGRAMS[program], *arguments[1:], "--run_dir", str(folder)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, **streams, text=True, start_new_session=True)
        attack = f"{program}: {number.name} after {moment / 10} seconds"
        try:
            process.wait(moment / 10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
        try:
            _, said = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
            campaign.note(attack, f"hung for {LIMIT} seconds: {said}")
            continue
        how = None if process.returncode in (0, 128 + number, -number) else f"exit code {process.returncode}: {said}"
        if campaign.note(attack, f"a traceback: {said}" if "Traceback" in said else how):
            continue
        end = train(arguments, folder)
        campaign.note(f"{attack}; then again", broken_by(end, ()) or wrong_outcome(folder, right))
