"""hf-vaswani train, average and convert, as far as it is not the training or the conversion itself."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani import averaging, recipe_file
from hf_vaswani.cli import main
from hf_vaswani.conversion import convert as conversion
from hf_vaswani.recipe import BestBy

from ..conftest import tiny_recipe


def test_average_writes_a_model(tiny_run, tmp_path, capsys) -> None:
    """Averaging the run's checkpoints, by name or with --last, gives the run's own model."""
    from safetensors.torch import load_file

    names = [str(tiny_run / name) for name in ("checkpoint-8", "checkpoint-12")]
    assert main(["average", *names, "--output", str(tmp_path / "named")]) == 0
    assert main(["average", str(tiny_run), "--last", "2", "--output", str(tmp_path / "last")]) == 0
    assert "checkpoint-8" in capsys.readouterr().out
    expected = load_file(tiny_run / "model" / "model.safetensors")
    for folder in (tmp_path / "named", tmp_path / "last"):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        assert all((model.state_dict()[name] == weight).all() for name, weight in expected.items())
        assert model.generation_config.num_beams == 2
        assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
        assert not list(folder.glob("*.bin")) + list(folder.glob("*.pkl")) + list(folder.glob("progress.json"))
    # Models can be averaged too; the mean of a model with itself is that model.
    model = str(tiny_run / "model")
    assert main(["average", model, model, "--output", str(tmp_path / "again")]) == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all((again[name] == weight).all() for name, weight in expected.items())


def test_average_of_the_best(tiny_run, tmp_path, capsys) -> None:
    # Only this run's last checkpoint was validated.
    assert main(["average", str(tiny_run), "--best", "1", "--output", str(tmp_path / "best")]) == 0
    assert "checkpoint-12" in capsys.readouterr().out


@pytest.fixture
def ranked(tmp_path, monkeypatch):
    """Makes a run of two checkpoints, the second with the lower loss, and returns the names of those averaged."""
    averaged: list[str] = []
    monkeypatch.setattr(averaging, "save_average", lambda folders, output: averaged.append(folders[0].name))
    record = {"position": {}, "data": {}, "launch": {}, "nonfinite": 0, "seconds": 1.0, "files": {}}
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "progress.json").write_text(json.dumps({"step": step, **record}))

    def make(recipe: str, *measures: dict[str, object]) -> list[str]:
        (tmp_path / "recipe.yaml").write_text(recipe)
        lines = [{"step": step, "loss": 3.0 - step, **each} for step, each in enumerate(measures, start=1)]
        (tmp_path / "validations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return averaged

    return make


def test_the_best_are_ranked_by_the_recipe_or_by_the_option(ranked, tmp_path, capsys) -> None:
    average = ["average", str(tmp_path), "--best", "1", "--output", str(tmp_path / "new")]
    for best_by in ("bleu", "loss"):
        recipe = f"training: {{save_every: 1, validate_every: 1, best_by: {best_by}}}"
        averaged = ranked(recipe, {"bleu": 9.0}, {"bleu": 8.0})
        for by in ([], ["--by", "bleu"], ["--by", "loss"]):
            assert main([*average, *by]) == 0
    assert averaged == [f"checkpoint-{step}" for step in (1, 1, 2, 2, 1, 2)]
    # Other tasks have other measures.
    averaged.clear()
    recipe = "task: masked_lm\ntraining: {save_every: 1, validate_every: 1}"
    ranked(recipe, {"measures": {"accuracy": 0.9}}, {"measures": {"accuracy": 0.8}})
    assert main([*average, "--by", "accuracy"]) == main(average) == 0
    for by, name in (("bleu", "BLEU"), ("f1", "F1")):
        assert main([*average, "--by", by]) == 2
        said = capsys.readouterr().err
        assert f"training.best_by is '{by}', but task 'masked_lm' has no {name}: set it to 'loss' or" in said
        assert said.count("\n") == 1
    assert averaged == ["checkpoint-1", "checkpoint-2"]


def test_every_measure_can_be_asked_for(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["average", "--help"])
    assert f"--by {{{','.join(get_args(BestBy))}}}" in capsys.readouterr().out


def test_train_takes_every_argument_for_the_recipe(monkeypatch, capsys) -> None:
    seen = []

    def stop(argv, program):
        seen.append((argv, program))
        raise ValueError("seen")

    monkeypatch.setattr(recipe_file, "load_recipe", stop)
    arguments = ["my.yaml", "--training.max_steps", "-1", "--seed=2", "--version", "-h"]
    for program, usage in (("hf-vaswani", "hf-vaswani train"), ("train.py", "accelerate launch train.py")):
        assert main(["train", *arguments], program) == 2
        assert capsys.readouterr().err == f"{program}: seen\n"
        assert seen.pop() == (arguments, usage)


@pytest.fixture
def converted(monkeypatch):
    """What `convert` is called with, which then returns two lines."""
    seen = []
    monkeypatch.setattr(conversion, "convert", lambda *arguments: seen.append(arguments) or ["one", "two"])
    return seen


def test_options_become_arguments(converted, tmp_path, capsys) -> None:
    assert main(["convert", str(tmp_path), "new", "--to", "onnx"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nModel     new\n"
    options = ["--quantization", "int8", "--force", "--sentence", "Hello."]
    assert main(["convert", str(tmp_path), "new", "--to", "ctranslate2", *options]) == 0
    assert converted == [
        (tmp_path, Path("new"), "onnx", None, False, conversion.SENTENCE),
        (tmp_path, Path("new"), "ctranslate2", "int8", True, "Hello."),
    ]


def test_a_conversion_computes_with_the_processors_of_the_process(monkeypatch, tmp_path, capsys) -> None:
    asked = []
    monkeypatch.setattr("hf_vaswani.processes.limit_threads", lambda: asked.append(True))
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "to"), "--to", "marian"]) == 2
    assert asked == [True] and "nowhere" in capsys.readouterr().err


def test_a_training_for_which_the_memory_is_too_small_says_what_to_set(tmp_path, monkeypatch, capsys) -> None:
    def fail(recipe: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines")

    monkeypatch.setattr("hf_vaswani.training.loop.train", fail)
    assert main(["train", *tiny_recipe(tmp_path), "--run_dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-vaswani: Out of memory: CUDA out of memory. Tried to allocate 20.00 GiB. Set training.")
    assert "training.tokens_per_batch to auto" in said and "training.gradient_checkpointing" in said
