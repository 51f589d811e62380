"""Text as people write it: in capitals, as a title, with typing errors, or without its final mark."""

import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache

from ..model.sentences_vaswani import CLOSING, MARKS, WHITE_SPACE, WIDE_CLOSING, WIDE_MARKS
from ..recipe import Alteration, AugmentRecipe

# The marks of sentences_vaswani, and those of Armenian, Ethiopic, Tibetan, Khmer and Burmese.
FINAL_MARKS = "".join((*MARKS, *WIDE_MARKS)) + "։።།។။"
AFTER_MARKS = CLOSING + WIDE_CLOSING + WHITE_SPACE + "\u3000"

# Never altered: a language tag in front; entities, which some corpora have for quotation marks and apostrophes; and
# everything that a program reads: tags, placeholders of C, Python and the shell, addresses, and code in backticks.
KEPT = (
    r"^<2[^<>\s]+>|&#?\w+;|</?[A-Za-z][^<>]*>|%\(\w+\)[a-z]|%(?:\d+\$)?[sdifr]\b|\$?\{[^{}\s]*\}"
    r"|(?:https?://|www\.)\S+|(?::[A-Za-z][\w:+-]{0,50}:)?`{1,3}[^`]+`{1,3}"
)
# A word begins with a letter or digit. The rest of a contraction, as in "it 's", is no word of its own.
WORD = re.compile(rf"(?:['’]|&apos;|&#39;)(?:s|t|m|d|re|ve|ll)\b|{KEPT}|(?P<word>\w[\w'’\u0300-\u036f]*)")
# Names of files and users, addresses, numbers and markup have no typing errors.
TECHNICAL = re.compile(rf"{KEPT}|[\d@/\\_<>{{}}=%`]|\w[.:]\w")

# One word in so many has a typing error.
WORDS_PER_TYPO = 15

# Rows of keys from left to right, each a fraction of a key further right than the row above.
KEYBOARDS = (
    ("qwertyuiop", "asdfghjkl", "zxcvbnm"),
    ("йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    ("ςερτυθιοπ", "ασδφγηξκλ", "ζχψωβνμ"),
)
OFFSETS = (0.0, 0.25, 0.75)


def upper(text: str) -> str:
    """
    Returns a text in capital letters, by the rules of Unicode that hold for every language: ß becomes SS, and an i
    becomes I, which is wrong in Turkish. Scripts without capitals stay as they are.
    """
    parts = re.split(f"({KEPT})", text)
    return "".join(part if i % 2 else part.upper() for i, part in enumerate(parts))


def title(text: str) -> str:
    """
    Returns a text with a capital letter at the beginning of each word; other letters stay as they are. Both parts of
    "well-known" are words; "don't", "3rd" and "it 's" have no capital inside.
    """

    def capitalized(word: re.Match[str]) -> str:
        return word[0][0].title() + word[0][1:]

    # The other parts of the pattern match what stays as it is.
    return WORD.sub(lambda match: capitalized(match) if match["word"] else match[0], text)


def no_final_mark(text: str) -> str:
    """
    Returns a text without the punctuation that ends its last sentence. Quotation marks and brackets after it stay,
    and so does a text that has nothing else.
    """
    end = len(text.rstrip(FINAL_MARKS + AFTER_MARKS))
    while (entity := re.search(r"&(?:quot|apos|#39|#34);$", text[max(0, end - 6) : end])) is not None:
        end = len(text[: end - len(entity[0])].rstrip(FINAL_MARKS + AFTER_MARKS))
    if not end:
        return text
    return text[:end] + re.sub(f"[{WHITE_SPACE}\u3000]*[{FINAL_MARKS}]+", "", text[end:])


def typos(text: str, source: random.Random) -> str:
    """
    Makes typing errors: two letters are swapped, or a letter is left out, doubled, or replaced by its neighbour on the
    keyboard (Latin, Cyrillic or Greek).

    One word in 15 has an error, and at least one in each sentence. The first letter of a word of more than two letters
    is right, as it mostly is; names of files, addresses, numbers and markup have no errors.

    Args:
        text (`str`): a sentence.
        source (`random.Random`): source of the choices.

    Returns:
        `str`: the sentence with its errors; unchanged if it has no word of two letters or more.
    """
    words = [word for word in _words(text) if len(word) > 2] or [word for word in _words(text) if len(word) == 2]
    if not words:
        return text
    count = max(1, sum(source.random() * WORDS_PER_TYPO < 1 for _ in words))
    letters: dict[int, str] = {}
    for word in source.sample(words, count):
        _mistype(word, letters, source)
    return "".join(letters.get(i, character) for i, character in enumerate(text))


# Letters of a word, each with its place in the text; a letter includes its combining marks.
_Letters = list[tuple[int, str]]


def _words(text: str) -> list[_Letters]:
    """Returns the words of a text that may have typing errors."""
    words: list[_Letters] = []
    for token in re.finditer(r"\S+", text):
        if TECHNICAL.search(token[0]):
            continue
        inside = False
        for place, character in enumerate(token[0], start=token.start()):
            if inside and unicodedata.category(character)[0] == "M":
                start, letter = words[-1][-1]
                words[-1][-1] = (start, letter + character)
                continue
            if character.isalpha():
                words += [] if inside else [[]]
                words[-1].append((place, character))
            inside = character.isalpha()
    return words


def _mistype(word: _Letters, letters: dict[int, str], source: random.Random) -> None:
    """Notes the text at the places of a word that a typing error changes; it never leaves the word as it was."""
    chosen = source.randrange(1, len(word))
    place, letter = word[chosen]
    place_after, after = word[chosen + 1] if chosen + 1 < len(word) else (place, letter)
    neighbours = _neighbours(letter.lower())
    errors = [{place: ""}, {place: letter * 2}]
    if after != letter:
        errors.append({place: after, place_after: letter})
    if neighbours:
        neighbour = source.choice(neighbours)
        errors.append({place: neighbour.upper() if letter.isupper() else neighbour})
    error = source.choice(errors)
    for where, old in ((place, letter), (place_after, after)):
        # A letter and its marks are written in the place of the first character.
        letters.update(dict.fromkeys(range(where, where + len(old)), ""))
    letters |= {place_after: after} | {place: letter} | error


@cache
def _neighbours(letter: str) -> str:
    """Returns the letters beside, above and below a letter on its keyboard."""
    for rows in KEYBOARDS:
        keys = {
            key: (column + offset, row)
            for row, (keys, offset) in enumerate(zip(rows, OFFSETS, strict=True))
            for column, key in enumerate(keys)
        }
        if letter in keys:
            x, y = keys[letter]
            near = [key for key, (u, v) in keys.items() if abs(u - x) <= 1 and abs(v - y) <= 1]
            return "".join(key for key in near if key != letter)
    return ""


BOTH_SIDES: dict[str, Callable[[str], str]] = {"upper": upper, "title": title, "no_final_mark": no_final_mark}


def altered_set(
    sources: Sequence[str], references: Sequence[Sequence[str]], alteration: Alteration
) -> tuple[list[str], list[list[str]]]:
    """
    Alters a test set, always in the same way.

    Args:
        sources (`Sequence[str]`): source sentences, each with or without a language tag in front.
        references (`Sequence[Sequence[str]]`): references of each sentence.
        alteration (`str`): `"upper"`, `"title"` or `"no_final_mark"`, which alter the references as well, because the
            translation of a title is a title; or `"typos"`, which does not.

    Returns:
        `list[str]` and `list[list[str]]`: the altered sources, and references for their translations.
    """
    if alteration == "typos":
        altered = [typos(text, random.Random(f"typos {number}")) for number, text in enumerate(sources)]
        return altered, [list(each) for each in references]
    alter = BOTH_SIDES[alteration]
    return [alter(text) for text in sources], [[alter(text) for text in each] for each in references]


def altered_pair(source: str, target: str, augment: AugmentRecipe, draws: random.Random) -> tuple[str, str]:
    """
    Alters a training pair by chance.

    Args:
        source (`str`), target (`str`): the two sides, without a language tag.
        augment ([`AugmentRecipe`]): probability of each alteration. They are drawn independently of each other; a pair
            for which both are drawn is in capitals rather than a title.
        draws (`random.Random`): source of the choices.

    Returns:
        `str` and `str`: the two sides.
    """
    drawn = {part.name: draws.random() < getattr(augment, part.name) for part in fields(augment)}
    if drawn["typos"]:
        source = typos(source, draws)
    for name, alter in BOTH_SIDES.items():
        if drawn[name] and not (name == "title" and drawn["upper"]):
            source, target = alter(source), alter(target)
    return source, target
