"""Small trainings in this process, and what may become of their files."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_vaswani.cli import main

from ..conftest import tiny_recipe


def train(folder: Path, run: Path, **training: object) -> int:
    return main(["train", *tiny_recipe(folder, **training), "--run_dir", str(run)])


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def same_weights(one: Path, two: Path, file: str = "model.safetensors") -> bool:
    """Compares the weights of two folders bit for bit."""
    ours, theirs = load_file(one / file), load_file(two / file)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_close_weights(one: Path, two: Path, *, atol: float, rtol: float = 0) -> None:
    ours, theirs = weights(one), weights(two)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=atol, rtol=rtol, msg=f"{one} {name}")


def assert_resumes_exactly(arguments: list[str], run: Path, last: int) -> None:
    """Trains the last part of a finished run again, from the checkpoint before."""
    before = (run / f"checkpoint-{last}").rename(run.with_name("before"))
    shutil.rmtree(run / "model")
    assert main(["train", *arguments, "--run_dir", str(run)]) == 0
    assert same_weights(run / f"checkpoint-{last}", before)


def validations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "validations.jsonl").read_text("utf-8").splitlines()]


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


# With a moving average, validations and a log; stopped after 8 of 12 updates.
HALF = {"scored": True, "ema_decay": 0.9, "validate_every": 4, "log_every": 2, "average_last": 1}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
}
