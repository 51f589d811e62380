"""FSDP2 on two CPU processes: sharded updates are those of the whole model, and so are its checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_vaswani import VaswaniConfig, VaswaniForMaskedLM, VaswaniForSequenceClassification
from hf_vaswani.cli import main
from hf_vaswani.training.state import vocabulary_modules

from ..children import End, run_launched
from ..conftest import tiny_recipe
from . import sharded
from .sharded import TIES, tied_model, tiny_optimizer, train_sharded, updates
from .task_recipes import recipe, weights


@pytest.fixture
def train(launch, tmp_path):
    """Runs the verb train in two processes that share the weights, with the settings of fsdp2.yaml."""
    settings = {key: value for key, value in launch("fsdp2").environment.items() if "FSDP" in key}

    def run(*arguments: str) -> list[End]:
        return run_launched(tmp_path / "outputs", sharded.train, list(arguments), environment=settings)

    return run


def assert_trained(ends: list[End]) -> None:
    assert [end.code for end in ends] == [0, 0], [end.err[-3000:] for end in ends]


def assert_same_weights(run: Path, expected: Path, **tolerances: float) -> None:
    ours, theirs = weights(run), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, msg=f"{run.name} {name}", **tolerances)


def test_a_classifier_has_no_output_over_the_vocabulary() -> None:
    sizes = tied_model(next(iter(TIES))).config.to_dict() | {"is_encoder_decoder": False}
    model = VaswaniForSequenceClassification(VaswaniConfig.from_dict(sizes))
    assert vocabulary_modules(model) == [model.model.encoder.embed_tokens]
    model = VaswaniForMaskedLM(VaswaniConfig.from_dict(sizes))
    assert vocabulary_modules(model) == [model.model.encoder.embed_tokens, model.lm_head]


@pytest.mark.process
def test_fsdp2_equals_the_whole_model(tmp_path) -> None:
    """Accelerate's own code for it, which takes no CPU, made to take one: sharded layers, clipping, accumulation."""
    assert_trained(run_launched(tmp_path / "outputs", train_sharded, tmp_path))
    for tie in TIES:
        model = tied_model(tie)
        optimizer = tiny_optimizer(model)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for batches in updates():
            tokens = sum((batch["labels"] != -100).sum() for batch in batches)
            for batch in batches:
                model(**batch, epsilon_ls=0.1, num_items_in_batch=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = load_file(tmp_path / f"{tie}.safetensors")
        assert set(found) == set(before)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(found[name], weight.detach(), atol=1e-6, rtol=0, msg=f"{tie} {name}")
            assert (weight - before[name]).abs().max() > 1e-3, name


@pytest.mark.process
@pytest.mark.parametrize("starts_from_a_model", [False, True])
def test_a_run_by_fsdp2_is_saved_resumed_validated_and_published(
    tmp_path, tiny_run, train, starts_from_a_model
) -> None:
    """The whole command, stopped and continued, makes the model that one process makes of the same batches."""
    settings = {"max_steps": 4, "save_every": 2, "validate_every": 2, "schedule": "constant"}
    arguments = tiny_recipe(tmp_path, scored=True, peak_learning_rate=0.001, **settings)
    arguments += ["--model.dropout=0", "--training.clip_norm=1", "--training.simcut.p=0.2", "--evaluation.num_beams=1"]
    if starts_from_a_model:
        arguments += [f"--initialize.from={tiny_run}", "--training.freeze=[encoder]"]
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert main(["train", *arguments, "--training.accumulation_steps=2", "--run_dir", str(alone)]) == 0
    arguments += ["--run_dir", str(run)]
    for max_steps in (2, 4):
        assert_trained(train(*arguments, f"--training.max_steps={max_steps}"))
    for name in ("checkpoint-2", "checkpoint-4", "model"):
        assert_same_weights(run / name, alone / name, atol=1e-6, rtol=0)
    shards = list((run / "checkpoint-4").rglob("*.distcp"))
    assert {path.parent.name for path in shards} == {"optimizer_0", "pytorch_model_fsdp_0"}
    losses = [
        [json.loads(line)["loss"] for line in (folder / "validations.jsonl").read_text().splitlines()]
        for folder in (run, alone)
    ]
    assert len(losses[0]) == 2 + starts_from_a_model and losses[0] == pytest.approx(losses[1], rel=1e-5)
    # A damaged shard is one sentence, too, whether its digest shows it or its reader.
    for folder, words in (
        ("optimizer_0", "checkpoint-4 could not be loaded"),
        ("pytorch_model_fsdp_0", "was changed"),
    ):
        next(path for path in shards if path.parent.name == folder).write_bytes(b"")
        ends = train(*arguments, "--training.max_steps=6")
        assert words in "".join(end.err for end in ends) and {end.code for end in ends} != {0}, ends


@pytest.mark.process
@pytest.mark.parametrize("task", ["next_sentence", "causal_lm", "classification"])
def test_a_model_of_one_stack_by_fsdp2(tmp_path, train, task) -> None:
    """Stopped and continued, it is the model that one process makes of the same batches."""
    arguments = [*recipe(tmp_path, task, max_steps=4, save_every=2, validate_every=2), "--model.dropout=0"]
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert main(["train", *arguments, "--training.accumulation_steps=2", "--run_dir", str(alone)]) == 0
    for max_steps in (2, 4):
        assert_trained(train(*arguments, "--run_dir", str(run), f"--training.max_steps={max_steps}"))
    for name in ("checkpoint-4", "model"):
        assert_same_weights(run / name, alone / name, atol=1e-5, rtol=1e-4)
    ours, theirs = (json.loads((folder / "test.json").read_text("utf-8")) for folder in (run, alone))
    assert ours["measures"] == pytest.approx(theirs["measures"], rel=1e-4)
