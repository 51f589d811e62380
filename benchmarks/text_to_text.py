"""Can one model do three tasks as well as three models do one each? BLEU and exact match, by prefix.

    python benchmarks/text_to_text.py PYTHON_DOCS_FOLDER MULTI30K_FOLDER RUNS_FOLDER [--section.key value ...]

configs/family/python_docs_tasks.yaml trains one model that translates technical prose into Spanish and captions into
German, and names the manual that a paragraph is from. Three models of the same size then learn one of these tasks
each, and share the updates of the recipe by the tokens of their text. All options after the folders override keys of
every training. An interrupted training is resumed, and a complete one is not repeated. Prints the table.
"""

import argparse
from pathlib import Path
from typing import Any

from adaptation import ROOT, train
from classification import split

from hf_vaswani.recipe_file import load_recipe

RECIPE = ROOT / "configs" / "family" / "python_docs_tasks.yaml"
# Share of the recipe's updates that a task alone gets, about that of its tokens.
SHARES = {"en-es": 0.7, "en-de": 0.25, "en-label": 0.05}


def sources(python_docs: Path, multi30k: Path, texts: Path) -> dict[str, dict[str, Any]]:
    """Returns the sources of the recipe by the name of their task, with the files of this machine."""
    names = {"train": "train", "validation": "valid", "test": "test"}
    captions = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
    labelled = {"train": "2000.1", "validation": "validation", "test": "test"}
    files: dict[str, dict[str, Any]] = {
        "en-es": {split: str(python_docs / f"{name}.tsv.gz") for split, name in names.items()},
        "en-de": {
            split: {language: str(multi30k / "raw" / f"{name}.{language}") for language in ("en", "de")}
            for split, name in captions.items()
        },
        "en-label": {split: str(texts / f"{name}.tsv") for split, name in labelled.items()},
    }
    recipe, found = load_recipe([str(RECIPE)]), {}
    for part in (recipe.data, *recipe.more_data):
        name = f"{part.source_language}-{part.target_language}"
        found[name] = {
            "source_language": part.source_language,
            "target_language": part.target_language,
            "prefix": part.prefix,
            "weight": part.weight,
            **{f"{split}_files": path for split, path in files[name].items()},
        }
    return found


def options_of(parts: list[dict[str, Any]], share: float) -> dict[str, Any]:
    """Returns the options of a training on some of the sources, with a share of the recipe's updates."""
    updates = round(share * load_recipe([str(RECIPE)]).training.max_steps)
    steps = {"max_steps": updates, "validate_every": updates}
    # One process in place of the two that the recipe is made for.
    steps |= {"warmup_steps": updates // 8, "save_every": updates // 12, "accumulation_steps": 2}
    options: dict[str, Any] = {f"training.{key}": value for key, value in steps.items()}
    return options | {f"data.{key}": value for key, value in parts[0].items()} | {"more_data": parts[1:]}


def main() -> None:
    """Trains the four models, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python_docs", type=Path, help="folder with the text of configs/python_docs_en_es.yaml")
    parser.add_argument("multi30k", type=Path, help="folder with raw/train.en and the other files of Multi30k")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    arguments, more = parser.parse_known_args()
    texts = arguments.runs / "texts"
    split(arguments.python_docs, texts)
    parts = sources(arguments.python_docs, arguments.multi30k, texts)
    together = train(arguments.runs / "together", options_of(list(parts.values()), 1.0), more, RECIPE)["sets"]
    print("| task | BLEU alone | together | exact match alone | together |\n|---|---:|---:|---:|---:|")
    for name, part in parts.items():
        result = train(arguments.runs / name, options_of([part], SHARES[name]), more, RECIPE)
        alone = {"bleu": result["bleu"], "exact_match": result["measures"]["exact_match"]}
        found = [scores[measure] for measure in ("bleu", "exact_match") for scores in (alone, together[name])]
        print(f"| {name} | {found[0]:.2f} | {found[1]:.2f} | {found[2]:.3f} | {found[3]:.3f} |")


if __name__ == "__main__":
    main()
