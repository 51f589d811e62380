"""Translation of text line by line: long lines are split, several processes share the work, lines keep their order."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from ..model.sentences_vaswani import LanguageTags, Parts, cut, has_words, longest_source, may_be_longer
from ..processes import Processes
from .alignment import Alignment, align_parts
from .batches import translate_corpus, translate_n_best
from .placement import translate_markup
from .quantization import autocast_to

# Lines per process that are sorted by length and translated together on a CPU: enough to fill batches, and a short
# wait. Devices that take larger batches take as many times as many lines, see [`times_on`].
LINES_AT_A_TIME = 1024

# The n-best list of a line: scores and translations, best first.
Candidates = list[tuple[float, str]]
# Numbers of a source and a target word, counted from 0, and the attention of the second to the first.
Link = tuple[int, int, float]

T = TypeVar("T")


# ---- Long lines --------------------------------------------------------------------------------------------------


def cut_lines(lines: Sequence[str], tags: LanguageTags, longest: int) -> list[Parts]:
    """
    Cuts lines that are longer than a model accepts.

    Args:
        lines (`Sequence[str]`): lines. A language tag in front of a line is repeated in each of its parts.
        tags ([`LanguageTags`]): those of the tokenizer.
        longest (`int`): maximum tokens of a line, see [`cut`].
    """
    doubtful = [line for line in lines if may_be_longer(line, longest) and has_words(line)]
    ids = tags.tokenizer(doubtful, verbose=False)["input_ids"] if doubtful else []
    too_long = {line for line, each in zip(doubtful, ids, strict=True) if len(each) > longest}
    encode = partial(tags.tokenizer, verbose=False)
    return [cut(*tags.split(line), encode, longest if line in too_long else None) for line in lines]


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


# ---- Lines ---------------------------------------------------------------------------------------------------------


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
        tokens_per_batch (`int`, *optional*): token budget of a batch, for `generate()`; by default that of the device.

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
        tokens_per_batch: int | None = None,
    ) -> None:
        self.dtype, self.tokens_per_batch = dtype, tokens_per_batch
        self.models, self.tokenizer, self.n_best, self.engine = models, tokenizer, n_best, engine
        self.tags = LanguageTags(tokenizer)
        self.settings: dict[str, Any] = {} if shortlist is None else {"shortlist": shortlist}
        if len(models) > 1:
            self.settings["ensemble"] = models[1:]
        self.longest = longest_source(models, tokenizer)
        self.lines_split = 0

    def __call__(self, lines: list[str]) -> list[Candidates]:
        """Returns the n-best list of each line; the lists of the parts of a line are joined rank by rank."""
        return [_joined(parts, found) for parts, found in self._translate_parts(lines)]

    def aligned(self, lines: list[str]) -> list[list[tuple[float, str, list[Link]]]]:
        """
        Returns the n-best list of each line, each translation with its links to the line. Words are separated by white
        space; a language tag in front of a line is not counted.
        """
        return [
            [(score, text, _links(self.tags.split(line)[1], text, pieces)) for score, text, pieces in candidates]
            for line, candidates in zip(lines, self._align(lines, "words"), strict=True)
        ]

    def with_markup(self, lines: list[str], kind: str) -> list[Candidates]:
        """Returns the best translation of each line, with its markup (see [`parse`])."""
        split: list[int] = []

        def translate(plain: list[str]) -> list[list[tuple[str, list[Alignment]]]]:
            found = self._align(plain, "pieces")
            # Lines that are translated again are not counted again.
            split.append(self.lines_split)
            self.lines_split = split[0]
            return [[(text, pieces) for _, text, pieces in candidates] for candidates in found]

        found = translate_markup(list(map(self.tags.split, lines)), kind, translate)
        return [[(0.0, candidates[0])] for candidates in found]

    def _align(self, lines: list[str], unit: str) -> list[list[tuple[float, str, list[Alignment]]]]:
        """Returns the n-best list of each line, each translation with the alignments of its parts."""
        found = self._translate_parts(lines)
        ranks = [
            (parts, [[text for _, text in rank] for rank in zip(*candidates, strict=True)])
            for parts, candidates in found
        ]
        aligned = align_parts(self.models[0], self.tokenizer, ranks, unit, tokens_per_batch=self.tokens_per_batch)
        return [
            [(score, *each) for (score, _), each in zip(_joined(*whole), candidates, strict=True)]
            for whole, candidates in zip(found, aligned, strict=True)
        ]

    def _translate_parts(self, lines: list[str]) -> list[tuple[Parts, list[Candidates]]]:
        """Returns the parts of each line, each with its n-best list."""
        parts = cut_lines(lines, self.tags, self.longest)
        self.lines_split += sum(len(each.spans) > 1 for each in parts)
        found = iter(self._translate([source for each in parts for source in each.sources]))
        return [(each, [next(found) for _ in each.spans]) for each in parts]

    def _translate(self, lines: list[str]) -> list[Candidates]:
        if self.engine is not None:
            return self.engine(lines)
        model, tokenizer, most = self.models[0], self.tokenizer, self.tokens_per_batch
        with autocast_to(self.dtype, model.device):
            if self.n_best is None:
                return [[(0.0, text)] for text in translate_corpus(model, tokenizer, lines, most, **self.settings)]
            return translate_n_best(model, tokenizer, lines, self.n_best, most, **self.settings)


def _joined(parts: Parts, found: Sequence[Candidates]) -> Candidates:
    """Joins the n-best lists of the parts of a line rank by rank."""
    return [
        (sum(score for score, _ in rank), parts.join([text for _, text in rank])) for rank in zip(*found, strict=True)
    ]


def _links(source: str, target: str, pieces: Sequence[Alignment]) -> list[Link]:
    """Returns the links between the words of a line and its translation."""
    starts = [[match.start() for match in re.finditer(r"\S+", text)] for text in (source, target)]
    links: dict[tuple[int, int], float] = {}
    for alignment in pieces:
        for link in alignment.links():
            spans = alignment.source_spans[link[0]], alignment.target_spans[link[1]]
            left, right = (max(0, bisect_right(words, span[0]) - 1) for words, span in zip(starts, spans, strict=True))
            links.setdefault((left, right), float(alignment.probabilities[link[1], link[0]]))
    return [(left, right, probability) for (left, right), probability in links.items()]
