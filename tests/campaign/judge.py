"""Judges how commands under attack end, and counts the attacks.

The rule: a correct result, or a one-line error with a non-zero exit code; never a traceback, a hang, a partially
written file, or silently different weights.
"""

import os
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tests.children import LIMIT, End

T = TypeVar("T")

# Setting a seed runs the full campaign. By default a small campaign with seed 1 is part of the tests.
SEED = int(os.environ.get("CAMPAIGN_SEED") or 1)
FULL = bool(os.environ.get("CAMPAIGN_SEED"))

# Maximum characters of an error message, which may contain the folders of the tests.
MAX_SENTENCE = 1500


def broken_by(end: End, codes: Iterable[int] = (2,), result: str | None = None) -> str | None:
    """
    Judges the outcome of a command.

    Args:
        end ([`End`]): outcome of a command.
        codes (`Iterable[int]`, *optional*): exit codes allowed for an error.
        result (`str`, *optional*): what is wrong with the result if the command has succeeded.

    Returns:
        `str`: how it broke the rule, or `None`.
    """
    shown = f"\n{end.err[-3000:]}"
    if end.code is None:
        return f"hung for {LIMIT} seconds{shown}"
    if "Traceback" in end.err:
        return f"a traceback{shown}"
    if end.code == 0:
        return result
    if end.code not in codes:
        return f"exit code {end.code}{shown}"
    said = [line for line in end.err.replace("\r", "\n").splitlines() if line.startswith("hf-vaswani: ")]
    if len(said) != 1 or said[0].strip() != end.sentence:
        return f"exit code {end.code} without one sentence at the end{shown}"
    if len(said[0]) > MAX_SENTENCE:
        return f"a sentence of {len(said[0])} letters: {said[0][:500]} ..."
    return None


@dataclass
class Campaign:
    """Attacks of one test: drawn by the seed, limited in number and time, and counted."""

    attacks: int = 0
    broken: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.random = random.Random(SEED)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def drawn(
        self, attacks: Sequence[T], few: int, seconds: float, by: Callable[[T], Hashable] = lambda _: None
    ) -> Iterator[T]:
        """
        Yields attacks in an order drawn by the seed, up to a limit.

        Args:
            attacks (`Sequence`): each is yielded at most once.
            few (`int`): number of attacks in a small campaign.
            seconds (`float`): time limit of a full campaign; a small one has a tenth of it.
            by (`Callable`, *optional*): returns the group of an attack; groups take turns.
        """
        until = time.monotonic() + (seconds if FULL else seconds / 10)
        shuffled = self.random.sample(attacks, len(attacks))
        groups = {group: iter([each for each in shuffled if by(each) == group]) for group in map(by, shuffled)}
        left = len(shuffled) if FULL else few
        while groups:
            for group in list(groups):
                attack = next(groups[group], None)
                if attack is None:
                    del groups[group]
                    continue
                if left == 0 or (time.monotonic() > until and self.attacks):
                    return
                left, self.attacks = left - 1, self.attacks + 1
                yield attack

    def note(self, attack: str, how: str | None) -> bool:
        """Records an attack if it broke the rule; returns whether it did."""
        if how is not None:
            self.broken.append(f"{attack}: {how}")
        return how is not None
