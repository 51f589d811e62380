"""Checks of sentence pairs: measures them, proposes limits from a validation set, and judges each."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

# Everything that may be wrong with a pair, in the order of the report.
REASONS = {
    "empty": "a side has no text",
    "encoding": "text that was decoded wrongly, such as Ã¤, or control characters",
    "identical": "source and target are the same, with more than max_identical words in lower case",
    "length": "a side has more than max_length words",
    "ratio": "the target is more than max_ratio times longer or shorter than usual",
    "letters": "letters are less than min_letters of a side's characters",
    "script": "most letters of a side are in another script",
    "language": "a side is in another language, with more confidence than max_foreign",
    "numbers": "more than max_numbers numbers are on one side only",
    "urls": "more than max_urls addresses are on one side only",
    "markup": "more than max_markup tags, placeholders or backticks are on one side only",
    "held_out": "the source or the target is also in the validation or test text",
    "duplicate": "the pair is there before",
}

# A side in this many letters or more is judged by its language, and by its script.
ENOUGH_LETTERS = 20
# The rest of a longer side says nothing new about its language.
ENOUGH_CHARACTERS = 500
# Added to both lengths, so that the ratio of short sentences may vary more.
SMOOTHING = 10
# A side may have this many characters for each word of the greatest length: one word may be a whole encoded file.
CHARACTERS_OF_A_WORD = 10
# A script is a side's own if it has this share of its letters.
OWN_SCRIPT = 0.05

# Kinds before the scripts. A letter without a script is one of many, as the ordinal indicators and combining marks.
SPACE, SIGN, DIGIT, DAMAGED, UNSCRIPTED = range(5)
FIRST_SCRIPT = 5
# Code points from here on are no letters but variants and marks.
LAST = 0x323B0

# First words in the names of letters that are the script of no language, or one of several of a language.
_UNSCRIPTED = frozenset(
    "COMBINING MODIFIER MATHEMATICAL FEMININE MASCULINE MICRO VARIATION DOUBLE-STRUCK CARON SUPERSCRIPT EULER ROMAN "
    "SCRIPT BLACK-LETTER PLANCK KELVIN ANGSTROM OHM INFORMATION TURNED FULLWIDTH".split()
)
_TOGETHER = dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HALFWIDTH", "IDEOGRAPHIC", "VERTICAL"), "CJK")
# Scripts without spaces between words: each of their letters counts as a word.
_WITHOUT_SPACES = ("CJK", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_URL = re.compile(r"(?:https?://|www\.)([\w.-]+)")
# Tags, entities, placeholders of C, Python and the shell, roles of reStructuredText, and backticks.
_MARKUP = re.compile(
    r"</?[A-Za-z][\w-]*|&(?:#x?[0-9A-Fa-f]+|[A-Za-z]+\d*);|%\(\w+\)[a-z]|%(?:\d+\$)?[sdifr]\b|\$?\{\w*\}"
    r"|:[A-Za-z][\w:+-]{0,50}:`|``|`"
)


def _misread() -> re.Pattern[str]:
    """Matches UTF-8 that was read as Windows-1252 or Latin-1: the letters that lead, and what follows them."""
    follow = set(bytes(range(0x80, 0xC0)).decode("cp1252", errors="ignore")) | {
        chr(code) for code in range(0x80, 0xC0)
    }
    # Quotation marks and dashes follow upper-case letters in sound text, too: IRMÃ, AMANHÃ.
    marks = "‘’‚“”„–—…«»‹›\xa0"
    plain = re.escape("".join(sorted(follow - set(marks))))
    ends_word = rf"(?<![A-ZÀ-Þ])[ÂÃ][{marks}]|[ÂÃ][{marks}](?=[^\W\d_])"
    # Square and cubic ångström begin a word, and misread letters rarely do.
    exponents = "[ÄÎÏÐÑ][²³]|(?<=[^\\W\\d_])Å[²³]"
    plain_but_exponents = re.escape("".join(sorted(follow - set(marks + "²³"))))
    return re.compile(
        f"[ÂÃ][{plain}]|{ends_word}|â(?:€|‚¬|„¢)|[ÄÅÎÏÐÑ][{plain_but_exponents}]|{exponents}|[à-ï][{plain}]{{2}}|ï»¿"
    )


_MISREAD = _misread()


@dataclass(frozen=True)
class Limits:
    """
    Limits that a pair must keep to.

    Attributes:
        max_length (`int`): words of the longer side.
        max_identical (`int`): words in lower case of a pair whose target is its source, which may be names.
        max_ratio (`float`): how many times longer or shorter than usual the target may be, for its source.
        min_letters (`float`): share of letters among the characters of either side.
        max_numbers (`int`), max_urls (`int`), max_markup (`int`): numbers, addresses and pieces of markup of either
            side without a counterpart on the other.
        max_foreign (`float`): confidence, up to 1, with which a side may be identified as another language.
    """

    max_length: int = 200
    max_identical: int = 3
    max_ratio: float = 3.0
    min_letters: float = 0.4
    max_numbers: int = 2
    max_urls: int = 1
    max_markup: int = 3
    max_foreign: float = 0.8


@dataclass(frozen=True)
class Norm:
    """
    What is usual in a text.

    Attributes:
        ratio (`float`): characters of the target for each character of the source: the median.
        scripts (`tuple[frozenset[str], frozenset[str]]`): scripts of source and target.
    """

    ratio: float
    scripts: tuple[frozenset[str], frozenset[str]]


@cache
def _kinds() -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the kind of each code point, and the names of the scripts."""
    kinds = np.full(LAST + 1, SIGN, dtype=np.uint8)
    scripts: dict[str, int] = {}
    for code in range(LAST):
        character = chr(code)
        category = unicodedata.category(character)
        if category[0] in "LM":
            word = unicodedata.name(character, "VARIATION").split(maxsplit=1)[0]
            word = _TOGETHER.get(word, word)
            kinds[code] = UNSCRIPTED if word in _UNSCRIPTED else scripts.setdefault(word, FIRST_SCRIPT + len(scripts))
        elif category == "Nd":
            kinds[code] = DIGIT
        elif character in "\t\n\r":
            kinds[code] = SPACE
        elif category in ("Cc", "Co", "Cs", "Zl", "Zp") or character == "\ufffd":
            kinds[code] = DAMAGED
        elif character.isspace():
            kinds[code] = SPACE
    return kinds, tuple(scripts)


@dataclass(frozen=True)
class Counts:
    """
    Counts of characters in some sentences, or in the two sides of some pairs.

    Attributes:
        kinds (`np.ndarray` of `int64`, of shape `(sentences, kinds)` or `(pairs, 2, kinds)`): characters of each kind;
            the first are `SPACE`, `SIGN`, `DIGIT`, `DAMAGED` and `UNSCRIPTED`, the others scripts.
        words (`np.ndarray` of `int64`, of shape `(sentences,)` or `(pairs, 2)`): words separated by white space; in
            scripts that have none between words, such as Han, kana and Thai, each letter counts as a word.
    """

    kinds: np.ndarray
    words: np.ndarray

    @property
    def characters(self) -> np.ndarray:
        """Characters without white space, of the shape of `words`."""
        return self.kinds.sum(axis=-1) - self.kinds[..., SPACE]

    @property
    def letters(self) -> np.ndarray:
        """Letters and combining marks, of the shape of `words`."""
        return self.kinds[..., UNSCRIPTED:].sum(axis=-1)

    @property
    def scripts(self) -> np.ndarray:
        """Letters of each script, of shape `(sentences, scripts)` or `(pairs, 2, scripts)`."""
        return self.kinds[..., FIRST_SCRIPT:]


def script_names() -> tuple[str, ...]:
    """Returns the names of the scripts, in the order of [`Counts.scripts`]: the first words in Unicode's names."""
    return _kinds()[1]


def count_characters(sentences: Sequence[str]) -> Counts:
    """
    Counts the characters of sentences by kind.

    Args:
        sentences (`Sequence[str]`): sentences without surrogates.

    Returns:
        [`Counts`].
    """
    kinds, scripts = _kinds()
    columns = FIRST_SCRIPT + len(scripts)
    codes = np.frombuffer("".join(sentences).encode("utf-32-le"), dtype=np.uint32)
    rows = np.repeat(np.arange(len(sentences)), list(map(len, sentences)))
    flat = rows * columns + kinds[np.minimum(codes, LAST)]
    table = np.bincount(flat, minlength=len(sentences) * columns).reshape(len(sentences), columns)
    unspaced = [FIRST_SCRIPT + scripts.index(name) for name in _WITHOUT_SPACES]
    words = np.fromiter((len(sentence.split()) for sentence in sentences), np.int64, len(sentences))
    return Counts(table, np.maximum(words, table[:, unspaced].sum(axis=1)))


@dataclass(frozen=True)
class Measures(Counts):
    """
    Measures of some pairs, besides the counts of their characters.

    Attributes:
        misread (`np.ndarray` of `bool`, of shape `(pairs,)`): whether a side was decoded wrongly.
        identical (`np.ndarray` of `int64`, of shape `(pairs,)`): words in lower case, if the target is the source.
        differences (`np.ndarray` of `int64`, of shape `(pairs, 3)`): numbers, URLs and markup without a counterpart.
        languages (`list[list[tuple[str, float]]]`): code and confidence of source and target; a side of few letters
            has the code "". Empty if languages are not identified.
    """

    misread: np.ndarray
    identical: np.ndarray
    differences: np.ndarray
    languages: tuple[list[tuple[str, float]], ...]

    def ratios(self, usual: float) -> np.ndarray:
        """Returns how many times longer or shorter each target is than usual, of shape `(pairs,)`; 1 is usual."""
        source, target = self.characters.T
        found = (target + SMOOTHING) / (source * usual + SMOOTHING)
        return np.maximum(found, 1 / found)

    def letter_shares(self) -> np.ndarray:
        """Returns the share of letters of the side that has fewer, of shape `(pairs,)`."""
        return (self.letters / np.maximum(self.characters, 1)).min(axis=1)

    def foreign(self, codes: Sequence[str]) -> np.ndarray:
        """Returns the highest confidence with which a side is identified as another language, of shape `(pairs,)`."""
        found = np.zeros(len(self.words))
        for code, side in zip(codes, self.languages, strict=False):
            confidences = [0.0 if not code or name in (code, "") else value for name, value in side]
            found = np.maximum(found, confidences)
        return found


class Checker:
    """
    Measures and judges pairs.

    Args:
        languages (`tuple[str, str]`): codes of source and target language, as in a recipe.
        identifier ([`LanguageIdentifier`], *optional*): identifies languages; `None` leaves them out.
    """

    def __init__(self, languages: tuple[str, str], identifier: Any = None) -> None:
        self.identifier = identifier
        known = set() if identifier is None else set(identifier.labels)
        base = [re.split("[-_]", code.lower())[0] for code in languages]
        self.codes = tuple(code if code in known else "" for code in base)
        # Languages that cannot be judged.
        self.unknown = [
            language
            for language, code in zip(languages, self.codes, strict=True)
            if identifier is not None and not code
        ]

    def measure(self, sources: Sequence[str], targets: Sequence[str]) -> Measures:
        """
        Measures pairs.

        Args:
            sources (`Sequence[str]`), targets (`Sequence[str]`): their two sides.

        Returns:
            [`Measures`].
        """
        sides = [count_characters(sources), count_characters(targets)]
        counts = Counts(*(np.stack([vars(side)[name] for side in sides], axis=1) for name in ("kinds", "words")))
        pairs = list(zip(sources, targets, strict=True))
        damaged = counts.kinds[..., DAMAGED].any(axis=1)
        return Measures(
            counts.kinds,
            counts.words,
            misread=damaged | np.array([any(map(_is_misread, pair)) for pair in pairs], dtype=bool),
            identical=np.array([_plain_words(a) if a.strip() == b.strip() else 0 for a, b in pairs], dtype=np.int64),
            differences=_differences(sources, targets, counts.kinds[..., DIGIT]),
            languages=tuple(map(self._languages, (sources, targets), counts.letters.T)) if self.identifier else (),
        )

    def _languages(self, sentences: Sequence[str], letters: np.ndarray) -> list[tuple[str, float]]:
        return [
            self.identifier.classify(sentence[:ENOUGH_CHARACTERS]) if count >= ENOUGH_LETTERS else ("", 0.0)
            for sentence, count in zip(sentences, letters, strict=True)
        ]

    def judge(self, measures: Measures, limits: Limits, norm: Norm) -> dict[str, np.ndarray]:
        """
        Judges measured pairs.

        Args:
            measures ([`Measures`]): result of [`Checker.measure`].
            limits ([`Limits`]): what a pair must keep to.
            norm ([`Norm`]): what is usual in the text.

        Returns:
            `dict[str, np.ndarray]`: for each of `REASONS` that does not need the rest of the text, the pairs that it
            applies to, as `bool` of shape `(pairs,)`. Nothing else is wrong with an empty pair.
        """
        empty = (measures.words == 0).any(axis=1)
        longest = measures.characters.max(axis=1) > CHARACTERS_OF_A_WORD * limits.max_length
        numbers, urls, markup = measures.differences.T
        found = {
            "empty": empty,
            "encoding": measures.misread,
            "identical": measures.identical > limits.max_identical,
            "length": (measures.words.max(axis=1) > limits.max_length) | longest,
            "ratio": measures.ratios(norm.ratio) > limits.max_ratio,
            "letters": measures.letter_shares() < limits.min_letters,
            "script": _in_other_script(measures, norm),
            "language": measures.foreign(self.codes) > limits.max_foreign,
            "numbers": numbers > limits.max_numbers,
            "urls": urls > limits.max_urls,
            "markup": markup > limits.max_markup,
        }
        if not measures.languages or not any(self.codes):
            del found["language"]
        return {reason: flags if reason == "empty" else flags & ~empty for reason, flags in found.items()}

    def propose(self, measures: Measures) -> tuple[Limits, Norm]:
        """
        Proposes limits that sound text keeps to.

        Args:
            measures ([`Measures`]): measures of a validation set.

        Returns:
            `tuple`: [`Limits`] that 99.9 % of the validation pairs keep to with a wide margin, and the [`Norm`] of the
            set.
        """
        norm = self.norm(measures)
        default, empty = Limits(), (measures.words == 0).any(axis=1)
        if empty.all():
            return default, norm

        def reached(values: np.ndarray) -> float:
            return float(np.quantile(values[~empty], 0.999, method="higher"))

        differences = [math.ceil(1.5 * reached(column)) + 1 for column in measures.differences.T]
        return Limits(
            max_length=max(default.max_length // 2, math.ceil(2 * reached(measures.words.max(axis=1)))),
            max_identical=max(default.max_identical, int(reached(measures.identical))),
            max_ratio=max(2.0, math.ceil(15 * reached(measures.ratios(norm.ratio))) / 10),
            min_letters=min(default.min_letters, math.floor(80 * -reached(-measures.letter_shares())) / 100),
            max_numbers=max(default.max_numbers, differences[0]),
            max_urls=max(default.max_urls, differences[1]),
            max_markup=max(default.max_markup, differences[2]),
            # A limit of 1 would let everything pass.
            max_foreign=min(
                0.99, max(default.max_foreign, math.ceil(100 * reached(measures.foreign(self.codes))) / 100)
            ),
        ), norm

    def norm(self, measures: Measures) -> Norm:
        """Returns what is usual in measured pairs."""
        full = (measures.words > 0).all(axis=1)
        source, target = measures.characters[full].T
        names, scripts = script_names(), []
        for side in measures.scripts.swapaxes(0, 1):
            letters = side.sum(axis=0)
            own = letters >= OWN_SCRIPT * max(1, letters.sum())
            scripts.append(frozenset(name for name, is_own in zip(names, own, strict=True) if is_own))
        ratio = float(np.median(target / source)) if len(source) else 1.0
        return Norm(ratio, (scripts[0], scripts[1]))


def _is_misread(sentence: str) -> bool:
    return not sentence.isascii() and _MISREAD.search(sentence) is not None


def _plain_words(sentence: str) -> int:
    """Counts the words that are no names, numbers or markup: those in lower case, punctuation aside."""
    words = (word.strip(".,;:!?()\"'") for word in sentence.split())
    return sum(word.isalpha() and word == word.lower() for word in words)


def _in_other_script(measures: Measures, norm: Norm) -> np.ndarray:
    """Returns the pairs with a side that has most of its letters in scripts that are not its own."""
    found = np.zeros(len(measures.words), dtype=bool)
    for side, own in zip(measures.scripts.swapaxes(0, 1), norm.scripts, strict=True):
        other = [i for i, name in enumerate(script_names()) if name not in own]
        # A text whose norm is not known has no scripts of its own.
        if own:
            letters = side.sum(axis=1)
            found |= (2 * side[:, other].sum(axis=1) > letters) & (letters >= ENOUGH_LETTERS)
    return found


def _differences(sources: Sequence[str], targets: Sequence[str], digits: np.ndarray) -> np.ndarray:
    found = np.zeros((len(sources), 3), dtype=np.int64)
    for i in np.flatnonzero(digits.any(axis=1)).tolist():
        numbers = _numbers(sources[i]), _numbers(targets[i])
        # The same digits may stand in other groups: 2,500 and 2 500, or 7:30 and 7.30.
        if "".join(numbers[0]) != "".join(numbers[1]):
            found[i, 0] = _without_counterpart(*numbers)
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        text = source + target
        if "://" in text or "www." in text:
            found[i, 1] = _without_counterpart(_hosts(source), _hosts(target))
        if "`" in text or "<" in text or "{" in text or "%" in text or "&" in text:
            found[i, 2] = _without_counterpart(_MARKUP.findall(source), _MARKUP.findall(target))
    return found


def _without_counterpart(source: list[str], target: list[str]) -> int:
    if source == target:
        return 0
    here, there = Counter(source), Counter(target)
    return max((here - there).total(), (there - here).total())


def _numbers(sentence: str) -> list[str]:
    """Returns the numbers outside of addresses, without separators, which are not the same in all languages."""
    if "://" in sentence or "www." in sentence:
        sentence = " ".join(word for word in sentence.split() if "://" not in word and "www." not in word)
    return [number.replace(".", "").replace(",", "") for number in _NUMBER.findall(sentence)]


def _hosts(sentence: str) -> list[str]:
    # The host without its first parts, which may be those of a language, as in en.wikipedia.org.
    return [".".join(host.rstrip(".").lower().split(".")[-2:]) for host in _URL.findall(sentence)]
