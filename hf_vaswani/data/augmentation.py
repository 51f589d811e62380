"""Training text drawn anew in each epoch: capitals, titles, typing errors, missing final marks, and BPE-dropout."""

import heapq
import json
import math
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model.sentences_vaswani import CLOSING, LANGUAGE_TAG, MARKS, WHITE_SPACE, WIDE_CLOSING

# The kinds of alterations, in the order in which they are drawn for a pair.
ALTERATIONS = ("upper", "title", "typos", "no_final_mark")


class TextAugmenter:
    """
    Alters pairs and skips merges at random. What happens to a pair depends on the seed, the pair's number in the text
    and the pass over the text, and on nothing else: not on processes, workers or batches, nor on where a run resumed.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): encodes the text.
        seed (`int`): seed of the run.
        probabilities (`Mapping[str, float]`): probability of each of the `ALTERATIONS`; of one that is missing, 0.
        bpe_dropout (`float`): probability of each merge to be skipped.

    Raises:
        ValueError: the tokenizer has no merges that could be skipped.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        probabilities: Mapping[str, float],
        bpe_dropout: float = 0.0,
    ) -> None:
        self.seed = seed
        self.probabilities = probabilities
        self.dropout = BpeDropout(tokenizer, bpe_dropout) if bpe_dropout else None

    def rng(self, number: int, repetition: int) -> random.Random:
        """Returns the random numbers for a pair, by its number in the text and how often it was taken before."""
        return random.Random(f"{self.seed} {number} {repetition}")

    def altered(self, source: str, target: str, rng: random.Random) -> tuple[str, str]:
        """
        Alters a pair, both of whose sides come without a language tag. Its alterations are drawn independently of each
        other; a pair for which both are drawn is in capitals rather than a title.
        """
        drawn = {name: rng.random() < self.probabilities.get(name, 0.0) for name in ALTERATIONS}
        if drawn["typos"]:
            source = typos(source, rng)
        for name, alter in BOTH_SIDES.items():
            if drawn[name] and not (name == "title" and drawn["upper"]):
                source, target = alter(source), alter(target)
        return source, target


# ---- Alterations -------------------------------------------------------------------------------------------------

AFTER_MARKS = CLOSING + WIDE_CLOSING + WHITE_SPACE + "\u3000"

# Never altered: a language tag in front; entities, which some corpora have for quotation marks and apostrophes; and
# everything that a program reads: tags, placeholders of C, Python and the shell, addresses, and code in backticks.
KEPT = (
    rf"^{LANGUAGE_TAG.pattern}"
    r"|&#?\w+;|</?[A-Za-z][^<>]*>|%\(\w+\)[a-z]|%(?:\d+\$)?[sdifr]\b|\$?\{[^{}\s]*\}"
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
    end = len(text.rstrip(MARKS + AFTER_MARKS))
    while (entity := re.search(r"&(?:quot|apos|#39|#34);$", text[max(0, end - 6) : end])) is not None:
        end = len(text[: end - len(entity[0])].rstrip(MARKS + AFTER_MARKS))
    if not end:
        return text
    return text[:end] + re.sub(f"[{WHITE_SPACE}\u3000]*[{MARKS}]+", "", text[end:])


def typos(text: str, rng: random.Random) -> str:
    """
    Makes typing errors: two letters are swapped, or a letter is left out, doubled, or replaced by its neighbour on the
    keyboard (Latin, Cyrillic or Greek).

    One word in 15 has an error, and at least one in each sentence. The first letter of a word of more than two letters
    is right, as it mostly is; names of files, addresses, numbers and markup have no errors.

    Args:
        text (`str`): a sentence.
        rng (`random.Random`): source of the choices.

    Returns:
        `str`: the sentence with its errors; unchanged if it has no word of two letters or more.
    """
    words = [word for word in _words(text) if len(word) > 2] or [word for word in _words(text) if len(word) == 2]
    if not words:
        return text
    count = max(1, sum(rng.random() * WORDS_PER_TYPO < 1 for _ in words))
    letters: dict[int, str] = {}
    for word in rng.sample(words, count):
        _mistype(word, letters, rng)
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


def _mistype(word: _Letters, letters: dict[int, str], rng: random.Random) -> None:
    """Notes the text at the places of a word that a typing error changes; it never leaves the word as it was."""
    chosen = rng.randrange(1, len(word))
    place, letter = word[chosen]
    place_after, after = word[chosen + 1] if chosen + 1 < len(word) else (place, letter)
    neighbours = _neighbours(letter.lower())
    errors = [{place: ""}, {place: letter * 2}]
    if after != letter:
        errors.append({place: after, place_after: letter})
    if neighbours:
        neighbour = rng.choice(neighbours)
        errors.append({place: neighbour.upper() if letter.isupper() else neighbour})
    error = rng.choice(errors)
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
    sources: Sequence[str], references: Sequence[Sequence[str]], alteration: str
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


# ---- BPE-dropout (Provilkov et al., 2020) -------------------------------------------------------------------------

# Characters of the words whose merges are remembered: about 200 MB.
REMEMBERED = 1_000_000

# In the place of a symbol that was merged with the one before it.
GONE = -1

# A merge: the places of its parts among the characters of a word, and its result.
_Merge = tuple[int, int, int]


class BpeDropout:
    """
    Splits the words of encoded sentences again, with merges left out (Algorithm 1 of the paper).

    A word starts as its characters or bytes. In each step, every merge that is possible is left out with the
    probability `p`, and the first of the others, in the order in which the merges were learned, is made; the word is
    ready when none is left. `tokenizers` can do this as well, but not twice in the same way: it has no seed.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): a fast tokenizer with a BPE model.
        p (`float`): probability of each merge to be left out; 0 changes nothing.

    Raises:
        ValueError: the tokenizer has no merges to leave out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, p: float) -> None:
        self.p = p
        self.log_of_kept = math.log(1 - p)
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        if model["type"] != "BPE" or not model["merges"]:
            raise ValueError(
                f"tokenizer.bpe_dropout is {p}, but the vocabulary has no merges that could be skipped: its kind is "
                f"{'bytes' if model['type'] == 'BPE' else model['type']}. Choose a vocabulary of kind bpe, or set "
                "tokenizer.bpe_dropout to 0."
            )
        ids, prefix = model["vocab"], len(model["continuing_subword_prefix"] or "")
        # The merges in the order in which they were learned: the rank of a pair, and the result of each rank.
        self.ranks: dict[tuple[int, int], int] = {}
        self.results: list[int] = []
        # The characters or bytes of each entry; an entry that no merge makes is one itself.
        self.characters: dict[int, tuple[int, ...]] = {}
        for rank, (left, right) in enumerate(model["merges"]):
            pair, merged = (ids[left], ids[right]), ids[left + right[prefix:]]
            self.ranks[pair] = rank
            self.results.append(merged)
            self.characters[merged] = tuple(character for part in pair for character in self._characters(part))
        self.remembered: dict[tuple[int, ...], tuple[list[int], list[_Merge]]] = {}
        self.room = REMEMBERED

    def __call__(self, encoding: Any, rng: random.Random) -> list[int]:
        """
        Args:
            encoding (`tokenizers.Encoding`): a sentence, encoded without dropout and with its `word_ids`.
            rng (`random.Random`): source of the choices.

        Returns:
            `list[int]`: ids of the sentence.
        """
        ids, words = encoding.ids, encoding.word_ids
        if not self.p:
            return list(ids)
        made: list[int] = []
        start, count = 0, len(ids)
        while start < count:
            stop, word = start + 1, words[start]
            while stop < count and words[stop] == word:
                stop += 1
            # Tokens outside of words, such as </s>, have no merges.
            made += ids[start:stop] if word is None else self._split(tuple(ids[start:stop]), rng)
            start = stop
        return made

    def _characters(self, entry: int) -> tuple[int, ...]:
        return self.characters.get(entry, (entry,))

    def _split(self, word: tuple[int, ...], rng: random.Random) -> Sequence[int]:
        """Splits a word, given as its ids without dropout."""
        known = self.remembered.get(word)
        if known is None:
            characters = [character for entry in word for character in self._characters(entry)]
            known = characters, list(self._merges(list(characters)))
            if len(characters) <= self.room:
                self.remembered[word] = known
                self.room -= len(characters)
        characters, merges = known
        # The number of merges before the first that is left out has a geometric distribution. Up to there they are
        # those of the word without dropout, so most words need one draw and no merging.
        made = int(math.log(1 - rng.random()) / self.log_of_kept)
        if made >= len(merges):
            return word
        symbols = _after(characters, merges[:made])
        return _after(symbols, self._merges(list(symbols), rng))

    def _merges(self, symbols: list[int], rng: random.Random | None = None) -> Iterator[_Merge]:
        """
        Makes the merges of a word in place, one after the other. With `rng` they are left out at random, and the
        first one that is possible is left out in any case.
        """
        count, ranks = len(symbols), self.ranks
        after, before = list(range(1, count + 1)), list(range(-1, count))
        queue = [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        heapq.heapify(queue)
        skipped = [heapq.heappop(queue)] if rng is not None else []
        while queue:
            rank, left = heapq.heappop(queue)
            right = after[left]
            # One of the parts may have been merged with another neighbour since.
            if right == count or ranks.get((symbols[left], symbols[right])) != rank:
                continue
            if rng is not None and rng.random() < self.p:
                skipped.append((rank, left))
                continue
            # Every step considers anew what earlier ones have left out.
            for merge in skipped:
                heapq.heappush(queue, merge)
            skipped = []
            symbols[left], symbols[right] = self.results[rank], GONE
            yield left, right, symbols[left]
            after[left] = after[right]
            before[after[right]] = left
            for first, second in ((before[left], left), (left, after[left])):
                if first >= 0 and second < count and (symbols[first], symbols[second]) in ranks:
                    heapq.heappush(queue, (ranks[symbols[first], symbols[second]], first))


def _after(symbols: Sequence[int], merges: Iterable[_Merge]) -> list[int]:
    """Returns the symbols of a word after some merges."""
    made = list(symbols)
    for left, right, merged in merges:
        made[left], made[right] = merged, GONE
    return [symbol for symbol in made if symbol != GONE]
