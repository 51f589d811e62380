"""Translates text line by line and in order: cut where it is too long, by several processes, an output that grows."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from transformers import PreTrainedTokenizerBase

from ..interruption import delayed_signals
from ..model.sentences_vaswani import language_tags, sentence_spans
from ..processes import Processes
from .batches import translate_corpus, translate_n_best

# Lines for each process that are read, sorted by length and translated together: enough for full batches, little to
# wait for.
LINES_AT_A_TIME = 1024
SPACE = re.compile(r"\s+")

# The best translations of a line, the best first, with their scores.
Candidates = list[tuple[float, str]]


# ---- Lines that are too long -------------------------------------------------------------------------------------


def longest_source(models: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that a source may have: `max_position_embeddings`, or the tokenizer's `model_max_length` if less."""
    limits = (getattr(model.config, "max_position_embeddings", None) for model in models)
    return min([tokenizer.model_max_length, *(limit for limit in limits if limit is not None)])


def cut(text: str, fits: Callable[[str], bool]) -> list[str]:
    """
    Cuts a text into its sentences, and sentences that do not fit in two, and these again.

    Args:
        text (`str`): without white space at its ends.
        fits (`Callable[[str], bool]`): tells whether a piece is short enough.

    Returns:
        `list[str]`: the pieces, in order. A sentence is cut between two words, those that are nearest to its middle;
        where there is but one, between two characters.
    """
    return [piece for start, end in sentence_spans(text) for piece in _halved(text[start:end], fits)]


def _halved(text: str, fits: Callable[[str], bool]) -> list[str]:
    if len(text) < 2 or fits(text):
        return [text]
    middle = len(text) // 2
    spaces = (match.end() for match in SPACE.finditer(text))
    middle = min(spaces, key=lambda place: abs(place - middle), default=middle)
    return [piece for half in (text[:middle], text[middle:]) for piece in _halved(half.strip(), fits)]


def in_pieces(lines: Sequence[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> list[list[str]]:
    """
    Each line, cut if it is longer than a model takes.

    Args:
        lines (`Sequence[str]`): may have the tag of a target language in front; then each piece has it.
        tokenizer ([`PreTrainedTokenizerBase`]): counts tokens.
        longest (`int`): tokens that a line may have. The pieces of a longer one are its sentences; none has more than
            half as many tokens, which leaves its translation some room.

    Returns:
        `list[list[str]]`: of each line its pieces.
    """
    tags = tuple(language_tags(tokenizer).values())
    found = []
    for line, ids in zip(lines, tokenizer(list(lines), verbose=False)["input_ids"] if lines else [], strict=True):
        if len(ids) <= longest:
            found.append([line])
            continue
        tag = next((tag for tag in tags if line.startswith(tag)), "")
        front = f"{tag} " if tag else ""

        def fits(piece: str, front: str = front) -> bool:
            return len(tokenizer(front + piece, verbose=False)["input_ids"]) <= longest // 2

        found.append([front + piece for piece in cut(line.removeprefix(tag).strip(), fits)])
    return found


# ---- Several processes -------------------------------------------------------------------------------------------


def each_some(
    processes: Processes, translate: Callable[[list[str]], list[Candidates]], chunk: list[str]
) -> list[Candidates]:
    """Translates a chunk, every process a part of it; returns all translations in every process."""
    whole: list[Candidates] = [[] for _ in chunk]
    # Line by line in turns: long lines beside each other do not all fall to one process.
    part = translate(chunk[processes.process_index :: processes.num_processes])
    for number, translations in enumerate(processes.gather(part)):
        whole[number :: processes.num_processes] = translations
    return whole


# ---- From lines to an output -------------------------------------------------------------------------------------


class LineTranslator:
    """
    Translates lines.

    Args:
        models (`Sequence` of [`PreTrainedModel`]): one, or an ensemble of models that have one vocabulary.
        tokenizer ([`PreTrainedTokenizerBase`]): theirs.
        n_best (`int`, *optional*): translations of each line, with their scores; by default the best one, without.
    """

    def __init__(self, models: Sequence[Any], tokenizer: PreTrainedTokenizerBase, n_best: int | None = None) -> None:
        self.models, self.tokenizer, self.n_best = models, tokenizer, n_best
        self.longest = longest_source(models, tokenizer)
        self.were_cut = 0  # lines

    def __call__(self, lines: list[str]) -> list[Candidates]:
        """The translations of lines; those of a line that was cut are joined from its pieces', scores are added."""
        pieces_of = in_pieces(lines, self.tokenizer, self.longest)
        self.were_cut += sum(len(pieces) > 1 for pieces in pieces_of)
        found = iter(self._translate([piece for pieces in pieces_of for piece in pieces]))
        return [join([next(found) for _ in pieces]) for pieces in pieces_of]

    def _translate(self, lines: list[str]) -> list[Candidates]:
        settings: dict[str, Any] = {"ensemble": self.models[1:]} if len(self.models) > 1 else {}
        if self.n_best is None:
            return [[(0.0, text)] for text in translate_corpus(self.models[0], self.tokenizer, lines, **settings)]
        return translate_n_best(self.models[0], self.tokenizer, lines, self.n_best, **settings)


def join(pieces: list[Candidates]) -> Candidates:
    """The candidates of a line from those of its pieces: the best with the best, the second with the second."""
    if len(pieces) == 1:
        return pieces[0]
    return [
        (sum(score for score, _ in candidates), " ".join(text for _, text in candidates))
        for candidates in zip(*pieces, strict=True)
    ]


def rest_of(lines: Iterator[str], done: int) -> Iterator[str]:
    """
    What follows some lines.

    Raises:
        ValueError: there are not so many.
    """
    there = sum(1 for _ in islice(lines, done))
    if there < done:
        raise ValueError(f"The output is of {done} lines already, but the text has only {there}: is it another text?")
    yield from lines


class OutputFile:
    """
    A file that whole lines are appended to; a device or a pipe, that they are written to.

    Args:
        path (`Path`): its name.

    Raises:
        OSError: it cannot be written; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_regular = path, path.is_file() or not path.exists()
        # A pipe has no end to go to. Without a buffer nothing is left to be written when it is closed.
        self.file = path.open("ab" if self.is_regular else "wb", buffering=0)

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        """Writes lines. Of those that do not fit on the disk, the file keeps the whole ones."""
        data, done = memoryview(text.encode()), 0
        try:
            while done < len(data):
                done += self.file.write(data[done:])
        except BrokenPipeError:
            raise
        except OSError as error:
            kept = ""
            if self.is_regular:
                whole = text.encode()[:done].rfind(b"\n") + 1
                self.file.truncate(self.file.seek(0, os.SEEK_END) - (done - whole))
                kept = " Its lines are whole, and --resume goes on with them."
            raise OSError(f"{self.path} cannot be written: {error.strerror or error}.{kept}") from error

    def flush(self) -> None:
        """Does nothing: every write is on its way at once."""


def write_whole(output: TextIO | OutputFile, text: str) -> None:
    """Writes whole lines: Ctrl-C and SIGTERM are delayed until they are written."""
    with delayed_signals():
        output.write(text)
        output.flush()
