"""Splitting a text into sentences, by a few rules for any language; joining their translations; language tags."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

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
    Splits a text into sentences.

    A sentence ends before a newline; after `.!?…` and similar marks, if white space follows and then no lower-case
    letter; and after `。！？`. A period does not end a sentence before a number or in an abbreviation, which is
    recognised by its form alone: "He is 12. She is 10." and "It is vitamin C. It helps." stay together, which does
    little harm, and "usw. Auch" is split.

    Args:
        text (`str`): a text of any length.

    Returns:
        `list[tuple[int, int]]`: start and end of each sentence, with only white space between them. A text without a
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


def join_sentences(text: str, spans: Sequence[tuple[int, int]], translations: Sequence[str]) -> str:
    """
    Joins the translations of a text's sentences.

    Args:
        text (`str`): the source text.
        spans (`Sequence[tuple[int, int]]`): its sentences, from [`sentence_spans`].
        translations (`Sequence[str]`): a translation of each sentence.

    Returns:
        `str`: the translations, separated by the source's white space if that has a newline, else by one space, or by
        nothing after a mark of a script without spaces.
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


def language_tags(tokenizer: Any) -> dict[str, str]:
    """
    Returns the tags of target languages in a vocabulary, as `{"de": "<2de>"}`. They are put in front of a source
    sentence. A tokenizer for a single direction has no tags.
    """
    get_added_vocab = getattr(tokenizer, "get_added_vocab", dict)
    return {match[1]: tag for tag in get_added_vocab() if (match := re.fullmatch(r"<2(.+)>", tag))}
