"""Runs what is attacked in children with a time limit, and judges how they end.

The rule: a right result, or one sentence with a non-zero exit code; never a traceback, a hang, a half-written file, or
silently other weights.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Everything is imported once, and each child is forked from there: a start takes a tenth of a second instead of five.
FORKED = multiprocessing.get_context("forkserver")
PRELOADED = [
    "hf_vaswani.cli",
    "hf_vaswani.training.loop",
    "hf_vaswani.metrics",
    "hf_vaswani.hub.publishing",
    "hf_vaswani.hub.curve",
]
PRELOADED += ["tests.campaign.verbs", "tests.campaign.warm"]

# A full campaign is asked for by its seed; without one, a small one with the seed 1 is a part of the tests.
SEED = int(os.environ.get("CAMPAIGN_SEED") or 1)
FULL = bool(os.environ.get("CAMPAIGN_SEED"))

# Seconds after which a command hangs: none takes a tenth of this on a free machine.
LIMIT = 60
# Letters of a sentence, folders of the tests included.
LONGEST_SENTENCE = 1500


@dataclass(frozen=True)
class End:
    """How a child ended; `code` is `None` where it had to be ended, and negative after a signal."""

    code: int | None
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last line of standard error."""
        return (self.err.replace("\r", "\n").strip().splitlines() or [""])[-1]


class Child:
    """A function in a process group of its own, with nothing on standard input and its outputs in files."""

    def __init__(self, folder: Path, function: Callable[..., Any], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = folder / "out", folder / "err"
        FORKED.set_forkserver_preload(PRELOADED)
        self.process = FORKED.Process(target=_in_child, args=(self.outputs, function, arguments))
        self.process.start()

    def kill(self) -> None:
        """Ends the whole group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()

    def end(self, limit: float = LIMIT) -> End:
        """Waits for it, `limit` seconds at most; none of its own children outlives it."""
        self.process.join(limit)
        hung = self.process.is_alive()
        self.kill()
        self.process.join()
        texts = [path.read_text("utf-8", errors="replace") if path.exists() else "" for path in self.outputs]
        return End(None if hung else self.process.exitcode, *texts)


def _in_child(outputs: tuple[Path, Path], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # As in a process that a person starts: this one would let its own children begin in a server of forks, too.
    multiprocessing.set_start_method("fork", force=True)
    # Says where it hung.
    faulthandler.dump_traceback_later(LIMIT - 5, file=2)
    sys.exit(function(*arguments))


def run(folder: Path, function: Callable[..., Any], *arguments: Any) -> End:
    """Runs a function in a child; see [`Child`]."""
    return Child(folder, function, *arguments).end()


def broken_by(end: End, codes: Iterable[int] = (2,)) -> str | None:
    """
    Judges an end, but for the result of one that ended well.

    Args:
        end ([`End`]): of a command.
        codes (`Iterable[int]`, *optional*): the exit codes that a refusal may have.

    Returns:
        `str`: how it broke the rule, or `None`.
    """
    shown = f"\n{end.err[-3000:]}"
    if end.code is None:
        return f"hung for {LIMIT} seconds{shown}"
    if "Traceback" in end.err:
        return f"a traceback{shown}"
    if end.code == 0:
        return None
    if end.code not in codes:
        return f"exit code {end.code}{shown}"
    said = [line for line in end.err.replace("\r", "\n").splitlines() if line.startswith("hf-vaswani: ")]
    if len(said) != 1 or said[0].strip() != end.sentence:
        return f"exit code {end.code} without one sentence at the end{shown}"
    if len(said[0]) > LONGEST_SENTENCE:
        return f"a sentence of {len(said[0])} letters: {said[0][:500]} ..."
    return None


@dataclass
class Campaign:
    """The attacks of one test: drawn by the seed, bounded in number and time, and counted."""

    attacks: int = 0
    broken: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.random = random.Random(SEED)

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def drawn(
        self, attacks: Sequence[T], few: int, seconds: float, by: Callable[[T], Hashable] = lambda _: None
    ) -> Iterator[T]:
        """
        Yields attacks in an order drawn by the seed, until enough of them were made.

        Args:
            attacks (`Sequence`): each one is made at most once.
            few (`int`): attacks of a small campaign.
            seconds (`float`): a full campaign begins no attack after this many, a small one after a tenth of it.
            by (`Callable`, *optional*): the group of an attack; the groups take turns.
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
        """Keeps an attack that broke the rule, if one did; tells whether it did."""
        if how is not None:
            self.broken.append(f"{attack}: {how}")
        return how is not None
