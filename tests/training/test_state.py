"""The state of a training: what the recipe builds, and what a checkpoint holds and gives back."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hf_vaswani.cli import main
from hf_vaswani.training.state import TrainState

from ..conftest import tiny_recipe, write_pairs
from .runs import HALF, train, validations, weights


def test_a_checkpoint_is_a_model_by_itself(tiny_run) -> None:
    """It loads as it is, with its tied weights, its search and its tokenizer."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = tiny_run / "checkpoint-8"
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights(folder).items())
    assert model.generation_config.num_beams == 2
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size


def test_a_model_knows_the_longest_sentence_that_it_has_seen(tiny_run, tmp_path) -> None:
    from transformers import AutoTokenizer

    source, _ = write_pairs(tmp_path)
    longest = max(
        map(len, AutoTokenizer.from_pretrained(tiny_run / "model")(source.read_text().splitlines()).input_ids)
    )
    configs = [json.loads((tiny_run / name / "config.json").read_text()) for name in ("checkpoint-8", "model")]
    assert [config["longest_sentence"] for config in configs] == [longest, longest]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"processes": 2}, "written with processes 2, but this launch has processes 1."),
        ({"mixed_precision": "bf16"}, "written with mixed_precision bf16, but this launch has mixed_precision no."),
        ({"processes": 4, "fsdp": True}, "with processes 4, fsdp True, but this launch has processes 1, fsdp False."),
    ],
)
def test_a_run_goes_on_as_it_was_started(half_run, run, capsys, changed, words) -> None:
    path = run / "checkpoint-8" / "progress.json"
    progress = json.loads(path.read_text())
    assert progress["launch"] == {"processes": 1, "mixed_precision": "no", "fsdp": False}
    path.write_text(json.dumps(progress | {"launch": progress["launch"] | changed}))
    assert train(half_run.parent, run, max_steps=12, **HALF) == 2
    assert words in capsys.readouterr().err


def test_a_moving_average_is_validated_averaged_and_resumed(tmp_path) -> None:
    """Recomputed from the checkpoints of every update: average = 0.75 * average + 0.25 * weights."""
    run, switches = tmp_path / "run", {"save_every": 1, "keep_last": 8, "ema_decay": 0.75, "average_last": 1}
    assert train(tmp_path, run, max_steps=5, **switches) == 0
    assert train(tmp_path, run, max_steps=8, **switches) == 0
    expected = weights(run / "checkpoint-1")
    for step in range(2, 9):
        now = weights(run / f"checkpoint-{step}")
        expected = {name: 0.75 * expected[name] + 0.25 * now[name] for name in now}
    kept = load_file(run / "checkpoint-8" / "ema.safetensors")
    published = load_file(run / "model" / "model.safetensors")
    assert set(kept) == set(expected) == set(published)
    for name in kept:
        torch.testing.assert_close(kept[name], expected[name], atol=1e-6, rtol=0)
        assert torch.equal(published[name], kept[name])
    # With a decay of nearly 1 the average stays at the first update's weights, and so does the validation.
    frozen = tmp_path / "frozen"
    switches |= {"max_steps": 8, "validate_every": 4, "ema_decay": 1 - 1e-12}
    assert train(tmp_path, frozen, scored=True, **switches) == 0
    losses = [line["loss"] for line in validations(frozen)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_the_settings_of_the_search_reach_the_model(tmp_path) -> None:
    settings = ["--evaluation.length_penalty_type=power", "--evaluation.length_penalty=1.5"]
    settings += ["--evaluation.max_length=null", "--evaluation.max_length_offset=3"]
    settings += ["--evaluation.finish_candidates=top", "--evaluation.early_stopping=true"]
    arguments = [*tiny_recipe(tmp_path, scored=True, max_steps=1), *settings]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 0
    generation = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert (generation["length_penalty_type"], generation["length_penalty"]) == ("power", 1.5)
    assert generation["max_length_offset"] == 3 and "max_length" not in generation
    assert (generation["finish_candidates"], generation["early_stopping"]) == ("top", True)
    assert main(["train", *arguments, "--evaluation.num_beams=1", "--run_dir", str(tmp_path / "greedy")]) == 0
    assert "length_penalty" not in json.loads((tmp_path / "greedy/model/generation_config.json").read_text())


def test_a_checkpoint_gets_its_name_when_every_process_has_written(tmp_path, monkeypatch) -> None:
    """Nobody writes before the folder is made, nobody goes on before it has its name."""
    from accelerate import Accelerator

    events: list[str] = []

    def noted(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (events.append(event(a)), function(*a, **k))[1])

    noted(Accelerator, "wait_for_everyone", lambda _: "wait")
    noted(Accelerator, "save_state", lambda _: "save")
    for name in ("mkdir", "rename"):
        noted(Path, name, lambda a, name=name: name if a[0].name == ".checkpoint-1.writing" else "")
    assert main(["train", *tiny_recipe(tmp_path, max_steps=1), "--run_dir", str(tmp_path / "run")]) == 0
    start = events.index("mkdir")
    assert [event for event in events[start:] if event][:6] == ["mkdir", "wait", "save", "wait", "rename", "wait"]


@pytest.mark.parametrize(("symbol", "start"), [("bos", 1), ("eos", 2), ("pad", 0)])
def test_the_first_symbol_of_the_target_is_the_recipes(tmp_path, symbol, start) -> None:
    arguments = [*tiny_recipe(tmp_path, max_steps=1), f"--tokenizer.decoder_start={symbol}"]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["decoder_start_token_id"] == start


def test_the_model_to_validate_is_the_average_else_the_whole_weights_else_the_model() -> None:
    model, unsharded = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    average = SimpleNamespace(module=torch.nn.Linear(2, 2))

    def state(unsharded, ema):
        return TrainState(model, model, unsharded, ema, None, None, 0, {})

    assert state(None, average).eval_model() is average.module
    assert state(None, None).eval_model() is model
    assert state(unsharded, None).eval_model() is unsharded
    assert torch.equal(unsharded.weight, model.weight)


def test_the_time_of_earlier_processes_counts() -> None:
    model = torch.nn.Linear(2, 2)
    state = TrainState(model, model, None, None, None, None, 0, {}, seconds_before=100.0)
    assert 100 <= state.seconds < 160
