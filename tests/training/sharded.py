"""One of two processes on CPUs that share the weights of a model by FSDP2."""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.processes import close_process_group
from hf_vaswani.training.optimization import build_optimizer
from hf_vaswani.training.state import full_weights, shard_tied_weights

from ..networks import tiny_model

LAYERS = ["VaswaniDecoderLayer", "VaswaniEncoderLayer"]

TIES = {"all": (True, True), "target": (False, True), "none": (False, False)}


def tied_model(tie: str = "all") -> VaswaniForConditionalGeneration:
    share_embeddings, tie_word_embeddings = TIES[tie]
    ties = {"share_embeddings": share_embeddings, "tie_word_embeddings": tie_word_embeddings}
    return tiny_model(vocab_size=301, d_ff=32, dropout=0.0, **ties).train()


def tiny_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    # So large an epsilon keeps Adam from blowing up the noise of a gradient that is zero.
    return build_optimizer("adam", model.named_parameters(), 0.01, adam_epsilon=1e-3)


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


def take_the_cpu_for_a_gpu() -> None:
    """Accelerate shards on accelerators only. Told that gloo on the CPU is one, it goes the same way."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def train_sharded(folder: Path) -> None:
    """Makes the [`updates`] with every other batch, and half of each weight; the main process saves the whole."""
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
    close_process_group()


def train(arguments: list[str]) -> int:
    """Runs the verb train on CPUs that Accelerate takes for GPUs."""
    import accelerate

    from hf_vaswani import processes
    from hf_vaswani.cli import main

    take_the_cpu_for_a_gpu()
    processes._computes_on_cpu = lambda: False
    accelerator = accelerate.Accelerator
    accelerate.Accelerator = lambda cpu, **rest: accelerator(**rest)
    return main(["train", *arguments])
