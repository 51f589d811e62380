"""Do the rules of beam search matter? BLEU of several models by the paper's rules, and by those of other engines.

    python benchmarks/search_rules.py SOURCE REFERENCE MODEL [MODEL ...]

Each model translates SOURCE with a beam of 4: by the paper's rules, by rules that CTranslate2 has as well, with two
length penalties, and by the closest to the paper's that CTranslate2 has (`approximate=True`). The table has the BLEU
of each model, the mean difference to the paper's rules with its standard deviation over the models, the translations
that equal those of the paper's rules, and the words of the translations relative to the reference's.
"""

import argparse
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch
from sacrebleu import corpus_bleu
from tabulate import tabulate
from transformers import pipeline

import hf_vaswani  # noqa: F401

PAPER = "paper: ((5 + L) / 6)^0.6, all candidates, never early"
CLOSEST = "the closest of CTranslate2"
SETTINGS: dict[str, dict[str, Any]] = {
    PAPER: {"length_penalty_type": "gnmt", "finish_candidates": "all", "early_stopping": "never"},
    "L^0.6, top candidates, early": {"length_penalty": 0.6},
    "L^1.0, top candidates, early": {"length_penalty": 1.0},
    CLOSEST: {"length_penalty_type": "gnmt", "finish_candidates": "all", "early_stopping": "never"},
}
EXACT = {"length_penalty_type": "power", "finish_candidates": "top", "early_stopping": True, "length_penalty": 0.6}


def main() -> None:
    """Translates, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of sentences, one per line")
    parser.add_argument("reference", type=Path, help="file of their translations")
    parser.add_argument("models", nargs="+", help="model folders")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source, reference = (path.read_text("utf-8").splitlines() for path in (arguments.source, arguments.reference))
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in SETTINGS}
    for model in arguments.models:
        auto = pipeline("translation", model=model, engine="auto")
        closest = pipeline("translation", model=model, engine="ctranslate2", approximate=True)
        expected: list[str] = []
        for name, settings in SETTINGS.items():
            translate = closest if name == CLOSEST else auto
            answers = translate(source, batch_size=64, num_beams=4, **(EXACT | settings))
            lines = [answer["translation_text"] for answer in answers]
            expected = expected or lines
            bleu = corpus_bleu(lines, [reference])
            equal = sum(line == other for line, other in zip(lines, expected, strict=True))
            found[name].append((bleu.score, equal, bleu.sys_len / bleu.ref_len))
    rows = []
    for name, results in found.items():
        differences = [after - before for (after, *_), (before, *_) in zip(results, found[PAPER], strict=True)]
        rows.append(
            [
                name,
                ", ".join(f"{bleu:.2f}" for bleu, _, _ in results),
                f"{mean(differences):+.2f} ({pstdev(differences):.2f})",
                f"{mean(equal for _, equal, _ in results):.0f} of {len(source)}",
                f"{mean(length for *_, length in results):.3f}",
            ]
        )
    print(tabulate(rows, ["rules", "BLEU", "difference", "equal", "length"], tablefmt="github"))


if __name__ == "__main__":
    main()
