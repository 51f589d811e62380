"""`training.tokens_per_batch: auto`: the memory decides about batches, and nothing about updates and their results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vaswani.cli import main
from hf_vaswani.recipe import TOKENS_PER_BATCH
from hf_vaswani.run_folder import read_environment
from hf_vaswani.training import batch_size, preparation
from hf_vaswani.training.batch_size import _extrapolated, _Trial

from ..conftest import dear, tiny_recipe
from . import task_recipes
from .runs import same_weights, weights


class Card:
    """An accelerator's memory: so many bytes, of which a model takes some, and each token of a batch more."""

    model, token = 5000, 10

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
        self.size, self.tokens, self.updates = capacity, 0, list[int]()
        update = _Trial.update

        def spy(trial: _Trial, tokens: int) -> int:
            if self.model + self.token * tokens > self.size:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.tokens = update(trial, tokens)
            self.updates.append(self.tokens)
            return self.tokens

        monkeypatch.setattr(_Trial, "update", spy)
        monkeypatch.setattr(batch_size, "Memory", lambda device: self)
        monkeypatch.setattr(preparation, "is_accelerator", lambda device: True)

    def capacity(self) -> int:
        return self.size

    def peak(self) -> int:
        return self.model + self.token * self.tokens


def trained(folder: Path, run: Path, *options: str, **training: Any) -> dict[str, Any]:
    """Trains, and returns how the last checkpoint was launched."""
    arguments = [*tiny_recipe(folder, **training), *options, "--run_dir", str(run)]
    assert main(["train", *arguments]) == 0
    checkpoint = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return dict(json.loads((checkpoint / "progress.json").read_text())["launch"])


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(batch_size, "FIRST", 64)
    monkeypatch.setattr(batch_size, "WIDTH", 16)


# The memory for so many tokens, of which a batch may fill half.
def for_tokens(tokens: int) -> int:
    return 2 * (Card.model + Card.token * tokens)


@pytest.mark.parametrize(
    "options", [[], dear(["--training.r_drop={}"]), dear(["--tokenizer.bpe_dropout=0.2"])], ids=str
)
def test_a_run_is_that_of_the_number_that_is_found(tmp_path, monkeypatch, caplog, options) -> None:
    """Bit for bit, and a resumed run keeps its number, whatever the memory is by then."""
    card = Card(monkeypatch, for_tokens(300))
    launch = trained(tmp_path, tmp_path / "auto", *options, tokens_per_batch="auto", tokens_per_update=1000)
    assert launch["tokens_at_once"] == 300 == read_environment(tmp_path / "auto").tokens_at_once
    assert card.updates == [64, 64, 128]
    assert "tokens_per_batch auto: an update has 4 batches of 250 tokens in each process" in caplog.text
    number = trained(tmp_path, tmp_path / "number", *options, tokens_per_batch=300, tokens_per_update=1000)
    assert "tokens_at_once" not in number
    assert same_weights(tmp_path / "auto" / "checkpoint-12", tmp_path / "number" / "checkpoint-12")
    auto = {"tokens_per_batch": "auto", "tokens_per_update": 1000}
    trained(tmp_path, tmp_path / "parts", *options, max_steps=4, **auto)
    card.size = for_tokens(100)
    assert trained(tmp_path, tmp_path / "parts", *options, **auto) == launch
    assert same_weights(tmp_path / "auto" / "checkpoint-12", tmp_path / "parts" / "checkpoint-12")


@pytest.mark.parametrize(
    ("tokens", "update", "found", "updates"),
    [
        # An update that fits is one batch; its memory was measured, or is far from the limit.
        (10_000, 1000, 1000, [64, 64, 128, 256, 512, 1024]),
        (1100, 1000, 1000, [64, 64, 128, 256, 512]),
        # Near the limit, larger updates are not tried.
        (100, 1000, 100, [64, 64, 128]),
    ],
)
def test_batches_are_as_large_as_the_memory_and_at_most_an_update(
    tmp_path, monkeypatch, tokens, update, found, updates
) -> None:
    card = Card(monkeypatch, for_tokens(tokens))
    options = {"tokens_per_batch": "auto", "tokens_per_update": update, "max_steps": 1}
    assert trained(tmp_path, tmp_path / "run", **options)["tokens_at_once"] == found
    assert card.updates == updates


def test_a_moving_average_needs_its_place_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Card, "token", 1000)
    Card(monkeypatch, for_tokens(300))
    options = {"tokens_per_batch": "auto", "tokens_per_update": 1000, "max_steps": 1}
    launch = trained(tmp_path, tmp_path / "run", **options, ema_decay=0.9)
    count = sum(weight.numel() for weight in weights(tmp_path / "run" / "checkpoint-1").values())
    assert launch["tokens_at_once"] == int(300 - 4 * count / 1000) < 270


def test_what_was_measured_before_the_memory_was_full_is_enough() -> None:
    assert _extrapolated([(64, 5640), (128, 6280)], 8000) == 300
    assert _extrapolated([(64, 5640), (128, 6280)], 5000) == 0
    assert _extrapolated([(64, 5640)], 8000) == _extrapolated([], 8000) == 0


def test_a_model_for_which_there_is_no_room_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys) -> None:
    Card(monkeypatch, Card.model + 100)
    arguments = [*tiny_recipe(tmp_path, tokens_per_batch="auto"), "--run_dir", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 2
    assert "training.tokens_per_batch auto finds no batch for the memory of cpu: 16 tokens" in capsys.readouterr().err


def test_a_device_that_tells_no_memory_takes_the_number_of_a_cpu(tmp_path, monkeypatch, caplog) -> None:
    options = {"tokens_per_batch": "auto", "max_steps": 1}
    cpu = trained(tmp_path, tmp_path / "cpu", **options)
    assert cpu["tokens_at_once"] == TOKENS_PER_BATCH and "because cpu tells no memory" not in caplog.text
    assert "tokens_per_batch auto: an update has one batch of 25,000 tokens in each process" in caplog.text
    # torch asks for no memory of a CPU.
    monkeypatch.setattr(preparation, "is_accelerator", lambda device: True)
    assert trained(tmp_path, tmp_path / "other", **options)["tokens_at_once"] == TOKENS_PER_BATCH
    assert caplog.text.count("training.tokens_per_batch auto is that of a CPU, because cpu tells no memory") == 1


def test_all_processes_take_the_number_of_the_smallest(tmp_path, monkeypatch) -> None:
    Card(monkeypatch, for_tokens(300))
    share = preparation.on_every_process

    def shared(launch: Any, function: Any) -> list[Any]:
        return [*share(launch, function), 200]

    monkeypatch.setattr(preparation, "on_every_process", shared)
    options = {"tokens_per_batch": "auto", "tokens_per_update": 1000, "max_steps": 1}
    assert trained(tmp_path, tmp_path / "run", **options)["tokens_at_once"] == 200


@pytest.mark.variants(3)
@pytest.mark.parametrize("name", task_recipes.TASKS)
def test_every_task_is_measured(tmp_path, monkeypatch, name) -> None:
    card = Card(monkeypatch, for_tokens(10_000))
    arguments = [*task_recipes.recipe(tmp_path, name), "--training.tokens_per_batch=auto", "--training.max_steps=1"]
    arguments += ["--training.tokens_per_update=300", "--run_dir", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 0
    assert card.updates and read_environment(tmp_path / "run").tokens_at_once == 300
