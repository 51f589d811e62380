"""BPE-dropout (Provilkov et al., 2020): byte-pair encoding that skips merges at random, reproducibly."""

import heapq
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

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

    def __call__(self, encoding: Any, draws: random.Random) -> list[int]:
        """
        Args:
            encoding (`tokenizers.Encoding`): a sentence, encoded without dropout and with its `word_ids`.
            draws (`random.Random`): source of the choices.

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
            made += ids[start:stop] if word is None else self._split(tuple(ids[start:stop]), draws)
            start = stop
        return made

    def _characters(self, entry: int) -> tuple[int, ...]:
        return self.characters.get(entry, (entry,))

    def _split(self, word: tuple[int, ...], draws: random.Random) -> Sequence[int]:
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
        made = int(math.log(1 - draws.random()) / self.log_of_kept)
        if made >= len(merges):
            return word
        symbols = _after(characters, merges[:made])
        return _after(symbols, self._merges(list(symbols), draws))

    def _merges(self, symbols: list[int], draws: random.Random | None = None) -> Iterator[_Merge]:
        """
        Makes the merges of a word in place, one after the other. With `draws` they are left out at random, and the
        first one that is possible is left out in any case.
        """
        count, ranks = len(symbols), self.ranks
        after, before = list(range(1, count + 1)), list(range(-1, count))
        queue = [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        heapq.heapify(queue)
        skipped = [heapq.heappop(queue)] if draws is not None else []
        while queue:
            rank, left = heapq.heappop(queue)
            right = after[left]
            # One of the parts may have been merged with another neighbour since.
            if right == count or ranks.get((symbols[left], symbols[right])) != rank:
                continue
            if draws is not None and draws.random() < self.p:
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
