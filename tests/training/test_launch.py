"""Several processes, GPUs, machines: what `accelerate launch` makes of configs/accelerate."""

import json
import os
import subprocess
import sys

import pytest

from ..children import free_port
from ..conftest import ROOT, tiny_recipe
from ..networks import tiny_model
from .conftest import FILES

TWO_NODES = ["--main_process_ip", "first.example", "--machine_rank", "1"]
STATIC = {"nnodes": "2", "node_rank": 1, "rdzv_backend": "static", "rdzv_endpoint": "first.example:29500"}


@pytest.mark.parametrize(
    ("name", "kind", "arguments", "torchrun", "precision"),
    [
        ("single_gpu", "NO", ["--gpu_ids", "3"], None, "bf16"),
        ("ddp_8_gpus", "MULTI_GPU", [], {"nproc_per_node": "8", "nnodes": "1:1"}, "bf16"),
        ("ddp_8_gpus", "MULTI_GPU", ["--num_processes=4", "--mixed_precision=no"], {"nproc_per_node": "4"}, "no"),
        ("two_nodes", "MULTI_GPU", TWO_NODES, STATIC | {"nproc_per_node": "8"}, "bf16"),
        ("fsdp2", "FSDP", [], {"nproc_per_node": "8"}, "bf16"),
    ],
)
def test_accelerate_starts_what_each_file_says(launch, name, kind, arguments, torchrun, precision) -> None:
    """Its own loader refuses keys that it does not know."""
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(FILES[name])).distributed_type.value == kind
    launched = launch(name, *arguments)
    assert launched.environment["ACCELERATE_MIXED_PRECISION"] == precision
    assert ("ACCELERATE_USE_FSDP" in launched.environment) == (kind == "FSDP")
    if torchrun is None:
        assert launched.torchrun is None and launched.environment["CUDA_VISIBLE_DEVICES"] == "3"
        assert launched.command == [sys.executable, "train.py", "configs/my.yaml", "--seed=2"]
    else:
        assert torchrun.items() <= vars(launched.torchrun).items()
        assert launched.torchrun.training_script == "train.py"
        assert launched.torchrun.training_script_args == ["configs/my.yaml", "--seed=2"]


def test_no_file_is_left_out() -> None:
    assert set(FILES) == {"single_gpu", "ddp_8_gpus", "two_nodes", "fsdp2"}


def test_fsdp2_shards_the_layers(launch, monkeypatch) -> None:
    """From the launcher's environment, Accelerate's plugin in the process reads version, layers and kind of state."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    for name, value in launch("fsdp2").environment.items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    plugin.set_auto_wrap_policy(tiny_model())
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert sorted(layer.__name__ for layer in wrapped) == ["VaswaniDecoderLayer", "VaswaniEncoderLayer"]


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
