"""Small training runs to attack, and the comparison of their results."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from tests.children import Child, End, run, worlds
from tests.conftest import tiny_recipe
from tests.training.task_recipes import TASKS
from tests.training.task_recipes import recipe as task_recipe

from .verbs import Fault, verb

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "accumulation, workers": {"accumulation_steps": 2, "data_workers": 2},
    "moving average": {"ema_decay": 0.9},
    "muon": {"optimizer": "muon", "schedule": "constant", "peak_learning_rate": 0.01},
    "stream": {},
    "two processes": {"ema_decay": 0.9},
    "adapters": {"adapter": "{rank: 2, alpha: 8, dropout: 0.1}", "schedule": "constant", "peak_learning_rate": 0.01},
    # Tasks without translations.
    "next_sentence": {},
    "tagging": {},
}
# Three checkpoints, of which the first is deleted, two validations, and an average of two.
STEPS = {"max_steps": 6, "save_every": 2, "keep_last": 2, "average_last": 2, "validate_every": 4, "log_every": 1}


def recipe(folder: Path, kind: str) -> list[str]:
    """Returns the command line of a kind of training, without `--run_dir`; writes its text to `folder`."""
    if kind in TASKS:
        return ["train", *task_recipe(folder, kind, **STEPS, **KINDS[kind])]
    arguments = ["train", *tiny_recipe(folder, scored=True, **STEPS, **KINDS[kind])]
    if kind == "adapters":
        base = folder / "base"
        assert run(folder / "base-outputs", verb, ["train", *tiny_recipe(folder), "--run_dir", str(base)]).code == 0
        arguments += ["--initialize.from", str(base / "model")]
    return [*arguments, "--data.streaming=true", "--data.stream_window=50"] if kind == "stream" else arguments


def train(arguments: list[str], folder: Path, fault: Fault | None = None, processes: int = 1) -> End:
    """
    Trains in `folder`, and returns the outcome of the first process, which has the fault. If it is killed, the others
    are killed with it; otherwise they must end as well.
    """
    command = [*arguments, "--run_dir", str(folder)]
    beside = folder.parent / f"{folder.name}-outputs"
    if processes == 1:
        return run(beside, verb, command, fault)
    ranks = [
        Child(beside / world["RANK"], verb, command, None if rank else fault, environment=world)
        for rank, world in enumerate(worlds(processes))
    ]
    first = ranks[0].end()
    if first.code is not None and first.code < 0:
        for other in ranks[1:]:
            other.kill()
    ends = [first, *(other.end(30) for other in ranks[1:])]
    return next((end for end in ends if end.code is None), first)


def sha(path: Path) -> str | None:
    """Returns the SHA-256 of a file, or `None` if it does not exist."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def result(folder: Path) -> dict[str, Any]:
    """Reads the result of a run: digests of the model files, translations, scores."""
    found: dict[str, Any] = {
        path.name: sha(path) for path in (folder / "model").glob("*") if path.suffix not in (".md", ".png")
    }
    found["test_translations.txt"] = sha(folder / "test_translations.txt")
    with contextlib.suppress(OSError, ValueError):
        told = json.loads((folder / "test.json").read_text("utf-8")) | {"seconds": 0, "model": ""}
        found["test.json"] = told
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """Reads the result of a run, its logs and the names of all its files."""
    logs = {name: (folder / name).read_text() for name in ("training.jsonl", "validations.jsonl")}
    return result(folder) | logs | {"names": sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))}


def difference(one: dict[str, Any], two: dict[str, Any]) -> str | None:
    """Describes how two results differ, or returns `None`."""
    different = [name for name in sorted(one | two) if one.get(name) != two.get(name)]
    if different == ["names"]:
        different = sorted(set(one["names"]) ^ set(two["names"]))
    return f"another {', '.join(different)}" if different else None


def half_written(folder: Path) -> str | None:
    """Lists leftovers that no command may leave behind, or returns `None`."""
    left = [str(path.relative_to(folder)) for path in folder.rglob(".*") if path.name.endswith((".writing", ".old"))]
    left += [path.name for path in folder.glob("checkpoint-*") if not (path / "progress.json").is_file()]
    return f"left {', '.join(sorted(left)[:5])}" if left else None


def wrong_outcome(folder: Path, right: dict[str, Any]) -> str | None:
    """Describes what a run has left behind, or how its [`outcome`] differs from the right one, or returns `None`."""
    return half_written(folder) or difference(right, outcome(folder))
