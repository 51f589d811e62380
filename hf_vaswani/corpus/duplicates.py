"""Sentences that occur more than once: in the training text, or in the training text and in a held-out set."""

import unicodedata
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)


class Seen:
    """
    A set of 64-bit hashes that takes 8 bytes for each; a Python set of integers takes about 90.

    The hashes are in sorted runs, each at least twice as long as the next, so that there are few runs and each hash is
    moved few times. Two different texts of n have the same hash with a probability of about n² / 2⁶⁵: 1 in 3,700 for
    100 million.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """
        Adds hashes.

        Args:
            hashes (`np.ndarray` of `int64`, of shape `(count,)`): results of Python's `hash`.

        Returns:
            `np.ndarray` of `bool`, of shape `(count,)`: whether each is here already, or occurs earlier in `hashes`.
        """
        if not len(hashes):
            return np.zeros(0, dtype=bool)
        # Stable, so that the first of equals stays the first.
        order = np.argsort(hashes, kind="stable")
        values = hashes[order]
        known = np.zeros(len(values), dtype=bool)
        known[1:] = values[1:] == values[:-1]
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, values), len(run) - 1)
            known |= run[places] == values
        if not known.all():
            self._append(values[~known])
        found = np.empty_like(known)
        found[order] = known
        return found

    def _append(self, run: np.ndarray) -> None:
        self._runs.append(run)
        while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
            last = self._runs.pop()
            merged = np.concatenate([self._runs.pop(), last])
            # A stable sort merges two sorted parts in linear time.
            merged.sort(kind="stable")
            self._runs.append(merged)


class Duplicates:
    """Pairs and sentences of a text that is read in parts: 24 bytes for each different pair with different sides."""

    def __init__(self) -> None:
        self._pairs, self._sources, self._targets = Seen(), Seen(), Seen()

    def find(self, direction: str, sources: Sequence[str], targets: Sequence[str]) -> tuple[np.ndarray, int, int]:
        """
        Finds what was there before, in this part of the text or an earlier one.

        Args:
            direction (`str`): languages, as in en-de; equal pairs of two directions are different.
            sources (`Sequence[str]`), targets (`Sequence[str]`): the two sides of the pairs, not empty. White space
                around them does not count.

        Returns:
            `tuple`: whether each pair is the repetition of an earlier one (`np.ndarray` of `bool`, of shape
            `(pairs,)`); among the others, the number of those whose source was there with another target, and of those
            whose target was there with another source.
        """
        keys = [(direction, a.strip(), b.strip()) for a, b in zip(sources, targets, strict=True)]
        repeated = self._pairs.add(_hashes(keys))
        new = [key for key, known in zip(keys, repeated, strict=True) if not known]
        same_source = self._sources.add(_hashes([(name, source) for name, source, _ in new]))
        same_target = self._targets.add(_hashes([(name, target) for name, _, target in new]))
        return repeated, int(same_source.sum()), int(same_target.sum())


def _hashes(keys: Sequence[tuple[str, ...]]) -> np.ndarray:
    # Python's own are different in each process, but these never leave it.
    return np.fromiter(map(hash, keys), np.int64, len(keys))


def folded(sentence: str) -> str:
    """Returns a sentence in the form in which sentences are compared: compatible characters, case and white space."""
    if not sentence.isascii():
        sentence = unicodedata.normalize("NFKC", sentence)
    return " ".join(sentence.casefold().split())


class HeldOut(Generic[Key]):
    """
    The sentences of validation and test sets, to be looked for in the training text.

    Args:
        sets (`Mapping[Key, Iterable[tuple[str, str]]]`): pairs of source and target by the name of the set. Empty
            sentences are ignored.

    Attributes:
        sides (`list[set[str]]`): sources and targets that are looked for, [`folded`].
    """

    def __init__(self, sets: Mapping[Key, Iterable[tuple[str, str]]]) -> None:
        self._sets = {
            name: [(folded(source), folded(target)) for source, target in pairs] for name, pairs in sets.items()
        }
        self.sides: list[set[str]] = [
            {pair[i] for pairs in self._sets.values() for pair in pairs} - {""} for i in (0, 1)
        ]
        self._met: list[set[str]] = [set(), set()]

    def find(self, sources: Sequence[str], targets: Sequence[str]) -> list[bool]:
        """
        Looks for training pairs, and notes which sentences of the sets they contain.

        Args:
            sources (`Sequence[str]`), targets (`Sequence[str]`): the two sides of training pairs.

        Returns:
            `list[bool]`: for each pair, whether its source is a source of a set, or its target a target.
        """
        found = [False] * len(sources)
        for known, met, sentences in zip(self.sides, self._met, (sources, targets), strict=True):
            for i, sentence in enumerate(map(folded, sentences)):
                if sentence in known:
                    met.add(sentence)
                    found[i] = True
        return found

    def counts(self) -> dict[Key, tuple[int, int]]:
        """Returns, for each set, its pairs, and those with a sentence that was met on the same side."""
        source, target = self._met
        return {
            name: (len(pairs), sum(a in source or b in target for a, b in pairs)) for name, pairs in self._sets.items()
        }
