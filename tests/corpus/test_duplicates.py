"""Repeated pairs, and held-out sentences in a training text, are found as a set of the sentences would find them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_vaswani.corpus.duplicates import Duplicates, HeldOut, Seen, folded


@given(st.lists(st.lists(st.integers(-5, 40))))
def test_a_set_of_hashes_is_a_set(parts) -> None:
    seen, known = Seen(), set()
    for part in parts:
        expected = []
        for value in part:
            expected.append(value in known)
            known.add(value)
        assert seen.add(np.array(part, dtype=np.int64)).tolist() == expected
    assert len(seen) == len(known)


def test_many_hashes_take_eight_bytes_each() -> None:
    seen, random = Seen(), np.random.default_rng(1)
    for _ in range(300):
        seen.add(random.integers(-(2**63), 2**63 - 1, 1000))
    # Few runs, or each part would be looked for in many.
    assert len(seen) == 300_000 and len(seen._runs) < 20
    assert sum(run.nbytes for run in seen._runs) == 8 * len(seen)


def test_repeated_pairs_and_sides() -> None:
    duplicates = Duplicates()
    found = duplicates.find("en-de", ["A dog.", "A cat.", "A dog.", "A dog. "], ["Hund.", "Katze.", "Köter.", "Hund."])
    assert (found[0].tolist(), *found[1:]) == ([False, False, False, True], 1, 0)
    # Also over the parts of a text, and in each direction by itself.
    found = duplicates.find("en-de", ["A cat.", "Cat!"], ["Katze.", "Katze."])
    assert (found[0].tolist(), *found[1:]) == ([True, False], 0, 1)
    found = duplicates.find("de-en", ["A cat."], ["Katze."])
    assert (found[0].tolist(), *found[1:]) == ([False], 0, 0)


def test_folded_sentences() -> None:
    assert folded("  A  DOG \t runs.") == "a dog runs."
    assert folded("STRASSE") == folded("Straße")
    assert folded("ﬁne\u00a0１") == "fine 1"
    assert folded("e\u0301") == folded("é")
    assert folded("A dog!") != folded("A dog.")


def test_held_out_sentences() -> None:
    held_out = HeldOut({"test": [("A dog.", "Ein Hund."), ("", "")], "validation": [("A cat.", "Eine Katze.")]})
    assert held_out.counts() == {"test": (2, 0), "validation": (1, 0)}
    sources, targets = ["a DOG.", "Eine Katze.", "One cat.", ""], ["Der Hund.", "A cat.", "Eine  Katze.", ""]
    # A sentence counts on its own side only, and an empty one never.
    assert held_out.find(sources, targets) == [True, False, True, False]
    assert held_out.counts() == {"test": (2, 1), "validation": (1, 1)}
