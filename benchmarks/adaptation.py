"""What does adapting a model to a domain bring? BLEU inside and outside of the domain, by pairs of the domain.

    python benchmarks/adaptation.py PYTHON_DOCS_FOLDER RUNS_FOLDER [--section.key value ...]

The text is that of configs/python_docs_en_es.yaml. A model is trained on all its sections but `whatsnew`. Then it
learns this section: from 500 pairs of the releases up to 3.10, from 2000 and from all. Release 3.11 validates, and
3.12 tests. Each amount is learned in three ways:

- alone: the model continues with these pairs;
- mixed: the model continues with these pairs and as many of its former text in each epoch;
- from scratch: a new model learns nothing but these pairs.

All options after the folders override keys of every training. An interrupted training is resumed, and a complete one
is not repeated. Prints the table.
"""

import argparse
import csv
import gzip
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs" / "python_docs_en_es.yaml"
DOMAIN = "whatsnew"
HELD_OUT = {"validation": "whatsnew/3.11", "test": "whatsnew/3.12"}
# Updates of a continued training by the number of pairs. A new model gets three times as many.
UPDATES = {500: 150, 2000: 400, None: 800}
# The former domain is held out in whole documents.
FORMER = {"validation": "valid", "test": "test"}
WAYS = ("alone", "mixed", "from scratch")


def read(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a compressed TSV file by the names of its columns."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Writes source and target of rows as TSV."""
    lines = ["en\tes", *(f"{row['en']}\t{row['es']}" for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def split(folder: Path, texts: Path) -> int:
    """
    Writes the text of both domains. No pair for training has the English side of one that is held out.

    Args:
        folder (`Path`): folder with `train.tsv.gz`.
        texts (`Path`): folder to write to.

    Returns:
        `int`: number of training pairs outside of the domain.
    """
    texts.mkdir(parents=True, exist_ok=True)
    rows = read(folder / "train.tsv.gz")
    held_out = {row["en"] for row in rows if row["document"] in HELD_OUT.values()}
    for name, document in HELD_OUT.items():
        write(texts / f"domain.{name}.tsv", (row for row in rows if row["document"] == document))
    rows = [row for row in rows if row["en"] not in held_out]
    general = [row for row in rows if row["section"] != DOMAIN]
    write(texts / "general.tsv", general)
    domain = [row for row in rows if row["section"] == DOMAIN]
    random.Random(1).shuffle(domain)
    for amount in UPDATES:
        write(texts / f"domain.{amount or 'all'}.tsv", domain[:amount])
    return len(general)


def train(
    run: Path, options: dict[str, Any], more: list[str], recipe: Path = RECIPE, verb: str = "train"
) -> dict[str, Any]:
    """Trains a run of a recipe with these options, and returns its `test.json`; the verb may also be `distill`."""
    if not (run / "test.json").exists():
        arguments = [
            f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()
        ]
        command = [sys.executable, "-m", "hf_vaswani.cli", verb, str(recipe), f"--run_dir={run}", *arguments, *more]
        subprocess.run(command, check=True)
    result: dict[str, Any] = json.loads((run / "test.json").read_text(encoding="utf-8"))
    return result


def options_of(amount: int | None, way: str, texts: Path, model: Path, general_pairs: int) -> dict[str, Any]:
    """Returns the options of the training that learns an amount of the domain in one of the ways."""
    pairs, updates = texts / f"domain.{amount or 'all'}.tsv", UPDATES[amount]
    # The domain decides which checkpoint is the best.
    options: dict[str, Any] = {"data.train_files": str(pairs), "training.best_set": "en-es"}
    options |= {"training.average_best": 1, "training.best_by": "loss"}
    options |= {f"data.{name}_files": str(texts / f"domain.{name}.tsv") for name in HELD_OUT}
    if way == "from scratch":
        updates *= 3
        options |= {"model.dropout": 0.3, "training.warmup_steps": min(updates // 5, 300)}
    else:
        # A seventh of the rate for random weights, by the same optimizer.
        options |= {"initialize.from": str(model), "training.peak_learning_rate": 0.0005}
        options |= {"training.warmup_steps": updates // 10}
    if way == "mixed":
        count = pairs.read_text("utf-8").count("\n") - 1
        source = {"target_language": "es", "train_files": str(texts / "general.tsv"), "weight": count / general_pairs}
        options["more_data"] = [source]
    every = updates // 5
    return (
        options
        | {f"training.{key}": every for key in ("validate_every", "save_every")}
        | {"training.max_steps": updates}
    )


def main() -> None:
    """Trains all models, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the text of configs/python_docs_en_es.yaml")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    arguments, more = parser.parse_known_args()
    texts = arguments.runs / "texts"
    pairs = split(arguments.folder, texts)
    former = {f"{name}_files": str(arguments.folder / f"{file}.tsv.gz") for name, file in FORMER.items()}
    general = {f"data.{key}": path for key, path in former.items()} | {"data.train_files": str(texts / "general.tsv")}
    # The recipe's own number of updates is for two processes.
    general |= {"training.max_steps": 3000, "training.validate_every": 500, "training.save_every": 250}
    train(arguments.runs / "general", general, more)
    rows = []
    for way in WAYS:
        for amount in UPDATES:
            options = options_of(amount, way, texts, arguments.runs / "general", pairs)
            # Only the domain is validated.
            options["validation_sets"] = {"general": {"test_files": former["test_files"]}}
            result = train(arguments.runs / f"{way.replace(' ', '_')}_{amount or 'all'}", options, more)
            if not rows:
                before = {name: scores["before"] for name, scores in result["before"].items()}
                rows.append(row("not adapted", "0", before))
            rows.append(row(way, f"{amount or 'all'}", result["sets"]))
    print("| training | pairs of the domain | BLEU in the domain | outside |\n|---|---:|---:|---:|", *rows, sep="\n")


def row(training: str, pairs: str, scores: dict[str, dict[str, float]]) -> str:
    """Returns a row of the table."""
    return f"| {training} | {pairs} | {scores['en-es']['bleu']:.2f} | {scores['general']['bleu']:.2f} |"


if __name__ == "__main__":
    main()
