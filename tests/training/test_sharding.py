"""FSDP2 on two CPU processes: sharded updates are those of the whole model, and so are its checkpoints."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from hf_vaswani import (
    VaswaniConfig,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForSequenceClassification,
)
from hf_vaswani.processes import leave
from hf_vaswani.training.optimization import build_optimizer
from hf_vaswani.training.sharding import full_weights, shard_tied_weights, vocabulary_modules

from ..conftest import ROOT, tiny_recipe
from ..networks import tiny_model
from .task_recipes import recipe

LAYERS = ["VaswaniDecoderLayer", "VaswaniEncoderLayer"]

TIES = {"all": (True, True), "target": (False, True), "none": (False, False)}


def tied_model(tie: str = "all") -> VaswaniForConditionalGeneration:
    share_embeddings, tie_word_embeddings = TIES[tie]
    ties = {"share_embeddings": share_embeddings, "tie_word_embeddings": tie_word_embeddings}
    return tiny_model(vocab_size=301, d_ff=32, dropout=0.0, **ties).train()


def tiny_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    # So large an epsilon keeps Adam from blowing up the noise of a gradient that is zero.
    return build_optimizer(model.parameters(), 0.9, 0.98, 1e-3, 0.0, 0.01)


def updates() -> list[list[dict[str, torch.Tensor]]]:
    """Three updates of four batches, all of other sizes; the last one is a batch with nothing to learn."""
    random = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, 9, (3, 4, 3), generator=random).tolist()
    result = [
        [
            {
                "input_ids": torch.randint(4, 301, (rows, source), generator=random),
                "labels": torch.randint(4, 301, (rows, target), generator=random),
            }
            for rows, source, target in update
        ]
        for update in sizes
    ]
    result[-1][-1]["labels"].fill_(-100)
    return result


def on_two_processes(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """This file as a program."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tests.training.test_sharding", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240, check=False)


def test_a_classifier_has_no_output_over_the_vocabulary() -> None:
    sizes = tied_model(next(iter(TIES))).config.to_dict() | {"is_encoder_decoder": False}
    model = VaswaniForSequenceClassification(VaswaniConfig.from_dict(sizes))
    assert vocabulary_modules(model) == [model.model.encoder.embed_tokens]
    model = VaswaniForMaskedLM(VaswaniConfig.from_dict(sizes))
    assert vocabulary_modules(model) == [model.model.encoder.embed_tokens, model.lm_head]


def test_fsdp2_equals_the_whole_model(tmp_path) -> None:
    """Accelerate's own code for it, which takes no CPU, made to take one: sharded layers, clipping, accumulation."""
    done = on_two_processes(str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
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
        sharded = load_file(tmp_path / f"{tie}.safetensors")
        assert set(sharded) == set(before)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(sharded[name], weight.detach(), atol=1e-6, rtol=0, msg=f"{tie} {name}")
            assert (weight - before[name]).abs().max() > 1e-3, name


def take_the_cpu_for_a_gpu() -> None:
    """Accelerate shards on accelerators only. Told that gloo on the CPU is one, it goes the same way."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def train_sharded(folder: Path) -> None:
    """One of the two processes: the same updates, but it has every other batch, and half of each weight."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.tensor import DTensor

    take_the_cpu_for_a_gpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin, step_scheduler_with_optimizer=False)
    assert (accelerator.is_fsdp2, accelerator.num_processes) == (True, 2)
    for tie in TIES:
        model = tied_model(tie)
        shard_tied_weights(accelerator, model)
        model, optimizer = accelerator.prepare(model, tiny_optimizer(model))
        sharded = {type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)}
        assert {f"FSDP{name}" for name in LAYERS} < sharded
        for weight in model.parameters():
            assert isinstance(weight, DTensor)
            assert weight.to_local().numel() < weight.numel()
        same = model.lm_head.weight is model.model.decoder.embed_tokens.weight
        assert same == (tie != "none")
        for batches in updates():
            mine = batches[accelerator.process_index :: 2]
            tokens = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in mine), "sum")
            for left, batch in zip(reversed(range(len(mine))), mine, strict=True):
                with accelerator.no_sync(model) if left else nullcontext():
                    loss = model(**batch, epsilon_ls=0.1, num_items_in_batch=tokens).loss
                    accelerator.backward(loss * accelerator.num_processes)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        whole = full_weights(model)
        if accelerator.is_main_process:
            save_file(whole, folder / f"{tie}.safetensors")
        accelerator.free_memory()
    leave()


@pytest.mark.parametrize("starts_from_a_model", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_by_fsdp2_is_saved_resumed_validated_and_published(
    tmp_path, tiny_run, launch, starts_from_a_model
) -> None:
    """The whole command, stopped and continued, makes the model that one process makes of the same batches."""
    from hf_vaswani.cli import main

    arguments = tiny_recipe(tmp_path, max_steps=8, schedule="constant", peak_learning_rate=0.001, validate_every=4)
    arguments += ["--model.dropout=0", "--training.clip_norm=1", "--training.simcut.p=0.2"]
    if starts_from_a_model:
        arguments += [f"--initialize.from={tiny_run}", "--training.freeze=[encoder]"]
    alone = ["--training.accumulation_steps=2", "--run_dir", str(tmp_path / "alone")]
    assert main(["train", *arguments, *alone]) == 0
    sharding = {key: value for key, value in launch("fsdp2").environment.items() if "FSDP" in key}
    for max_steps in (4, 8):
        run = ["--run_dir", str(tmp_path / "run"), f"--training.max_steps={max_steps}"]
        done = on_two_processes("train", *arguments, *run, **sharding)
        assert done.returncode == 0, done.stderr[-3000:]
    for name in ("checkpoint-4", "checkpoint-8", "model"):
        ours, theirs = (load_file(tmp_path / run / name / "model.safetensors") for run in ("run", "alone"))
        for weight in ours.keys() | theirs.keys():
            torch.testing.assert_close(ours[weight], theirs[weight], atol=1e-6, rtol=0, msg=f"{name} {weight}")
    shards = list((tmp_path / "run" / "checkpoint-8").rglob("*.distcp"))
    assert {path.parent.name for path in shards} == {"optimizer_0", "pytorch_model_fsdp_0"}
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "validations.jsonl").read_text().splitlines()]
        for run in ("run", "alone")
    ]
    assert len(losses[0]) == 2 + starts_from_a_model and losses[0] == pytest.approx(losses[1], rel=1e-5)
    # A damaged shard is one sentence, too.
    shards[0].write_bytes(b"")
    run = ["--run_dir", str(tmp_path / "run"), "--training.max_steps=12"]
    done = on_two_processes("train", *arguments, *run, **sharding)
    assert f"{shards[0]} was changed or damaged" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", ["next_sentence", "causal_lm", "classification"])
def test_a_model_of_one_stack_by_fsdp2(tmp_path, launch, task) -> None:
    """Stopped and continued, it is the model that one process makes of the same batches."""
    from hf_vaswani.cli import main

    arguments = [*recipe(tmp_path, task), "--model.dropout=0"]
    alone = ["--training.accumulation_steps=2", "--run_dir", str(tmp_path / "alone")]
    assert main(["train", *arguments, *alone]) == 0
    sharding = {key: value for key, value in launch("fsdp2").environment.items() if "FSDP" in key}
    for max_steps in (3, 6):
        run = ["--run_dir", str(tmp_path / "run"), f"--training.max_steps={max_steps}"]
        done = on_two_processes("train", *arguments, *run, **sharding)
        assert done.returncode == 0, done.stderr[-3000:]
    for name in ("checkpoint-6", "model"):
        ours, theirs = (load_file(tmp_path / run / name / "model.safetensors") for run in ("run", "alone"))
        assert ours.keys() == theirs.keys()
        for weight, expected in theirs.items():
            torch.testing.assert_close(ours[weight], expected, atol=1e-5, rtol=1e-4, msg=f"{name} {weight}")
    ours, theirs = (json.loads((tmp_path / run / "test.json").read_text("utf-8")) for run in ("run", "alone"))
    assert ours["measures"] == pytest.approx(theirs["measures"], rel=1e-4)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        from hf_vaswani.cli import main

        take_the_cpu_for_a_gpu()
        import accelerate

        accelerator = accelerate.Accelerator
        accelerate.Accelerator = lambda cpu, **rest: accelerator(**rest)
        sys.exit(main(sys.argv[1:]))
    train_sharded(Path(sys.argv[1]))
