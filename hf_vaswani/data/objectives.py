"""The objectives of pre-training: what a model reads, and what it is to predict, for each block of a text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from .encoding import as_lists
from .noise import corrupted_spans, infilled, masked_fragment, masked_tokens, reordered

MASK = "<mask>"
# A first piece of a word begins with a space, which byte-level vocabularies write as Ġ and SentencePiece as ▁.
SPACES = ("Ġ", "▁", " ", "<0x20>")
# All blocks that are read together.
ALL = slice(None)
NOISE_RATES = {"masked_lm": 0.15, "span_corruption": 0.15, "infilling": 0.3, "fragment": 0.5}


@dataclass
class BlockText:
    """
    The text of a block.

    Attributes:
        ids (`list[int]`): its tokens, without special tokens.
        ends (`list[int]`): places behind the last token of each line.
        documents (`list[int]`): places behind the last token of each document.
        is_complete (`bool`): whether the last document ends with the block.
        document (`tuple[int, int]`): source and number of the first document.
        tag (`int`, *optional*): id of the language tag of its source.
    """

    ids: list[int]
    ends: list[int]
    documents: list[int]
    is_complete: bool = True
    document: tuple[int, int] = (0, 0)
    tag: int | None = None


# A row: `source_ids`, `target_ids` and the other columns of an objective.
Row = dict[str, Any]


class Objective:
    """An objective of pre-training."""

    extra: int
    """Tokens that a document in a block costs besides its text."""
    is_packed = False
    """True if a block may have several documents."""
    columns: tuple[str, ...] = ()
    """Columns of its rows besides `source_ids` and `target_ids`, for [`PairCollator`]."""

    def row(self, text: BlockText, rng: random.Random) -> Row:
        """Makes the row of a block, by the random numbers for it."""
        raise NotImplementedError

    def rows(self, texts: Sequence[BlockText], rngs: Sequence[random.Random], part: slice = ALL) -> list[Row]:
        """Makes the rows of a part of the blocks that are read together, by the random numbers for each."""
        return [self.row(text, rng) for text, rng in zip(texts[part], rngs[part], strict=True)]

    def table(
        self, texts: Sequence[BlockText], rngs: Sequence[random.Random], numbers: Sequence[int], part: slice = ALL
    ) -> pa.Table:
        """Makes the rows of a part of the blocks as an Arrow table, with the `number` of each block."""
        rows = self.rows(texts, rngs, part)
        found = {"number": pa.array(numbers[part], pa.int64())}
        for name in ("source_ids", "target_ids", *self.columns):
            values = [row[name] for row in rows]
            found[name] = pa.array(values, pa.int64()) if name == "next_sentence" else as_lists(values)
        return pa.table(found)


@dataclass(frozen=True)
class ObjectiveSettings:
    """
    Settings of an objective.

    Attributes:
        task (`str`): `"masked_lm"`, `"causal_lm"`, `"span_corruption"` or `"denoise"`.
        block_length (`int`): most tokens of a block, special tokens included.
        noise_rate (`float`, *optional*): share of the tokens that are masked or corrupted; by default that of
            `NOISE_RATES`.
        span_length (`float`): mean length of the spans, in tokens.
        noise (`Sequence[str]`): kinds of noise for `"denoise"`.
        whole_words (`bool`): whether all tokens of a word are masked, or none.
        next_sentence (`bool`): whether a masked language model also predicts if the second segment continues the
            first.
    """

    task: str
    block_length: int
    noise_rate: float | None = None
    span_length: float = 3.0
    noise: Sequence[str] = ("infilling",)
    whole_words: bool = False
    next_sentence: bool = False

    def rate(self, name: str) -> float:
        """Returns the share of the tokens to mask, by the name of a task or a noise."""
        return NOISE_RATES[name] if self.noise_rate is None else self.noise_rate

    def build(self, tokenizer: PreTrainedTokenizerBase) -> Objective:
        """Returns the objective; raises a `ValueError` if the vocabulary lacks a token that it needs."""
        bos, eos, task = tokenizer.bos_token_id, tokenizer.eos_token_id, self.task
        if task == "causal_lm":
            return CausalLM(_needed(tokenizer, "<s>", bos, task), eos)
        if task == "span_corruption":
            return SpanCorruption(self.rate(task), self.span_length, sentinels_of(tokenizer), eos)
        mask = _needed(tokenizer, MASK, token_id(tokenizer, MASK), task)
        if task == "denoise":
            return Denoise(self, mask, eos)
        special = special_ids(tokenizer)
        replacements = [i for i in range(len(tokenizer)) if i not in special]
        begins = word_beginnings(tokenizer) if self.whole_words else None
        kind, bos = NextSentence if self.next_sentence else MaskedLM, _needed(tokenizer, "<s>", bos, task)
        return kind(self.rate(task), mask, replacements, begins, bos, eos, self.block_length)

    def extra_tokens(self) -> list[str]:
        """Returns the entries that the objective needs in the vocabulary."""
        if self.task == "span_corruption":
            spans = self.block_length * self.rate(self.task) / self.span_length
            # As many as a block can need, and one for the end.
            return [f"<extra_{i}>" for i in range(round(spans) + 2)]
        return [MASK] if self.task in ("masked_lm", "denoise") else []


# ---- The vocabulary ----------------------------------------------------------------------------------------------


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """Returns the id of an entry, if the vocabulary has it."""
    return tokenizer.get_vocab().get(token)


def _needed(tokenizer: PreTrainedTokenizerBase, token: str, id_: int | None, task: str) -> int:
    if id_ is None:
        raise ValueError(
            f"task {task!r} needs {token} in the vocabulary, which this tokenizer does not have: leave out "
            "tokenizer.path and initialize.from, so that the recipe trains one, or name others."
        )
    return id_


def sentinels_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids of `<extra_0>`, `<extra_1>`, ...; raises a `ValueError` if there are fewer than two."""
    vocabulary, found = tokenizer.get_vocab(), list[int]()
    while (token := f"<extra_{len(found)}>") in vocabulary:
        found.append(vocabulary[token])
    if len(found) < 2:
        _needed(tokenizer, f"<extra_{len(found)}>", None, "span_corruption")
    return found


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids that are no text: special tokens, masks, sentinels and tags."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def word_beginnings(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Returns whether a word begins at each entry of the vocabulary, of shape `(vocab_size,)`."""
    begins = np.zeros(len(tokenizer), dtype=bool)
    for piece, i in tokenizer.get_vocab().items():
        begins[i] = piece.startswith(SPACES)
    begins[list(special_ids(tokenizer))] = True
    return begins


# ---- One class for each objective --------------------------------------------------------------------------------


@dataclass
class CausalLM(Objective):
    """
    The next token (Radford et al., 2018). Documents share a block, each with `<s>` in front and positions of its own;
    `</s>` stands at its end, also if the document began in an earlier block.

    Attributes:
        bos (`int`), eos (`int`): ids of `<s>` and `</s>`.
    """

    bos: int
    eos: int

    extra, is_packed = 2, True
    columns = ("positions",)

    def row(self, text: BlockText, rng: random.Random) -> Row:
        """See [`Objective`]; draws nothing."""
        source, target, positions = list[int](), list[int](), list[int]()
        for start, end in pairwise([0, *text.documents]):
            ids = [self.bos, *text.ids[start:end]]
            if end < len(text.ids) or text.is_complete:
                ids.append(self.eos)
            source += ids
            target += [-100, *ids[1:]]
            positions += range(len(ids))
        return {"source_ids": source, "target_ids": target, "positions": positions}


@dataclass
class MaskedLM(Objective):
    """
    Masked tokens (Devlin et al., 2018), in `<s> text </s>`.

    Attributes:
        rate (`float`): share of the tokens to predict.
        mask (`int`): id of `<mask>`.
        replacements (`list[int]`): ids that may replace a token.
        begins (`np.ndarray` of shape `(vocab_size,)`, *optional*): whether a word begins at an entry, for whole words.
        bos (`int`), eos (`int`): ids of `<s>` and `</s>`.
        longest (`int`): most tokens of a block.
    """

    rate: float
    mask: int
    replacements: list[int]
    begins: np.ndarray | None
    bos: int
    eos: int
    longest: int

    extra = 2

    def masked(self, ids: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
        """Returns input and labels, as [`masked_tokens`] does."""
        words = None if self.begins is None else self.begins[ids].tolist()
        return masked_tokens(ids, self.rate, self.mask, self.replacements, rng, words)

    def row(self, text: BlockText, rng: random.Random) -> Row:
        """See [`Objective`]."""
        inputs, labels = self.masked(text.ids, rng)
        return {"source_ids": [self.bos, *inputs, self.eos], "target_ids": [-100, *labels, -100]}


class NextSentence(MaskedLM):
    """
    Masked tokens, and whether the second segment continues the first (Devlin et al., 2018), in `<s> a </s> b </s>`. A
    block is cut at the end of a line. In half of the blocks, the second segment is replaced by that of another
    document among the blocks that are read with it.
    """

    extra = 3
    columns = ("segments", "next_sentence")

    def rows(self, texts: Sequence[BlockText], rngs: Sequence[random.Random], part: slice = ALL) -> list[Row]:
        """See [`Objective`]."""
        rows, others = [], _next_documents(texts)
        for text, rng in zip(texts[part], rngs[part], strict=True):
            first, second = _halves(text, rng)
            # The same random numbers whatever they are used for.
            is_other, start = rng.random() < 0.5, rng.randrange(len(texts))
            other = None
            if is_other or not second:
                other = texts[start] if texts[start].document != text.document else others[start]
            if other is not None:
                second = _halves(other, rng)[1] or other.ids
                second = second[: self.longest - self.extra - len(first)]
            inputs, labels = self.masked(first + second, rng)
            cut = len(first)
            rows.append(
                {
                    "source_ids": [self.bos, *inputs[:cut], self.eos, *inputs[cut:], self.eos],
                    "target_ids": [-100, *labels[:cut], -100, *labels[cut:], -100],
                    "segments": [0] * (cut + 2) + [1] * (len(second) + 1),
                    "next_sentence": int(other is not None),
                }
            )
        return rows


def _halves(text: BlockText, rng: random.Random) -> tuple[list[int], list[int]]:
    """Cuts a block at the end of one of its lines; a single line in its middle."""
    place = rng.choice(text.ends[:-1]) if len(text.ends) > 1 else (len(text.ids) + 1) // 2
    return text.ids[:place], text.ids[place:]


def _next_documents(texts: Sequence[BlockText]) -> list[BlockText | None]:
    """Returns the next block of another document for each block, around the end of the list; `None` without one."""
    found: list[BlockText | None] = [None] * len(texts)
    # Twice, from the back: the last document finds the first one.
    for i in [*range(len(texts) - 1, -1, -1)] * 2:
        after = texts[(i + 1) % len(texts)]
        found[i] = after if after.document != texts[i].document else found[(i + 1) % len(texts)]
    return found


@dataclass
class SpanCorruption(Objective):
    """
    The spans that sentinels stand for (Raffel et al., 2019).

    Attributes:
        rate (`float`): share of the tokens.
        span_length (`float`): mean length of the spans.
        sentinels (`list[int]`): ids of `<extra_0>`, `<extra_1>`, ...
        eos (`int`): id of `</s>`, at the end of both sides.
    """

    rate: float
    span_length: float
    sentinels: list[int]
    eos: int

    # A language tag, and `</s>`.
    extra = 2

    def row(self, text: BlockText, rng: random.Random) -> Row:
        """See [`Objective`]."""
        source, target = corrupted_spans(text.ids, self.rate, self.span_length, self.sentinels, rng)
        return {"source_ids": [*_tag(text), *source, self.eos], "target_ids": [*target, self.eos]}


@dataclass
class Denoise(Objective):
    """
    The text itself, from a noisy one (BART, MASS).

    Attributes:
        settings ([`ObjectiveSettings`]): kinds of noise, share of the tokens, length of the spans.
        mask (`int`), eos (`int`): ids of `<mask>` and `</s>`.
    """

    settings: ObjectiveSettings
    mask: int
    eos: int

    # A language tag, `</s>`, and the mask that a span of length 0 inserts.
    extra = 3

    def row(self, text: BlockText, rng: random.Random) -> Row:
        """See [`Objective`]."""
        return {
            "source_ids": [*_tag(text), *self.noisy(text, rng), self.eos],
            "target_ids": [*text.ids, self.eos],
        }

    def noisy(self, text: BlockText, rng: random.Random) -> list[int]:
        """Returns a text with all kinds of noise, reordered first."""
        settings, ids = self.settings, text.ids
        if "permutation" in settings.noise:
            ids = reordered(ids, text.ends, rng)
        if "infilling" in settings.noise:
            ids = infilled(ids, settings.rate("infilling"), settings.span_length, self.mask, rng)
        if "fragment" in settings.noise:
            ids = masked_fragment(ids, settings.rate("fragment"), self.mask, rng)
        return ids


def _tag(text: BlockText) -> list[int]:
    return [] if text.tag is None else [text.tag]
