"""Every task by the real command: trained, resumed, measured, saved, and loaded by its Auto class and its pipeline."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    pipeline,
)

from hf_vaswani import (
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
)
from hf_vaswani.cli.main import main
from hf_vaswani.data.sources import EvaluationSet
from hf_vaswani.hub.card import card_files, render_card
from hf_vaswani.recipe import ObjectiveRecipe, Recipe
from hf_vaswani.run_folder import read_result
from hf_vaswani.training.tasks import model_class, perplexities

from ..conftest import ROOT, SEED, THREADS
from ..hub_server import Access, HubServer

TOKEN = "hf_the_writing_token"
WORDS = "the a small old red cat dog house sees likes finds in under near and or very quite tree book".split()
TASKS = {
    "masked_lm": ("masked_lm", {}),
    "next_sentence": ("masked_lm", {"next_sentence": "true"}),
    "whole_words": ("masked_lm", {"whole_words": "true", "unit": "lines"}),
    "causal_lm": ("causal_lm", {}),
    "span_corruption": ("span_corruption", {}),
    "denoise": ("denoise", {"noise": "[permutation, infilling]"}),
}
CLASSES = {
    "masked_lm": (VaswaniForMaskedLM, AutoModelForMaskedLM),
    "next_sentence": (VaswaniForPreTraining, AutoModelForPreTraining),
    "whole_words": (VaswaniForMaskedLM, AutoModelForMaskedLM),
    "causal_lm": (VaswaniForCausalLM, AutoModelForCausalLM),
    "span_corruption": (VaswaniForConditionalGeneration, AutoModelForSeq2SeqLM),
    "denoise": (VaswaniForConditionalGeneration, AutoModelForSeq2SeqLM),
}


def write_text(path: Path, documents: int, seed: int = 0) -> Path:
    """Writes documents of a few lines, whose words repeat in each document."""
    lines = []
    for document in range(documents):
        some = [WORDS[(7 * document + 3 * i + seed) % len(WORDS)] for i in range(6)]
        for line in range(2 + document % 4):
            lines.append(" ".join(some[(line + i * i) % 6] for i in range(4 + (line + document) % 5)))
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def recipe(folder: Path, name: str, **training: object) -> list[str]:
    """Returns the arguments of a small recipe for a task."""
    task, objective = TASKS[name]
    texts = {"train": 40, "validation": 8, "test": 9}
    files = {split: write_text(folder / f"{split}.txt", count, count) for split, count in texts.items()}
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {task}\nseed: {SEED}\ndata:\n  source_language: en\n"
        + "".join(f"  {split}_files: {file}\n" for split, file in files.items())
        + "tokenizer: {vocab_size: 300}\n"
        "model: {d_model: 16, d_ff: 32, num_heads: 2, encoder_layers: 1, decoder_layers: 1}\n"
        f"objective: {{block_length: 32{''.join(f', {key}: {value}' for key, value in objective.items())}}}\n"
        "training: {max_steps: 6, tokens_per_batch: 256, warmup_steps: 4, validate_every: 3, save_every: 3,\n"
        f"           average_last: 2, cpu_threads: {THREADS}}}\n",
        encoding="utf-8",
    )
    return [str(path), *(f"--training.{key}={value}" for key, value in training.items())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Trains each task once, with the real command."""
    found = {}
    for name in TASKS:
        folder = tmp_path_factory.mktemp(name)
        assert main(["train", *recipe(folder, name), "--run_dir", str(folder / "run")]) == 0
        found[name] = folder / "run"
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", TASKS)
def test_a_run_is_complete(name, runs) -> None:
    run = runs[name]
    result = json.loads((run / "test.json").read_text("utf-8"))
    lines = [json.loads(line) for line in (run / "validations.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [3, 6] and result["averaged"] == ["checkpoint-3", "checkpoint-6"]
    assert "bleu" not in result and "bleu" not in lines[0]
    assert [line["best"] for line in lines].count(True) == 1
    assert min(lines, key=lambda line: line["loss"])["best"]
    expected = {"perplexity"}
    if TASKS[name][0] == "masked_lm":
        expected |= {"accuracy"}
    if name == "next_sentence":
        expected |= {"next_sentence_accuracy"}
    if name == "causal_lm":
        expected |= {"word_perplexity", "byte_perplexity"}
    for measures in (lines[0]["measures"], result["measures"]):
        assert measures.keys() - {"loss"} == expected
        assert all(0 <= measures[each] <= 1 for each in expected if each.endswith("accuracy"))
    assert lines[0]["measures"]["perplexity"] == pytest.approx(math.exp(lines[0]["loss"]))
    kind, auto = CLASSES[name]
    assert type(auto.from_pretrained(run / "model")) is kind
    checkpoint, report = auto.from_pretrained(run / "checkpoint-6", output_loading_info=True)
    assert type(checkpoint) is kind and not any(report.values())


@pytest.mark.parametrize("name", TASKS)
def test_the_measured_loss_is_that_of_the_saved_model(name, runs, tmp_path) -> None:
    """Recomputed with transformers alone, from the rows that the objective makes."""
    from hf_vaswani.data.batching import PairCollator
    from hf_vaswani.data.text_sources import encode_text_sets, read_texts
    from hf_vaswani.recipe_file import load_recipe

    run = runs[name]
    settings = load_recipe([str(run / "recipe.yaml")])
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    (test,) = encode_text_sets(settings, read_texts(settings), tokenizer)["test"]
    model = CLASSES[name][1].from_pretrained(run / "model")
    total = labels = 0.0
    collator = PairCollator(tokenizer.pad_token_id, test.encoded.column_names)
    for row in test.encoded:
        batch = collator([row])
        for extra in ("numbers", "next_sentence_label"):
            batch.pop(extra, None)
        with torch.no_grad():
            total += model(**batch, num_items_in_batch=1).loss.item()
        labels += int((batch["labels"] != -100).sum())
    measures = json.loads((run / "test.json").read_text("utf-8"))["measures"]
    assert total / labels == pytest.approx(measures["loss"], rel=1e-4)


@pytest.mark.parametrize("name", TASKS)
def test_a_stopped_run_ends_the_same(name, runs, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[name], run)
    for gone in ("checkpoint-6", "model", "test.json"):
        path = run / gone
        path.unlink() if path.is_file() else shutil.rmtree(path)
    before = weights(runs[name] / "checkpoint-6")
    arguments = [*recipe(runs[name].parent, name), "--run_dir", str(run)]
    assert main(["train", *arguments]) == 0
    again = weights(run / "checkpoint-6")
    assert before.keys() == again.keys()
    assert all(torch.equal(again[key], before[key]) for key in before)
    both = [json.loads((path / "test.json").read_text("utf-8"))["measures"] for path in (run, runs[name])]
    assert both[0] == both[1]


@pytest.mark.parametrize("name", ["next_sentence", "causal_lm"])
def test_two_processes_make_the_same_updates(name, runs, tmp_path) -> None:
    """One process that accumulates two batches makes the update of two processes with one each."""
    options = ["--model.dropout=0", "--training.max_steps=3", "--data.test_files=null", "--training.average_last=1"]
    one = [*recipe(tmp_path, name, accumulation_steps=2), *options, "--run_dir", str(tmp_path / "one")]
    assert main(["train", *one]) == 0
    two = [*recipe(tmp_path, name), *options, "--training.cpu_threads=1", "--run_dir", str(tmp_path / "two")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(ROOT / "train.py"), *two],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = weights(tmp_path / "one" / "checkpoint-3"), weights(tmp_path / "two" / "checkpoint-3")
    for key, weight in ours.items():
        torch.testing.assert_close(theirs[key], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["next_sentence", "causal_lm"])
def test_a_streamed_run_ends_the_same_after_a_stop(name, tmp_path) -> None:
    options = ["--data.streaming=true", "--data.stream_window=40", "--run_dir", str(tmp_path / "run")]
    arguments = [*recipe(tmp_path, name), *options]
    assert main(["train", *arguments]) == 0
    before = weights(tmp_path / "run" / "checkpoint-6")
    for gone in ("checkpoint-6", "model"):
        shutil.rmtree(tmp_path / "run" / gone)
    assert main(["train", *arguments]) == 0
    again = weights(tmp_path / "run" / "checkpoint-6")
    assert all(torch.equal(again[key], before[key]) for key in before)


def test_workers_change_nothing(runs, tmp_path) -> None:
    run = tmp_path / "run"
    arguments = [*recipe(tmp_path, "next_sentence", data_workers=2), "--run_dir", str(run)]
    assert main(["train", *arguments]) == 0
    ours, theirs = weights(run / "checkpoint-6"), weights(runs["next_sentence"] / "checkpoint-6")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_models_work_in_their_pipelines(runs) -> None:
    fill = pipeline("fill-mask", model=str(runs["masked_lm"] / "model"))
    assert len(fill("the cat sees the <mask>")) == 5
    write = pipeline("text-generation", model=str(runs["causal_lm"] / "model"))
    text = write("the small cat", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith("the small cat")
    tokenizer = AutoTokenizer.from_pretrained(runs["causal_lm"] / "model")
    assert tokenizer("the cat")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer("the cat")["input_ids"][-1] != tokenizer.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(runs["next_sentence"] / "model")
    pair = tokenizer("the cat", "the dog")
    cut = pair["input_ids"].index(tokenizer.eos_token_id) + 1
    assert pair["token_type_ids"] == [0] * cut + [1] * (len(pair["input_ids"]) - cut)
    assert pair["input_ids"][0] == tokenizer.bos_token_id and pair["input_ids"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", TASKS)
def test_a_run_leaves_its_card(name, runs, tmp_path) -> None:
    model = runs[name] / "model"
    result = read_result(runs[name])
    files = card_files(runs[name], model, result, None, "main")
    assert files == {file: (model / file).read_bytes() for file in ("README.md", "curve.png")}
    data = ModelCard(files["README.md"].decode()).data
    assert {each.metric_type for each in data.eval_results} == set(result.measures)
    # A finished run writes a card that was deleted again.
    run = tmp_path / "run"
    shutil.copytree(runs[name], run)
    (run / "model" / "README.md").unlink()
    assert main(["train", *recipe(runs[name].parent, name), "--run_dir", str(run)]) == 0
    assert (run / "model" / "README.md").is_file()


@pytest.mark.parametrize("name", TASKS)
def test_the_examples_of_a_card_run(name, runs) -> None:
    """With the package, and by the code beside the weights; the last line is what the model makes of the example."""
    folder = runs[name] / "model"
    card = render_card(runs[name], folder, read_result(runs[name]), repo_id=str(folder))
    examples = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        *lines, last = example.strip().splitlines()
        names: dict[str, object] = {}
        exec("\n".join(lines), names)
        found = eval(last, names)
        if "inputs" in names:
            assert isinstance(found, str)
            mask = {"denoise": "<mask>", "span_corruption": "<extra_0>"}[name]
            assert names["tokenizer"].convert_tokens_to_ids(mask) in names["inputs"]["input_ids"][0].tolist()
        else:
            first = "generated_text" if name == "causal_lm" else "token_str"
            assert all(first in each for each in found)


def test_a_training_publishes_a_language_model(tmp_path) -> None:
    """A checkpoint with the accuracy of its validation, and then the model with that of its test."""
    with HubServer(tokens={TOKEN: Access("alice", "write")}) as hub:
        options = ["--run_dir", str(tmp_path / "run"), "--hub.repo_id=alice/m", "--hub.min_score=0"]
        arguments = [*recipe(tmp_path, "next_sentence", best_by="accuracy"), *options, "--hub.every_n_checkpoints=2"]
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        environment = os.environ | hub.environment(tmp_path / "home", TOKEN)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        titles = [commit.title for commit in reversed(hub.commits("alice/m"))]
        lines = [json.loads(line) for line in (tmp_path / "run" / "validations.jsonl").read_text().splitlines()]
        accuracies = [line["measures"]["accuracy"] for line in lines]
        tested = json.loads((tmp_path / "run" / "test.json").read_text())["measures"]["accuracy"]
        assert titles == [
            "initial commit",
            f"checkpoint-6: accuracy {accuracies[1]:.2f} after 6 updates",
            f"model: accuracy {tested:.2f} after 6 updates",
        ]
        files, model = hub.files("alice/m"), tmp_path / "run" / "model"
        assert files.keys() - {".gitattributes"} == {path.name for path in model.iterdir()}
        assert all(files[path.name] == path.read_bytes() for path in model.iterdir())
        assert "Training curve: loss and accuracy by update" in files["README.md"].decode()
        assert [line["best"] for line in lines] == [accuracies[0] > accuracies[1], accuracies[1] >= accuracies[0]]
        # The same command with a minimum that no model reaches publishes nothing, and says so.
        done = subprocess.run([*command, "--hub.min_score=1"], env=environment, capture_output=True, check=False)
        assert done.returncode == 2 and b"and hub.min_score is 1.0000" in done.stderr.splitlines()[-1]
        assert len(hub.commits("alice/m")) == 3
        assert hub.unknown == []


def test_a_model_without_a_test_set_is_not_published(tmp_path, capsys) -> None:
    options = ["--run_dir", str(tmp_path / "run"), "--data.test_files=null", "--hub.repo_id=alice/m"]
    assert main(["train", *recipe(tmp_path, "masked_lm"), *options]) == 2
    assert "hub.repo_id needs a test set" in capsys.readouterr().err


def test_a_translation_starts_from_a_denoiser(runs, tmp_path) -> None:
    """Its architecture and vocabulary become those of the translation."""
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("en\tde\n" + "the cat\tthe dog\n" * 20, encoding="utf-8")
    path = tmp_path / "translate.yaml"
    path.write_text(
        f"data: {{train_files: {pairs}, validation_files: {pairs}}}\n"
        f"initialize: {{from: {runs['denoise']}}}\n"
        "training: {max_steps: 2, tokens_per_batch: 256, warmup_steps: 4, validate_every: 2, save_every: 2}\n",
        encoding="utf-8",
    )
    assert main(["train", str(path), "--run_dir", str(tmp_path / "run")]) == 0
    start, before = weights(tmp_path / "run" / "start"), weights(runs["denoise"] / "model")
    assert all(torch.equal(start[key], before[key]) for key in before)


def test_perplexities_count_words_and_bytes() -> None:
    text = EvaluationSet("en", ["one two", "drei ü"], [], None, None, "en", None)
    recipe = Recipe(task="causal_lm")
    found = perplexities(recipe, 12.0, 6.0, [text])
    assert found == {
        "perplexity": math.exp(2),
        "word_perplexity": math.exp(3),
        "byte_perplexity": math.exp(12 / 16),
    }
    assert perplexities(Recipe(task="masked_lm"), 12.0, 6.0, [text]) == {"perplexity": math.exp(2)}
    assert perplexities(recipe, 1e9, 6.0, [text])["perplexity"] == math.inf


def test_each_task_has_its_class() -> None:
    for name, (task, _) in TASKS.items():
        settings = ObjectiveRecipe(next_sentence=name == "next_sentence")
        assert model_class(Recipe(task=task, objective=settings)) is CLASSES[name][0]
    assert model_class(Recipe()) is VaswaniForConditionalGeneration
