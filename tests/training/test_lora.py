"""Low-rank adapters: trained, saved in PEFT's format, resumed, merged, averaged and published."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.averaging import average_checkpoints, load_weights
from hf_vaswani.cli import main
from hf_vaswani.hub.publishing import read_candidate
from hf_vaswani.recipe import AdapterRecipe, HubRecipe
from hf_vaswani.training.transfer import attach_adapters, target_modules
from hf_vaswani.translation.loading import load_model

from ..conftest import tiny_recipe
from ..networks import tiny_model, with_labels

ADAPTER = "{rank: 2, alpha: 8, dropout: 0.1}"


def adapt(tiny_run: Path, folder: Path, run: Path, *arguments: str, **training: object) -> int:
    """Trains adapters on the model of a finished run."""
    training = {"adapter": ADAPTER, "schedule": "constant", "peak_learning_rate": 0.01} | training
    recipe = tiny_recipe(folder, scored=True, **training)
    return main(["train", *recipe, f"--initialize.from={tiny_run / 'model'}", *arguments, "--run_dir", str(run)])


@pytest.fixture(scope="module")
def adapted(tiny_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    assert adapt(tiny_run, folder, folder / "run") == 0
    return folder / "run"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**with_labels()).logits


def test_a_checkpoint_is_an_adapter_of_peft(adapted) -> None:
    checkpoint = adapted / "checkpoint-12"
    assert not (checkpoint / "model.safetensors").exists()
    base = AutoModelForSeq2SeqLM.from_pretrained(adapted / "start")
    before = logits(base)
    oracle = logits(peft.PeftModel.from_pretrained(base, checkpoint))
    assert (oracle - before).abs().max() > 1e-3
    torch.testing.assert_close(logits(load_model(checkpoint)), oracle, atol=1e-5, rtol=1e-5)


def test_only_the_adapters_are_trained(adapted) -> None:
    start, end = load_file(adapted / "start" / "model.safetensors"), load_weights(adapted / "checkpoint-12")
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if ".layers." in name and name.endswith("weight") and "norm" not in name}


def test_the_published_model_is_plain_and_the_mean_of_merged_weights(adapted) -> None:
    checkpoints = [adapted / "checkpoint-8", adapted / "checkpoint-12"]
    published = load_file(adapted / "model" / "model.safetensors")
    for name, weight in average_checkpoints(checkpoints).items():
        assert torch.equal(published[name], weight)
    merged = []
    for checkpoint in checkpoints:
        base = AutoModelForSeq2SeqLM.from_pretrained(adapted / "start")
        merged.append(peft.PeftModel.from_pretrained(base, checkpoint).merge_and_unload().state_dict())
    for name, weight in published.items():
        torch.testing.assert_close(weight, (merged[0][name] + merged[1][name]) / 2, atol=1e-6, rtol=1e-5)


def test_a_resumed_training_is_the_same_bit_for_bit(adapted, tiny_run, tmp_path) -> None:
    run = tmp_path / "run"
    assert adapt(tiny_run, tmp_path, run, max_steps=5, save_every=1, keep_last=20) == 0
    # The recipe of the whole run saves every 4 updates; what is saved is no part of what is trained.
    assert adapt(tiny_run, tmp_path, run, max_steps=12, save_every=1, keep_last=20) == 0
    for step in (8, 12):
        one, other = (load_file(each / f"checkpoint-{step}" / "adapter_model.safetensors") for each in (adapted, run))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    one, other = (load_file(each / "start" / "model.safetensors") for each in (adapted, run))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_translates_from_the_command_line(adapted, tmp_path) -> None:
    source = tmp_path / "source"
    source.write_text("one two\nthree\n", encoding="utf-8")
    load_model(adapted / "checkpoint-12").save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(adapted / "checkpoint-12").save_pretrained(tmp_path / "merged")
    outputs = []
    for model in (adapted / "checkpoint-12", tmp_path / "merged"):
        output = tmp_path / f"{model.name}.txt"
        assert main(["translate", "--model", str(model), "--output", str(output), str(source)]) == 0
        outputs.append(output.read_text("utf-8"))
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 2
    data = ["--data", str(source), str(source), "--output", str(tmp_path / "evaluated.txt")]
    assert main(["evaluate", "--model", str(adapted / "checkpoint-12"), *data]) == 0
    assert (tmp_path / "evaluated.txt").read_text("utf-8") == outputs[0]


@pytest.mark.parametrize("way", ["missing", "changed"])
def test_adapters_without_their_model_are_refused(adapted, tiny_run, tmp_path, way) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    assert load_model(run / "checkpoint-12") is not None
    if way == "missing":
        shutil.rmtree(run / "start")
    else:
        tiny_model(seed=3).save_pretrained(run / "start")
    for load in (load_model, load_weights):
        with pytest.raises(ValueError, match=str(run / "start")):
            load(run / "checkpoint-12")
    assert adapt(tiny_run, tmp_path, run, max_steps=16) == 2


def test_an_average_is_a_plain_model(adapted, tmp_path) -> None:
    folders = [str(adapted / f"checkpoint-{step}") for step in (8, 12)]
    assert main(["average", *folders, "--output", str(tmp_path / "mean")]) == 0
    assert not (tmp_path / "mean" / "adapter_config.json").exists()
    torch.testing.assert_close(logits(load_model(tmp_path / "mean")), logits(load_model(adapted / "model")))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_adapters_take_part_in_loss_gradient_and_search(tmp_path, implementation) -> None:
    model = tiny_model()
    model.set_attn_implementation(implementation)
    inputs = with_labels()
    before = model.eval()(**inputs, loss_only=True).loss.item()
    adapters = attach_adapters(model, AdapterRecipe(rank=2), tmp_path / "start")
    assert model.eval()(**inputs, loss_only=True).loss.item() == pytest.approx(before)
    torch.manual_seed(1)
    factors = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert factors and all("lora_" in name for name in factors)
    for each in factors.values():
        torch.nn.init.normal_(each, std=0.3)
    loss = model(**inputs, loss_only=True).loss
    assert abs(loss.item() - before) > 1e-3
    loss.backward()
    assert all(each.grad is not None and each.grad.abs().max() > 0 for each in factors.values())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**inputs, loss_only=True).loss.item() == pytest.approx(loss.item(), abs=0.05)
    search = {"num_beams": 2, "max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    source = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    found = model.generate(**source, **search)
    plain = adapters.merge_and_unload()
    assert plain is model
    torch.testing.assert_close(plain(**inputs, loss_only=True).loss, loss, atol=1e-5, rtol=1e-5)
    again = plain.generate(**source, **search)
    assert torch.equal(found.sequences, again.sequences)
    torch.testing.assert_close(found.sequences_scores, again.sequences_scores, atol=1e-5, rtol=1e-5)


def test_targets_are_sublayers_or_single_modules() -> None:
    model = tiny_model()
    assert target_modules(model, ["feed_forward"]) == ["fc1", "fc2"]
    assert target_modules(model, ["cross_attn.q_proj", "fc1"]) == ["cross_attn.q_proj", "fc1"]
    for word in ("fc3", "proj", "lm_head"):
        with pytest.raises(ValueError, match=f"'{word}', but the model has only attention, feed_forward, q_proj"):
            target_modules(model, [word])
    with pytest.raises(ValueError, match="is empty"):
        target_modules(model, [])


def test_a_wrong_target_leaves_no_run(tiny_run, tmp_path, capsys) -> None:
    adapter = "{rank: 2, alpha: 8, dropout: 0.1, target: [fc3]}"
    assert adapt(tiny_run, tmp_path, tmp_path / "run", adapter=adapter) == 2
    assert "training.adapter.target has 'fc3'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.variants(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_learns(tiny_run, tmp_path, checkpointing, capsys) -> None:
    assert adapt(tiny_run, tmp_path, tmp_path / "run", max_steps=4, gradient_checkpointing=checkpointing) == 0
    factors = load_file(tmp_path / "run" / "checkpoint-4" / "adapter_model.safetensors")
    # B begins as zero.
    assert all(weight.abs().max() > 0 for weight in factors.values())
    assert sum("lora_B" in name for name in factors) == 4 + 2 + 4 + 4 + 2
    trained = sum(weight.numel() for weight in factors.values())
    assert f"parameters ({trained:,} of them trained), 1 process on" in capsys.readouterr().err


def test_a_checkpoint_of_adapters_is_not_published(adapted) -> None:
    with pytest.raises(ValueError, match="it has only adapters"):
        read_candidate(adapted, adapted / "checkpoint-12", HubRecipe(repo_id="me/model", min_bleu=0.0))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_lost_file_is_named(adapted, tmp_path, name) -> None:
    shutil.copytree(adapted, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-12" / name).unlink()
    with pytest.raises(ValueError, match=name):
        average_checkpoints([tmp_path / "run" / "checkpoint-12"])
    with pytest.raises(ValueError, match="checkpoint-12"):
        load_model(tmp_path / "run" / "checkpoint-12")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.freeze", "[encoder]"),
        ("training.optimizer", "muon"),
        ("training.ema_decay", "0.9"),
        ("initialize.vocabulary", "transfer"),
        ("initialize.add_tokens", '["<2fr>"]'),
        ("initialize.parts", "[encoder]"),
    ],
)
def test_keys_without_a_meaning_for_adapters_are_refused(tiny_run, tmp_path, capsys, key, value) -> None:
    assert adapt(tiny_run, tmp_path, tmp_path / "run", f"--{key}={value}") == 2
    assert f"training.adapter excludes {key}" in capsys.readouterr().err


def test_adapters_need_a_model(tmp_path, capsys) -> None:
    assert main(["train", *tiny_recipe(tmp_path, adapter=ADAPTER), "--run_dir", str(tmp_path / "run")]) == 2
    assert "training.adapter requires initialize.from" in capsys.readouterr().err


def test_without_peft_the_extra_is_named(tiny_run, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    assert adapt(tiny_run, tmp_path, tmp_path / "run") != 0
    assert "pip install 'hf_vaswani[adapt]'" in capsys.readouterr().err


def test_a_record_names_the_files_of_the_model(adapted) -> None:
    record = json.loads((adapted / "checkpoint-12" / "progress.json").read_text("utf-8"))
    assert "model.safetensors" in record["start"]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= record["files"].keys()
