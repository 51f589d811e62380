"""
The rules by which pipelines handle a text, for pages: constants of `sentences_vaswani` in JavaScript, of which
`sentences.js`, beside this module, has the functions.

Patterns are translated construct by construct, and their classes, such as `\\w`, into the characters that Python finds
in them. So a browser with another version of Unicode splits a text as Python does.
"""

import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from re import Pattern
from typing import Any

import numpy as np
import regex

# The parser of `re`, and the names of what it finds.
from re import _constants as codes  # type: ignore[attr-defined]  # isort: skip
from re import _parser as parser  # type: ignore[attr-defined]  # isort: skip

from ..model import sentences_vaswani as sentences

FUNCTIONS = Path(__file__).with_name("sentences.js")
CHARACTERS = "".join(map(chr, range(sys.maxunicode + 1)))
CATEGORIES = {
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
LOOKS = {
    (codes.ASSERT, 1): "(?=",
    (codes.ASSERT, -1): "(?<=",
    (codes.ASSERT_NOT, 1): "(?!",
    (codes.ASSERT_NOT, -1): "(?<!",
}
# A set or a class of the package `regex`, with sets in it, and the only constructs that may stand around it.
SET_OF_REGEX = regex.compile(r"(?<set>\[(?:[^][\\]|\\.|(?&set))*+\])|\\[pPdDsSwW](?:\{[^}]*\})?")
AROUND_SETS = re.compile(r"(?:\(\?<?[=!]|\))*")
# \X of the package `regex`: the extended grapheme cluster of Unicode's annex 29, where a linker joins a consonant to
# whatever is in front. Each repeat ends where the next construct begins, so that nothing is tried twice.
JOINED = r"\p{InCB=Extend}*\p{InCB=Consonant}"
GRAPHEME_CLUSTER = (
    r"[\r][\n]|[\p{GCB=CN}\r\n]|\p{GCB=PP}*(?:\p{GCB=RI}\p{GCB=RI}"
    r"|\p{GCB=L}*(?:\p{GCB=V}+|\p{GCB=LV}\p{GCB=V}*|\p{GCB=LVT})\p{GCB=T}*|\p{GCB=L}+|\p{GCB=T}+"
    r"|\p{Extended_Pictographic}(?:\p{GCB=EX}*\p{GCB=ZWJ}\p{Extended_Pictographic})*"
    rf"|\p{{InCB=Linker}}{JOINED}|[^\p{{GCB=CN}}\r\n])"
    rf"(?:[\p{{InCB=Linker}}&&\p{{GCB=EX}}]{JOINED}|[\p{{GCB=EX}}\p{{GCB=ZWJ}}\p{{GCB=SM}}])*"
)


def sentence_script() -> str:
    """Returns the functions of `sentences.js` behind their constants, to be put in front of other code."""
    return f"const RULES = {json.dumps(browser_rules())};\n{FUNCTIONS.read_text('utf-8')}"


@cache
def browser_rules() -> dict[str, str]:
    """Returns the constants by their names: sets of characters, and patterns for the flag `u` of JavaScript."""
    patterns = "LINE_BREAK WORD ABBREVIATION ENDED LINK INVISIBLE REPEATED LANGUAGE_TAG SPACE"
    found = {name: javascript_pattern(getattr(sentences, name)) for name in patterns.split()}
    found["UNSPACED"] = javascript_pattern(re.compile(sentences.UNSPACED))
    found |= {name: pattern_of_regex(getattr(sentences, name)) for name in ("WORDS", "BEHIND_PUNCTUATION")}
    found["CHARACTER"] = _character(sentences.CHARACTER)
    # Where Python asks a method of a character.
    found["NO_TITLE"] = character_class(_members(each for each in CHARACTERS if each != each.title()))
    found["DIGIT"] = character_class(_members(filter(str.isdigit, CHARACTERS)))
    found["STRIPPED"] = "".join(filter(str.isspace, CHARACTERS))
    names = ("OPENING", "CLOSING", "WHITE_SPACE", "WIDE_MARKS", "WIDE_CLOSING", "HIDDEN")
    return found | {name: "".join(getattr(sentences, name)) for name in names}


# ---- Patterns of `re` --------------------------------------------------------------------------------------------


def javascript_pattern(pattern: Pattern[str]) -> str:
    """
    Returns a pattern of `re` as one of JavaScript. Group 1 is called `g1`. Raises a `ValueError` for a construct that
    is not known to mean the same, among them those that no rule needs.
    """
    if pattern.flags != re.UNICODE:
        raise ValueError(f"The pattern {pattern.pattern!r} has flags, which are not translated to JavaScript.")
    try:
        return _Translation().sequence(parser.parse(pattern.pattern), is_whole=True)
    except ValueError as error:
        raise ValueError(f"{error}, in the pattern {pattern.pattern!r}.") from None


class _Translation:
    """The translation of a pattern: its possessive repeats are numbered, and references only go to certain groups."""

    def __init__(self) -> None:
        self.possessive = 0
        self.certain: set[int] = set()

    def sequence(self, items: Iterable[tuple[Any, Any]], is_whole: bool = False, is_behind: bool = False) -> str:
        """Translates what the parser has found. What `is_behind` is matched from right to left by JavaScript."""
        parts = []
        for kind, value in items:
            parts.append(self.item(kind, value, is_behind))
            if is_whole and kind is codes.SUBPATTERN:
                self.certain.add(value[0])
        return "".join(parts)

    def item(self, kind: Any, value: Any, is_behind: bool) -> str:
        """Translates a construct."""
        if kind in (codes.LITERAL, codes.NOT_LITERAL, codes.IN):
            return character_class(_set_of(value if kind is codes.IN else [(kind, value)]))
        if kind is codes.BRANCH:
            return f"(?:{'|'.join(self.sequence(each, is_behind=is_behind) for each in value[1])})"
        if kind in (codes.ASSERT, codes.ASSERT_NOT):
            return LOOKS[kind, value[0]] + self.sequence(value[1], is_behind=value[0] < 0) + ")"
        if kind is codes.AT and value is codes.AT_END_STRING:
            return "$"
        if kind is codes.SUBPATTERN and not is_behind and not value[1] and not value[2]:
            name = "?:" if value[0] is None else f"?<g{value[0]}>"
            return f"({name}{self.sequence(value[3])})"
        # In JavaScript a reference to a group that has matched nothing matches.
        if kind is codes.GROUPREF and value in self.certain and not is_behind:
            return rf"\k<g{value}>"
        # JavaScript ends a repeat whose last turn is empty elsewhere.
        if kind in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT) and value[2].getwidth()[0]:
            return self.repeat(kind, value, is_behind)
        raise ValueError(f"{kind} {value} is not translated to JavaScript")

    def repeat(self, kind: Any, value: Any, is_behind: bool) -> str:
        """Translates a repeat."""
        least, most, items = value
        limit = "" if most is codes.MAXREPEAT else most
        repeated = f"(?:{self.sequence(items, is_behind=is_behind)}){{{least},{limit}}}"
        if kind is not codes.POSSESSIVE_REPEAT:
            return repeated + "?" * (kind is codes.MIN_REPEAT)
        if is_behind:
            raise ValueError("A possessive repeat in a look behind is not translated to JavaScript")
        # JavaScript has none, but gives nothing back of what it has seen ahead.
        self.possessive += 1
        name = f"p{self.possessive}"
        return rf"(?=(?<{name}>{repeated}))\k<{name}>"


# ---- Patterns of the package `regex` -----------------------------------------------------------------------------


def pattern_of_regex(pattern: Any) -> str:
    """
    Returns a pattern of the package `regex` as one of JavaScript: sets and classes of characters, and looks ahead and
    behind. Raises a `ValueError` for anything else.
    """
    has_flags = pattern.flags & ~(regex.UNICODE | regex.V0 | regex.V1 | regex.FULLCASE)
    if has_flags or not AROUND_SETS.fullmatch(SET_OF_REGEX.sub("", pattern.pattern)):
        raise ValueError(f"The pattern {pattern.pattern!r} is not translated to JavaScript.")
    return _with_classes(pattern.pattern, pattern.flags)


def _character(pattern: Any) -> str:
    """Returns the pattern of a character, the only one that has \\X; browsers follow other versions of Unicode."""
    before, behind, rest = pattern.pattern.partition(r"?\X")
    if not behind or rest or not SET_OF_REGEX.fullmatch(before):
        raise ValueError(f"The pattern of a character must be a set and ?\\X, but it is {pattern.pattern!r}.")
    return f"{_with_classes(before, pattern.flags)}?(?:{_with_classes(GRAPHEME_CLUSTER, regex.V1)})"


def _with_classes(pattern: str, flags: int) -> str:
    """Replaces each set of a pattern by the characters in it."""
    return SET_OF_REGEX.sub(
        lambda match: character_class(_places(regex.finditer(match[0], CHARACTERS, flags))), pattern
    )


# ---- Sets of characters ------------------------------------------------------------------------------------------


def character_class(members: np.ndarray) -> str:
    """Returns a set as a class of JavaScript; `members` has for each code point whether it is one."""
    is_negated = bool(members[-1])
    edges = np.flatnonzero(np.diff(members ^ is_negated, prepend=False, append=False)).tolist()
    ranges = [(first, end - 1) for first, end in zip(edges[::2], edges[1::2], strict=True)]
    written = (rf"\u{{{first:x}}}" + (rf"-\u{{{last:x}}}" if last > first else "") for first, last in ranges)
    return f"[{'^' * is_negated}{''.join(written)}]"


def _set_of(items: Iterable[tuple[Any, Any]]) -> np.ndarray:
    """Returns the members of a set as the parser has found it."""
    members, is_negated = _members(()), False
    for kind, value in items:
        if kind in (codes.LITERAL, codes.NOT_LITERAL):
            members[value] = True
            is_negated |= kind is codes.NOT_LITERAL
        elif kind is codes.RANGE:
            members[value[0] : value[1] + 1] = True
        elif kind is codes.CATEGORY and value in CATEGORIES:
            members |= _category(value)
        elif kind is codes.NEGATE:
            is_negated = True
        else:
            raise ValueError(f"{kind} {value} in a set is not translated to JavaScript")
    return members ^ is_negated


@cache
def _category(name: Any) -> np.ndarray:
    return _places(re.finditer(CATEGORIES[name], CHARACTERS))


def _places(matches: Iterable[Any]) -> np.ndarray:
    """Returns the set of the characters that have been found among all of them."""
    return _members(match[0] for match in matches)


def _members(characters: Iterable[str]) -> np.ndarray:
    members = np.zeros(len(CHARACTERS), bool)
    members[[ord(each) for each in characters]] = True
    return members
