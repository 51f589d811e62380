"""Runs of two processes under `torchrun`, which go on by themselves when a process, the launcher or a machine dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.children import free_port
from tests.conftest import ROOT, tiny_recipe

from .judge import FULL, Campaign
from .runs import outcome, wrong_outcome

# Long enough to be killed in. Two logged updates are apart by more than one look at the log.
UPDATES = {"max_steps": 60, "save_every": 5, "log_every": 1, "validate_every": 30, "ema_decay": 0.9, "cpu_threads": 1}
ONE_MACHINE = ["--standalone", "--nproc_per_node=2", "--max-restarts=3"]
# Far more than any run takes.
LIMIT = 180


def launch(arguments: list[str], run: Path, *options: str, **environment: str) -> subprocess.Popen:
    """Starts `torchrun`, in a process group of its own; what it prints goes to a file beside the run."""
    with run.with_suffix(".log").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "train.py", *arguments, "--run_dir", str(run)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def processes_of(launcher: int) -> dict[int, int]:
    """Returns the ids of a launcher's processes by rank."""
    found = {}
    for child in psutil.Process(launcher).children():
        with suppress(psutil.Error, KeyError):
            found[int(child.environ()["RANK"])] = child.pid
    return found


def wait_for_update(run: Path, at: int, *launchers: subprocess.Popen) -> bool:
    """Waits until a run has logged so many updates; returns whether it has."""
    path, until = run / "training.jsonl", time.monotonic() + LIMIT
    while time.monotonic() < until and all(launcher.poll() is None for launcher in launchers):
        if path.is_file() and path.read_bytes().count(b"\n") >= at:
            return True
        time.sleep(0.002)
    return False


def judged(run: Path, right: dict, *launchers: subprocess.Popen) -> str | None:
    """Waits for the end of a run, and returns what is wrong with it, or `None`."""
    try:
        codes = [launcher.wait(timeout=LIMIT) for launcher in launchers]
    except subprocess.TimeoutExpired:
        for launcher in launchers:
            os.killpg(launcher.pid, signal.SIGKILL)
        return f"hung for {LIMIT} seconds\n{run.with_suffix('.log').read_text()[-3000:]}"
    if any(codes):
        return f"exit codes {codes}\n{run.with_suffix('.log').read_text()[-3000:]}"
    return wrong_outcome(run, right)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict]:
    """Trains without an attack; returns the folder, the arguments and the result."""
    folder = tmp_path_factory.mktemp("elastic")
    arguments = tiny_recipe(folder, scored=True, **UPDATES)
    assert launch(arguments, folder / "whole", *ONE_MACHINE).wait(timeout=LIMIT) == 0
    return folder, arguments, outcome(folder / "whole")


def test_a_run_goes_on_when_one_of_its_processes_dies(campaign: Campaign, undisturbed) -> None:
    folder, arguments, right = undisturbed
    attacks = [(who, at) for who in ("rank 0", "rank 1", "launcher") for at in range(1, 58)]
    by: Callable[[tuple], str] = lambda attack: "" if attack[0] != "launcher" else "launcher"  # noqa: E731
    for who, at in campaign.drawn(attacks, 1, 240, by=by):
        run = folder / f"{who.replace(' ', '-')}-{at}"
        launcher = launch(arguments, run, *ONE_MACHINE)
        attack = f"{who} killed after update {at}"
        if not wait_for_update(run, at, launcher):
            campaign.note(attack, "it did not come so far")
            continue
        os.kill(launcher.pid if who == "launcher" else processes_of(launcher.pid)[int(who[-1])], signal.SIGKILL)
        if who == "launcher":
            # As a supervisor does, while the processes of the first launcher are still there.
            launcher.wait()
            launcher = launch(arguments, run, *ONE_MACHINE)
        campaign.note(attack, judged(run, right, launcher))


@pytest.mark.skipif(not FULL, reason="only in `make campaign`: takes two minutes")
def test_a_run_goes_on_when_a_machine_comes_back_late(campaign: Campaign, undisturbed) -> None:
    folder, arguments, right = undisturbed
    for at in campaign.drawn(range(1, 58), 1, 120):
        run, pause = folder / f"machine-{at}", campaign.random.uniform(0, 20)
        options = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run"]
        options.append(f"--rdzv-endpoint=127.0.0.1:{free_port()}")

        def start(machine: int, options: list[str] = options, run: Path = run) -> subprocess.Popen:
            # Without it, torch's launcher waits in vain for the one that has come back.
            environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            return launch(arguments, run, *options, f"--rdzv-conf=is_host={int(machine == 0)}", **environment)

        machines = [start(0), start(1)]
        attack = f"second machine away for {pause:.1f} seconds after update {at}"
        if not wait_for_update(run, at, *machines):
            campaign.note(attack, "it did not come so far")
            continue
        for process in processes_of(machines[1].pid).values():
            os.kill(process, signal.SIGKILL)
        machines[1].kill()
        machines[1].wait()
        time.sleep(pause)
        machines[1] = start(1)
        campaign.note(attack, judged(run, right, *machines))
