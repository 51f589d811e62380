"""Translation of text line by line: long lines are split, several processes share the work, lines keep their order."""

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from ..interruption import delayed_signals
from ..model.alignment_vaswani import Alignment, alignments
from ..model.placement_vaswani import Block, translate_markup
from ..model.precision_vaswani import autocast_to
from ..model.sentences_vaswani import LanguageTags, fitting_spans, has_words, longest_source, may_be_longer
from ..processes import Processes
from .batches import translate_corpus, translate_n_best

# Lines per process that are sorted by length and translated together: enough to fill batches, and a short wait.
LINES_AT_A_TIME = 1024

# The n-best list of a line: scores and translations, best first.
Candidates = list[tuple[float, str]]
# Numbers of a source and a target word, counted from 0, and the attention of the second to the first.
Link = tuple[int, int, float]

T = TypeVar("T")


# ---- Long lines --------------------------------------------------------------------------------------------------


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """
    Splits a text into sentences, and halves sentences that are too long, until all pieces fit.

    Args:
        text (`str`): text without white space at its ends.
        fits (`Callable[[str], bool]`): returns whether a piece is short enough.

    Returns:
        `list[str]`: the pieces, in order, see [`fitting_spans`].
    """
    return [text[start:end] for start, end in fitting_spans(text, fits)]


def split_lines(lines: Sequence[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> list[list[str]]:
    """
    Splits lines that are longer than a model accepts.

    Args:
        lines (`Sequence[str]`): lines. A language tag in front of a line is repeated in each of its pieces.
        tokenizer ([`PreTrainedTokenizerBase`]): counts the tokens.
        longest (`int`): maximum tokens of a line. A longer line is split into sentences of at most half as many
            tokens, which leaves room for longer translations.

    Returns:
        `list[list[str]]`: the pieces of each line.
    """
    tags = LanguageTags(tokenizer)
    doubtful = [line for line in lines if may_be_longer(line, longest) and has_words(line)]
    ids = tokenizer(doubtful, verbose=False)["input_ids"] if doubtful else []
    too_long = {line for line, each in zip(doubtful, ids, strict=True) if len(each) > longest}
    found = []
    for line in lines:
        if line not in too_long:
            found.append([line])
            continue
        front, rest = tags.split(line)

        def fits(piece: str, front: str = front) -> bool:
            return len(tokenizer(front + piece, verbose=False)["input_ids"]) <= longest // 2

        found.append([front + piece for piece in split_text(rest.strip(), fits)])
    return found


# ---- Several processes -------------------------------------------------------------------------------------------


def translate_chunk(
    processes: Processes, translate: Callable[[list[str]], list[list[T]]], chunk: list[str]
) -> list[list[T]]:
    """Translates a chunk, of which every process takes a part; returns all translations in every process."""
    whole: list[list[T]] = [[] for _ in chunk]
    # Dealt out line by line, because long lines are often neighbours.
    part = translate(chunk[processes.process_index :: processes.num_processes])
    for number, translations in enumerate(processes.gather(part)):
        whole[number :: processes.num_processes] = translations
    return whole


# ---- Lines and their output --------------------------------------------------------------------------------------


class LineTranslator:
    """
    Translates lines, and splits those that are too long.

    Args:
        models (`Sequence` of [`PreTrainedModel`]): one model, or an ensemble with one vocabulary.
        tokenizer ([`PreTrainedTokenizerBase`]): their tokenizer.
        n_best (`int`, *optional*): size of the n-best lists; by default only the best translation, with score 0.
        engine (`Callable`, *optional*): translates sentences into such lists, in place of `generate()`.
        dtype (`torch.dtype`, *optional*): number format of matrix products, by `torch.autocast`; by default that of
            the weights.
        shortlist ([`Shortlist`], *optional*): the likely entries of translations, for `generate()`.

    Attributes:
        longest (`int`): maximum tokens of a line that is not split.
        lines_split (`int`): number of lines that were split so far.
    """

    def __init__(
        self,
        models: Sequence[Any],
        tokenizer: PreTrainedTokenizerBase,
        n_best: int | None = None,
        engine: Callable[[list[str]], list[Candidates]] | None = None,
        dtype: torch.dtype | None = None,
        shortlist: Any = None,
    ) -> None:
        self.dtype = dtype
        self.models, self.tokenizer, self.n_best, self.engine = models, tokenizer, n_best, engine
        self.tags = LanguageTags(tokenizer)
        self.settings: dict[str, Any] = {} if shortlist is None else {"shortlist": shortlist}
        if len(models) > 1:
            self.settings["ensemble"] = models[1:]
        self.longest = longest_source(models, tokenizer)
        self.lines_split = 0

    def __call__(self, lines: list[str]) -> list[Candidates]:
        """Returns the n-best list of each line; the lists of the pieces of a split line are joined."""
        pieces_of = split_lines(lines, self.tokenizer, self.longest)
        self.lines_split += sum(len(pieces) > 1 for pieces in pieces_of)
        found = iter(self._translate([piece for pieces in pieces_of for piece in pieces]))
        return [join_candidates([next(found) for _ in pieces]) for pieces in pieces_of]

    def aligned(self, lines: list[str]) -> list[list[tuple[float, str, list[Link]]]]:
        """
        Returns the n-best list of each line, each translation with its links to the line. Words are separated by white
        space; a language tag in front of a line is not counted.
        """
        found = []
        for line, best in zip(lines, self._with_alignments(lines, "words"), strict=True):
            source = _word_starts(self.tags.split(line)[1].lstrip())
            of_line = []
            for score, text, blocks in best:
                target = _word_starts(text)
                links = []
                for alignment, of_source, of_target in blocks:
                    for i, j in alignment.links():
                        left = bisect_right(source, alignment.source_spans[i][0] + of_source) - 1
                        right = bisect_right(target, alignment.target_spans[j][0] + of_target) - 1
                        links.append((left, right, float(alignment.probabilities[j, i])))
                of_line.append((score, text, links))
            found.append(of_line)
        return found

    def with_markup(self, lines: list[str], kind: str) -> list[Candidates]:
        """Returns the best translation of each line, with its markup (see [`parse`])."""
        texts = list(map(self.tags.split, lines))
        split: list[int] = []

        def translate(plain: list[str]) -> list[list[tuple[str, list[Block]]]]:
            found = self._with_alignments(plain, "pieces")
            # Lines that are translated again are not counted again.
            split.append(self.lines_split)
            self.lines_split = split[0]
            return [[(text, blocks) for _, text, blocks in best] for best in found]

        return [[(0.0, of_line[0])] for of_line in translate_markup(texts, kind, translate)]

    def _with_alignments(self, lines: list[str], unit: str) -> list[list[tuple[float, str, list[Block]]]]:
        """Returns the n-best list of each line, each translation with the alignments of its pieces."""
        pieces_of = split_lines(lines, self.tokenizer, self.longest)
        self.lines_split += sum(len(pieces) > 1 for pieces in pieces_of)
        pieces = [piece for pieces in pieces_of for piece in pieces]
        found = self._translate(pieces)
        pairs = [(piece, text) for piece, best in zip(pieces, found, strict=True) for _, text in best]
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        of_pairs = iter(alignments(self.models[0], self.tokenizer, sources, targets, unit=unit))
        aligned = iter([[(*candidate, next(of_pairs)) for candidate in best] for best in found])
        joined = []
        for line, parts in zip(lines, pieces_of, strict=True):
            place, begins = 0, []
            whole = self.tags.split(line)[1].lstrip()
            for piece in parts:
                text = self.tags.split(piece)[1].strip()
                place = whole.index(text, place)
                begins.append(place - piece.index(text))
                place += len(text)
            ranks = zip(*(next(aligned) for _ in parts), strict=True)
            joined.append([_join_aligned(rank, begins) for rank in ranks])
        return joined

    def _translate(self, lines: list[str]) -> list[Candidates]:
        if self.engine is not None:
            return self.engine(lines)
        model = self.models[0]
        with autocast_to(self.dtype, model.device):
            if self.n_best is None:
                return [[(0.0, text)] for text in translate_corpus(model, self.tokenizer, lines, **self.settings)]
            return translate_n_best(model, self.tokenizer, lines, self.n_best, **self.settings)


def join_candidates(pieces: list[Candidates]) -> Candidates:
    """Joins the n-best lists of the pieces of a line rank by rank."""
    if len(pieces) == 1:
        return pieces[0]
    return [
        (sum(score for score, _ in candidates), " ".join(text for _, text in candidates))
        for candidates in zip(*pieces, strict=True)
    ]


def _join_aligned(
    pieces: Sequence[tuple[float, str, Alignment]], begins: Sequence[int]
) -> tuple[float, str, list[Block]]:
    """Joins the translations of the pieces of a line, which begin at these characters."""
    blocks, place = [], 0
    for (_, text, alignment), begin in zip(pieces, begins, strict=True):
        blocks.append(Block(alignment, begin, place))
        place += len(text) + 1
    ((score, text),) = join_candidates([[(score, text)] for score, text, _ in pieces])
    return score, text, blocks


def _word_starts(text: str) -> list[int]:
    return [match.start() for match in re.finditer(r"\S+", text)]


def skip_lines(lines: Iterator[T], done: int) -> Iterator[T]:
    """
    Skips the first `done` lines.

    Raises:
        ValueError: there are fewer lines.
    """
    there = sum(1 for _ in islice(lines, done))
    if there < done:
        raise ValueError(f"The output has {done} lines already, but the text has only {there}: give the same text.")
    yield from lines


class OutputFile:
    """
    Appends complete lines to a file, or writes them to a device or a pipe.

    Args:
        path (`Path`): the file.
        going_on (`str`): how the work goes on after a full disk, for the error message.

    Raises:
        OSError: the file cannot be written; the message names it.
    """

    def __init__(self, path: Path, going_on: str = "--resume continues after them") -> None:
        self.going_on = going_on
        self.path, self.is_regular = path, path.is_file() or not path.exists()
        # A pipe cannot be opened for appending. Unbuffered, so closing never has to write.
        self.file = path.open("ab" if self.is_regular else "wb", buffering=0)

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        """Writes lines. On a full disk, the file keeps the complete ones."""
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
                kept = f" Its lines are complete, and {self.going_on}."
            raise OSError(f"{self.path} cannot be written: {error.strerror or error}.{kept}") from error

    def flush(self) -> None:
        """Does nothing, because writes are not buffered."""


def write_whole(output: TextIO | OutputFile, text: str) -> None:
    """Writes complete lines: Ctrl-C and SIGTERM are delayed until they are written."""
    with delayed_signals():
        output.write(text)
        output.flush()
