"""How much does monolingual text help when there are few pairs? BLEU with pre-training and back-translation.

    python benchmarks/few_pairs.py PYTHON_DOCS_FOLDER RUNS_FOLDER [--section.key value ...]

The text is that of configs/python_docs_en_es.yaml. From its training text, 2000 and 10,000 pairs are drawn; of all
others, only the sides are known. A model is trained

- from scratch: on the pairs;
- pre-trained: on the pairs, from the model that configs/family/python_docs_denoise.yaml trains on both languages;
- back-translated: from scratch, on the pairs and on the Spanish side of all others with synthetic sources, which a
  model of the other direction, trained on the same pairs from scratch, makes by greedy search;
- both: in the same way, but both models are pre-trained.

All options after the folders override keys of every training. An interrupted training is resumed, and a complete one
is not repeated. Prints the table.
"""

import argparse
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from adaptation import RECIPE, ROOT, read, train, write

FILES = {"train": "train", "validation": "valid", "test": "test"}
DENOISE = ROOT / "configs" / "family" / "python_docs_denoise.yaml"
# Updates of a training by its number of pairs. Without pre-training, it takes longer.
UPDATES = {
    "scratch": {2000: 2400, 10_000: 4800, "back-translation": 4800},
    "pretrained": {2000: 800, 10_000: 1600, "back-translation": 2400},
}
# A vocabulary of 8000 entries would have the words of 2000 pairs by heart.
ENTRIES = {2000: 4000, 10_000: 8000}


def split(folder: Path, texts: Path) -> None:
    """Writes the pairs, and the Spanish side of all others; `folder` has `train.tsv.gz`."""
    texts.mkdir(parents=True, exist_ok=True)
    rows = read(folder / "train.tsv.gz")
    random.Random(1).shuffle(rows)
    for amount in ENTRIES:
        write(texts / f"pairs.{amount}.tsv", rows[:amount])
        known = {row["es"] for row in rows[:amount]}
        others = dict.fromkeys(row["es"] for row in rows[amount:] if row["es"] not in known)
        (texts / f"others.{amount}.es").write_text("\n".join(others) + "\n", encoding="utf-8")


def options_of(amount: int, name: str, texts: Path, denoiser: Path, sets: dict[str, str]) -> dict[str, Any]:
    """Returns the options of a training on pairs alone."""
    options: dict[str, Any] = {"data.train_files": str(texts / f"pairs.{amount}.tsv"), **sets}
    if name == "pretrained":
        options |= {"initialize.from": str(denoiser), "data.target_tag": True, "training.peak_learning_rate": 0.001}
    else:
        options |= {"tokenizer.vocab_size": ENTRIES[amount], "model.dropout": 0.2}
    return options | steps(UPDATES[name][amount])


def steps(updates: int) -> dict[str, Any]:
    """Returns the options for a number of updates, of which the best of five validations counts."""
    keys = {"max_steps": updates, "warmup_steps": updates // 8, "average_best": 1, "best_by": "loss"}
    keys |= dict.fromkeys(("validate_every", "save_every"), updates // 5)
    return {f"training.{key}": value for key, value in keys.items()}


def backtranslated(texts: Path, amount: int, name: str, model: Path, sets: dict[str, str]) -> str:
    """Back-translates the Spanish side, and returns the file with the pairs."""
    output = texts / f"synthetic.{amount}.{name}.tsv"
    options = {
        "model": model,
        "text": texts / f"others.{amount}.es",
        "output": output,
        "method": "beam",
        "num_beams": 1,
    }
    arguments = [f"--backtranslation.{key}={value}" for key, value in options.items()]
    files = [f"--{key}={value}" for key, value in sets.items()]
    command = [sys.executable, "-m", "hf_vaswani.cli", "backtranslate", str(RECIPE), *arguments, *files]
    if not output.exists():
        subprocess.run(command, check=True)
    return str(output)


def main() -> None:
    """Trains all models, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the text of configs/python_docs_en_es.yaml")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    arguments, more = parser.parse_known_args()
    runs, texts, denoiser = arguments.runs, arguments.runs / "texts", arguments.runs / "denoiser"
    split(arguments.folder, texts)
    files = {f"{split}_files": str(arguments.folder / f"{name}.tsv.gz") for split, name in FILES.items()}
    unpaired = {key: path for key, path in files.items() if key != "test_files"}
    english = {f"data.{key}": path for key, path in unpaired.items()}
    spanish = {"source_language": "es", "document_column": "document"} | unpaired
    # One process in place of the two that the recipe is made for.
    one_process = {"training.accumulation_steps": 2}
    train(denoiser, english | {"more_data": [spanish]} | one_process, more, DENOISE)
    sets = {f"data.{key}": path for key, path in files.items() if key != "train_files"}
    print("| training | pairs | BLEU |\n|---|---:|---:|")
    for amount in ENTRIES:
        for name in UPDATES:
            options = options_of(amount, name, texts, denoiser, sets)
            result = train(runs / f"{name}_{amount}", options, more)
            print(f"| {name} | {amount:,} | {result['bleu']:.2f} |")
            turned = {"data.source_language": "es", "data.target_language": "en", "data.test_files": None}
            train(runs / f"{name}_{amount}_reverse", options | turned, more)
            synthetic = backtranslated(texts, amount, name, runs / f"{name}_{amount}_reverse", sets)
            source = {"target_language": "es", "train_files": synthetic, "prefix": "<bt>"}
            # As many real pairs as synthetic ones in each epoch.
            weight = max(1, synthetic_pairs(synthetic) // amount)
            with_both = {"more_data": [source], "data.weight": weight}
            if name == "pretrained":
                with_both["initialize.add_tokens"] = ["<bt>"]
            else:
                with_both["tokenizer.vocab_size"] = 8000
            with_both |= steps(UPDATES[name]["back-translation"])
            result = train(runs / f"{name}_{amount}_bt", options | with_both, more)
            print(f"| {name}, back-translation | {amount:,} | {result['bleu']:.2f} |")


def synthetic_pairs(path: str) -> int:
    """Returns the number of pairs in a TSV file with a header line."""
    return Path(path).read_text(encoding="utf-8").count("\n") - 1


if __name__ == "__main__":
    main()
