"""Checkpoints of low-rank adapters, merged into the model beside them."""

import json
from pathlib import Path

import peft
import pytest
import torch

from hf_vaswani.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_folder, has_adapter, merged_weights
from hf_vaswani.run_folder import digests

from .networks import tiny_model


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """An adapter as PEFT saves it, with the record of a checkpoint, beside its model."""
    start, checkpoint = tmp_path / "start", tmp_path / "checkpoint-1"
    model = tiny_model()
    model.save_pretrained(start)
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "fc2"], init_lora_weights=False)
    adapters = peft.get_peft_model(model, settings)
    settings.base_model_name_or_path = "elsewhere/start"
    adapters.save_pretrained(checkpoint)
    record = {"start": digests(start), "files": digests(checkpoint)}
    (checkpoint / "progress.json").write_text(json.dumps(record), encoding="utf-8")
    return checkpoint


def test_weights_are_merged_as_peft_merges_them(checkpoint) -> None:
    assert has_adapter(checkpoint) and not has_adapter(checkpoint.parent / "start")
    oracle = peft.PeftModel.from_pretrained(tiny_model(), checkpoint).merge_and_unload().state_dict()
    start = tiny_model().state_dict()
    merged = merged_weights(checkpoint)
    for name, weight in merged.items():
        torch.testing.assert_close(weight, oracle[name], atol=1e-6, rtol=1e-6)
        assert torch.equal(weight, start[name]) is not name.endswith(("q_proj.weight", "fc2.weight"))


def test_a_run_folder_may_be_moved(checkpoint, tmp_path) -> None:
    moved = checkpoint.parent.rename(tmp_path.parent / f"{tmp_path.name}-moved")
    assert base_folder(moved / checkpoint.name) == moved / "start"


@pytest.mark.parametrize("name", [ADAPTER_WEIGHTS, ADAPTER_CONFIG, "../start/model.safetensors"])
def test_a_changed_or_lost_file_is_named(checkpoint, name) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if name != ADAPTER_CONFIG else content + b" ")
    with pytest.raises(ValueError, match=f"{path.name} was changed"):
        merged_weights(checkpoint)
    path.unlink()
    with pytest.raises((ValueError, OSError), match=path.name):
        merged_weights(checkpoint)
