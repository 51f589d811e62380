"""A run: its folder, going on after a stop, and what it refuses."""

import importlib.metadata
import json
import math
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.cli import main
from hf_vaswani.metrics import score
from hf_vaswani.model import modeling_vaswani
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.training import loop, validation
from hf_vaswani.training.optimization import Muon, noam
from hf_vaswani.translation.shortlist import FILE as SHORTLIST

from ..conftest import ROOT, dear, tiny_recipe, write_pairs
from .runs import assert_resumes_exactly, same_weights, train, validations, weights


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
    (validation,) = validations(tiny_run)
    assert validation["step"] == 12
    assert validation["best"] is True


def test_stop_and_resume_equals_uninterrupted_bit_for_bit(tiny_run, tmp_path, capsys) -> None:
    folder = tiny_run.parent
    run = tmp_path / "run"
    assert train(folder, run, scored=True, max_steps=8) == 0
    (run / "model" / SHORTLIST).write_text("{}")
    assert train(folder, run, scored=True, max_steps=12) == 0
    # It was made from the same text and vocabulary, and is no part of what was scored.
    assert (run / "model" / SHORTLIST).read_text() == "{}"
    assert SHORTLIST not in json.loads((run / "test.json").read_text())["files"]
    assert same_weights(run / "checkpoint-12", tiny_run / "checkpoint-12")
    results = [json.loads((path / "test.json").read_text()) for path in (run, tiny_run)]
    assert results[0]["bleu"] == results[1]["bleu"]


@pytest.mark.parametrize(
    "switches",
    [
        {"schedule": "cosine"},
        {"schedule": "inverse_sqrt", "simcut": "{p: 0.2}"},
        {"schedule": "cosine", "optimizer": "muon", "r_drop": "{alpha: 5}"},
    ],
    ids=lambda switches: "-".join(switches.values()),
)
def test_every_switch_resumes_bit_for_bit(tmp_path, switches) -> None:
    """AdamW, Muon, transformers' schedules, two passes, smoothing over all, characters: the update after a stop."""
    run = tmp_path / "run"
    switches |= {"peak_learning_rate": 0.01, "weight_decay": 0.1, "max_steps": 8, "label_smoothing_over": "all"}
    arguments = [*tiny_recipe(tmp_path, **switches), "--tokenizer.kind=characters"]
    assert main(["train", *arguments, "--run_dir", str(run)]) == 0
    assert_resumes_exactly(arguments, run, 8)


def test_each_switch_of_the_training_reaches_it(tiny_run, tmp_path, monkeypatch) -> None:
    """The recipe's numbers, where the optimizer and the schedule are made."""
    seen = {}

    def stop(run, state, *_):
        optimizer, schedule = state.optimizer.optimizer, state.schedule.scheduler
        seen.update(optimizer=optimizer, schedule=schedule, tokenizer=run.tokenizer, model=state.model)
        raise ValueError("Enough is seen.")

    monkeypatch.setattr(loop, "_train", stop)
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
    assert [type(part) for part in parts] == [torch.optim.AdamW, Muon]
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


NOAM = {"max_steps": 12, "learning_rate_factor": 3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5}
COSINE = {"schedule": "cosine", "peak_learning_rate": 0.01, "warmup_steps": 2, "max_steps": 6}


@pytest.mark.parametrize(
    ("switches", "rates", "adam"),
    [
        (NOAM, [noam(n, 16, 10, 3) for n in range(1, 13)], ((0.8, 0.9), 1e-5)),
        # It ends with the training.
        (COSINE, [0.005, *(0.01 * (1 + math.cos(math.pi * n / 5)) / 2 for n in range(5))], ((0.9, 0.98), 1e-9)),
    ],
)
def test_each_update_has_the_learning_rate_of_its_step(tmp_path, monkeypatch, switches, rates, adam) -> None:
    seen, step = [], torch.optim.Adam.step

    def spy(optimizer, *args, **kwargs):
        seen.append(dict(optimizer.param_groups[0]))
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    assert train(tmp_path, tmp_path / "run", **switches) == 0
    assert [group["lr"] for group in seen] == pytest.approx(rates)
    assert all((group["betas"], group["eps"], group["amsgrad"]) == (*adam, False) for group in seen)


def validate_as(monkeypatch, bleu: Iterable[float]) -> None:
    """Gives the validations of a training these BLEU."""
    score, values = validation._scores, iter(bleu)

    def scored(run, split, translations):
        found = score(run, split, translations)
        if split == "validation":
            found["scores"]["bleu"] = next(values)
        return found

    monkeypatch.setattr(validation, "_scores", scored)


def test_the_model_may_be_the_average_of_the_best_checkpoints(tmp_path, monkeypatch, capsys) -> None:
    """Those of the highest validation BLEU stay on disk, and are averaged."""
    validate_as(monkeypatch, [7.0, 1.0, 9.0, 3.0, 5.0])
    switches = {"max_steps": 10, "save_every": 2, "validate_every": 2, "keep_last": 1, "average_best": 2}
    run = tmp_path / "run"
    assert train(tmp_path, run, scored=True, **switches) == 0
    result = json.loads((run / "test.json").read_text())
    assert (result["averaged"], result["step"]) == (["checkpoint-2", "checkpoint-6"], 10)
    assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 6, 10)}
    first, second, final = (weights(run / name) for name in ("checkpoint-2", "checkpoint-6", "model"))
    for name in set(first) & set(final):
        torch.testing.assert_close(final[name], (first[name] + second[name]) / 2)
    # Complete: nothing is trained or averaged again.
    before = (run / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(tmp_path, run, scored=True, **switches) == 0
    assert (run / "model" / "model.safetensors").stat().st_mtime_ns == before
    blind = ["--data.validation_files=null", "--run_dir", str(tmp_path / "blind")]
    assert main(["train", *tiny_recipe(tmp_path, scored=True, **switches), *blind]) == 2
    assert "average_best needs a validation set" in capsys.readouterr().err


@pytest.mark.slow
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
    assert same_weights(tmp_path / "plain" / "model", tmp_path / "often" / "model")
    saved.clear()
    assert train(tmp_path, tmp_path / "seldom", **switches, save_every_minutes=100) == 0
    assert saved == [4, 8, 10]


@pytest.mark.parametrize(("best_by", "end"), [("bleu", 8), dear("loss", 10)])
def test_patience_ends_a_run_early(tmp_path, monkeypatch, best_by, end) -> None:
    """Two validations in a row without a new best; a complete run stays complete, and more patience goes on."""
    validate_as(monkeypatch, [1.0, 3.0, 2.0, 3.0, 9.0, 9.0])
    loss = iter([5.0, 4.0, 3.0, 6.0, 3.5, 1.0])
    monkeypatch.setattr(validation, "totals", lambda *_: {"en-de": {"loss": (next(loss), 1)}})
    switches = {"max_steps": 40, "save_every": 2, "validate_every": 2, "best_by": best_by, "keep_best": 1}
    run = tmp_path / "run"
    assert train(tmp_path, run, scored=True, patience=2, keep_last=1, average_last=1, **switches) == 0
    lines = validations(run)
    assert lines[-1]["step"] == end
    best = [line["step"] for line in lines if line["best"]]
    assert best == ([8] if best_by == "bleu" else [6])
    assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (*best, end)}
    before = (run / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(tmp_path, run, scored=True, patience=2, keep_last=1, average_last=1, **switches) == 0
    assert (run / "model" / "model.safetensors").stat().st_mtime_ns == before
    switches["max_steps"] = end + 1
    assert train(tmp_path, run, scored=True, patience=9, keep_last=1, average_last=1, **switches) == 0
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
    assert train(tiny_run.parent, tmp_path / "run", scored=True, gradient_checkpointing="true") == 0
    layers, updates = 2, 12
    assert calls == 2 * layers * updates
    ours, theirs = weights(tmp_path / "run" / "checkpoint-12"), weights(tiny_run / "checkpoint-12")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=0)


@pytest.mark.slow
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
    arguments = [*tiny_recipe(tiny_run.parent, scored=True), *options, "--model.dropout=0", "--run_dir"]
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


def test_auto_takes_bf16_where_it_is_faster_and_a_resumed_run_keeps_it(tmp_path, monkeypatch, caplog) -> None:
    from accelerate.state import AcceleratorState

    def precision(name: str, steps: int, least: int) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
        monkeypatch.setattr("hf_vaswani.translation.quantization.TRAINING", least)
        assert train(tmp_path, tmp_path / name, mixed_precision="auto", max_steps=steps) == 0
        AcceleratorState._reset_state(reset_partial_state=True)
        return json.loads((tmp_path / name / "checkpoint-4" / "progress.json").read_text())["launch"][
            "mixed_precision"
        ]

    assert precision("fast", 4, 16) == "bf16" and precision("slow", 4, 17) == "no"
    assert caplog.text.count("training.mixed_precision auto is bf16, because the cpu of this machine has") == 1
    # On another machine, it is the same run, without a choice.
    caplog.clear()
    assert precision("fast", 8, 17) == "bf16" and precision("slow", 8, 16) == "no"
    assert "mixed_precision auto" not in caplog.text


@pytest.mark.parametrize(("precision", "has_instructions"), [("bf16", True), ("bf16", False), ("no", False)])
def test_bf16_on_a_cpu_attends_by_plain_products_and_keeps_its_weights_in_fp32(
    tmp_path, monkeypatch, capsys, new_state, precision, has_instructions
) -> None:
    calls, attention = [], modeling_vaswani.eager_attention_forward

    def spy(module, *args, **kwargs):
        calls.append((module.training, torch.is_autocast_enabled("cpu")))
        return attention(module, *args, **kwargs)

    monkeypatch.setattr(modeling_vaswani, "eager_attention_forward", spy)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_instructions}, raising=False)
    run, is_bf16 = tmp_path / "run", precision == "bf16"
    assert train(tmp_path, run, mixed_precision=precision, max_steps=1) == 0
    assert {autocast for training, autocast in calls if training} == ({True} if is_bf16 else set())
    assert json.loads((run / "environment.json").read_text())["mixed_precision"] == precision
    assert {weight.dtype for weight in weights(run / "checkpoint-1").values()} == {torch.float32}
    is_reported = "no instructions for bfloat16" in "".join(capsys.readouterr())
    assert is_reported == (is_bf16 and not has_instructions)


@pytest.mark.parametrize(
    ("switch", "fsdp", "words"),
    [
        ({"ema_decay": 0.9}, 2, "training.ema_decay is 0.9, but a moving average cannot be taken"),
        ({"optimizer": "muon"}, 2, "training.optimizer is 'muon', which needs whole matrices"),
        ({"tokens_per_batch": "auto"}, 2, "auto measures a whole model on each device, but FSDP shards it"),
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
    recipe = tiny_recipe(tmp_path, scored=True, max_steps=6, validate_every=3, log_every=2, trackers="[notebook]")
    secret = "--data.license=https://me:SECRET@host/licence?SECRET"
    assert main(["train", *recipe, secret, "--run_dir", str(tmp_path / "run")]) == 0
    assert Notebook.config["training.max_steps"] == "6"
    assert Notebook.config["data.license"] == "https://host/licence"
    lines = validations(tmp_path / "run")
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
    arguments = [*tiny_recipe(tiny_run.parent, scored=True, max_steps=4), "--seed=2", "--training.cpu_threads=1"]
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 0
    ours, theirs = weights(tmp_path / "run" / "checkpoint-4"), weights(tiny_run / "checkpoint-4")
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours if "q_proj" in name)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["cpu_threads"] == 1


@pytest.mark.process
def test_a_full_disk_leaves_the_earlier_checkpoint_to_go_on_from(tiny_run, tmp_path) -> None:
    folder, run = tiny_run.parent, tmp_path / "run"
    assert train(folder, run, scored=True, max_steps=4) == 0
    shutil.rmtree(run / "model")
    arguments = [*tiny_recipe(folder, scored=True, max_steps=8), "--run_dir", str(run)]
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
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
    assert train(folder, run, scored=True, max_steps=8) == 0
    assert (run / "checkpoint-8").is_dir()


@pytest.mark.parametrize("place", ["/proc/run", "a file/deep/run"])
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
    run, arguments = tmp_path / "run", tiny_recipe(tmp_path, scored=True, max_steps=4)
    for name in ("v.en", "v.de"):
        (tmp_path / name).write_text("\n")
    blank = f"--data.validation_files={{en: {tmp_path / 'v.en'}, de: {tmp_path / 'v.de'}}}"
    assert main(["train", *arguments, blank, "--run_dir", str(run)]) == 2
    assert "The validation set of en-de is empty" in capsys.readouterr().err
    assert not run.exists()
    assert train(tmp_path, run, scored=True, max_steps=4) == 0
    shutil.rmtree(run / "model")
    assert train(tmp_path, run, scored=True, max_steps=4) == 0
    assert (run / "model" / "config.json").is_file()
    write_pairs(tmp_path, count=60)
    # `tiny_recipe` writes the text of before again, so the command line is made by hand.
    longer = [argument.replace("max_steps=4", "max_steps=8") for argument in arguments]
    assert main(["train", *longer, "--run_dir", str(run)]) == 2
    assert "The training or validation text has changed since" in (error := capsys.readouterr().err)
    assert "(pairs 120 -> 60, " in error
    # BLEU against two texts has no best.
    write_pairs(tmp_path)
    path = tmp_path / "text.de"
    copy = path.with_name("validation.de")
    copy.write_text(path.read_text("utf-8").replace("eins", "zwei"), "utf-8")
    other = f"--data.validation_files={{en: {tmp_path / 'text.en'}, de: {copy}}}"
    assert main(["train", *longer, other, "--run_dir", str(run)]) == 2
    assert "or validation text has changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("when", "step"),
    [("VaswaniForConditionalGeneration.forward", 3), ("validate", 4), ("save_checkpoint", 4)],
)
def test_asked_to_stop_in_an_update_it_stops_after_it_and_before_the_test(
    tmp_path, capsys, monkeypatch, when, step
) -> None:
    owner = VaswaniForConditionalGeneration if "." in when else loop
    name, calls = when.rsplit(".")[-1], iter(range(1, 100))
    function = getattr(owner, name)

    def asked(*arguments, **keywords):
        if next(calls) == (step if "." in when else 1):
            signal.raise_signal(signal.SIGTERM)
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, asked)
    run = tmp_path / "run"
    assert train(tmp_path, run, scored=True, max_steps=4) == 143
    assert f"stopped. Everything is saved in {run / f'checkpoint-{step}'}" in capsys.readouterr().err
    assert not (run / "model").exists()
    monkeypatch.undo()
    assert train(tmp_path, run, scored=True, max_steps=4) == 0


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
    arguments = [*tiny_recipe(tmp_path, scored=True, max_steps=2), "--model.position_encoding=learned"]
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
@pytest.mark.slow
def test_training_learns(tmp_path) -> None:
    """A sentence's own reference is nearer to its translation than another sentence's, and nearer than at first."""
    run = tmp_path / "run"
    arguments = tiny_recipe(
        tmp_path, scored=True, max_steps=400, warmup_steps=100, save_every=50, tokens_per_batch=512, validate_every=50
    )
    assert main(["train", *arguments, "--model.d_model=64", "--model.d_ff=128", "--run_dir", str(run)]) == 0
    translations = (run / "test_translations.txt").read_text("utf-8").splitlines()
    references = (tmp_path / "text.de").read_text("utf-8").splitlines()
    of_others = score(translations, references[1:] + references[:1])["bleu"]
    assert json.loads((run / "test.json").read_text())["bleu"] > 2 * of_others
    lines = validations(run)
    assert [line["step"] for line in lines] == list(range(50, 401, 50))
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert [line["bleu"] for line in lines if line["best"]] == [max(line["bleu"] for line in lines)]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("a bug"), KeyboardInterrupt()])
def test_trackers_are_closed_whatever_ends_a_training(tmp_path, monkeypatch, error) -> None:
    from accelerate import Accelerator

    def fail(*_, **__):
        raise error

    ended = []
    monkeypatch.setattr(Accelerator, "end_training", lambda self: ended.append(True))
    monkeypatch.setattr(loop.Updater, "__call__", fail)
    recipe = load_recipe([*tiny_recipe(tmp_path, max_steps=2), "--run_dir", str(tmp_path / "run")])
    with pytest.raises(type(error)):
        loop.train(recipe)
    assert ended == [True]
