"""Several processes, GPUs, machines: what `accelerate launch` makes of configs/accelerate."""

import json
import os
import subprocess
import sys

import pytest

from ..children import free_port
from ..conftest import ROOT, tiny_recipe
from .conftest import FILES
from .sharded import LAYERS, tied_model


@pytest.mark.parametrize(
    ("name", "kind", "processes", "machines"),
    [
        ("single_gpu", "NO", 1, 1),
        ("ddp_8_gpus", "MULTI_GPU", 8, 1),
        ("two_nodes", "MULTI_GPU", 16, 2),
        ("fsdp2", "FSDP", 8, 1),
    ],
)
def test_accelerate_reads_each_file(name, kind, processes, machines) -> None:
    """Its own loader, which refuses keys that it does not know."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(FILES[name]))
    assert (config.distributed_type.value, config.num_processes, config.num_machines) == (kind, processes, machines)
    assert config.mixed_precision == "bf16"


def test_no_file_is_left_out() -> None:
    assert set(FILES) == {"single_gpu", "ddp_8_gpus", "two_nodes", "fsdp2"}


def test_one_gpu_is_one_process_and_no_torchrun(launch) -> None:
    launched = launch("single_gpu", "--gpu_ids", "3")
    assert launched.torchrun is None
    assert launched.command == [sys.executable, "train.py", "configs/my.yaml", "--seed=2"]
    assert launched.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launched.environment["ACCELERATE_USE_CPU"] == "False"
    assert launched.environment["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("arguments", [[], ["--num_processes", "4", "--mixed_precision", "no"]])
def test_eight_gpus_are_eight_processes_of_one_machine(launch, arguments) -> None:
    launched = launch("ddp_8_gpus", *arguments)
    assert launched.torchrun.nproc_per_node == ("4" if arguments else "8")
    assert launched.torchrun.nnodes == "1:1"
    assert launched.torchrun.training_script == "train.py"
    assert launched.torchrun.training_script_args == ["configs/my.yaml", "--seed=2"]
    assert launched.environment["ACCELERATE_MIXED_PRECISION"] == ("no" if arguments else "bf16")
    assert "ACCELERATE_USE_FSDP" not in launched.environment


@pytest.mark.parametrize("rank", [0, 1])
def test_two_nodes_are_eight_processes_on_each(launch, rank) -> None:
    launched = launch("two_nodes", "--main_process_ip", "first.example", "--machine_rank", str(rank))
    torchrun = launched.torchrun
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.node_rank) == ("2", "8", rank)
    assert (torchrun.rdzv_backend, torchrun.rdzv_endpoint) == ("static", "first.example:29500")
    assert launched.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_fsdp2_shards_the_layers(launch, monkeypatch) -> None:
    """From the launcher's environment, Accelerate's plugin in the process reads version, layers and kind of state."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    launched = launch("fsdp2")
    assert launched.torchrun.nproc_per_node == "8"
    assert launched.environment["ACCELERATE_USE_FSDP"] == "true"
    assert launched.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    for name, value in launched.environment.items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    plugin.set_auto_wrap_policy(tied_model())
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert sorted(layer.__name__ for layer in wrapped) == LAYERS


@pytest.mark.process
def test_two_launchers_train_one_model(tmp_path) -> None:
    """
    The command of two_nodes.yaml, given twice on one machine without a GPU, with a process for each: `accelerate
    launch` passes the settings of a file to `torchrun`'s agents, which meet, and to `train.py`.
    """
    recipe = [*tiny_recipe(tmp_path, max_steps=1, average_last=1), "--run_dir", str(tmp_path / "run")]
    node = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES["two_nodes"])]
    node += ["--num_processes=2", "--main_process_ip=127.0.0.1", f"--main_process_port={free_port()}"]
    # Only on a machine without GPUs would it be the CPU by itself.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    nodes = [
        subprocess.Popen(
            [*node, "--mixed_precision=no", f"--machine_rank={rank}", str(ROOT / "train.py"), *recipe],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in nodes]
    finally:
        for process in nodes:
            process.kill()
    assert [process.returncode for process in nodes] == [0, 0], said
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2
    states = {path.name for path in (tmp_path / "run" / "checkpoint-1").glob("random_states_*")}
    assert states == {"random_states_0.pkl", "random_states_1.pkl"}
