"""Counts of kinds of characters in many sentences at once: letters by script, digits, and the others."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

# Kinds before the scripts. A letter without a script is one of many, as the ordinal indicators and combining marks.
SPACE, SIGN, DIGIT, DAMAGED, UNSCRIPTED = range(5)
FIRST_SCRIPT = 5
# Code points from here on are no letters but variants and marks.
LAST = 0x323B0

# First words in the names of letters that are the script of no language, or one of several of a language.
_UNSCRIPTED = {"COMBINING", "MODIFIER", "MATHEMATICAL", "FEMININE", "MASCULINE", "MICRO", "VARIATION", "DOUBLE-STRUCK"}
_UNSCRIPTED |= {
    "CARON",
    "SUPERSCRIPT",
    "EULER",
    "ROMAN",
    "SCRIPT",
    "BLACK-LETTER",
    "PLANCK",
    "KELVIN",
    "ANGSTROM",
    "OHM",
    "INFORMATION",
    "TURNED",
    "FULLWIDTH",
}
_TOGETHER = dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HALFWIDTH", "IDEOGRAPHIC", "VERTICAL"), "CJK")
# Scripts without spaces between words: each of their letters counts as a word.
_WITHOUT_SPACES = ("CJK", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


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
    Counts of characters in some sentences.

    Attributes:
        kinds (`np.ndarray` of `int64`, of shape `(sentences, kinds)`): characters of each kind; the first columns are
            `SPACE`, `SIGN`, `DIGIT`, `DAMAGED` and `UNSCRIPTED`, the others scripts.
        words (`np.ndarray` of `int64`, of shape `(sentences,)`): words separated by white space; in scripts that have
            none between words, such as Han, kana and Thai, each letter counts as a word.
    """

    kinds: np.ndarray
    words: np.ndarray

    @property
    def characters(self) -> np.ndarray:
        """Characters without white space, of shape `(sentences,)`."""
        return self.kinds.sum(axis=1) - self.kinds[:, SPACE]

    @property
    def scripts(self) -> np.ndarray:
        """Letters of each script, of shape `(sentences, scripts)`."""
        return self.kinds[:, FIRST_SCRIPT:]

    @property
    def digits(self) -> np.ndarray:
        """Digits, of shape `(sentences,)`."""
        return self.kinds[:, DIGIT]

    @property
    def damaged(self) -> np.ndarray:
        """Control characters, line and paragraph separators, and U+FFFD, of shape `(sentences,)`."""
        return self.kinds[:, DAMAGED]

    @property
    def letters(self) -> np.ndarray:
        """Letters and combining marks, of shape `(sentences,)`."""
        return self.kinds[:, UNSCRIPTED:].sum(axis=1)


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
