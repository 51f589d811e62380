"""What `accelerate launch` makes of a configuration file, without starting it; and Accelerate as in a new process."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..conftest import ROOT
from .runs import HALF, train

FILES = {path.stem: path for path in (ROOT / "configs" / "accelerate").glob("*.yaml")}


@dataclass
class Launched:
    """What would have been started: arguments of torchrun (or a command), and the environment of the processes."""

    environment: dict[str, str] = field(default_factory=dict)
    command: list[str] | None = None
    torchrun: object = None


@pytest.fixture
def launch():
    """Accelerate's launcher up to the point where it starts processes."""
    import torch.distributed.run
    from accelerate.commands import launch as launcher

    def run(name: str, *arguments: str) -> Launched:
        seen = Launched()

        def start_command(command, env):
            seen.command, seen.environment = command, env
            return SimpleNamespace(wait=lambda: 0, returncode=0)

        def start_torchrun(args):
            seen.torchrun, seen.environment = args, dict(os.environ)

        parser = launcher.launch_command_parser()
        command = ["--config_file", str(FILES[name]), *arguments, "train.py", "configs/my.yaml", "--seed=2"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher.subprocess, "Popen", start_command)
            patch.setattr(torch.distributed.run, "run", start_torchrun)
            launcher.launch_command(parser.parse_args(command))
        assert seen.environment
        return seen

    return run


@pytest.fixture
def new_state() -> Iterator[None]:
    """Accelerate keeps a process's number format and compiler for all later trainings in it."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def half_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    assert train(folder, folder / "run", max_steps=8, **HALF) == 0
    for name in ("model", "test.json", "test_translations.txt"):
        path = folder / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder / "run"


@pytest.fixture(scope="session")
def whole_run(half_run: Path) -> Path:
    """What becomes of it when nothing is damaged."""
    run = half_run.parent / "whole"
    shutil.copytree(half_run, run)
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    return run


@pytest.fixture
def run(half_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(half_run, tmp_path / "run")
    return tmp_path / "run"
