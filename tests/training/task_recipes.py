"""Small recipes of every task on made-up text, and their classes."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_vaswani import (
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)
from hf_vaswani.cli.main import main

from ..conftest import SEED, THREADS

WORDS = "the a small old red cat dog house sees likes finds in under near and or very quite tree book".split()
TASKS = {
    "masked_lm": ("masked_lm", {}),
    "next_sentence": ("masked_lm", {"next_sentence": "true"}),
    "whole_words": ("masked_lm", {"whole_words": "true", "unit": "lines"}),
    "causal_lm": ("causal_lm", {}),
    "span_corruption": ("span_corruption", {}),
    "denoise": ("denoise", {"noise": "[permutation, infilling]"}),
    "classification": ("classification", {}),
    "pairs": ("classification", {}),
    "decoder": ("classification", {"stack": "decoder"}),
    "tagging": ("tagging", {}),
}
LABELLED = ("classification", "pairs", "decoder", "tagging")
CLASSES = {
    "masked_lm": (VaswaniForMaskedLM, AutoModelForMaskedLM),
    "next_sentence": (VaswaniForPreTraining, AutoModelForPreTraining),
    "whole_words": (VaswaniForMaskedLM, AutoModelForMaskedLM),
    "causal_lm": (VaswaniForCausalLM, AutoModelForCausalLM),
    "span_corruption": (VaswaniForConditionalGeneration, AutoModelForSeq2SeqLM),
    "denoise": (VaswaniForConditionalGeneration, AutoModelForSeq2SeqLM),
    "classification": (VaswaniForSequenceClassification, AutoModelForSequenceClassification),
    "pairs": (VaswaniForSequenceClassification, AutoModelForSequenceClassification),
    "decoder": (VaswaniForSequenceClassification, AutoModelForSequenceClassification),
    "tagging": (VaswaniForTokenClassification, AutoModelForTokenClassification),
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


def write_labelled(path: Path, rows: int, name: str) -> Path:
    """Writes sentences, each with the animal in it as a label, or with a tag for each animal and thing."""
    kinds = {"dog": "B-ANIMAL", "cat": "B-ANIMAL", "house": "B-THING", "tree": "B-THING", "old": "I-THING"}
    lines = ["en\tother\tlabel" if name == "pairs" else "en\tlabel"]
    for row in range(rows):
        words = [WORDS[(5 * row + 3 * i) % len(WORDS)] for i in range(3 + row % 5)]
        animal = ("dog", "cat", "tree")[row % 3]
        words = [word for word in words if word not in ("dog", "cat", "tree")]
        words.insert(row % (len(words) + 1), animal)
        text = " ".join(words)
        if name == "pairs":
            other = text if row % 2 else " ".join(words[::-1])
            lines.append(f"{text}\t{other}\t{'same' if row % 2 else 'turned'}")
        elif name == "tagging":
            lines.append(f"{text}\t{' '.join(kinds.get(word, 'O') for word in words)}")
        else:
            lines.append(f"{text}\t{animal}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def recipe(folder: Path, name: str, **training: object) -> list[str]:
    """Returns the arguments of a small recipe for a task."""
    task, objective = TASKS[name]
    texts = {"train": 40, "validation": 8, "test": 9}
    if name in LABELLED:
        files = {split: write_labelled(folder / f"{split}.tsv", 3 * rows, name) for split, rows in texts.items()}
    else:
        files = {split: write_text(folder / f"{split}.txt", count, count) for split, count in texts.items()}
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {task}\nseed: {SEED}\ndata:\n  source_language: en\n"
        + "".join(f"  {split}_files: {file}\n" for split, file in files.items())
        + ("  pair_column: other\n" if name == "pairs" else "")
        + "tokenizer: {vocab_size: 300}\n"
        "model: {d_model: 16, d_ff: 32, num_heads: 2, encoder_layers: 1, decoder_layers: 1}\n"
        f"objective: {{block_length: 32{''.join(f', {key}: {value}' for key, value in objective.items())}}}\n"
        "training: {max_steps: 6, tokens_per_batch: 256, warmup_steps: 4, validate_every: 3, save_every: 3,\n"
        f"           average_last: 2, cpu_threads: {THREADS}}}\n",
        encoding="utf-8",
    )
    return [str(path), *(f"--training.{key}={value}" for key, value in training.items())]


def trained(folders: pytest.TempPathFactory, names: Iterable[str]) -> dict[str, Path]:
    """Trains each of these tasks with the real command; returns the run folders by task."""
    found = {}
    for name in names:
        folder = folders.mktemp(name)
        assert main(["train", *recipe(folder, name), "--run_dir", str(folder / "run")]) == 0
        found[name] = folder / "run"
    return found
