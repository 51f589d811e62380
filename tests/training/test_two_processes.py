"""Two processes make the updates of one: of translations, of every other objective, and from a model."""

import json
import os
import subprocess
import sys
import time
from functools import wraps
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from hf_vaswani.cli import main

from ..campaign.verbs import verb
from ..children import run_launched
from ..conftest import ROOT, dear, tiny_recipe
from . import task_recipes
from .runs import assert_close_weights, same_weights
from .test_start import adaptation

pytestmark = pytest.mark.process


def train_alone(arguments: list[str], run: Path) -> None:
    assert main(["train", *arguments, "--run_dir", str(run)]) == 0


def train_in_two(arguments: list[str], run: Path) -> None:
    ends = run_launched(run.with_name(f"{run.name}-outputs"), verb, ["train", *arguments, "--run_dir", str(run)])
    assert [end.code for end in ends] == [0, 0], [end.err[-2000:] for end in ends]


@pytest.mark.parametrize("options", [[], ["--training.simcut.p=0.2"]], ids=["plain", "simcut"])
def test_an_update_is_the_same_however_it_is_split(tmp_path, options) -> None:
    """
    One process with one batch, with the same pairs in 4 batches, and 2 processes: the same weights after 12 updates.
    Of an odd number of batches, the last update of an epoch has fewer than the others, and one process none.
    """
    from hf_vaswani.training.update import Updater

    settings = {"max_steps": 12, "warmup_steps": 2, "save_every": 12, "average_last": 1, "tokens_per_batch": 88}
    arguments = [*tiny_recipe(tmp_path, scored=True, **settings), "--model.dropout=0", "--evaluation.num_beams=1"]
    arguments += ["--training.schedule=constant", "--training.peak_learning_rate=0.0005", *options]
    runs = {"four": ["--training.accumulation_steps=4"], "two": ["--training.accumulation_steps=2"]}
    train_alone([*arguments, *runs["four"]], tmp_path / "four")
    train_in_two([*arguments, *runs["two"]], tmp_path / "two")

    # The same updates as one batch each, which no budget of tokens would give: their batches are joined.
    update, sizes = Updater.__call__, set()

    def joined(self, batches, *rest, **keywords):
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
        return update(self, [whole], *rest, **keywords)

    def pad(rows: torch.Tensor, width: int, filling: int) -> torch.Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filling)

    unscored = ["--data.validation_files=null", "--data.test_files=null"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updater, "__call__", joined)
        train_alone([*arguments, *runs["four"], *unscored], tmp_path / "one")
    assert 4 in sizes and sizes & {1, 3}, "an epoch is to end with an odd number of batches"

    progress = json.loads((tmp_path / "two" / "checkpoint-12" / "progress.json").read_text())
    assert progress["position"]["epoch"] >= 2
    one, four, two = (tmp_path / name / "checkpoint-12" for name in ("one", "four", "two"))
    assert_close_weights(one, four, atol=1e-6)
    assert_close_weights(one, two, atol=1e-6)
    translations = [(tmp_path / run / "test_translations.txt").read_text() for run in ("four", "two")]
    assert translations[0] == translations[1]
    validations = [json.loads((tmp_path / run / "validations.jsonl").read_text()) for run in ("four", "two")]
    assert validations[0]["loss"] == pytest.approx(validations[1]["loss"], rel=1e-5)
    assert validations[0]["bleu"] == validations[1]["bleu"]


@pytest.mark.parametrize("name", ["next_sentence", "causal_lm", "pairs", "tagging"])
def test_every_task_is_split_alike(tmp_path, name) -> None:
    """One process that accumulates two batches makes the update of two processes with one each."""
    options = ["--model.dropout=0", "--training.max_steps=3", "--data.test_files=null", "--training.average_last=1"]
    options.append("--data.validation_files=null")
    arguments = [*task_recipes.recipe(tmp_path, name), *options]
    train_alone([*arguments, "--training.accumulation_steps=2"], tmp_path / "one")
    train_in_two(arguments, tmp_path / "two")
    assert_close_weights(tmp_path / "one" / "checkpoint-3", tmp_path / "two" / "checkpoint-3", atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("more", [[], dear(["--data.streaming=true", "--training.data_workers=1"])], ids=str)
def test_pairs_that_are_altered_in_parts_are_those_of_one_process(tmp_path, more) -> None:
    """Each process encodes its share of a window, and its workers do so ahead."""
    options = ["--model.dropout=0", "--tokenizer.bpe_dropout=0.2", "--data.stream_window=49", *more]
    arguments = [*tiny_recipe(tmp_path, max_steps=4, average_last=1, save_every=4), *options]
    train_alone([*arguments, "--training.accumulation_steps=2"], tmp_path / "one")
    train_in_two(arguments, tmp_path / "two")
    assert_close_weights(tmp_path / "one" / "checkpoint-4", tmp_path / "two" / "checkpoint-4", atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("more", ["--training.freeze=[encoder]", "--training.adapter={rank: 2, dropout: 0}"])
def test_both_start_from_one_model(tiny_run, tmp_path, more) -> None:
    arguments = [*adaptation(tmp_path, tiny_run), "--model.dropout=0", "--training.accumulation_steps=2", more]
    train_alone(arguments, tmp_path / "alone")
    recipe = yaml.safe_load((tmp_path / "alone" / "recipe.yaml").read_text("utf-8"))
    recipe["training"]["accumulation_steps"] = 1
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(recipe))
    train_in_two([str(tmp_path / "both.yaml")], tmp_path / "both")
    assert_close_weights(tmp_path / "alone" / "model", tmp_path / "both" / "model", atol=1e-5)


def test_both_agree_on_the_precision(tmp_path) -> None:
    train_in_two(tiny_recipe(tmp_path, max_steps=1, average_last=1, mixed_precision="auto"), tmp_path / "run")
    launch = json.loads((tmp_path / "run" / "checkpoint-1" / "progress.json").read_text())["launch"]
    assert launch["processes"] == 2 and launch["mixed_precision"] in ("no", "bf16")


def test_torchrun_is_what_the_forked_processes_are(tmp_path) -> None:
    """
    The real `torchrun` and `train.py`: environment, store and imports of the launcher's own processes, which the
    forked ones of all other tests only imitate. The weights are the same, bit for bit.
    """
    arguments = tiny_recipe(tmp_path, max_steps=2, save_every=2, average_last=1, cpu_threads=1)
    train_in_two(arguments, tmp_path / "forked")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    done = subprocess.run(
        [*command, *arguments, "--run_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_weights(tmp_path / "forked" / "model", tmp_path / "run" / "model")
    environments = [json.loads((tmp_path / run / "environment.json").read_text()) for run in ("forked", "run")]
    assert [environment["processes"] for environment in environments] == [2, 2]


def prepared(arguments: list[str]) -> None:
    """Prepares a training, and prints how often this process computed a table of text anew."""
    from datasets import Dataset

    from hf_vaswani.processes import build_accelerator
    from hf_vaswani.recipe_file import load_recipe
    from hf_vaswani.training.preparation import prepare

    computed, compute = [], Dataset._map_single

    @wraps(compute)
    def slowly(*given, **settings):
        computed.append(1)
        # The other process would begin meanwhile.
        time.sleep(0.5)
        return compute(*given, **settings)

    Dataset._map_single = staticmethod(slowly)
    recipe = load_recipe(arguments)
    run = prepare(recipe, build_accelerator(recipe.training, recipe.run_dir, str), None)
    print(len(computed), len(run.sets["test"][0].source))


@pytest.mark.parametrize("name", ["masked_lm", "classification", "tagging", "pairs"])
def test_one_process_of_a_machine_writes_the_text_that_both_read(tmp_path, name) -> None:
    arguments = [*task_recipes.recipe(tmp_path, name), "--run_dir", str(tmp_path / "run")]
    if name not in task_recipes.LABELLED:
        for split in ("train", "validation", "test"):
            path = tmp_path / f"{split}.tsv"
            lines = (tmp_path / f"{split}.txt").read_text().split("\n\n")
            path.write_text("en\n" + "".join(f"{each.replace(chr(10), ' ')}\n" for each in lines if each.strip()))
            arguments.append(f"--data.{split}_files={path}")
    else:
        for split in ("train", "validation", "test"):
            table = pd.read_csv(tmp_path / f"{split}.tsv", sep="\t")
            table.to_parquet(tmp_path / f"{split}.parquet")
            arguments.append(f"--data.{split}_files={tmp_path / f'{split}.parquet'}")
    first, second = run_launched(tmp_path / "outputs", prepared, arguments)
    assert [first.code, second.code] == [0, 0], (first.err[-2000:], second.err[-2000:])
    (wrote, rows), (again, same) = (map(int, end.out.split()[-2:]) for end in (first, second))
    assert wrote >= 6 and again == 0 and rows == same > 0


@pytest.mark.parametrize(("name", "words"), [("masked_lm", "is empty"), ("pairs", "has no column 'other'")])
def test_an_error_in_the_text_is_said_by_both(tmp_path, name, words) -> None:
    arguments = [*task_recipes.recipe(tmp_path, name), "--run_dir", str(tmp_path / "run")]
    path = next(tmp_path.glob("validation.*"))
    path.write_text("en\tlabel\n" if name == "pairs" else "")
    ends = run_launched(tmp_path / "outputs", verb, ["train", *arguments])
    assert [end.code for end in ends] == [2, 2] and all(words in end.sentence for end in ends), ends
