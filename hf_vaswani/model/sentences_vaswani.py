"""Sentences as a model gets them: split and joined, tagged, kept without words, cut when too long, and in batches."""

import os
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import regex
import torch

# ---- Models and tokenizers that several threads use --------------------------------------------------------------

# Held while a tokenizer is called, because calls change its settings, and while a model changes its mode. Pipelines
# can share tokenizers and models, so they share the lock. Translation itself runs without it. The thread that holds it
# can take it again, because a fork takes it, and a tokenizer may fork.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A worker that is forked to read a dataset must not inherit a tokenizer that another thread is calling.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)

# For each model, the number of threads in [`evaluation_mode`], and its modules that they found in training mode.
IN_USE: dict[torch.nn.Module, tuple[int, list[torch.nn.Module]]] = {}


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode. The last of several threads to leave gives its modules their modes back."""
    with LOCK:
        threads, in_training = IN_USE.get(model, (0, []))
        IN_USE[model] = threads + 1, in_training + [module for module in model.modules() if module.training]
        model.eval()
    try:
        yield
    finally:
        with LOCK:
            threads, in_training = IN_USE.pop(model)
            if threads > 1:
                IN_USE[model] = threads - 1, in_training
            else:
                for module in in_training:
                    module.training = True


# ---- Sentences of a text -----------------------------------------------------------------------------------------

OPENING, CLOSING = "\"'“”„‘’‚«»‹›([{¿¡", "\"'“”‘’«»‹›)]}"
WHITE_SPACE = " \t\u00a0\u202f"
MARKS = tuple(".!?…؟۔।॥")
# Marks of scripts without spaces, which end a word as well.
WIDE_MARKS, WIDE_CLOSING = tuple("。！？｡"), "」』）】》”’"
# A closing mark with spaces around it, as in "« Bonjour. »", belongs to the word before.
WORD = re.compile(r"[^\s。！？｡]*[。！？｡]+[」』）】》”’]*|\S+(?:[^\S\n]+[”’»›)\]}]+(?!\S))?")
# Words whose period does not end a sentence: letters, as in "J.", "z. B.", "e.g.", "Ph.D."; numbers, as in "3. Mai"
# and "Ludwig XIV."; consonants, as in "Dr.", "vs.", "bzw."; and some abbreviations that never end a sentence.
ABBREVIATION = re.compile(
    r"\W*(?:(?:[A-Za-zÀ-ӿ]{1,2}\.)+[A-Za-zÀ-ӿ]{1,2}|[A-Za-zÀ-ӿ]|\d{1,2}|[IVX]+|[A-Z]?[bcdfghjklmnpqrstvwxz]{1,4}"
    r"|Prof|Capt|Col|Gen|Gov|Rep|Rev|Sen|Abb|Fig|Tel|inkl)\."
)


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """
    Returns start and end of each sentence of a text, with only white space between them. A text without a word is one
    sentence.

    A sentence ends before a newline; after `.!?…` and similar marks, if white space follows and then no lower-case
    letter; and after `。！？`. A period does not end a sentence before a number or in an abbreviation, which is
    recognised by its form alone: "He is 12. She is 10." and "It is vitamin C. It helps." stay together, which does
    little harm, and "usw. Auch" is split.
    """
    words = list(WORD.finditer(text))
    if not words:
        return [(0, len(text))]
    starts, ends = [words[0].start()], []
    for word, after in pairwise(words):
        if "\n" in text[word.end() : after.start()] or _ends_sentence(word[0], after[0]):
            ends.append(word.end())
            starts.append(after.start())
    return list(zip(starts, [*ends, words[-1].end()], strict=True))


def _ends_sentence(word: str, after: str) -> bool:
    """Returns whether a sentence ends between two words."""
    if _is_wide(word):
        # A sentence continues after a quotation with a comma or with hiragana, as in 「行く。」と言った.
        return not after.startswith(("，", "、")) and not (word[-1] in WIDE_CLOSING and "ぁ" <= after[0] <= "ゟ")
    bare, first = word.rstrip(CLOSING + WHITE_SPACE), after.lstrip(OPENING)[:1]
    if not bare.endswith(MARKS) or first.islower():
        return False
    return not (bare.endswith(".") and first.isdigit()) and not ABBREVIATION.fullmatch(word)


def _is_wide(text: str) -> bool:
    """Returns whether a text ends with a sentence mark of a script without spaces."""
    return text.rstrip(WIDE_CLOSING).endswith(WIDE_MARKS)


# Letters that are not seen: the fillers of Hangul.
FILLERS = frozenset("\u115f\u1160\u3164\uffa0")


def has_words(text: str) -> bool:
    """Returns whether a text has a visible letter. Digits, punctuation, emoji and invisible signs are no words."""
    return any(sign.isalpha() and sign not in FILLERS for sign in text)


def kept(text: str) -> str | None:
    """
    Returns what stands for the translation of a text without words, for which a model would invent something: the
    text, and nothing for white space alone. `None` for a text that has words.
    """
    if has_words(text):
        return None
    return text if text.strip() else ""


# ---- Language tags -----------------------------------------------------------------------------------------------

LANGUAGE_TAG = re.compile(r"<2[^<>\s]+>")
# The tag of a target language: "de" -> "<2de>".
language_tag = "<2{}>".format


class LanguageTags:
    """
    The tags of target languages in a vocabulary, such as `<2de>`: each source sentence has one in front of it. The
    tokenizer of a single direction has none.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): the tokenizer; tokens may be added to it later.
        config ([`PretrainedConfig`], *optional*): config of the model, which may have `language_pairs`.
        option (`str`): where a language is chosen, for error messages.
        is_required (`bool`): refuse text without a tag of a model that names no languages, too.
    """

    def __init__(
        self, tokenizer: Any, config: Any = None, option: str = "tgt_lang", is_required: bool = False
    ) -> None:
        self.tokenizer, self.config, self.option, self.is_required = tokenizer, config, option, is_required
        self._size: int | None = None
        self._tags: dict[str, str] = {}

    @property
    def by_language(self) -> dict[str, str]:
        """The tags, as `{"de": "<2de>"}`."""
        with LOCK:
            if hasattr(self.tokenizer, "get_added_vocab") and self._size != len(self.tokenizer):
                added = filter(LANGUAGE_TAG.fullmatch, self.tokenizer.get_added_vocab())
                self._tags = {tag[2:-1]: tag for tag in added}
                self._size = len(self.tokenizer)
            return self._tags

    @property
    def targets(self) -> list[str]:
        """The languages that the model translates into, if its config names them."""
        return list(dict.fromkeys(pair[1] for pair in getattr(self.config, "language_pairs", None) or ()))

    def find(self, language: str) -> str:
        """Returns the tag of a language, or raises a `ValueError` that lists the known ones."""
        tags = self.by_language
        if language not in tags:
            known = f", only for {', '.join(tags)}" if tags else ": it has no language tags"
            raise ValueError(f"The vocabulary has no tag for the target language {language!r}{known}.")
        return tags[language]

    def split(self, text: str) -> tuple[str, str]:
        """Splits a text into the tag at its beginning and a space, or nothing, and the rest."""
        if (match := LANGUAGE_TAG.match(text.lstrip())) and match[0] in self.by_language.values():
            return f"{match[0]} ", match.string[match.end() :].lstrip()
        return "", text

    def front(self, tag: str, language: str | None) -> str:
        """
        Returns what is put in front of a sentence with this tag, as [`~LanguageTags.split`] returns it: the tag of the
        target language and a space, or nothing if the sentence has it or the vocabulary has no tags. The language is
        by default the only one that the model translates into. Raises a `ValueError` if the vocabulary has no tag for
        it, the sentence has another one, or neither chooses among several.
        """
        tags, targets = self.by_language, self.targets
        if language is None and not tag:
            known = sorted(tags.keys() & targets) or sorted(tags if self.is_required and not targets else ())
            if len(known) > 1 or (not targets and known):
                raise ValueError(
                    f"The model translates into {', '.join(known)}: choose one by {self.option}, or put one of "
                    f"{', '.join(tags[each] for each in known)} in front of the text."
                )
            language = known[0] if known else None
        if language is None or not tags:
            return ""
        if tag not in ("", front := f"{self.find(language)} "):
            raise ValueError(f"The target language is {language!r}, but the text begins with {tag.strip()}.")
        return "" if tag else front

    def put(self, text: str, language: str | None = None) -> str:
        """Returns a text with a tag in front, see [`~LanguageTags.front`]. Blank text stays as it is."""
        return self.front(self.split(text)[0], language) + text if text.strip() else text


# ---- Long sentences ----------------------------------------------------------------------------------------------

# In tokens: the longest sentence that is not cut, for a model that does not say; the same for one that was trained on
# short text alone; and the least that may be asked for.
LONGEST, SHORT, MIN_LONGEST = 1024, 128, 16
# A normalizer may make several tokens of one byte, also beside the rules of Unicode.
TOKENS_OF_A_BYTE = 3
SPACE = re.compile(r"\s+")
# A character as people see it: a letter with its accents, a syllable, an emoji or a flag (a grapheme cluster), with
# the vowels of Thai and Lao that are written in front of their consonant.
CHARACTER = regex.compile(r"[\u0e40-\u0e44\u0ec0-\u0ec4]?\X")
# A place behind punctuation that is not within a word or a number, as in "don't" and "1.5".
BEHIND_PUNCTUATION = regex.compile(r"(?<=[\p{Po}\p{Pd}\p{Pe}\p{Pf}--['’·]])(?!\p{P})(?<![.,:](?=\d))", regex.V1)


def longest_source(models: Iterable[Any], tokenizer: Any) -> int:
    """
    Returns the tokens of the longest sentence that all models translate in one piece: with sinusoidal positions
    `longest_sentence` of the config, which training records, but at least 128; else `max_position_embeddings`; and
    `model_max_length` of the tokenizer.
    """
    limits = [tokenizer.model_max_length]
    for config in (model.config for model in models):
        recorded = getattr(config, "longest_sentence", None)
        positions = getattr(config, "max_position_embeddings", None) or LONGEST
        is_learned = getattr(config, "position_encoding", None) == "learned"
        limits.append(positions if recorded is None or is_learned else max(recorded, SHORT))
    return min(limits)


@dataclass(frozen=True)
class Parts:
    """
    A text in parts, which are translated one by one.

    Attributes:
        front (`str`): text in front of each part, as a language tag and a space, or nothing.
        text (`str`): the text without it.
        spans (`list[tuple[int, int]]`): start and end of each part, with only white space between them.
    """

    front: str
    text: str
    spans: list[tuple[int, int]]

    @property
    def sources(self) -> list[str]:
        """The parts, each with what is in front of it."""
        return [self.front + self.text[start:end] for start, end in self.spans]

    def join(self, translations: Sequence[str]) -> str:
        """
        Joins translations of the parts: by the white space between the parts if that has a newline, else by one space,
        and by nothing after a mark of a script without spaces.
        """
        joined, end = "", 0
        for (start, next_end), translation in zip(self.spans, translations, strict=True):
            space, end = self.text[end:start], next_end
            if "\n" in space:
                joined += space
            elif translation and joined[-1:].strip() and not _is_wide(joined):
                joined += " "
            joined += translation
        return joined + (self.text[end:] if "\n" in self.text[end:] else "")


def cut(front: str, text: str, encode: Callable[[str], Any], longest: int | None, split: bool = False) -> Parts:
    """
    Cuts a text into what is translated at a time: into its sentences, if it is to be `split`, and what `encode` finds
    longer than `longest` tokens into pieces of at most half as many, which leaves room for longer translations.
    """

    def fits(part: str, most: int) -> bool:
        is_short = not has_words(part) or not may_be_longer(front + part, most)
        return is_short or len(encode(front + part)["input_ids"]) <= most

    spans = []
    for start, end in sentence_spans(text) if split else [(0, len(text))]:
        if longest is None or fits(text[start:end], longest):
            spans.append((start, end))
        else:
            pieces = fitting_spans(text[start:end], partial(fits, most=longest // 2))
            spans += [(start + left, start + right) for left, right in pieces]
    return Parts(front, text, spans)


def may_be_longer(text: str, longest: int) -> bool:
    """Returns whether a text has to be tokenized to know that it has at most this many tokens."""
    return TOKENS_OF_A_BYTE * len(unicodedata.normalize("NFKC", text).encode("utf-8", "replace")) > longest


def fitting_spans(text: str, fits: Callable[[str], bool]) -> list[tuple[int, int]]:
    """
    Splits a text into sentences, and halves sentences until all pieces fit: near the middle, at white space, else
    behind punctuation, else between characters. Returns start and end of each piece, with only white space between
    them.
    """
    found = []
    pending = sentence_spans(text)[::-1]
    while pending:
        start, end = pending.pop()
        if end - start < 2 or fits(text[start:end]):
            found.append((start, end))
            continue
        middle = _middle(text, start, end)
        left, right = text[start:middle].rstrip(), text[middle:end].lstrip()
        pending += [(end - len(right), end), (start, start + len(left))]
    return found


def _middle(text: str, start: int, end: int) -> int:
    """Returns where a sentence without white space at its ends is cut in two."""
    middle = (start + end) // 2
    places = [match.end() for match in SPACE.finditer(text, start, end)]
    if not places:
        characters = [match.end() for match in CHARACTER.finditer(text, start, end)][:-1]
        places = [place for place in characters if BEHIND_PUNCTUATION.match(text, place)] or characters or [middle]
    return min(places, key=lambda place: abs(place - middle))


# ---- Batches -----------------------------------------------------------------------------------------------------

# Positions of a batch, rows times longest; of a batch with more padding than text; and how many times as many an
# accelerator translates at once.
MAX_POSITIONS, MAX_PADDED, TIMES_ON_ACCELERATORS = 4096, 1024, 4


def batch_limits(device: torch.device, num_beams: int, usual: int) -> tuple[int, int]:
    """Returns `most` and `padded` of a search: less with more beams than usual, more on an accelerator, to fill it."""
    times = usual * (1 if device.type == "cpu" else TIMES_ON_ACCELERATORS)
    return MAX_POSITIONS * times // max(usual, num_beams), MAX_PADDED * times // max(usual, num_beams)


def length_groups(
    lengths: Sequence[int], most: int = MAX_POSITIONS, padded: int = MAX_PADDED, rows: int | None = None
) -> list[list[int]]:
    """
    Groups sentences of similar length into batches, so that memory follows the number of tokens. Returns the numbers
    of the sentences of each batch, longest first.

    Args:
        lengths (`Sequence[int]`): tokens of each sentence, in any order.
        most (`int`): positions of a batch, padding included. A longer sentence gets a batch of its own.
        padded (`int`): positions of a batch with a sentence that is less than half as long as the longest.
        rows (`int`, *optional*): most sentences of a batch.
    """
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if groups:
            longest = max(1, lengths[groups[-1][0]])
            limit = most if 2 * lengths[number] >= longest else padded
            if longest * (len(groups[-1]) + 1) <= limit and len(groups[-1]) != rows:
                groups[-1].append(number)
                continue
        groups.append([number])
    return groups
