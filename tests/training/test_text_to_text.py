"""Several tasks in one model, told apart by a prefix: trained, resumed, and scored one by one."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_vaswani.cli.main import main
from hf_vaswani.records import Validation, from_json

from ..conftest import SEED, THREADS, tiny_recipe
from .runs import assert_resumes_exactly
from .task_recipes import write_labelled


def recipe(folder: Path, **training: object) -> list[str]:
    """Returns the arguments of a recipe that copies sentences and names the animal in them."""
    lines = ["task: text_to_text", f"seed: {SEED}", "data:", "  prefix: 'copy:'", "  target_language: xx"]
    for split, rows in (("train", 120), ("validation", 24), ("test", 27)):
        table = write_labelled(folder / f"{split}.tsv", rows, "classification")
        sentences = [line.split("\t")[0] for line in table.read_text("utf-8").splitlines()[1:]]
        copies = "en\txx\n" + "".join(f"{sentence}\t{sentence}\n" for sentence in sentences)
        (folder / f"{split}.copies.tsv").write_text(copies, encoding="utf-8")
        lines.append(f"  {split}_files: {folder / f'{split}.copies.tsv'}")
    lines += ["more_data:", "- prefix: 'animal:'", "  target_language: animal", "  target_column: label"]
    lines += [f"  {split}_files: {folder / f'{split}.tsv'}" for split in ("train", "validation", "test")]
    path = folder / "recipe.yaml"
    path.write_text(
        "\n".join(lines) + "\n"
        "tokenizer: {vocab_size: 300}\n"
        "model: {d_model: 32, d_ff: 64, num_heads: 2, encoder_layers: 1, decoder_layers: 1, dropout: 0.0}\n"
        "evaluation: {num_beams: 2, max_length_offset: 5}\n"
        "training: {max_steps: 6, tokens_per_batch: 512, warmup_steps: 4, validate_every: 3, save_every: 3,\n"
        f"           average_last: 2, cpu_threads: {THREADS}}}\n",
        encoding="utf-8",
    )
    return [str(path), *(f"--training.{key}={value}" for key, value in training.items())]


def test_a_run_scores_each_task_and_ends_the_same_after_a_stop(tmp_path) -> None:
    arguments, run = recipe(tmp_path), tmp_path / "run"
    assert main(["train", *arguments, "--run_dir", str(run)]) == 0
    first = json.loads((run / "test.json").read_text("utf-8"))
    assert first["sets"].keys() == {"en-xx", "en-animal"}
    for scored in (first, json.loads((run / "validations.jsonl").read_text("utf-8").splitlines()[-1])):
        each = [part["exact_match"] for part in scored["sets"].values()]
        assert scored["measures"] == {"exact_match": sum(each) / 2}
        assert scored["bleu"] == sum(part["bleu"] for part in scored["sets"].values()) / 2
    assert_resumes_exactly(arguments, run, 6)
    settings = json.loads((run / "model" / "config.json").read_text("utf-8"))
    assert settings.get("language_pairs") is None


@pytest.mark.slow
def test_one_model_learns_two_tasks(tmp_path, caplog) -> None:
    """The same sentence with another prefix gets another answer, by `generate` and by the pipeline."""
    arguments = recipe(tmp_path, max_steps=400, validate_every=400, save_every=400, average_last=1)
    faster = ["--training.schedule=constant", "--training.peak_learning_rate=0.01", "--training.label_smoothing=0"]
    run = tmp_path / "run"
    assert main(["train", *arguments, *faster, "--training.best_by=exact_match", "--run_dir", str(run)]) == 0
    assert "have no tag for them" not in caplog.text
    result = json.loads((run / "test.json").read_text("utf-8"))
    assert result["sets"]["en-animal"]["exact_match"] > 0.9
    model, tokenizer = (auto.from_pretrained(run / "model") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    with torch.inference_mode():
        found = model.generate(
            **tokenizer(["animal: the small dog", "animal: a cat sees"], return_tensors="pt", padding=True)
        )
    assert tokenizer.batch_decode(found, skip_special_tokens=True) == ["dog", "cat"]
    answer = pipeline("translation", model=str(run / "model"))
    assert answer("animal: the small dog")[0]["translation_text"] == "dog"
    assert answer("copy: the small dog")[0]["translation_text"] != "dog"
    card = ModelCard.load(run / "model" / "README.md")
    assert "A text-to-text model for en-xx and en-animal with" in card.text
    assert f"| {result['sets']['en-animal']['exact_match']:.4f} |" in card.text
    # A label is no language.
    assert card.data.language == ["en", "xx"]
    names = {(each.task_name, each.metric_type) for each in card.data.eval_results}
    assert ("Text to text en-animal", "exact_match") in names and ("Text to text en-xx", "bleu") in names


@pytest.mark.slow
def test_a_translation_model_forgets_its_directions(tmp_path) -> None:
    """Otherwise its pipeline would put their tag in front of every text."""
    first = [*tiny_recipe(tmp_path, max_steps=2), "--data.target_tag=true", "--run_dir", str(tmp_path / "translation")]
    assert main(["train", *first]) == 0
    again = [*recipe(tmp_path), f"--initialize.from={tmp_path / 'translation'}", "--run_dir", str(tmp_path / "run")]
    path = Path(again[0])
    path.write_text(path.read_text("utf-8").replace("tokenizer: {vocab_size: 300}\n", ""), encoding="utf-8")
    path.write_text("\n".join(line for line in path.read_text("utf-8").splitlines() if "model:" not in line))
    assert main(["train", *again]) == 0
    for folder in ("start", "model"):
        settings = json.loads((tmp_path / "run" / folder / "config.json").read_text("utf-8"))
        assert settings.get("language_pairs") is None


def test_a_validation_has_bleu_and_another_measure() -> None:
    line = {"step": 1, "loss": 1.0, "bleu": 2.0, "chrf": 3.0, "ter": 4.0, "measures": {"exact_match": 0.5}}
    scores = {"loss": 1.0, "bleu": 2.0, "chrf": 3.0, "ter": 4.0, "exact_match": 0.5}
    assert from_json(Validation, line).scores == scores
