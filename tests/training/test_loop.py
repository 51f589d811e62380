"""A run: its folder, going on after a stop, exact updates, and what it refuses."""

import importlib.metadata
import json
import math
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.cli import main
from hf_vaswani.interruption import Interruption
from hf_vaswani.metrics import score
from hf_vaswani.model import modeling_vaswani, precision_vaswani
from hf_vaswani.model.shortlist_vaswani import FILE as SHORTLIST
from hf_vaswani.recipe import TrainingRecipe
from hf_vaswani.training import loop
from hf_vaswani.training.optimization import noam

from ..conftest import ROOT, tiny_recipe, write_pairs


def train(folder: Path, run: Path, **training: object) -> int:
    return main(["train", *tiny_recipe(folder, **training), "--run_dir", str(run)])


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def test_a_run_folder_is_complete(tiny_run) -> None:
    names = {path.name for path in tiny_run.iterdir()}
    assert names == {
        "recipe.yaml", "environment.json", "tokenizer",
        "checkpoint-4", "checkpoint-8", "checkpoint-12",
        "validations.jsonl", "model", "test.json", "test_translations.txt",
    }  # fmt: skip
    model = {path.name for path in (tiny_run / "model").iterdir()}
    assert model >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    generation = json.loads((tiny_run / "model" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["max_length"], generation["length_penalty"]) == (2, 12, 0.8)
    environment = json.loads((tiny_run / "environment.json").read_text())
    # The version of the distribution: `torch.__version__` may also name the build.
    assert environment["packages"]["torch"] == importlib.metadata.version("torch")
    result = json.loads((tiny_run / "test.json").read_text())
    assert result["averaged"] == ["checkpoint-8", "checkpoint-12"]
    assert all(signature.startswith("nrefs:1|") for signature in result["signatures"].values())
    assert result["signatures"].keys() == {"bleu", "chrf", "ter"} <= result.keys()
    assert len(result["samples"]) == 5
    translations = (tiny_run / "test_translations.txt").read_text("utf-8").splitlines()
    assert len(translations) == 120
    assert translations[0] == result["samples"][0]["translation"]
    (validation,) = [json.loads(line) for line in (tiny_run / "validations.jsonl").read_text().splitlines()]
    assert validation["step"] == 12
    assert validation["best"] is True


def test_the_model_is_the_average_of_the_last_checkpoints(tiny_run) -> None:
    first, second, final = (weights(tiny_run / name) for name in ("checkpoint-8", "checkpoint-12", "model"))
    for name, weight in final.items():
        if name in first:
            torch.testing.assert_close(weight, (first[name] + second[name]) / 2)
    assert len(set(final) & set(first)) >= len(final) - 1


def test_stop_and_resume_equals_uninterrupted_bit_for_bit(tiny_run, tmp_path, capsys) -> None:
    folder = tiny_run.parent
    run = tmp_path / "run"
    assert train(folder, run, max_steps=8) == 0
    (run / "model" / SHORTLIST).write_text("{}")
    assert train(folder, run, max_steps=12) == 0
    # It was made from the same text and vocabulary, and is no part of what was scored.
    assert (run / "model" / SHORTLIST).read_text() == "{}"
    assert SHORTLIST not in json.loads((run / "test.json").read_text())["files"]
    ours, theirs = weights(run / "checkpoint-12"), weights(tiny_run / "checkpoint-12")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    results = [json.loads((path / "test.json").read_text()) for path in (run, tiny_run)]
    assert results[0]["bleu"] == results[1]["bleu"]


@pytest.mark.parametrize(
    "switches",
    [{"schedule": "cosine"}, {"schedule": "inverse_sqrt"}, {"schedule": "cosine", "optimizer": "muon"}],
    ids=lambda switches: "-".join(switches.values()),
)
def test_every_switch_resumes_bit_for_bit(tmp_path, switches) -> None:
    """AdamW, Muon, transformers' schedules, smoothing over all, characters: the update after a stop is the same."""
    run = tmp_path / "run"
    arguments = [
        *tiny_recipe(tmp_path, **switches, peak_learning_rate=0.01, weight_decay=0.1, max_steps=8),
        "--training.label_smoothing_over=all",
        "--tokenizer.kind=characters",
        "--run_dir",
        str(run),
    ]
    assert main(["train", *arguments]) == 0
    uninterrupted = weights(run / "checkpoint-8")
    for folder in ("checkpoint-8", "model"):
        shutil.rmtree(run / folder)
    assert main(["train", *arguments]) == 0
    again = weights(run / "checkpoint-8")
    assert all(torch.equal(again[name], uninterrupted[name]) for name in again)


def test_each_switch_of_the_training_reaches_it(tiny_run, tmp_path, monkeypatch) -> None:
    """The recipe's numbers, where the optimizer and the schedule are made."""
    from hf_vaswani.training import loop as training

    seen = {}

    def stop(run, state, *_):
        optimizer, schedule = state.optimizer.optimizer, state.schedule.scheduler
        seen.update(optimizer=optimizer, schedule=schedule, tokenizer=run.tokenizer, model=state.model)
        raise ValueError("Enough is seen.")

    monkeypatch.setattr(training, "_train", stop)
    switches = {"schedule": "constant", "peak_learning_rate": 0.5, "warmup_steps": 2, "weight_decay": 0.125}
    arguments = [*tiny_recipe(tiny_run.parent, **switches), "--tokenizer.kind=bytes", "--run_dir", str(tmp_path / "r")]
    assert main(["train", *arguments]) == 2
    assert type(seen["optimizer"]) is torch.optim.AdamW
    assert [group["weight_decay"] for group in seen["optimizer"].param_groups] == [0.125, 0.0]
    assert seen["schedule"].get_last_lr() == [0.25, 0.25]
    assert len(seen["tokenizer"]) == 260
    arguments = tiny_recipe(tiny_run.parent, **switches, optimizer="muon")
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "muon")]) == 2
    parts = seen["optimizer"].parts
    assert [type(part) for part in parts] == [torch.optim.AdamW, torch.optim.Muon]
    assert [[group["weight_decay"] for group in part.param_groups] for part in parts] == [[0.125, 0.0], [0.125]]
    assert seen["schedule"].get_last_lr() == [0.25] * 3
    names = {id(weight): name for name, weight in seen["model"].named_parameters()}
    adam, muon = ([names[id(weight)] for group in part.param_groups for weight in group["params"]] for part in parts)
    # 4 of each attention and 2 of each feed-forward network; one embedding for all three uses.
    assert len(muon) == 6 + 10 and all(".layers.0." in name and name.endswith(".weight") for name in muon), muon
    assert sorted(muon + adam) == sorted(names.values())
    assert train(tiny_run.parent, tmp_path / "default") == 2
    assert type(seen["optimizer"]) is torch.optim.Adam
    assert len(seen["optimizer"].param_groups) == 1
    # Equation 3 at step 1, with d_model 16 and warmup_steps 10.
    assert seen["schedule"].get_last_lr() == pytest.approx([16**-0.5 * 10**-1.5])


@pytest.fixture
def steps(monkeypatch) -> list[dict[str, object]]:
    """What Adam had been told at each of its steps."""
    seen, step = [], torch.optim.Adam.step

    def spy(optimizer, *args, **kwargs):
        group = optimizer.param_groups[0]
        seen.append({name: group[name] for name in ("lr", "betas", "eps", "amsgrad")})
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    return seen


def test_each_update_has_the_learning_rate_of_its_step(tmp_path, steps) -> None:
    constants = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5}
    assert train(tmp_path, tmp_path / "noam", max_steps=12, learning_rate_factor=3, **constants) == 0
    assert [step["lr"] for step in steps] == pytest.approx([noam(n, 16, 10, 3) for n in range(1, 13)])
    assert all((step["betas"], step["eps"], step["amsgrad"]) == ((0.8, 0.9), 1e-5, False) for step in steps)


def test_a_cosine_ends_with_the_training(tmp_path, steps) -> None:
    arguments = {"schedule": "cosine", "peak_learning_rate": 0.01, "warmup_steps": 2, "max_steps": 6}
    assert train(tmp_path, tmp_path / "cosine", **arguments) == 0
    down = [0.01 * (1 + math.cos(math.pi * n / 5)) / 2 for n in range(5)]
    assert [step["lr"] for step in steps] == pytest.approx([0.005, *down])


def test_the_model_may_be_the_average_of_the_best_checkpoints(tmp_path, monkeypatch, capsys) -> None:
    """Those of the highest validation BLEU stay on disk, and are averaged."""
    from hf_vaswani.training import loop as training
    from hf_vaswani.training import validation

    bleu, score = iter([7.0, 1.0, 9.0, 3.0, 5.0]), validation.translate_and_score

    def scored(run, model, split, num_beams):
        translations, result = score(run, model, split, num_beams)
        return translations, result | ({"bleu": next(bleu)} if split == "validation" else {})

    for module in (training, validation):
        monkeypatch.setattr(module, "translate_and_score", scored)
    switches = {"max_steps": 10, "save_every": 2, "validate_every": 2, "keep_last": 1, "average_best": 2}
    run = tmp_path / "run"
    assert train(tmp_path, run, **switches) == 0
    result = json.loads((run / "test.json").read_text())
    assert (result["averaged"], result["step"]) == (["checkpoint-2", "checkpoint-6"], 10)
    assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 6, 10)}
    first, second, final = (weights(run / name) for name in ("checkpoint-2", "checkpoint-6", "model"))
    for name in set(first) & set(final):
        torch.testing.assert_close(final[name], (first[name] + second[name]) / 2)
    # Complete: nothing is trained or averaged again.
    before = (run / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(tmp_path, run, **switches) == 0
    assert (run / "model" / "model.safetensors").stat().st_mtime_ns == before
    blind = ["--data.validation_files=null", "--run_dir", str(tmp_path / "blind")]
    assert main(["train", *tiny_recipe(tmp_path, **switches), *blind]) == 2
    assert "average_best needs a validation set" in capsys.readouterr().err


def test_checkpoints_by_the_clock_are_kept_until_the_next_and_change_nothing(tmp_path, monkeypatch) -> None:
    saved, save_checkpoint = [], loop.save_checkpoint

    def save(run, state):
        saved.append(state.step)
        save_checkpoint(run, state)

    monkeypatch.setattr(loop, "save_checkpoint", save)
    switches = {"max_steps": 10, "save_every": 4, "keep_last": 2, "average_last": 2}
    assert train(tmp_path, tmp_path / "plain", **switches) == 0
    assert saved == [4, 8, 10]
    saved.clear()
    assert train(tmp_path, tmp_path / "often", **switches, save_every_minutes=1e-6) == 0
    assert saved == list(range(1, 11))
    for folder in ("plain", "often"):
        found = {path.name for path in (tmp_path / folder).glob("checkpoint-*")}
        assert found == {"checkpoint-8", "checkpoint-10"}
    first, second = (weights(tmp_path / folder / "model") for folder in ("plain", "often"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    saved.clear()
    assert train(tmp_path, tmp_path / "seldom", **switches, save_every_minutes=100) == 0
    assert saved == [4, 8, 10]


@pytest.mark.parametrize(("best_by", "end"), [("bleu", 8), ("loss", 10)])
def test_patience_ends_a_run_early(tmp_path, monkeypatch, best_by, end) -> None:
    """Two validations in a row without a new best; a complete run stays complete, and more patience goes on."""
    from hf_vaswani.training import validation

    bleu, loss = iter([1.0, 3.0, 2.0, 3.0, 9.0, 9.0]), iter([5.0, 4.0, 3.0, 6.0, 3.5, 1.0])
    score = validation.translate_and_score

    def scored(run, model, split, num_beams):
        translations, result = score(run, model, split, num_beams)
        return translations, result | ({"bleu": next(bleu)} if split == "validation" else {})

    monkeypatch.setattr(validation, "translate_and_score", scored)
    monkeypatch.setattr(validation, "totals", lambda *_: {"en-de": {"loss": (next(loss), 1)}})
    switches = {"max_steps": 40, "save_every": 2, "validate_every": 2, "best_by": best_by, "keep_best": 1}
    run = tmp_path / "run"
    assert train(tmp_path, run, patience=2, keep_last=1, average_last=1, **switches) == 0
    lines = [json.loads(line) for line in (run / "validations.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == end
    best = [line["step"] for line in lines if line["best"]]
    assert best == ([8] if best_by == "bleu" else [6])
    assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (*best, end)}
    before = (run / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(tmp_path, run, patience=2, keep_last=1, average_last=1, **switches) == 0
    assert (run / "model" / "model.safetensors").stat().st_mtime_ns == before
    switches["max_steps"] = end + 1
    assert train(tmp_path, run, patience=9, keep_last=1, average_last=1, **switches) == 0
    assert json.loads((run / "test.json").read_text())["step"] == end + 1


def test_gradient_checkpointing_computes_twice_and_changes_no_weight(tiny_run, tmp_path, monkeypatch) -> None:
    """Dropout included: the second pass draws the same."""
    from hf_vaswani.model.modeling_vaswani import VaswaniFeedForward

    calls, forward = 0, VaswaniFeedForward.forward

    def counted(self, hidden_states):
        nonlocal calls
        calls += self.training
        return forward(self, hidden_states)

    monkeypatch.setattr(VaswaniFeedForward, "forward", counted)
    assert train(tiny_run.parent, tmp_path / "run", gradient_checkpointing="true") == 0
    layers, updates = 2, 12
    assert calls == 2 * layers * updates
    ours, theirs = weights(tmp_path / "run" / "checkpoint-12"), weights(tiny_run / "checkpoint-12")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [[], ["--training.simcut.p=0.2"]])
def test_compiled_the_network_is_traced_once_for_all_lengths(
    tiny_run, tmp_path, monkeypatch, new_state, options
) -> None:
    """By dynamo without its code generator, which would take a minute here; a resumed run is not another one."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin
    from torch._dynamo.utils import counters

    monkeypatch.setattr(
        "accelerate.utils.TorchDynamoPlugin",
        lambda backend, dynamic: TorchDynamoPlugin(backend="eager", dynamic=dynamic),
    )
    torch._dynamo.reset()
    counters.clear()
    # Without dropout: compiled, it draws other numbers.
    arguments = [*tiny_recipe(tiny_run.parent), *options, "--model.dropout=0", "--run_dir"]
    assert main(["train", *arguments, str(tmp_path / "plain")]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    assert main(["train", *arguments, str(tmp_path / "run"), "--training.compile=true"]) == 0
    # A first batch that is special in some length, and all others.
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
    ours, theirs = (weights(tmp_path / name / "checkpoint-12") for name in ("run", "plain"))
    before = weights(tmp_path / "plain" / "checkpoint-4")
    assert set(ours) == set(theirs)
    for name in ours:
        # Rounding, which Adam multiplies, is far from what the last updates did.
        assert (ours[name] - theirs[name]).abs().max() < 0.02 * (theirs[name] - before[name]).abs().max(), name
    torch._dynamo.reset()


def test_bf16_trains_and_keeps_its_weights_in_fp32(tmp_path, new_state) -> None:
    run = tmp_path / "run"
    assert train(tmp_path, run, mixed_precision="bf16", max_steps=4) == 0
    assert json.loads((run / "environment.json").read_text())["mixed_precision"] == "bf16"
    assert {weight.dtype for weight in weights(run / "checkpoint-4").values()} == {torch.float32}


def test_auto_takes_bf16_where_it_is_faster_and_a_resumed_run_keeps_it(tmp_path, monkeypatch, caplog) -> None:
    from accelerate.state import AcceleratorState

    def precision(name: str, steps: int, speedup: float) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
        monkeypatch.setattr(precision_vaswani, "speedup_of_bfloat16", lambda work, device: speedup)
        assert train(tmp_path, tmp_path / name, mixed_precision="auto", max_steps=steps) == 0
        AcceleratorState._reset_state(reset_partial_state=True)
        return json.loads((tmp_path / name / "checkpoint-4" / "progress.json").read_text())["launch"][
            "mixed_precision"
        ]

    assert precision("fast", 4, 2.0) == "bf16" and precision("slow", 4, 0.5) == "no"
    assert caplog.text.count("training.mixed_precision auto is bf16, because bfloat16 is 2.00 times as fast") == 1
    # On another machine, it is the same run, without a measurement.
    caplog.clear()
    assert precision("fast", 8, 0.5) == "bf16" and precision("slow", 8, 2.0) == "no"
    assert "mixed_precision auto" not in caplog.text


def test_two_processes_agree_on_the_precision(tmp_path) -> None:
    by_torchrun(
        [*tiny_recipe(tmp_path, max_steps=4, mixed_precision="auto"), f"--run_dir={tmp_path / 'run'}"], tmp_path
    )
    launch = json.loads((tmp_path / "run" / "checkpoint-4" / "progress.json").read_text())["launch"]
    assert launch["processes"] == 2 and launch["mixed_precision"] in ("no", "bf16")


@pytest.mark.parametrize(("precision", "plain"), [("bf16", True), ("no", False)])
def test_bf16_on_a_cpu_attends_by_plain_products(tmp_path, monkeypatch, new_state, precision, plain) -> None:
    calls, attention = [], modeling_vaswani.eager_attention_forward

    def spy(module, *args, **kwargs):
        calls.append((module.training, torch.is_autocast_enabled("cpu")))
        return attention(module, *args, **kwargs)

    monkeypatch.setattr(modeling_vaswani, "eager_attention_forward", spy)
    assert train(tmp_path, tmp_path / "run", mixed_precision=precision, max_steps=1) == 0
    assert bool(calls) == plain
    assert {autocast for training, autocast in calls if training} == ({True} if plain else set())


@pytest.mark.parametrize("has_them", [False, True])
def test_bf16_on_a_cpu_without_instructions_for_it_is_reported(
    tmp_path, monkeypatch, capsys, new_state, has_them
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_them}, raising=False)
    assert train(tmp_path, tmp_path / "run", mixed_precision="bf16", max_steps=1) == 0
    assert ("no instructions for bfloat16" in "".join(capsys.readouterr())) != has_them


@pytest.mark.parametrize(
    ("switch", "fsdp", "words"),
    [
        ({"ema_decay": 0.9}, 2, "training.ema_decay is 0.9, but a moving average cannot be taken"),
        ({"optimizer": "muon"}, 2, "training.optimizer is 'muon', which needs whole matrices"),
        ({"adapter": "{rank: 2}"}, 2, "training.adapter does not work with FSDP"),
        ({}, 1, "launch it with fsdp_version: 2"),
    ],
)
def test_what_fsdp_cannot_do_is_refused_before_the_text_is_read(
    tmp_path, switch, fsdp, words, monkeypatch, capsys, new_state
) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    class Launched(Accelerator):
        sharded = False
        is_fsdp2 = fsdp == 2
        distributed_type = property(lambda self: DistributedType.FSDP if self.sharded else DistributedType.NO)

        def __init__(self, **keywords):
            super().__init__(**keywords)
            self.sharded = True

    monkeypatch.setattr("accelerate.Accelerator", Launched)
    start = ["--initialize.from=nowhere"] if "adapter" in switch else []
    assert main(["train", *tiny_recipe(tmp_path, **switch), *start, "--run_dir", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tracker_has_the_curves_and_the_recipe(tmp_path, monkeypatch, new_state) -> None:
    """By the name that Accelerate knows it by; here a tracker that only remembers."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

    logged: dict[str, dict[int, float]] = {}

    class Notebook(GeneralTracker):
        name = "notebook"
        requires_logging_directory = False
        tracker = None
        config: dict[str, str] = {}

        def __init__(self, run_name, **_):
            super().__init__()

        def store_init_configuration(self, values):
            Notebook.config = values

        def log(self, values, step, **_):
            for name, value in values.items():
                logged.setdefault(name, {})[step] = value

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    assert train(tmp_path, tmp_path / "run", max_steps=6, validate_every=3, log_every=2, trackers="[notebook]") == 0
    assert Notebook.config["training.max_steps"] == "6"
    lines = [json.loads(line) for line in (tmp_path / "run" / "validations.jsonl").read_text().splitlines()]
    assert logged["validation_bleu"] == {line["step"]: line["bleu"] for line in lines}
    assert logged["validation_loss"] == {line["step"]: line["loss"] for line in lines}
    assert list(logged["loss"]) == [2, 4, 6]
    assert logged["learning_rate"] == pytest.approx({n: noam(n, 16, 10) for n in (2, 4, 6)})
    assert all(norm > 0 for norm in logged["gradient_norm"].values())
    # Without a tracker, the same is in the run's folder.
    curve = [json.loads(line) for line in (tmp_path / "run" / "training.jsonl").read_text().splitlines()]
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert {line["step"]: line[name] for line in curve} == logged[name]


def test_a_seed_is_a_run(tiny_run, tmp_path) -> None:
    arguments = [*tiny_recipe(tiny_run.parent, max_steps=4), "--seed=2", "--training.cpu_threads=1"]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 0
    ours, theirs = weights(tmp_path / "run" / "checkpoint-4"), weights(tiny_run / "checkpoint-4")
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours if "q_proj" in name)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["cpu_threads"] == 1


def test_gradients_are_clipped_only_on_request() -> None:
    from accelerate import Accelerator

    from hf_vaswani.training.loop import _update

    moved = []
    for clip_norm in (None, 0.01):
        torch.manual_seed(0)
        config = VaswaniConfig(vocab_size=30, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1)
        model = VaswaniForConditionalGeneration(config).train()
        before = [p.detach().clone() for p in model.parameters()]
        ids = torch.arange(4, 10)[None]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        recipe = TrainingRecipe(clip_norm=clip_norm)
        _update(Accelerator(), model, torch.optim.SGD(model.parameters(), lr=1.0), [batch], recipe, Interruption())
        moved.append(
            sum((p - b).square().sum() for p, b in zip(model.parameters(), before, strict=True)).sqrt().item()
        )
    assert moved[0] > 0.1
    assert moved[1] == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(("over", "epsilon"), [("others", 0.25), ("all", 0.2)])
def test_who_shares_the_label_smoothing(over, epsilon) -> None:
    """Over all V tokens is torch's own label_smoothing; over the others, V / (V - 1) = 5 / 4 of it."""
    from accelerate import Accelerator

    from hf_vaswani.training.loop import _update

    torch.manual_seed(0)
    config = VaswaniConfig(
        vocab_size=5, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0
    )
    model = VaswaniForConditionalGeneration(config).train()
    ids = torch.tensor([[3, 4, 2]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    logits = model(**batch).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, ids[0], label_smoothing=epsilon)
    recipe = TrainingRecipe(label_smoothing=0.2, label_smoothing_over=over)
    update = _update(
        Accelerator(), model, torch.optim.SGD(model.parameters(), lr=1.0), [batch], recipe, Interruption()
    )
    assert update.loss == pytest.approx(expected.item())


def test_epsilon_over_all_tokens_by_hand() -> None:
    """V = 5, epsilon = 0.2: each of the five has 0.04, so the four others have 0.16."""
    from hf_vaswani.training.loop import _epsilon_without_target

    assert _epsilon_without_target(0.2, 5) == pytest.approx(0.16)


def test_a_complete_run_shows_its_result_again(tiny_run, capsys) -> None:
    before = (tiny_run / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(tiny_run.parent, tiny_run) == 0
    assert "Test BLEU" in capsys.readouterr().out
    assert (tiny_run / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_a_run_of_another_recipe_is_refused(tiny_run, capsys) -> None:
    assert train(tiny_run.parent, tiny_run, warmup_steps=3) == 2
    error = capsys.readouterr().err
    assert "training.warmup_steps is 10 there and 3 here" in error
    assert (tiny_run / "checkpoint-12").is_dir()


def test_a_run_of_a_version_without_an_option_is_one_without_the_option(tiny_run, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("model", "test.json"))
    for checkpoint in run.glob("checkpoint-*"):
        record = json.loads((checkpoint / "progress.json").read_text())
        del record["digest"], record["recipe"]["training.simcut"]
        (checkpoint / "progress.json").write_text(json.dumps(record))
    arguments = ["train", *tiny_recipe(tiny_run.parent), "--run_dir", str(run)]
    assert main([*arguments, "--training.simcut.p=0.1"]) == 2
    assert "training.simcut is None there and {'alpha': 3.0, 'p': 0.1} here" in capsys.readouterr().err
    assert main(arguments) == 0


def test_labels_are_counted_where_the_model_is() -> None:
    """Counts of several objectives are stacked, and a batch may have the labels of one alone."""
    import torch

    from hf_vaswani.training.loop import _count_labels

    device = torch.device("meta")
    labels = torch.full((2, 3), -100, device=device)
    assert _count_labels([labels, labels], device).device == _count_labels([], device).device == device
    cpu = torch.device("cpu")
    assert int(_count_labels([torch.tensor([[1, -100], [2, 3]]), torch.tensor([[4]])], cpu)) == 4
    assert int(_count_labels([], cpu)) == 0


def test_an_update_does_not_depend_on_how_it_is_split() -> None:
    """Two uneven batches added up are one batch: the loss is per token of the update, not a mean of means."""
    from accelerate import Accelerator

    from hf_vaswani.training.loop import _update

    long = {"input_ids": torch.randint(4, 30, (3, 6)), "labels": torch.randint(4, 30, (3, 7))}
    short = {"input_ids": torch.randint(4, 30, (1, 6)), "labels": torch.full((1, 7), -100)}
    short["labels"][0, :2] = 5
    both = {name: torch.cat([long[name], short[name]]) for name in long}
    results = []
    for batches in ([both], [long, short]):
        torch.manual_seed(0)
        config = VaswaniConfig(
            vocab_size=30, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0
        )
        model = VaswaniForConditionalGeneration(config).double().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]
        update = _update(Accelerator(), model, optimizer, batches, TrainingRecipe(), Interruption())
        results.append((update.loss, update.tokens, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert results[0][1] == results[1][1] == 23
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    torch.testing.assert_close(results[0][2], results[1][2], atol=1e-7, rtol=0)


def by_torchrun(arguments: list[str], folder: Path) -> None:
    """The real command, as two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command = [*launch, str(ROOT / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("options", [[], ["--training.simcut.p=0.2"]], ids=["plain", "simcut"])
def test_an_update_is_the_same_however_it_is_split(tmp_path, options) -> None:
    """
    One process with one batch, with the same pairs in 4 batches, and 2 processes: the same weights after 20 updates.
    Of an odd number of batches, the last update of an epoch has fewer than the others, and one process none.
    """
    from hf_vaswani.training import loop as training

    arguments = [*tiny_recipe(tmp_path, max_steps=20, save_every=20, average_last=1, tokens_per_batch=88)]
    arguments += ["--model.dropout=0", "--evaluation.num_beams=1", *options]
    arguments += ["--training.schedule=constant", "--training.peak_learning_rate=0.0005"]
    runs = {"four": ["--training.accumulation_steps=4"], "two": ["--training.accumulation_steps=2"]}
    assert main(["train", *arguments, *runs["four"], "--run_dir", str(tmp_path / "four")]) == 0
    by_torchrun([*arguments, *runs["two"], "--run_dir", str(tmp_path / "two")], tmp_path)

    # The same updates as one batch each, which no budget of tokens would give: their batches are joined.
    update, sizes = training._update, set()

    def joined(accelerator, model, optimizer, batches, *rest):
        sizes.add(len(batches))
        fillings = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        if options:
            fillings["decoder_input_ids"] = 0
        whole = {}
        for name, filling in fillings.items():
            rows = [pad(batch[name], max(b[name].shape[1] for b in batches), filling) for batch in batches]
            # The first passes of all batches come before the second passes.
            passes = zip(*(part.chunk(2) for part in rows), strict=True) if options and name != "labels" else [rows]
            whole[name] = torch.cat([part for parts in passes for part in parts])
        whole |= {name: value for name, value in batches[0].items() if name == "consistency"}
        return update(accelerator, model, optimizer, [whole], *rest)

    def pad(rows: torch.Tensor, width: int, filling: int) -> torch.Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_update", joined)
        assert main(["train", *arguments, *runs["four"], "--run_dir", str(tmp_path / "one")]) == 0
    assert 4 in sizes and sizes & {1, 3}, "an epoch is to end with an odd number of batches"

    progress = json.loads((tmp_path / "two" / "checkpoint-20" / "progress.json").read_text())
    assert progress["position"]["epoch"] >= 2
    one, four, two = (weights(tmp_path / name / "checkpoint-20") for name in ("one", "four", "two"))
    for name in one:
        torch.testing.assert_close(four[name], one[name], atol=1e-6, rtol=0)
        torch.testing.assert_close(two[name], one[name], atol=1e-6, rtol=0)
    translations = [(tmp_path / run / "test_translations.txt").read_text() for run in ("four", "two")]
    assert translations[0] == translations[1]
    validations = [json.loads((tmp_path / run / "validations.jsonl").read_text()) for run in ("four", "two")]
    assert validations[0]["loss"] == pytest.approx(validations[1]["loss"], rel=1e-5)
    assert validations[0]["bleu"] == validations[1]["bleu"]


def test_a_full_disk_leaves_the_earlier_checkpoint_to_go_on_from(tiny_run, tmp_path) -> None:
    folder, run = tiny_run.parent, tmp_path / "run"
    assert train(folder, run, max_steps=4) == 0
    shutil.rmtree(run / "model")
    command = [sys.executable, str(ROOT / "train.py"), *tiny_recipe(folder, max_steps=8), "--run_dir", str(run)]
    # No file may become larger than 20 000 bytes, which a checkpoint's are, and the ids of the text are not.
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    sentence = done.stderr.replace("\r", "\n").strip().splitlines()[-1]
    assert sentence.startswith("train.py: ")
    assert "checkpoint-8 could not be written" in sentence
    assert "Traceback" not in done.stderr
    assert [path.name for path in run.glob("*checkpoint*")] + [path.name for path in run.glob(".*")] == [
        "checkpoint-4"
    ]
    assert train(folder, run, max_steps=8) == 0
    assert (run / "checkpoint-8").is_dir()


# ---- Damage ------------------------------------------------------------------------------------------------------

# With a moving average, validations and a log; stopped after 8 of 12 updates.
HALF = {"ema_decay": 0.9, "validate_every": 4, "log_every": 2, "average_last": 1}


@pytest.fixture(scope="module")
def half_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    assert train(folder, folder / "run", max_steps=8, **HALF) == 0
    for name in ("model", "test.json", "test_translations.txt"):
        path = folder / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder / "run"


@pytest.fixture(scope="module")
def whole_run(half_run: Path) -> Path:
    """What becomes of it when nothing is damaged."""
    run = half_run.parent / "whole"
    shutil.copytree(half_run, run)
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    return run


@pytest.fixture
def run(half_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(half_run, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
}


def same_end(one: Path, two: Path) -> bool:
    names = [
        f"{folder}/{name}.safetensors" for folder in ("checkpoint-12", "checkpoint-8") for name in ("model", "ema")
    ]
    for name in ("model/model.safetensors", *names):
        first, second = load_file(one / name), load_file(two / name)
        if not all(torch.equal(first[key], second[key]) for key in first | second):
            return False
    names = ["validations.jsonl", "training.jsonl", "test_translations.txt", "tokenizer/tokenizer.json"]
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(
    half_run, whole_run, tmp_path, capsys, kind
) -> None:
    """Whichever of its files it is, and whatever has become of it: nothing is loaded, and the way out works."""
    run = tmp_path / "run"
    shutil.copytree(half_run, run)
    names = sorted(path.name for path in (run / "checkpoint-8").iterdir())
    expected = {"model.safetensors", "ema.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}
    assert expected | {"tokenizer.json", "config.json", "modeling_vaswani.py", "progress.json"} <= set(names)
    # Without that one it is no checkpoint, and the run goes on from the one before.
    for name in [name for name in names if (kind, name) != ("deleted", "progress.json")]:
        path = run / "checkpoint-8" / name
        before = path.read_bytes()
        DAMAGES[kind](path)
        assert train(half_run.parent, run, max_steps=12, **HALF) == 2, name
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert str(path) in error
        assert f"Delete {path.parent}: the same training command then resumes from {run / 'checkpoint-4'}" in error
        path.write_bytes(before)
    shutil.rmtree(run / "checkpoint-8") if kind != "deleted" else (run / "checkpoint-8" / "progress.json").unlink()
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    assert same_end(run, whole_run)


def test_where_no_checkpoint_is_whole_that_is_said(half_run, run, capsys) -> None:
    for step in (4, 8):
        flip(run / f"checkpoint-{step}" / "optimizer.bin")
    assert train(half_run.parent, run, max_steps=12, **HALF) == 2
    error = capsys.readouterr().err
    assert "checkpoint-8/optimizer.bin was changed or damaged" in error and "No earlier checkpoint is intact" in error


def test_a_checkpoint_of_an_earlier_version_resumes(half_run, run, whole_run, caplog) -> None:
    """It noted the digests of the model alone, and nothing of the recipe and the validations."""
    for step in (4, 8):
        path = run / f"checkpoint-{step}" / "progress.json"
        progress = json.loads(path.read_text())
        for key in ("state", "recipe", "validations", "digest"):
            del progress[key]
        path.write_text(json.dumps(progress))
    caplog.set_level("WARNING", "hf_vaswani")
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    assert same_end(run, whole_run) and caplog.text == ""


def test_a_damaged_pickle_of_an_earlier_version_is_named(half_run, run, capsys) -> None:
    path = run / "checkpoint-8" / "progress.json"
    progress = json.loads(path.read_text())
    del progress["state"], progress["digest"]
    path.write_text(json.dumps(progress))
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        before = (run / "checkpoint-8" / name).read_bytes()
        for damage in (b"", before[:200], bytes(200), before[:-3]):
            (run / "checkpoint-8" / name).write_bytes(damage)
            assert train(half_run.parent, run, max_steps=12, **HALF) == 2
            assert "checkpoint-8 could not be loaded" in capsys.readouterr().err
        (run / "checkpoint-8" / name).write_bytes(before)


NOISE = {
    "deleted": None,
    "empty": b"",
    "binary": bytes(range(256)),
    "a list": b"[]\n",
    "an object": b"{}\n",
    "of strings": b'{"step": "4", "loss": "x", "bleu": "y"}\n',
    "nested": b"[" * 20_000,
}


@pytest.mark.parametrize("kind", NOISE)
def test_what_lies_beside_the_checkpoints_does_not_count(half_run, run, whole_run, kind) -> None:
    """A resume reads the newest checkpoint and the recipe that it is given, and writes the rest anew."""
    for name in ("recipe.yaml", "environment.json", "validations.jsonl", "tokenizer/tokenizer.json"):
        if NOISE[kind] is None:
            (run / name).unlink()
        else:
            (run / name).write_bytes(NOISE[kind])
    # That is for the curve alone, which then lacks some points.
    log = (run / "training.jsonl").read_bytes()
    for name in ("training.jsonl", "nonfinite_updates.jsonl"):
        (run / name).write_bytes(log + (NOISE[kind] or b""))
    assert train(half_run.parent, run, max_steps=12, **HALF) == 0
    (run / "nonfinite_updates.jsonl").unlink()
    assert same_end(run, whole_run)
    assert json.loads((run / "environment.json").read_text())["processes"] == 1
    assert (run / "model" / "README.md").is_file() and (run / "model" / "curve.png").is_file()


def test_a_flipped_validation_averages_no_other_checkpoint(tmp_path) -> None:
    """A single digit would make another the best."""
    switches = {"average_best": 1, "validate_every": 4, "keep_best": 3}
    assert train(tmp_path, tmp_path / "run", max_steps=8, best_by="loss", **switches) == 0
    path = tmp_path / "run" / "validations.jsonl"
    (best,) = json.loads((tmp_path / "run" / "test.json").read_text())["averaged"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["loss"] = 9.0 if f"checkpoint-{line['step']}" == best else 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(tmp_path, tmp_path / "run", max_steps=8, best_by="loss", **switches) == 0
    assert json.loads((tmp_path / "run" / "test.json").read_text())["averaged"] == [best]
    arguments = ["average", str(tmp_path / "run"), "--best", "1", "--output", str(tmp_path / "mean")]
    assert main(arguments) == 0
    assert all(
        torch.equal(weight, weights(tmp_path / "mean")[name])
        for name, weight in weights(tmp_path / "run" / best).items()
    )


@pytest.mark.parametrize("name", ["ema.safetensors", "config.json", "progress.json"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_not_averaged(run, tmp_path, capsys, kind, name) -> None:
    DAMAGES[kind](run / "checkpoint-4" / name)
    folders = [str(run / f"checkpoint-{step}") for step in (4, 8)]
    for what in (folders, [str(run), "--last", "2"]):
        assert main(["average", *what, "--output", str(tmp_path / "mean")]) == 2
        assert name in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()
    assert main(["average", folders[1], "--output", str(tmp_path / "mean")]) == 0
    # What is averaged does not depend on the optimizer.
    flip(run / "checkpoint-8" / "optimizer.bin")
    assert main(["average", folders[1], "--output", str(tmp_path / "again")]) == 0


def test_a_damaged_checkpoint_is_not_averaged_at_the_end(half_run, run, capsys) -> None:
    flip(run / "checkpoint-4" / "ema.safetensors")
    assert train(half_run.parent, run, max_steps=8, **HALF | {"average_last": 2}) == 2
    assert "checkpoint-4/ema.safetensors was changed or damaged" in capsys.readouterr().err
    assert not (run / "model").exists() and not (run / "test.json").exists()


@pytest.mark.parametrize("name", ["checkpoint-8", "model"])
def test_weights_that_are_not_those_of_the_run_do_not_translate(tiny_run, tmp_path, capsys, name) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (tmp_path / "in.txt").write_text("one two\n")
    command = ["translate", "--model", str(run / name), str(tmp_path / "in.txt")]
    assert main(command) == 0
    flip(run / name / "model.safetensors")
    assert main(command) == 2
    assert f"{run / name / 'model.safetensors'} was changed or damaged" in capsys.readouterr().err


def test_a_recipe_that_was_changed_averages_nothing(run, tmp_path, capsys) -> None:
    """Another `save_every` would leave checkpoints out."""
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("save_every: 4", "save_every: 8"))
    assert main(["average", str(run), "--last", "2", "--output", str(tmp_path / "mean")]) == 2
    assert "recipe.yaml was changed or damaged: training.save_every is 8" in capsys.readouterr().err


# ---- A finished run ----------------------------------------------------------------------------------------------


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_damaged_of_a_finished_run_is_made_again(tiny_run, tmp_path, capsys, caplog, kind) -> None:
    caplog.set_level("INFO", "hf_vaswani")
    for name in ("model/model.safetensors", "model/tokenizer.json", "test_translations.txt", "test.json"):
        run = tmp_path / name.replace("/", "-")
        shutil.copytree(tiny_run, run)
        DAMAGES[kind](run / name)
        caplog.clear()
        assert train(tiny_run.parent, run) == 0
        assert "Test BLEU" in capsys.readouterr().out
        assert (kind, name) == ("deleted", "test.json") or f"{run / name} " in caplog.text.splitlines()[0]
        after = contents(run)
        for other in ("model/model.safetensors", "model/tokenizer.json", "test_translations.txt"):
            assert after[other] == (tiny_run / other).read_bytes(), other
        assert json.loads(after["test.json"])["files"] == json.loads((tiny_run / "test.json").read_text())["files"]
        caplog.clear()
        assert train(tiny_run.parent, run) == 0 and "is complete" in caplog.text
        assert contents(run) == after


def test_what_cannot_be_made_again_is_said(tiny_run, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    flip(run / "model" / "model.safetensors")
    assert train(tiny_run.parent, run) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        f"{run / 'model' / 'model.safetensors'} was changed or damaged" in error
        and "no checkpoint to resume from" in error
    )


def test_a_result_of_an_earlier_version_counts(tiny_run, tmp_path, caplog) -> None:
    """It noted no digest of the translations, and none of itself."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    result = json.loads((run / "test.json").read_text())
    del result["digest"], result["translations"]
    (run / "test.json").write_text(json.dumps(result))
    before = contents(run)
    caplog.set_level("INFO", "hf_vaswani")
    assert train(tiny_run.parent, run) == 0
    assert [record.getMessage() for record in caplog.records if "complete" in record.getMessage()]
    assert contents(run) == before


def test_what_a_finished_run_lacks_is_made(tiny_run, tmp_path, caplog) -> None:
    """Killed between its result and its card, or tidied up by somebody."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    before = contents(run)
    gone = ("model/README.md", "model/curve.png", "environment.json", "recipe.yaml")
    for name in gone:
        (run / name).unlink()
        caplog.clear()
        assert train(tiny_run.parent, run) == 0
        assert caplog.text.count("was missing or damaged, and was written again") == 1
        assert (run / name).is_file() and not list(run.rglob(".*"))
    for name in gone:
        (run / name).unlink()
    assert train(tiny_run.parent, run) == 0
    after = contents(run)
    assert after.keys() == before.keys() and after["model/curve.png"] == before["model/curve.png"]
    assert all(after[name] == before[name] for name in before if name not in (*gone, "run.lock"))


@pytest.mark.parametrize("name", ["README.md", "test.json", "test_translations.txt", "model.safetensors"])
def test_a_full_disk_at_the_end_is_named_and_the_same_command_ends_it(half_run, tmp_path, capsys, name) -> None:
    from hf_vaswani import files

    run = tmp_path / "run"
    shutil.copytree(half_run, run)
    write_bytes, save_pretrained = Path.write_bytes, VaswaniForConditionalGeneration.save_pretrained

    def full(path: Path, content: bytes) -> int:
        if name in path.name:
            write_bytes(path, content[:3])
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    def full_folder(model, folder, **options):
        save_pretrained(model, folder, **options)
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Path, "write_bytes", full)
        if name == "model.safetensors":
            patch.setattr(VaswaniForConditionalGeneration, "save_pretrained", full_folder)
        assert train(half_run.parent, run, max_steps=8, **HALF) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ("model" if name == "model.safetensors" else name) in error and "No space left" in error
    assert not [path for path in run.rglob("*") if path.name.startswith(".")]
    assert train(half_run.parent, run, max_steps=8, **HALF) == 0
    assert (run / "model" / "README.md").is_file() and (run / "model" / "curve.png").is_file()


def test_a_full_disk_in_the_log_is_named(tmp_path, capsys, monkeypatch) -> None:
    import builtins

    from hf_vaswani import files

    def full(path, *arguments, **keywords):
        if str(path).endswith("training.jsonl"):
            raise OSError(28, "No space left on device")
        return builtins.open(path, *arguments, **keywords)

    monkeypatch.setattr(files, "open", full, raising=False)
    assert train(tmp_path, tmp_path / "run", log_every=1) == 2
    assert f"{tmp_path / 'run' / 'training.jsonl'} could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["/proc/run", "a file/run", "a file/deep/run"])
def test_a_run_dir_where_nothing_can_be_written_is_named(tmp_path, capsys, place) -> None:
    (tmp_path / "a file").write_text("x")
    run = tmp_path / place
    assert train(tmp_path, run) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{run} cannot be written to" in error and "another process" not in error


@pytest.mark.filterwarnings("ignore:.log_with=")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--data.train_files={en: nowhere.en, de: nowhere.de}"], ["nowhere.en"]),
        (["--data.train_files=null"], ["no training text"]),
        (["--data.train_files={en: /dev/null, de: /dev/null}"], ["/dev/null"]),
        (["--model.num_heads=3"], ["d_model (16)", "num_heads (3)"]),
        (["--training.tokens_per_batch=1"], ["training.tokens_per_batch 1", "has 2 tokens"]),
        (["--tokenizer.vocab_size=100"], ["260", "100"]),
        (["--tokenizer.path=/"], ["no tokenizer"]),
        (["--evaluation.tokenize=14a"], ["14a", "13a"]),
        (["--training.mixed_precision=fp16"], ["fp16", "GPU"]),
        (["--evaluation.tokenize=ja-mecab"], ["ja-mecab"]),
        (["--data.target_language=en"], ["different languages", "'en'"]),
        (["--training.trackers=[comet_ml]"], ["training.trackers", "comet_ml"]),
        (["--training.mixed_precision=fp8"], ["training.mixed_precision", "fp8"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys, changes, words) -> None:
    run = tmp_path / "run"
    assert main(["train", *tiny_recipe(tmp_path), "--run_dir", str(run), *changes]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-vaswani: ")
    assert all(word in error for word in words), error
    # Put right, the same folder starts anew.
    assert train(tmp_path, run, max_steps=1) == 0


def test_empty_validation_set_changed_text_and_lost_models(tmp_path, capsys) -> None:
    run, arguments = tmp_path / "run", tiny_recipe(tmp_path, max_steps=4)
    for name in ("v.en", "v.de"):
        (tmp_path / name).write_text("\n")
    blank = f"--data.validation_files={{en: {tmp_path / 'v.en'}, de: {tmp_path / 'v.de'}}}"
    assert main(["train", *arguments, blank, "--run_dir", str(run)]) == 2
    assert "The validation set is empty" in capsys.readouterr().err
    assert not run.exists()
    assert train(tmp_path, run, max_steps=4) == 0
    shutil.rmtree(run / "model")
    assert train(tmp_path, run, max_steps=4) == 0
    assert (run / "model" / "config.json").is_file()
    write_pairs(tmp_path, count=60)
    # `tiny_recipe` writes the text of before again, so the command line is made by hand.
    longer = [argument.replace("max_steps=4", "max_steps=8") for argument in arguments]
    assert main(["train", *longer, "--run_dir", str(run)]) == 2
    assert "The training or validation text is not that of" in (error := capsys.readouterr().err)
    assert "'pairs': 120" in error and "'pairs': 60" in error


def test_a_validation_set_stays_what_it_was(tmp_path, capsys) -> None:
    """BLEU against two texts has no best."""
    arguments = [*tiny_recipe(tmp_path, max_steps=4), "--run_dir", str(tmp_path / "run")]
    path = tmp_path / "dev.tsv"
    arguments = [
        f"--data.validation_files={path}" if word.startswith("--data.validation") else word for word in arguments
    ]
    path.write_text("en\tde\none\teins\n")
    assert main(["train", *arguments]) == 0
    path.write_text("en\tde\none\tzwei\n")
    assert main(["train", *arguments, "--training.max_steps=8"]) == 2
    assert "or validation text is not that of" in capsys.readouterr().err
    path.write_text("en\tde\none\teins\n")
    assert main(["train", *arguments, "--training.max_steps=8"]) == 0


def test_a_complete_run_without_its_checkpoints_is_complete_and_never_started_anew(tiny_run, tmp_path, capsys) -> None:
    """They are what takes room on the disk; the model and its result are what the training was for."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert train(tiny_run.parent, run) == 0
    assert "Test BLEU" in capsys.readouterr().out
    for switches, words in (
        ({"max_steps": 99}, "has the result of a training, but no checkpoint to resume from"),
        ({"warmup_steps": 3}, "training.warmup_steps is 10 there and 3 here"),
    ):
        assert train(tiny_run.parent, run, **switches) == 2
        assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_model_that_is_replaced_takes_its_result_along(tiny_run, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)

    def fail(*_):
        raise OSError("no power")

    monkeypatch.setattr(VaswaniForConditionalGeneration, "save_pretrained", fail)
    assert train(tiny_run.parent, run, average_last=1) == 2
    assert (run / "model").is_dir() and not (run / "test.json").exists()


def test_a_run_that_was_moved_names_its_model_where_it_is(tiny_run, tmp_path, capsys) -> None:
    shutil.copytree(tiny_run, tmp_path / "moved")
    assert train(tiny_run.parent, tmp_path / "moved") == 0
    assert f"Model     {tmp_path / 'moved' / 'model'}\n" in capsys.readouterr().out


def test_checkpoints_that_were_not_kept_are_not_averaged(tmp_path, capsys) -> None:
    """More than there are is no reason to take others, nor to show the old result."""
    run = tmp_path / "run"
    assert train(tmp_path, run, keep_last=1, average_last=1) == 0
    assert train(tmp_path, run, keep_last=2, average_last=2) == 2
    assert "checkpoint-8 was deleted" in capsys.readouterr().err
    assert json.loads((run / "test.json").read_text())["averaged"] == ["checkpoint-12"]


def test_a_complete_run_stays_complete_without_its_older_checkpoints(tiny_run, tmp_path, capsys) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    assert train(tiny_run.parent, tmp_path / "run") == 0
    assert "Test BLEU" in capsys.readouterr().out


def test_asked_to_stop_in_an_update_it_stops_after_that_one(tmp_path, capsys, monkeypatch) -> None:
    import signal

    forward, updates = VaswaniForConditionalGeneration.forward, iter(range(1, 100))

    def asked(model, *arguments, **keywords):
        if model.training and next(updates) == 3:
            signal.raise_signal(signal.SIGTERM)
        return forward(model, *arguments, **keywords)

    monkeypatch.setattr(VaswaniForConditionalGeneration, "forward", asked)
    run = tmp_path / "run"
    assert train(tmp_path, run) == 143
    assert "stopped. Everything is saved in " + str(run / "checkpoint-3") in capsys.readouterr().err


@pytest.mark.parametrize("when", ["validate", "save_checkpoint"])
def test_asked_to_stop_at_its_very_end_it_does_not_go_on_to_the_test_set(tmp_path, capsys, monkeypatch, when) -> None:
    import signal

    from hf_vaswani.training import loop as training

    function = getattr(training, when)

    def asked(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return function(*arguments)

    monkeypatch.setattr(training, when, asked)
    run = tmp_path / "run"
    assert train(tmp_path, run, max_steps=4) == 143
    assert "stopped. Everything is saved in " + str(run / "checkpoint-4") in capsys.readouterr().err
    assert not (run / "model").exists()
    monkeypatch.undo()
    assert train(tmp_path, run, max_steps=4) == 0


def test_empty_and_too_long_pairs_are_left_out_and_counted_once(tmp_path, caplog) -> None:
    source, target = write_pairs(tmp_path)
    arguments = tiny_recipe(tmp_path, max_steps=2)
    for path, extra in ((source, "\nword\n" + "one " * 300), (target, "leer\n\n" + "eins " * 300)):
        path.write_text(path.read_text("utf-8") + extra + "\n", encoding="utf-8")
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([w for w in warnings if "2 pairs with an empty side, 1 with a side above 256 tokens" in w]) == 1


def test_a_learned_table_of_positions_bounds_the_pairs(tmp_path, caplog, capsys) -> None:
    """Longer pairs are left out of the training; a longer sentence to validate on is refused before that begins."""
    source, target = write_pairs(tmp_path)
    arguments = [*tiny_recipe(tmp_path, max_steps=2), "--model.position_encoding=learned"]
    for path, extra in ((source, "one " * 300), (target, "eins " * 300)):
        path.write_text(path.read_text("utf-8") + extra + "\n", encoding="utf-8")
    arguments += ["--training.tokens_per_batch=2000", "--model.max_position_embeddings=100"]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "a")]) == 2
    assert "side of 301 tokens, but model.max_position_embeddings is 100" in capsys.readouterr().err
    short = tmp_path / "short.tsv"
    short.write_text("en\tde\n" + "one\teins\n" * 3, encoding="utf-8")
    short_sets = [f"--data.{split}_files={short}" for split in ("validation", "test")]
    arguments = [
        argument for argument in arguments if "validation_files" not in argument and "test_files" not in argument
    ]
    assert main(["train", *arguments, *short_sets, "--run_dir", str(tmp_path / "b")]) == 0, capsys.readouterr().err
    warnings = [record.getMessage() for record in caplog.records]
    assert [w for w in warnings if "1 with a side above 100 tokens (model.max_position_embeddings)" in w]


@pytest.mark.portable
def test_training_learns(tmp_path) -> None:
    """A sentence's own reference is nearer to its translation than another sentence's, and nearer than at first."""
    run = tmp_path / "run"
    arguments = tiny_recipe(
        tmp_path, max_steps=400, warmup_steps=100, save_every=50, tokens_per_batch=512, validate_every=50
    )
    assert main(["train", *arguments, "--model.d_model=64", "--model.d_ff=128", "--run_dir", str(run)]) == 0
    translations = (run / "test_translations.txt").read_text("utf-8").splitlines()
    references = (tmp_path / "text.de").read_text("utf-8").splitlines()
    of_others = score(translations, references[1:] + references[:1])["bleu"]
    assert json.loads((run / "test.json").read_text())["bleu"] > 2 * of_others
    lines = [json.loads(line) for line in (run / "validations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(50, 401, 50))
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert [line["bleu"] for line in lines if line["best"]] == [max(line["bleu"] for line in lines)]


def tiny_update():
    from accelerate import Accelerator

    torch.manual_seed(0)
    config = VaswaniConfig(vocab_size=30, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    model = VaswaniForConditionalGeneration(config).train()
    ids = torch.arange(4, 10)[None]
    return Accelerator(), model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def test_an_infinite_gradient_of_a_finite_loss_is_left_out() -> None:
    from hf_vaswani.training.loop import _update

    accelerator, model, batch = tiny_update()
    before = [weight.detach().clone() for weight in model.parameters()]
    next(model.model.encoder.layers[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    update = _update(
        accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0), [batch], TrainingRecipe(), Interruption()
    )
    assert math.isfinite(update.loss) and not math.isfinite(update.gradient_norm) and not update.finite
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_the_last_batch_of_an_update_is_synchronised_and_weighs_as_many_processes() -> None:
    """As one of three processes, each with its share of one sum, of which DDP takes the mean."""
    from hf_vaswani.training.loop import _update

    accelerator, model, batch = tiny_update()
    seen: list[object] = []

    class OneOfThree:
        num_processes = 3

        @contextmanager
        def no_sync(self, _):
            seen.append("no sync")
            yield

        def backward(self, loss):
            seen.append(loss.item())
            loss.backward()

        def reduce(self, tensor, _):
            return tensor * 3

        def __getattr__(self, name):
            return getattr(accelerator, name)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    interruption = Interruption()
    interruption.signal = 15
    update = _update(OneOfThree(), model, optimizer, [batch, batch], TrainingRecipe(), interruption)
    assert [entry == "no sync" for entry in seen] == [True, False, False]
    assert sum(seen[1:]) == pytest.approx(update.loss)
    assert (update.tokens, update.stop) == (3 * 2 * 6, True)


def scaled_update():
    """As in fp16, with a scaler that starts at 8."""
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator, model, batch = tiny_update()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    class Scaled:
        def __init__(self):
            self.scaler = scaler

        def backward(self, loss):
            scaler.scale(loss).backward()

        def clip_grad_norm_(self, parameters, most):
            scaler.unscale_(optimizer.optimizer)
            return torch.nn.utils.clip_grad_norm_(parameters, most)

        def __getattr__(self, name):
            return getattr(accelerator, name)

    return Scaled(), model, optimizer, batch


def test_in_fp16_an_update_after_one_that_was_left_out_goes_on() -> None:
    """The scaler hears of it, too: it takes an optimizer's gradients once between two of its own updates."""
    from hf_vaswani.training.loop import _update

    scaled, model, optimizer, batch = scaled_update()
    infinite = model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.inf)
    assert not _update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite
    infinite.remove()
    before = model.lm_head.weight.detach().clone()
    assert _update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite
    assert scaled.scaler.get_scale() == 4.0 and not torch.equal(model.lm_head.weight, before)


def test_in_fp16_infinite_gradients_count_once_they_cannot_be_scaled_any_less() -> None:
    from hf_vaswani.training.loop import _update

    scaled, model, optimizer, batch = scaled_update()
    before = [weight.detach().clone() for weight in model.parameters()]
    next(model.model.encoder.layers[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    found = [_update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite for _ in range(5)]
    # At 8, 4 and 2 the scaler still looks for its scale.
    assert found == [True, True, True, False, False]
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))


def test_a_complete_run_is_averaged_anew_on_request(tiny_run, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    for count, names in ((2, ["checkpoint-8", "checkpoint-12"]), (1, ["checkpoint-12"])):
        arguments = tiny_recipe(tiny_run.parent, average_last=count)
        assert main(["train", *arguments, "--run_dir", str(run)]) == 0
        assert json.loads((run / "test.json").read_text())["averaged"] == names
