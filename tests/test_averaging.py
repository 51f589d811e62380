"""The mean of checkpoints is the mean, nothing that was damaged goes into it, and weights are loaded by name."""

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vaswani.averaging import average_checkpoints, load_stored, load_weights, save_average
from hf_vaswani.files import digest

from .conftest import ROOT
from .networks import tiny_model
from .test_run_folder import checkpoint, seal


def test_the_average_is_the_mean(tmp_path) -> None:
    folders = [checkpoint(tmp_path, step) for step in (1, 2, 6)]
    assert average_checkpoints(folders)["w"].tolist() == [3, 3]
    assert average_checkpoints(folders)["w"].dtype == torch.float32
    assert average_checkpoints(folders[:1])["w"].tolist() == [1, 1]


def test_what_cannot_be_averaged_is_named(tmp_path) -> None:
    one, two = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    save_file({"w": torch.zeros(3)}, two / "model.safetensors")
    seal(two, 2)
    with pytest.raises(ValueError, match=r"w has the shape \(3,\).*\(2,\)"):
        average_checkpoints([one, two])
    save_file({"v": torch.zeros(2)}, two / "model.safetensors")
    seal(two, 2)
    with pytest.raises(ValueError, match="same weights: v"):
        average_checkpoints([one, two])
    with pytest.raises(ValueError, match="no checkpoint"):
        average_checkpoints([])


def test_models_of_different_vocabularies_are_not_averaged(tmp_path) -> None:
    folders = [checkpoint(tmp_path, step) for step in (1, 2, 3)]
    for folder, vocabulary, truncation in zip(folders, ("ab", "ab", "ba"), (None, 9, None), strict=True):
        content = {"truncation": truncation, "added_tokens": [], "model": {"vocab": list(vocabulary)}}
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        seal(folder, 1)
    save_average(folders[:2], tmp_path / "mean")
    with pytest.raises(ValueError, match="checkpoint-3 and .*checkpoint-1 have different vocabularies"):
        save_average(folders, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_weights_are_averaged_in_float64_and_keep_their_type(tmp_path) -> None:
    """In float16 the sum of the first two is already infinite."""
    folders = [checkpoint(tmp_path, step) for step in (1, 2, 3)]
    for folder, value in zip(folders, (60_000.0, 60_000.0, 3.0), strict=True):
        save_file({"w": torch.tensor([value], dtype=torch.float16)}, folder / "model.safetensors")
        (folder / "progress.json").unlink()
    mean = average_checkpoints(folders)["w"]
    assert mean.dtype == torch.float16 and mean.item() == torch.tensor(120_003 / 3, dtype=torch.float16).item()


def test_the_moving_average_stands_for_a_checkpoint_that_has_one(tmp_path) -> None:
    one, two = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    save_file({"w": torch.full((2,), 5.0)}, two / "ema.safetensors")
    seal(two, 2)
    assert average_checkpoints([one, two])["w"].tolist() == [3, 3]
    # One that was lost is not replaced by the weights behind it.
    (two / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="ema.safetensors is missing"):
        average_checkpoints([one, two])
    with pytest.raises(ValueError, match="ema.safetensors cannot be read"):
        load_weights(two)


def test_the_mean_is_saved_as_a_model_without_the_state_of_the_training(tmp_path) -> None:
    folders = [checkpoint(tmp_path, step) for step in (1, 3)]
    for folder, width in zip(folders, (8, 16), strict=True):
        (folder / "config.json").write_text(json.dumps({"d_model": width}))
        (folder / "optimizer.bin").write_bytes(b"state")
        seal(folder, width)
    save_average(folders, tmp_path / "mean")
    assert {path.name for path in (tmp_path / "mean").iterdir()} == {"config.json", "model.safetensors"}
    assert load_file(tmp_path / "mean" / "model.safetensors")["w"].tolist() == [2, 2]
    assert json.loads((tmp_path / "mean" / "config.json").read_text()) == {"d_model": 16}
    with pytest.raises(ValueError, match="mean exists already"):
        save_average(folders, tmp_path / "mean")


def test_the_model_of_a_run_is_averaged_only_as_it_was_scored(tmp_path) -> None:
    model: Path = checkpoint(tmp_path / "run", 1, complete=False).rename(tmp_path / "run" / "model")
    (tmp_path / "run" / "recipe.yaml").write_text("")
    result = {"step": 1, "averaged": [], "files": {"model.safetensors": digest(model / "model.safetensors")}}
    (tmp_path / "run" / "test.json").write_text(json.dumps(result))
    assert average_checkpoints([model])["w"].tolist() == [1, 1]
    save_file({"w": torch.zeros(2)}, model / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors was changed or damaged"):
        average_checkpoints([model])


# ---- Loading by name ---------------------------------------------------------------------------------------------

FC1 = "model.decoder.layers.0.feed_forward.fc1.weight"
SOURCE, TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


def test_weights_are_loaded_in_one_place_if_names_may_be_missing() -> None:
    for path in (ROOT / "hf_vaswani").rglob("*.py"):
        code = path.read_text("utf-8")
        for node in ast.walk(ast.parse(code)) if "load_state_dict" in code else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load_state_dict":
                is_strict = not any(keyword.arg == "strict" for keyword in node.keywords)
                assert is_strict or path.name == "averaging.py", (path, node.lineno)


def test_weights_are_loaded_by_name_or_not_at_all() -> None:
    model, stored = tiny_model(0), dict(tiny_model(1).state_dict())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    cases = {
        f"1 missing .first: {FC1}.*, 1 unexpected .first: {FC1.replace('fc1', 'fc_1')}": {
            name.replace(FC1, FC1.replace("fc1", "fc_1")): weight for name, weight in stored.items()
        },
        f"1 missing .first: {FC1}": {name: weight for name, weight in stored.items() if name != FC1},
        "1 unexpected .first: extra": stored | {"extra": torch.ones(1)},
        "3 missing .first: lm_head": {
            name: stored[name] for name in stored if "embed" not in name and "lm" not in name
        },
    }
    for message, weights in cases.items():
        with pytest.raises(ValueError, match=f"Weights do not fit to the VaswaniForConditionalGeneration: {message}"):
            load_stored(model, weights)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    # One matrix, whichever of its names is there.
    for name in (SOURCE, TARGET, "lm_head.weight"):
        other = tiny_model(0)
        load_stored(
            other, {key: stored[key] for key in stored if ("embed" not in key and "lm" not in key) or key == name}
        )
        assert all(torch.equal(weight, stored[key]) for key, weight in other.state_dict().items())
    load_stored(model, {FC1: stored[FC1]}, is_new=lambda name: name != FC1)
    assert torch.equal(model.get_parameter(FC1), stored[FC1]) and torch.equal(model.lm_head.weight, before[SOURCE])
