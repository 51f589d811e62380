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

# A brace begins a placeholder, and is no opening mark.
OPENING, CLOSING = "\"'“”„‘’‚«»‹›([¿¡", "\"'“”‘’«»‹›)]}"
WHITE_SPACE, LINE_BREAK = " \t\u00a0\u202f", re.compile("[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")
# Unicode's sentence marks without three commas, and with marks of Tibetan, Sinhala, Thai and Hebrew.
OF_UNICODE = r"(?V1)[[\p{SB=STerm}\p{SB=ATerm}…།༎༏༐༑༔෴๚๛׃]--[၊᭞꧈]]"
MARKS = "".join(regex.findall(OF_UNICODE, "".join(map(chr, range(0x20000)))))
# Marks of scripts without spaces end a word as well. So do the marks of other scripts in front of a letter, and those
# of several scripts between letters that are written without spaces.
WIDE_MARKS, WIDE_CLOSING, COMMON_MARKS = tuple("。！？｡．"), "」』）】》”’", "!?‼⁇⁈⁉‽．"
OWN_MARKS = "".join({*MARKS} - {*WIDE_MARKS, *COMMON_MARKS, *".․﹒…۔"})
BROKEN = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
UNSPACED = f"[{BROKEN}\u0f00-\u0fff\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
# Signs that are not seen and that no model reads: possible breaks and joints of words, and directions of writing. A
# break between words of Thai, Lao, Khmer or Burmese is read.
HIDDEN = "\u00ad\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
INVISIBLE = re.compile(rf"(?!\u200b)[{HIDDEN}]|(?<!\u200b)(?:\u200b++(?![{BROKEN}])|(?<![{BROKEN}])\u200b++)")
# A closing mark with spaces around it, as in "« Bonjour. »", belongs to the word before, as does a second shad of
# Tibetan. "។ល។" is an abbreviation of Khmer.
WORD = re.compile(
    rf"(?=[^\s{MARKS}]*[{MARKS}]\S)\S*?(?:[。！？｡]++[{WIDE_CLOSING}]*+|(?<={UNSPACED})[{COMMON_MARKS}]++(?={UNSPACED})"
    rf"|(?<![{OWN_MARKS}])[{OWN_MARKS}]++[”’»›)\]}}\"'{HIDDEN}]*+(?!ល។)(?=[“‘„«‹(\[]?[^\W\d_]))"
    rf"|\S+(?:(?:(?!{LINE_BREAK.pattern})\s)+(?:[”’»›)\]}}]+(?!\S)|[།༎]+))?"
)
# Words whose period does not end a sentence: letters, as in "J.", "z. B.", "e.g.", "Ph.D."; numbers, as in "3. Mai"
# and "Ludwig XIV."; consonants, as in "Dr.", "vs.", "bzw."; and some abbreviations that never end a sentence.
LETTER = r"[^\W\d_ᄀ-ᇿ぀-ヿ㐀-鿿가-힣]"
ABBREVIATION = re.compile(
    rf"\W*(?:(?:{LETTER}{{1,2}}\.)+{LETTER}{{1,2}}|{LETTER}|\d{{1,2}}|[IVX]+|[A-Z]?[bcdfghjklmnpqrstvwxz]{{1,4}}"
    r"|Prof|Capt|Col|Gen|Gov|Rep|Rev|Sen|Abb|Fig|Tel|inkl)\."
)
# The question mark of Greek is a semicolon.
ENDED = re.compile(rf"(?:[{MARKS}]|[\u0300-\u03ff\u1f00-\u1fff]{{2}}[;\u037e])\Z")
# A link, an address or a name with dots, which begins a sentence in lower case, too.
LINK = re.compile(r"[\w+.-]+:(?=//|\S+@)|www\.|[\w.+-]+@\w|[\w-]{2,}(?:\.[\w-]{2,})+(?![\w.])")


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """
    Returns start and end of each sentence of a text, with only white space between them. A text without a word is one
    sentence.

    A sentence ends before a line break; after `.!?…` and similar marks, if white space follows and then no lower-case
    word; and after `。！？`, and marks of one script in front of a letter. A period does not end a sentence before a
    number or in an abbreviation, which is recognised by its form alone: "He is 12. She is 10." and "It is vitamin C.
    It helps." stay together, which does little harm, and "usw. Auch" is split.
    """
    words = list(WORD.finditer(text))
    if not words:
        return [(0, len(text))]
    starts, ends = [words[0].start()], []
    for word, after in pairwise(words):
        if LINE_BREAK.search(text, word.end(), after.start()) or _ends_sentence(word[0], after[0]):
            ends.append(word.end())
            starts.append(after.start())
    return list(zip(starts, [*ends, words[-1].end()], strict=True))


def _ends_sentence(word: str, after: str) -> bool:
    """Returns whether a sentence ends between two words."""
    if _is_wide(word):
        # A sentence continues after a quotation with a comma or with hiragana, as in 「行く。」と言った.
        return not after.startswith(("，", "、")) and not (word[-1] in WIDE_CLOSING and "ぁ" <= after[0] <= "ゟ")
    bare, first = word.rstrip(CLOSING + WHITE_SPACE + HIDDEN), after.lstrip(OPENING + HIDDEN)
    if not ENDED.search(bare[-3:]):
        return False
    # Letters without capitals are their own titles.
    if first[:1] != first[:1].title() and not LINK.match(first):
        return False
    return not (bare.endswith(".") and (first[:1].isdigit() or ABBREVIATION.fullmatch(word)))


def _is_wide(text: str) -> bool:
    """Returns whether a text ends with a sentence mark of a script without spaces."""
    return text.rstrip(WIDE_CLOSING).endswith(WIDE_MARKS)


# Letters but fillers, marks of sound or repetition, and those of ordinal numbers.
WORDS = regex.compile(r"[\p{L}--[\p{Lm}\p{Default_Ignorable_Code_Point}ªº]]", regex.V1)
REPEATED = re.compile(r"(?<!\S)(\S++)(?: \1(?!\w)){3,}+")


def has_words(text: str) -> bool:
    """Returns whether a text has a visible letter. Digits, punctuation, emoji and invisible signs are no words."""
    return WORDS.search(text) is not None


def kept(text: str) -> str | None:
    """Returns a text without words, for which a model would invent something, or `None` for one that has words."""
    return None if has_words(text) else text


def visible(text: str) -> str:
    """Returns what a model reads of a text: all but its [`INVISIBLE`] signs. A text without words stays as it is."""
    return INVISIBLE.sub("", text) if has_words(text) else text


def without_repetition(source: str, translations: list[str]) -> list[str]:
    """Returns translations of a sentence; those of one word without words that stand four times in a row or more."""
    is_word = len(LANGUAGE_TAG.sub("", source).split()) == 1 and not re.search(f"{UNSPACED}{{4}}", source)
    return [REPEATED.sub(r"\1", text) if is_word else text for text in translations]


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
    """A text in parts, which are translated one by one."""

    front: str  # what is in front of each part, as a language tag and a space, or nothing
    text: str  # the text without it
    spans: list[tuple[int, int]]  # start and end of each part, with only white space around it

    @property
    def sources(self) -> list[str]:
        """The parts as a model reads them, each with its front."""
        return [self.front + visible(self.text[start:end]) for start, end in self.spans]

    def join(self, translations: Sequence[str]) -> str:
        """
        Joins translations of the parts by the white space of the text. Where it has none or spaces alone, there is a
        space at least, but nothing after a mark of a script without spaces, or beside an empty translation.
        """
        end = self.spans[0][0]
        joined = self.text[:end]
        for (start, next_end), translation in zip(self.spans, translations, strict=True):
            space, end = self.text[end:start], next_end
            if space.strip(" "):
                joined += space
            elif translation and joined[-1:].strip() and not _is_wide(joined):
                joined += space or " "
            joined += translation
        return joined + self.text[end:]


def cut(front: str, text: str, encode: Callable[[str], Any], longest: int | None, split: bool = False) -> Parts:
    """
    Cuts a text into what is translated at a time: into its sentences, if it is to be `split`, and what `encode` finds
    longer than `longest` tokens into pieces of at most half as many, which leaves room for longer translations. White
    space around the text is in no part.
    """

    def fits(part: str, most: int) -> bool:
        is_short = not has_words(part) or not may_be_longer(source := front + visible(part), most)
        return is_short or len(encode(source)["input_ids"]) <= most

    spans, begin = [], len(text) - len(text.lstrip())
    whole = (begin, len(text.rstrip())) if text.strip() else (0, len(text))
    for start, end in sentence_spans(text) if split else [whole]:
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

# Positions of a batch, rows times longest; of a batch with more padding than text; and how many times as many a GPU or
# another accelerator translates at once.
MAX_POSITIONS, MAX_PADDED, TIMES, TIMES_ON_OTHERS = 4096, 1024, {"cpu": 1, "cuda": 8}, 4


def batch_limits(model: Any, num_beams: int, usual: int) -> tuple[int, ...]:
    """Returns `most` and `padded` of a search: less with more beams than usual, more on an accelerator, to fill it."""
    times = usual * TIMES.get(model.device.type, TIMES_ON_OTHERS)
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
