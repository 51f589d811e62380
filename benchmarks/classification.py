"""What does pre-training bring to a classifier? The accuracy with which it names the manual that a paragraph is from.

    python benchmarks/classification.py PYTHON_DOCS_FOLDER RUNS_FOLDER [--section.key value ...]

The text is the English side of configs/python_docs_en_es.yaml. Of six manuals, whole documents are held out until
100 paragraphs for validation and 100 for test are drawn of each. configs/family/python_docs_bert.yaml pre-trains an
encoder on all other documents, without labels. From 200 and from 2000 of their paragraphs, as many of each manual, a
classifier is trained, with three seeds that also draw the paragraphs:

- fine-tuned: it starts from the encoder;
- frozen: it starts from the encoder, and only its head is trained;
- from scratch: the same network starts from random weights, with the encoder's vocabulary.

All options after the folders override keys of every training. An interrupted training is resumed, and a complete one
is not repeated. Prints the table: mean and range of the accuracy.
"""

import argparse
import random
from pathlib import Path
from statistics import mean
from typing import Any

from adaptation import ROOT, read, train

RECIPES = ROOT / "configs" / "family"
MANUALS = ("c-api", "howto", "library", "reference", "tutorial", "whatsnew")
HELD_OUT = 100
# Titles and single terms say little about their manual.
FEWEST_WORDS = 8
# Updates by number of labels.
UPDATES = {200: 100, 2000: 300}
SEEDS = (1, 2, 3)
WAYS: dict[str, dict[str, Any]] = {
    "fine-tuned": {"training.peak_learning_rate": 0.0005},
    "frozen": {"training.peak_learning_rate": 0.005, "training.freeze": ["encoder", "embeddings"]},
    "from scratch": {"training.peak_learning_rate": 0.0005},
}


def write_labelled(path: Path, rows: list[dict[str, str]]) -> None:
    """Writes paragraphs and their manuals as TSV."""
    lines = ["en\tlabel", *(f"{row['en']}\t{row['section']}" for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def split(folder: Path, texts: Path) -> None:
    """Writes the text of all trainings; `folder` has `train.tsv.gz`."""
    texts.mkdir(parents=True, exist_ok=True)
    rows, chance = read(folder / "train.tsv.gz"), random.Random(1)
    held_out = set[str]()
    sets: dict[str, list[dict[str, str]]] = {"validation": [], "test": []}
    for manual in MANUALS:
        of_manual = [row for row in rows if row["section"] == manual and len(row["en"].split()) >= FEWEST_WORDS]
        documents = sorted({row["document"] for row in of_manual})
        chance.shuffle(documents)
        for name in sets:
            found: list[dict[str, str]] = []
            while len(found) < HELD_OUT:
                document = documents.pop()
                held_out.add(document)
                found += [row for row in of_manual if row["document"] == document]
            sets[name] += chance.sample(found, HELD_OUT)
    for name, part in sets.items():
        write_labelled(texts / f"{name}.tsv", part)
    known = {row["en"] for part in sets.values() for row in part}
    rest = [row for row in rows if row["document"] not in held_out and row["en"] not in known]
    lines = ["document\ten", *(f"{row['document']}\t{row['en']}" for row in rest)]
    (texts / "unlabelled.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for seed in SEEDS:
        chance = random.Random(seed)
        drawn = {
            manual: [row for row in rest if row["section"] == manual and len(row["en"].split()) >= FEWEST_WORDS]
            for manual in MANUALS
        }
        for part in drawn.values():
            chance.shuffle(part)
        for amount in UPDATES:
            # The smaller amount is part of the larger one.
            counts = [(amount + i) // len(MANUALS) for i in range(len(MANUALS))]
            labelled = [row for part, count in zip(drawn.values(), counts, strict=True) for row in part[:count]]
            write_labelled(texts / f"{amount}.{seed}.tsv", labelled)


def options_of(way: str, amount: int, seed: int, texts: Path, encoder: Path) -> dict[str, Any]:
    """Returns the options of a classifier's training."""
    start = {"initialize.from": str(encoder)}
    if way == "from scratch":
        start = {"tokenizer.path": str(encoder / "tokenizer")}
    return {
        "data.train_files": str(texts / f"{amount}.{seed}.tsv"),
        "data.validation_files": str(texts / "validation.tsv"),
        "data.test_files": str(texts / "test.tsv"),
        "seed": seed,
        "training.max_steps": UPDATES[amount],
        "training.validate_every": UPDATES[amount] // 10,
        "training.save_every": UPDATES[amount] // 10,
        **start,
        **WAYS[way],
    }


def main() -> None:
    """Trains all models, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the text of configs/python_docs_en_es.yaml")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    arguments, more = parser.parse_known_args()
    texts, encoder = arguments.runs / "texts", arguments.runs / "encoder"
    split(arguments.folder, texts)
    # One process in place of the two that the recipe is made for.
    text = {"data.train_files": str(texts / "unlabelled.tsv"), "training.accumulation_steps": 2}
    train(encoder, text, more, RECIPES / "python_docs_bert.yaml")
    print("| classifier | labels | accuracy | lowest | highest |\n|---|---:|---:|---:|---:|")
    for amount in UPDATES:
        for way in WAYS:
            found = []
            for seed in SEEDS:
                run = arguments.runs / f"{way.replace(' ', '_')}_{amount}_{seed}"
                options = options_of(way, amount, seed, texts, encoder)
                result = train(run, options, more, RECIPES / "python_docs_classifier.yaml")
                found.append(100 * result["measures"]["accuracy"])
            print(f"| {way} | {amount} | {mean(found):.1f} | {min(found):.1f} | {max(found):.1f} |")


if __name__ == "__main__":
    main()
