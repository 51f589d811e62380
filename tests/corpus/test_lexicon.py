"""IBM Model 1 against its definition, and the translations that it finds."""

import numpy as np
import pytest

from hf_vaswani.corpus import lexicon
from hf_vaswani.corpus.lexicon import ITERATIONS, likely_translations, train_model_1


def by_definition(sources: list[list[int]], targets: list[list[int]], empty: int) -> dict[tuple[int, int], float]:
    """Expectation maximization with dictionaries."""
    pairs = [([empty, *source], target) for source, target in zip(sources, targets, strict=True)]
    found = {(s, t): 1.0 for source, target in pairs for s in source for t in target}
    for _ in range(ITERATIONS):
        counts = dict.fromkeys(found, 0.0)
        for source, target in pairs:
            for t in target:
                total = sum(found[s, t] for s in source)
                for s in source:
                    counts[s, t] += found[s, t] / total
        totals: dict[int, float] = {}
        for (s, _), count in counts.items():
            totals[s] = totals.get(s, 0.0) + count
        found = {(s, t): count / totals[s] for (s, t), count in counts.items()}
    return found


@pytest.mark.parametrize("products", [1, 20, 10**6])
def test_probabilities_follow_the_definition(monkeypatch, products) -> None:
    monkeypatch.setattr(lexicon, "PRODUCTS", products)
    generator = np.random.default_rng(0)
    sources, targets = ([generator.integers(0, 9, generator.integers(0, 6)).tolist() for _ in range(30)] for _ in "st")
    keys, probabilities = train_model_1(sources, targets, 9)
    expected = by_definition(sources, targets, 9)
    assert [divmod(int(key), 9) for key in keys] == sorted(expected)
    assert probabilities == pytest.approx([expected[pair] for pair in sorted(expected)])


def test_translations_are_found_and_ranked() -> None:
    # 0 the, 1 house, 2 dog, 3 red; 4 das, 5 Haus, 6 Hund, 7 rote; 8 is the end of a sentence.
    sources = [[0, 1, 8], [0, 2, 8], [0, 3, 1, 8], [0, 3, 2, 8], [2, 8]]
    targets = [[4, 5, 8], [4, 6, 8], [4, 7, 5, 8], [4, 7, 6, 8], [6, 8]]
    found = likely_translations(sources, targets, 9, count=2, excluded=[8])
    assert [found[entry][0] for entry in range(4)] == [4, 5, 6, 7]
    assert all(len(row) <= 2 and 8 not in row for row in found.values())
    assert likely_translations([[]], [[]], 9, count=2) == {}
