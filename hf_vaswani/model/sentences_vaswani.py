"""A text cut into sentences, and their translations joined again: by a few rules, for any language."""

import re
from collections.abc import Sequence
from itertools import pairwise

OPENING, CLOSING = "\"'“”„‘’‚«»‹›([{¿¡", "\"'“”‘’«»‹›)]}"
WHITE_SPACE = " \t\u00a0\u202f"
MARKS = tuple(".!?…؟۔।॥")
# Of scripts that have no spaces: these end a word as well.
WIDE_MARKS, WIDE_CLOSING = tuple("。！？｡"), "」』）】》”’"
# A mark that closes may stand by itself, as in "« Bonjour. »": then it belongs to the word before.
WORD = re.compile(r"[^\s。！？｡]*[。！？｡]+[」』）】》”’]*|\S+(?:[^\S\n]+[”’»›)\]}]+(?!\S))?")
# What has a period that ends no sentence: letters, as in "J.", "z. B.", "e.g.", "Ph.D."; numbers, as in "3. Mai" and
# "Ludwig XIV."; and consonants, as in "Dr.", "vs.", "bzw."; and some that no sentence ends with.
ABBREVIATION = re.compile(
    r"\W*(?:(?:[A-Za-zÀ-ӿ]{1,2}\.)+[A-Za-zÀ-ӿ]{1,2}|[A-Za-zÀ-ӿ]|\d{1,2}|[IVX]+|[A-Z]?[bcdfghjklmnpqrstvwxz]{1,4}"
    r"|Prof|Capt|Col|Gen|Gov|Rep|Rev|Sen|Abb|Fig|Tel|inkl)\."
)


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """
    Where the sentences of a text are.

    A sentence ends before a newline; behind `.!?…` and the like, if white space follows and then no small letter; and
    behind `。！？`. A period ends none before a number, or in an abbreviation, which is told by its form alone: "He is
    12. She is 10." and "It is vitamin C. It helps." stay together, which does little harm; "usw. Auch" is cut.

    Args:
        text (`str`): of any length.

    Returns:
        `list[tuple[int, int]]`: where each begins and ends; between them there is but white space. A text without a
        word is one sentence.
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
    """Whether a sentence ends behind a word, and before the one that comes after it."""
    if _is_wide(word):
        # What was said in quotes goes on with a comma, or with hiragana, as in 「行く。」と言った.
        return not after.startswith(("，", "、")) and not (word[-1] in WIDE_CLOSING and "ぁ" <= after[0] <= "ゟ")
    bare, first = word.rstrip(CLOSING + WHITE_SPACE), after.lstrip(OPENING)[:1]
    if not bare.endswith(MARKS) or first.islower():
        return False
    return not (bare.endswith(".") and first.isdigit()) and not ABBREVIATION.fullmatch(word)


def _is_wide(text: str) -> bool:
    """Whether a text ends as a sentence does in a script that has no spaces."""
    return text.rstrip(WIDE_CLOSING).endswith(WIDE_MARKS)


def join_sentences(text: str, spans: Sequence[tuple[int, int]], translations: Sequence[str]) -> str:
    """
    One text of the translations of another one's sentences.

    Args:
        text (`str`): the other one.
        spans (`Sequence[tuple[int, int]]`): where its sentences are, as [`sentence_spans`] has them.
        translations (`Sequence[str]`): of each.

    Returns:
        `str`: between two of them the white space of the text where that has a newline, else one space, or none in a
        script that has none.
    """
    pieces, end = [""], 0
    for (start, next_end), translation in zip(spans, translations, strict=True):
        space, last = text[end:start], pieces[-1]
        if "\n" in space:
            pieces.append(space)
        elif translation and last.strip() and not _is_wide(last):
            pieces.append(" ")
        if translation:
            pieces.append(translation)
        end = next_end
    return "".join(pieces) + (text[end:] if "\n" in text[end:] else "")
