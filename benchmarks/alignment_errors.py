"""How well does attention align words? Alignment error rates on the built-in corpus, whose grammar knows the links.

    python benchmarks/alignment_errors.py RUN_FOLDER

The run is that of configs/quickstart.yaml. Its model aligns the 1000 sentences of its test and validation sets by each
layer of its decoder, at the step that predicts a word and at the next one. Two aligners do without a model: the
diagonal, and IBM Model 1 (Brown et al., 1993) of the words of the training set. The error rate is 1 less the F1 of the
links (Och and Ney, 2003, without possible links). Prints the table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hf_vaswani import alignments
from hf_vaswani.corpus.lexicon import train_model_1
from hf_vaswani.data.pocket_corpus import read_pocket_corpus
from hf_vaswani.translation.alignment import METHODS, choose_alignment
from hf_vaswani.translation.loading import load_translator

Links = list[tuple[int, int]]
Pairs = list[tuple[str, str]]


def error_rate(found: Sequence[Links], known: Sequence[Links]) -> float:
    """Returns the alignment error rate in per cent."""
    right = sum(len(set(left) & set(right)) for left, right in zip(found, known, strict=True))
    return 100 * (1 - 2 * right / (sum(map(len, found)) + sum(map(len, known))))


def diagonal(pairs: Pairs) -> list[Links]:
    """Links each target word to the source word at its relative position."""
    lengths = [(len(source.split()), len(target.split())) for source, target in pairs]
    return [[(min(m - 1, round(j * m / n)), j) for j in range(n)] for m, n in lengths]


def model_1(train: Pairs, pairs: Pairs) -> list[Links]:
    """Links each target word to the source word that IBM Model 1 makes most probable."""
    words = {word: id_ for id_, word in enumerate(sorted({word for pair in train for word in " ".join(pair).split()}))}
    # Both languages have the same ids, and unknown words one of their own.
    ids = [[[words.get(word, len(words)) for word in text.split()] for text in pair] for pair in (*train, *pairs)]
    size = len(words) + 1
    learned = ids[: len(train)]
    keys, probabilities = train_model_1([pair[0] for pair in learned], [pair[1] for pair in learned], size)
    found = []
    for source, target in ids[len(train) :]:
        key = np.array(source)[None] * size + np.array(target)[:, None]  # [target, source]
        place = np.searchsorted(keys, key).clip(max=len(keys) - 1)
        table = np.where(keys[place] == key, probabilities[place], 0.0)
        found.append([(int(i), j) for j, i in enumerate(table.argmax(axis=1))])
    return found


def main() -> None:
    """Aligns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of configs/quickstart.yaml")
    run = parser.parse_args().run
    model, tokenizer = load_translator(run / "model")
    corpus = read_pocket_corpus()
    held_out = [*corpus["test"], *corpus["validation"]]
    known = [[(int(i), int(j)) for i, j in (link.split("-") for link in row.links.split())] for row in held_out]
    pairs, train = ([(row.english, row.german) for row in rows] for rows in (held_out, corpus["train"]))
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    chosen = choose_alignment(model, tokenizer, sources, targets)
    print("| aligner | argmax | intersection |\n|---|---:|---:|")
    for layer in range(model.config.decoder_layers):
        for shift in (False, True):
            found = alignments(model, tokenizer, sources, targets, layer=layer, shift=shift)
            rates = [error_rate([each.links(method) for each in found], known) for method in METHODS]
            name = f"layer {layer}, {'the next step' if shift else 'the step of the word'}"
            mark = " (chosen)" if (layer, shift) == chosen else ""
            print(f"| {name}{mark} | {rates[0]:.1f} % | {rates[1]:.1f} % |")
    print(f"| IBM Model 1 | {error_rate(model_1(train, pairs), known):.1f} % | |")
    print(f"| the diagonal | {error_rate(diagonal(pairs), known):.1f} % | |")


if __name__ == "__main__":
    main()
