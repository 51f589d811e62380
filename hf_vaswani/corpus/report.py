"""The report of a check: counts what was found in a source of text, as text for people and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .checking import REASONS, Limits, Measures, Norm, script_names

SIDES = ("source", "target")
# Lengths in words that the histogram distinguishes: from each number up to the next.
EDGES = (0, 1, 6, 11, 16, 21, 31, 41, 61, 81, 101, 151, 201)
# Longer sentences are counted as this long in quantiles.
MAX_WORDS = 5000


@dataclass
class Report:
    """
    Counts of one source of text.

    Attributes:
        name (`str`): direction, as in en-de.
        text (`list[str]`): its files, or its dataset.
        limits ([`Limits`]), norm ([`Norm`]): what its pairs were judged by.
        limits_from (`str`): origin of the limits, for people.
        pairs (`int`), kept (`int`): all pairs, and those that nothing is wrong with.
        found (`Counter[str]`): pairs that each reason applies to; several may apply to one.
        same_source (`int`), same_target (`int`): different pairs of which one side was there before.
        held_out (`dict[str, dict[str, int]]`): by set, its `pairs`, and those `found` in the training text by a side.
        words, characters (`np.ndarray` of shape `(2,)`): of source and target.
        lengths (`np.ndarray` of shape `(2, MAX_WORDS + 1)`): sentences of each number of words.
        scripts, languages (`tuple[Counter[str], Counter[str]]`): letters of each script, and sentences in each
            language, of source and target; those that cannot be told with a confidence of `max_foreign` are "?".
    """

    name: str
    text: list[str]
    limits: Limits
    norm: Norm
    limits_from: str
    pairs: int = 0
    kept: int = 0
    found: Counter[str] = field(default_factory=Counter)
    same_source: int = 0
    same_target: int = 0
    held_out: dict[str, dict[str, int]] = field(default_factory=dict)
    words: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    characters: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros((2, MAX_WORDS + 1), dtype=np.int64))
    scripts: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    languages: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))

    def add(self, measures: Measures, found: dict[str, np.ndarray]) -> None:
        """Counts measured pairs, and the pairs that each reason applies to, as `bool` of shape `(pairs,)`."""
        self.pairs += len(measures.words)
        self.kept += int((~np.any(list(found.values()), axis=0)).sum())
        self.found.update({reason: int(flags.sum()) for reason, flags in found.items()})
        self.words += measures.words.sum(axis=0)
        self.characters += measures.characters.sum(axis=0)
        for i, counter in enumerate(self.scripts):
            self.lengths[i] += np.bincount(np.minimum(measures.words[:, i], MAX_WORDS), minlength=MAX_WORDS + 1)
            letters = measures.scripts[:, i].sum(axis=0)
            counter.update({script_names()[j].lower(): int(letters[j]) for j in np.flatnonzero(letters)})
        for counter, side in zip(self.languages, measures.languages, strict=False):
            sure = self.limits.max_foreign
            counter.update(name if confidence > sure else "?" for name, confidence in side if name)

    @property
    def histogram(self) -> list[list[int]]:
        """Sentences between two `EDGES` each, of source and target; the last has all that are longer."""
        return [[int(side[a:b].sum()) for a, b in pairwise((*EDGES, MAX_WORDS + 1))] for side in self.lengths]

    def quantile(self, side: int, share: float) -> int:
        """Returns the number of words that a share of the sentences of a side does not exceed."""
        return int(np.searchsorted(self.lengths[side].cumsum(), share * self.pairs)) if self.pairs else 0

    def as_json(self) -> dict[str, Any]:
        """Returns the counts as a JSON object."""
        return {
            "name": self.name,
            "text": self.text,
            "pairs": self.pairs,
            "kept": self.kept,
            "rejected": self.pairs - self.kept,
            "reasons": {reason: self.found[reason] for reason in REASONS},
            "same_source": self.same_source,
            "same_target": self.same_target,
            "held_out": self.held_out,
            "words": _by_side(self.words.tolist()),
            "characters": _by_side(self.characters.tolist()),
            "lengths": {"from": list(EDGES)} | _by_side(self.histogram),
            "scripts": _by_side([dict(counter.most_common()) for counter in self.scripts]),
            "languages": _by_side([dict(counter.most_common()) for counter in self.languages]),
            "ratio": self.norm.ratio,
            "limits": asdict(self.limits),
            "limits_from": self.limits_from,
        }

    def as_text(self) -> str:
        """Returns the counts as a page of text."""
        from tabulate import tabulate

        def table(rows: Sequence[Sequence[str]], headers: Sequence[str], *sides: str) -> str:
            return tabulate(rows, headers, tablefmt="plain", colalign=sides, disable_numparse=True)

        overview = [("words", *(f"{count:,}" for count in self.words))]
        for title, share in (("half of the sentences up to", 0.5), ("99.9 % up to", 0.999), ("longest", 1.0)):
            overview.append((f"  {title}", *(f"{self.quantile(i, share):,}" for i in (0, 1))))
        overview.append(("characters", *(f"{count:,}" for count in self.characters)))
        overview.append(("scripts", *map(_shares, self.scripts)))
        if any(self.languages):
            overview.append(("languages", *map(_shares, self.languages)))
        reasons = [
            (reason, f"{self.found[reason]:,}", _percent(self.found[reason], self.pairs), REASONS[reason])
            for reason in REASONS
            if reason in self.found
        ]
        parts = [
            f"{self.name}: {self.pairs:,} pairs of {', '.join(self.text)}",
            table(overview, ("", *SIDES), "left", "right", "right"),
            table(self._bars(), ("words", *SIDES, ""), "right", "right", "right", "left"),
            table(reasons, ("reason", "pairs", "", "meaning"), "left", "right", "right", "left"),
            "\n".join(self._notes()),
        ]
        return "\n\n".join(parts) + "\n"

    def _bars(self) -> list[tuple[str, str, str, str]]:
        """Returns the rows of the histogram, each with a bar for the source and one for the target."""
        histogram, rows = self.histogram, []
        most = max(1, *map(max, histogram))
        used = [i for i in range(len(EDGES)) if histogram[0][i] or histogram[1][i]]
        for i in used:
            last = i == len(EDGES) - 1
            single = not last and EDGES[i + 1] - EDGES[i] == 1
            words = f"{EDGES[i]}" if single else f"{EDGES[i]}+" if last else f"{EDGES[i]}-{EDGES[i + 1] - 1}"
            bars = ["#" * -(-count[i] * 24 // most) for count in histogram]
            rows.append((words, f"{histogram[0][i]:,}", f"{histogram[1][i]:,}", f"{bars[0]:24}  {bars[1]}".rstrip()))
        return rows

    def _notes(self) -> list[str]:
        same = "different pairs have a {} that was there before with another {}"
        notes = [
            f"{self.same_source:,} {same.format('source', 'target')}, {self.same_target:,} a target with another "
            "source: synonymous translations, or a text that is not aligned."
        ]
        for name, counts in self.held_out.items():
            notes.append(
                f"{counts['found']:,} of {counts['pairs']:,} {name} pairs have their source or target in the "
                "training text too."
            )
        limits = " ".join(f"{name}={value}" for name, value in asdict(self.limits).items())
        notes.append(f"Limits ({self.limits_from}): {limits}")
        notes.append(
            f"Nothing is wrong with {self.kept:,} of {self.pairs:,} pairs ({_percent(self.kept, self.pairs)})."
        )
        return notes


def total(reports: Sequence[Report]) -> dict[str, Any]:
    """Returns the sums over all sources, as a JSON object."""
    pairs, kept = sum(report.pairs for report in reports), sum(report.kept for report in reports)
    reasons = {reason: sum(report.found[reason] for report in reports) for reason in REASONS}
    words = _by_side(np.sum([report.words for report in reports], axis=0).tolist())
    return {"pairs": pairs, "kept": kept, "rejected": pairs - kept, "words": words, "reasons": reasons}


def _by_side(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(SIDES, values, strict=True))


def _shares(counter: Counter[str]) -> str:
    """Returns the most frequent values with their shares, as in "en 99.5 %, de 0.3 %"."""
    shares = [(name, _percent(count, counter.total())) for name, count in counter.most_common(3)]
    return ", ".join(f"{name} {share}" for name, share in shares if share != _percent(0, 1))


def _percent(count: int, of: int) -> str:
    return f"{100 * count / max(of, 1):.2f} %"
