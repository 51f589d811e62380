"""
Markup in translations: tags and placeholders, placed by the attention to the source.

Segments are translated without their tags. Placeholders, URLs and code stay in what the model reads, because many
models copy them; what it did not copy takes the place of the words that were made from it. Tags enclose the target
words that mostly attend to the words between them in the source.
"""

import html
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from ..model.configuration_vaswani import VaswaniConfig
from ..model.pipeline_vaswani import require_text
from .alignment import Alignment, aligning_layers, end_if_over, translate_and_align
from .markup import SPACE, WORD, Node, Segment, all_nodes, parse, parse_attributes
from .protected import PROTECTED

Span = tuple[int, int]

# Weaker attention is no link.
MIN_ATTENTION = 0.1
# Sums that differ by less are a tie.
TIE_TOLERANCE = 1e-6
# Products of the words on both sides; more take too long.
MAX_PAIRS = 2**24
# Most characters of a plain text whose placeholders are kept: its words are paired with those of its translation.
MAX_PROTECTED = 10_000
PUNCTUATION = re.compile(r"[^\w\s]+")
OPENING = "([{¿¡„‚«‹“‘"
COMMAS = ",;:"
SENTENCE_ENDS = tuple(".!?…")


# ---- Words -------------------------------------------------------------------------------------------------------


class Word(NamedTuple):
    """
    A word, a punctuation mark, or what is not translated, such as a placeholder.

    Attributes:
        text (`str`), span (`tuple[int, int]`): its characters.
        markup (`str`, *optional*): how it is written, if it is not translated.
    """

    text: str
    span: Span
    markup: str | None = None

    @property
    def is_word(self) -> bool:
        """True for a word that may be translated; false for a punctuation mark."""
        return self.markup is None and _has_letters(self.text)


def _has_letters(text: str) -> bool:
    return any(map(str.isalnum, text))


def _words(text: str, start: int, end: int, cuts: Sequence[int] = ()) -> Iterator[Word]:
    """Yields the words and punctuation marks of a part of a text, which are divided at `cuts`, too."""
    for match in WORD.finditer(text, start, end):
        ends = [*(cut for cut in cuts if match.start() < cut < match.end()), match.end()]
        for span in zip([match.start(), *ends], ends, strict=False):
            yield Word(text[slice(*span)], span)


def source_words(segment: Segment) -> list[Word]:
    """Splits the text of a segment. A tag within a word splits it, too."""
    cuts = sorted({place for node in all_nodes(segment.nodes) for place in (node.start, node.end)})
    words: list[Word] = []
    place = 0
    for start, end, markup in segment.protected:
        words += _words(segment.text, place, start, cuts)
        if start < end:
            words.append(Word(segment.text[start:end], (start, end), markup))
        place = end
    return [*words, *_words(segment.text, place, len(segment.text), cuts)]


def target_words(translation: str, texts: set[str]) -> list[Word]:
    """Splits a translation. Copies of protected texts and placeholders that the source lacks are not translated."""
    # Longer texts first, because they may contain shorter ones. A word is no copy within another one.
    ordered = sorted(texts, key=len, reverse=True)
    edges = [(r"(?<!\w)" if text[0].isalnum() else "", r"(?!\w)" if text[-1].isalnum() else "") for text in ordered]
    parts = [re.escape(text).join(edge) for text, edge in zip(ordered, edges, strict=True)]
    copies = re.compile("|".join(parts) or r"(?!)")
    words: list[Word] = []
    place = 0
    for match in (*copies.finditer(translation), None):
        start, end = (len(translation),) * 2 if match is None else match.span()
        look = place
        while (other := PROTECTED.search(translation, look, start)) is not None:
            # Names and domains may be words of the translation; quotation marks without their other half may enclose
            # anything.
            if other.lastgroup is not None or SPACE.search(other[0]):
                look = other.start() + 1
                continue
            words += _words(translation, place, other.start())
            words.append(Word(other[0], other.span(), other[0]))
            place = look = other.end()
        words += _words(translation, place, start)
        if match is not None:
            words.append(Word(match[0], match.span(), match[0]))
        place = end
    return words


def _attention(aligned: Sequence[Alignment], sources: Sequence[Word], targets: Sequence[Word]) -> torch.Tensor:
    """Returns the attention of each target word to the source's, of shape `(target, source)`; rows sum to 1 or 0."""
    attention = torch.zeros(len(targets), len(sources))
    for part in aligned:
        if part.probabilities.numel():
            source, target = (slice(*each) for each in _within(part, sources, targets))
            columns = _shares(part.source_spans, [word.span for word in sources[source]])
            rows = _shares([word.span for word in targets[target]], part.target_spans)
            attention[target, source] += rows @ part.probabilities @ columns
    return attention / attention.sum(dim=1, keepdim=True).clamp(min=1e-9)


def _within(part: Alignment, sources: Sequence[Word], targets: Sequence[Word]) -> tuple[Span, Span]:
    """Returns which words of the source and of the translation have characters of a part."""
    source, target = (
        (
            bisect_right(words, spans[0][0], key=lambda word: word.span[1]),
            bisect_left(words, spans[-1][1], key=lambda word: word.span[0]),
        )
        for words, spans in ((sources, part.source_spans), (targets, part.target_spans))
    )
    return source, target


def _shares(spans: Sequence[Span], parts: Sequence[Span]) -> torch.Tensor:
    """Returns the share of each part in the characters of each span, of shape `(spans, parts)`; rows sum to 1 or 0."""
    if not spans or not parts:
        return torch.zeros(len(spans), len(parts))
    left, right = torch.tensor(spans)[:, None], torch.tensor(parts)
    common = torch.minimum(left[..., 1], right[:, 1]) - torch.maximum(left[..., 0], right[:, 0])
    common = common.clamp(min=0).float()
    return common / common.sum(dim=1, keepdim=True).clamp(min=1e-9)


def _best_run(scores: torch.Tensor, free: torch.Tensor) -> Span | None:
    """
    Returns the neighbouring free words with the largest sum of scores above one half, if there are any. Of several
    that are as good, it is the longest of the last.
    """
    end_if_over()
    if not len(scores):
        return None
    above = torch.where(free, scores.double() - 0.5, torch.tensor(-1.0 - len(scores), dtype=torch.float64))
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), above.cumsum(dim=0)])
    least = sums[:-1].cummin(dim=0).values
    gains = sums[1:] - least
    if gains.max() < TIE_TOLERANCE:
        return None
    last = int((gains >= gains.max() - TIE_TOLERANCE).nonzero()[-1])
    return int((sums[: last + 1] <= least[last] + TIE_TOLERANCE).nonzero()[0]), last + 1


# ---- What is protected -------------------------------------------------------------------------------------------

# In place of the source word that a target word stands for.
FREE, DROPPED = -1, -2


class Placement:
    """
    Chooses the place of each protected text of a segment in its translation: a copy of it, a placeholder that the
    source lacks, or what remains of it. No word of the translation is lost: where a text has no such place for sure,
    it is added.

    Args:
        segment ([`Segment`]): the segment.
        translation (`str`): the translation of its text.
        aligned (`Sequence[Alignment]`): the alignments of its sentences, by their characters in both.

    Attributes:
        source (`list[Word]`), target (`list[Word]`): the words of both.
        attention (`torch.FloatTensor` of shape `(target, source)`): of these to those.
        owners (`list[int]`): for each target word the protected source word whose place it is, `FREE`, or `DROPPED`: a
            copy too many, or a placeholder that the source lacks.
        added (`dict[int, list[int]]`): the protected source words that are added, by the target word that they stand
            in front of.

    Raises:
        ValueError: the segment has several thousand words.
    """

    def __init__(self, segment: Segment, translation: str, aligned: Sequence[Alignment]) -> None:
        end_if_over()
        self.text, self.translation = segment.text, translation
        self.source = source_words(segment)
        # The texts of source words that are not translated.
        self.protected = {k: word.text for k, word in enumerate(self.source) if word.markup is not None}
        self.target = target_words(translation, set(self.protected.values()))
        if len(self.target) * len(self.source) > MAX_PAIRS:
            raise ValueError(
                f"Markup cannot be placed in a paragraph of {len(self.source):,} words and punctuation marks with a "
                f"translation of {len(self.target):,}: split it."
            )
        self.attention = _attention(aligned, self.source, self.target)
        self.sentences = [_within(part, self.source, self.target) for part in aligned if part.probabilities.numel()]
        self.owners = [FREE] * len(self.target)
        self.added: dict[int, list[int]] = {}
        left = self._take_copies()
        for k in sorted(left):
            if (run := self._remains(k)) is not None:
                self.owners[slice(*run)] = [k] * (run[1] - run[0])
                left.remove(k)
        for k in sorted(left):
            self.added.setdefault(self._gap(k), []).append(k)

    def _take_copies(self) -> set[int]:
        """Gives copies and placeholders to protected words, drops those too many, and returns the words without."""
        left = set(self.protected)
        texts = set(self.protected.values())
        placeholders = [j for j, word in enumerate(self.target) if word.markup is not None]
        scores = {j: self.attention[j].tolist() for j in placeholders}

        def take(pairs: list[tuple[float, int, int]]) -> None:
            for _, k, j in sorted(pairs, key=lambda pair: -pair[0]):
                if k in left and self.owners[j] == FREE:
                    self.owners[j] = k
                    left.remove(k)

        alike = [(scores[j][k], k, j) for j in placeholders for k in left if self.protected[k] == self.target[j].text]
        # A word may be there for another reason; a text with punctuation can only be a copy.
        take([pair for pair in alike if pair[0] > MIN_ATTENTION or re.search(r"\W", self.protected[pair[1]])])
        foreign = [j for j in placeholders if self.target[j].text not in texts]
        take([(scores[j][k], k, j) for j in foreign for k in left if scores[j][k] > MIN_ATTENTION])
        unprotected = Counter({self.target[j].text: self.text.count(self.target[j].text) for j in placeholders})
        unprotected.subtract(self.protected.values())
        for j in placeholders:
            text = self.target[j].text
            if self.owners[j] == FREE and re.search(r"\W", text):
                # As the second half of "5%s", which is not protected.
                if unprotected[text] > 0:
                    unprotected[text] -= 1
                else:
                    self.owners[j] = DROPPED
        return left

    def _sentence(self, k: int) -> tuple[Span, Span]:
        """Returns the sentence that has a source word, by the words of the source and of the translation."""
        whole = ((0, len(self.source)), (0, len(self.target)))
        return next((each for each in self.sentences if each[0][0] <= k < each[0][1]), whole)

    def _remains(self, k: int) -> Span | None:
        """
        Returns the target words that remain of a protected text, such as "name" of "{name}", and mark its place. They
        occur in the protected text, and no other source word needs them. `None` if nothing remains.
        """
        inside, translated = self._sentence(k)
        text, target = self.protected[k], self.target
        pieces = Counter(match[0].casefold() for match in WORD.finditer(text))
        is_candidate = [
            owner == FREE and (_has_letters(word.text) or word.text in pieces)
            for owner, word in zip(self.owners, target, strict=True)
        ]
        run = _best_run(self.attention[:, k], torch.tensor(is_candidate, dtype=torch.bool))
        if run is None:
            return None
        start, end = run
        first, last = _edges(text)
        while start < end and not _has_letters(target[start].text) and target[start].text not in first:
            start += 1
        while start < end and not _has_letters(target[end - 1].text) and target[end - 1].text not in last:
            end -= 1
        taken = Counter(word.text.casefold() for word in target[start:end])
        if start == end or not taken <= pieces or self._is_within_word(start) or self._is_within_word(end):
            return None
        words = [j for j in range(*translated) if self.owners[j] == FREE and _has_letters(target[j].text)]
        around = [i for i in range(*inside) if self.source[i].is_word]
        if around and words:
            # For each word of the source, the word that most probably translates it.
            best, places = self.attention[words][:, around].max(dim=0)
            needed = [words[place] for place, score in zip(places, best, strict=True) if score > TIE_TOLERANCE]
            if any(start <= j < end for j in needed):
                return None
        # The punctuation beside it that the text begins or ends with, such as quotes.
        while start and self.owners[start - 1] == FREE and self._touches(start) and target[start - 1].text in first:
            start -= 1
        while end < len(target) and self.owners[end] == FREE and self._touches(end) and target[end].text in last:
            end += 1
        return start, end

    def _touches(self, j: int) -> bool:
        """Returns whether there is nothing between a target word and the one in front of it."""
        return self.target[j - 1].span[1] == self.target[j].span[0]

    def _is_within_word(self, j: int) -> bool:
        """Returns whether two neighbours, of which this is the second, are parts of a word, as vowel signs are."""
        if not 0 < j < len(self.target) or not self._touches(j):
            return False
        letters = self.target[j - 1].text[-1], self.target[j].text[0]
        return all(unicodedata.category(letter)[0] in "LMN" for letter in letters)

    def _gap(self, k: int) -> int:
        """
        Returns the number of target words in front of the place of a protected text that is added: at the beginning or
        the end of its sentence if it is there in the source, else behind the translation of what is in front of it.
        """
        inside, (first, last) = self._sentence(k)
        before, behind = (
            [self.source[i].text for i in range(*part) if i not in self.protected]
            for part in ((inside[0], k), (k + 1, inside[1]))
        )
        owners, target = self.owners, self.target
        # The marks at the end of the sentence.
        end = last
        while end > first and (
            owners[end - 1] > k or (owners[end - 1] == FREE and not _has_letters(target[end - 1].text))
        ):
            end -= 1
        if not any(map(_has_letters, before)):
            while first < last and (
                0 <= owners[first] < k or (owners[first] == FREE and target[first].text in before)
            ):
                first += 1
            return first
        if not any(map(_has_letters, behind)):
            is_last = not behind and not _has_letters(before[-1])
            return last if is_last else end
        gap = min(max(self._gap_behind(k - 1), first), end)
        mark = self.source[k - 1].text
        if gap < end and mark in SENTENCE_ENDS and owners[gap] == FREE and target[gap].text == mark:
            gap += 1
        while gap < end and self._is_within_word(gap):
            gap += 1
        return gap

    def _gap_behind(self, k: int) -> int:
        """Returns the number of target words in front of the place behind the translation of source word `k`."""
        free = torch.tensor([owner == FREE for owner in self.owners], dtype=torch.float32)
        for before in range(k, -1, -1):
            end_if_over()
            if before in self.owners:
                return len(self.owners) - self.owners[::-1].index(before)
            scores = self.attention[:, before] * free
            if len(scores) and scores.max() > MIN_ATTENTION:
                return int(scores.argmax()) + 1
        return 0


def _comma_behind(text: str, span: Span) -> str:
    """
    Returns the comma behind a protected text that begins a sentence, as in "{name}, hello", or nothing. It goes with
    the protected text: a model that reads neither does not write it.
    """
    start, end = span
    before = text[max(0, start - 9) : start].rstrip()
    is_first = before.endswith(SENTENCE_ENDS) if before else start < 9
    return text[end : end + 1] if is_first and text[end : end + 1] in tuple(COMMAS) else ""


def _edges(text: str) -> tuple[str, str]:
    """Returns the punctuation that a text begins with, and those that it ends with."""
    first, last = (PUNCTUATION.match(each) for each in (text, text[::-1]))
    return first[0] if first else "", last[0] if last else ""


# ---- Tags --------------------------------------------------------------------------------------------------------


class _Writer:
    """
    Writes a translation with tags, and with everything that is protected exactly once.

    Args:
        placement ([`Placement`]): the translation.
        as_html (`bool`): escape the characters that have a meaning in HTML.

    Attributes:
        words (`list[str]`), spaces (`list[str]`): its words as they are written, and the white space in front of them.
        attention (`torch.FloatTensor` of shape `(words, source)`): their attention to the words of the source.
        is_word (`torch.BoolTensor` of shape `(words,)`): which are no punctuation marks.
    """

    def __init__(self, placement: Placement, as_html: bool) -> None:
        self.placement, self.source = placement, placement.source
        self.words: list[str] = []
        self.spaces: list[str] = []
        rows: list[torch.Tensor] = []
        itself = torch.eye(len(self.source))

        def add(word: str, space: str, attention: torch.Tensor) -> None:
            self.words.append(word)
            self.spaces.append(space if rows else "")
            rows.append(attention)

        place = 0
        # The character in front; whether it is of a protected text; and that word if it was added just now.
        last, is_protected, beside = "", False, FREE
        for j in range(len(placement.target) + 1):
            for k in placement.added.get(j, ()):
                comma = _comma_behind(placement.text, self.source[k].span)
                comma = "" if j < len(placement.target) and placement.target[j].text[0] == comma else comma
                space = self._space_beside(k, last, is_protected, behind=False)
                add(str(self.source[k].markup) + comma, space, itself[k])
                last, is_protected, beside = self.source[k].text[-1], True, k
            if j == len(placement.target):
                break
            owner, word = placement.owners[j], placement.target[j]
            space = placement.translation[place : word.span[0]]
            place = word.span[1]
            if owner == DROPPED or (owner >= 0 and j and placement.owners[j - 1] == owner):
                continue
            if beside >= 0 and not space:
                space = self._space_beside(beside, word.text[0], owner >= 0, behind=True)
            elif beside >= 0 and owner == FREE and placement.text[self.source[beside].span[1] :][:1].isalnum():
                # As "px" in "{n}px".
                space = "" if int(placement.attention[j].argmax()) == beside + 1 else space
            if owner >= 0:
                add(str(self.source[owner].markup), space, itself[owner])
            else:
                add(html.escape(word.text, quote=False) if as_html else word.text, space, placement.attention[j])
            last, is_protected, beside = word.text[-1], owner >= 0, FREE
        self.attention = torch.stack(rows) if rows else torch.zeros(0, len(self.source))
        self.is_word = torch.tensor(list(map(_has_letters, self.words)), dtype=torch.bool)

    def _space_beside(self, k: int, character: str, is_protected: bool, behind: bool) -> str:
        """
        Returns the white space between a protected text that is added and a neighbour: as in the source, where the
        neighbours are of one kind.

        Args:
            k (`int`): the source word that is added.
            character (`str`): the nearest character of the neighbour, or nothing at the beginning.
            is_protected (`bool`): the neighbour is a protected text, too.
            behind (`bool`): it stands behind.
        """
        text, (start, end) = self.placement.text, self.source[k].span
        end += len(_comma_behind(text, (start, end)))
        in_source = text[end:][:1] if behind else text[:start][-1:]
        is_mark = not character.isalnum()
        if in_source.strip():
            is_close = in_source.isalnum() != is_mark or (behind and is_mark)
        else:
            is_close = not is_protected and is_mark and (character in OPENING) != behind
            # All other marks stand behind a word.
            is_close = is_close and (behind or character in OPENING)
        return "" if is_close or not character else " "

    def write(self, nodes: Sequence[Node], target: Span, source: Span) -> list[str]:
        """
        Returns words with the tags around them.

        Args:
            nodes (`Sequence[Node]`): the tags, without those inside of them.
            target (`tuple[int, int]`): the target words, from start to end.
            source (`tuple[int, int]`): the source words that `nodes` are among.
        """
        written: list[str] = []
        place = target[0]
        # At one place, tags that enclose nothing come first.
        for start, end, number in sorted(
            self._places(nodes, target, source), key=lambda each: (each[0], each[1] > each[0], each[2])
        ):
            node = nodes[number]
            written += self._plain(place, start)
            if start < end:
                written.append(self._space(start))
            elif node.spaced[0] and start:
                # Alone, it stands in front of the next word or, with white space on both sides, between two words.
                is_apart = node.spaced[1] or start == len(self.words) or not self.is_word[start]
                written.append(" " if is_apart else self._space(start))
            written += [node.before, *self.write(node.nodes, (start, end), self._inside(node)), node.after]
            place = end
        return written + self._plain(place, target[1])

    def _space(self, j: int) -> str:
        """Returns the white space in front of a word, the first time."""
        space, self.spaces[j] = self.spaces[j], ""
        return space

    def _plain(self, start: int, end: int) -> list[str]:
        return [self._space(j) + self.words[j] for j in range(start, end)]

    def _inside(self, node: Node) -> Span:
        """Returns the source words within a pair of tags."""
        first = bisect_left(self.source, node.start, key=lambda word: word.span[0])
        return first, max(first, bisect_right(self.source, node.end, key=lambda word: word.span[1]))

    def _free(self, target: Span) -> torch.Tensor:
        """Returns a mask of shape `(target,)` with these words."""
        free = torch.zeros(len(self.words), dtype=torch.bool)
        free[slice(*target)] = True
        return free

    def _places(self, nodes: Sequence[Node], target: Span, source: Span) -> list[tuple[int, int, int]]:
        """Returns the target words that each pair of tags encloses, and the places of the others; none overlap."""
        free = self._free(target)
        inside = [self._inside(node) for node in nodes]
        places: dict[int, Span] = {}
        for number in sorted(range(len(nodes)), key=lambda each: inside[each][0] - inside[each][1]):
            scores = self.attention[:, slice(*inside[number])].sum(dim=1) * free
            run = _best_run(scores, free)
            if run is None and scores.numel() and scores.max() > MIN_ATTENTION:
                run = int(scores.argmax()), int(scores.argmax()) + 1
            if run is not None:
                places[number] = run
                free[slice(*run)] = False
        taken, last = list(places.values()), target[0]
        for number in range(len(nodes)):
            if number not in places:
                # Tags without their other half stay in order.
                gap = max(self._gap(inside[number], target, source), last)
                last = gap = next((end for start, end in taken if start < gap < end), gap)
                places[number] = gap, gap
        return [(*places[number], number) for number in range(len(nodes))]

    def _gap(self, inside: Span, target: Span, source: Span) -> int:
        """Returns the place of a tag that encloses no words: behind the translation of what it stands behind."""
        end_if_over()
        if inside[0] <= source[0]:
            return target[0]
        if inside[0] >= source[1]:
            return target[1]
        free = self._free(target)
        before, behind = (word.is_word or word.markup is not None for word in self.source[inside[0] - 1 :][:2])
        # A mark such as a full stop attends to words as well.
        scores = self.attention[:, inside[0]] * (free & ~self.is_word)
        if before and not behind and len(scores) and scores.max() > MIN_ATTENTION:
            return int(scores.argmax())
        scores = self.attention[:, inside[0] - 1] * (free & self.is_word if before else free)
        return int(scores.argmax()) + 1 if len(scores) and scores.max() > 0 else target[0]


def restore(segment: Segment, translation: str, aligned: Sequence[Alignment], as_html: bool) -> str:
    """
    Puts the markup of a segment into its translation.

    Args:
        segment ([`Segment`]): the segment.
        translation (`str`): the translation of its text.
        aligned (`Sequence[Alignment]`): the alignments of its sentences, by their characters in both.
        as_html (`bool`): escape the characters that have a meaning in HTML.

    Returns:
        `str`: the translation, with each tag and everything that is protected exactly once.

    Raises:
        ValueError: the segment has several thousand words.
    """
    writer = _Writer(Placement(segment, translation, aligned), as_html)
    written = writer.write(segment.nodes, (0, len(writer.words)), (0, len(writer.source)))
    return segment.front + "".join(written) + segment.back


# ---- Whole texts -------------------------------------------------------------------------------------------------


class _Shortened(NamedTuple):
    """
    The text of a segment without some of what is protected.

    Attributes:
        text (`str`): the text.
        places (`list[int]`): where each of its characters is in the segment's text.
    """

    text: str
    places: list[int]

    def aligned(self, part: Alignment) -> Alignment:
        """Returns an alignment of this text as one of the segment's text."""
        spans = []
        for start, end in part.source_spans:
            # The space in front of a piece may be far from it there.
            start = min(start + len(self.text[start:end]) - len(self.text[start:end].lstrip()), end - 1)
            spans.append((self.places[start], self.places[end - 1] + 1))
        return replace(part, source_spans=spans)


def _shortened(segment: Segment, placement: Placement) -> _Shortened:
    """Leaves out the protected texts that were added to a translation, because the model did not copy them."""
    text = segment.text
    # The places of the characters that stay; two words that would touch get a space between them.
    left: list[int] = []
    letters = list(text)
    place = 0
    for start, end in sorted(placement.source[k].span for added in placement.added.values() for k in added):
        left += range(place, start)
        place, behind = end, text[end : end + 1]
        if _comma_behind(text, (start, end)) or not left:
            while text[place : place + 1].isspace() or text[place : place + 1] in tuple(COMMAS):
                place += 1
        elif not behind or behind.isspace() or not (behind.isalnum() or behind in OPENING):
            while left and text[left[-1]].isspace():
                left.pop()
            # As in "Hello, {name}!"
            while left and behind.strip() and text[left[-1]] in COMMAS:
                left.pop()
        elif text[left[-1]].isalnum() and behind.isalnum():
            left.append(start)
            letters[start] = " "
    left += range(place, len(text))
    return _Shortened("".join(letters[i] for i in left), left)


def translate_markup(
    texts: Sequence[tuple[str, str]],
    kind: str,
    translate: Callable[[list[str]], list[list[tuple[str, list[Alignment]]]]],
) -> list[list[str]]:
    """
    Translates texts with markup. A text that has something protected which the model has not copied is translated
    once more without it, because a model that does not know placeholders may write anything beside them.

    Args:
        texts (`Sequence[tuple[str, str]]`): for each text, a language tag and a space, or nothing; and the text.
        kind (`str`): kind of markup, see [`parse`].
        translate (`Callable`): returns the translations of each text without markup, best first, with alignments.

    Returns:
        `list[list[str]]`: the translations of each text, best first.

    Raises:
        ValueError: there is no such kind of markup, or a paragraph has several thousand words.
    """
    if kind == "html+attributes":
        values = [(tag, parse_attributes(text)) for tag, text in texts]
        # All candidates have the same attributes.
        best = [ranks[0] for ranks in _translate(values, translate, _attribute)]
        texts = [(tag, text) for (tag, _), text in zip(texts, best, strict=True)]
    parsed = [(tag, parse(text, kind)) for tag, text in texts]
    return _translate(parsed, translate, partial(restore, as_html=kind != "placeholders"))


def _attribute(segment: Segment, translation: str, aligned: Sequence[Alignment]) -> str:
    """Writes the translation of an attribute, as [`restore`]."""
    return html.escape(restore(segment, translation, aligned, as_html=False))


def _translate(
    parsed: Sequence[tuple[str, list[str | Segment]]],
    translate: Callable[[list[str]], list[list[tuple[str, list[Alignment]]]]],
    write: Callable[[Segment, str, Sequence[Alignment]], str],
) -> list[list[str]]:
    """Translates the segments of texts, as [`translate_markup`], and writes their translations."""
    segments = [(tag, part) for tag, parts in parsed for part in parts if isinstance(part, Segment)]
    # Texts without words are repeated, for as many candidates as the empty text has.
    found = translate([tag + segment.text for tag, segment in segments] or [""])
    count = len(found[0])
    again: dict[int, _Shortened] = {}
    for number, (_, segment) in enumerate(segments):
        if segment.protected and (placement := Placement(segment, *found[number][0])).added:
            again[number] = _shortened(segment, placement)
    shorter = translate([segments[number][0] + each.text for number, each in again.items()]) if again else []
    for (number, each), candidates in zip(again.items(), shorter, strict=True):
        found[number] = [(text, list(map(each.aligned, aligned))) for text, aligned in candidates]
    translations = iter(found)
    written = []
    for _, parts in parsed:
        ranks = [
            [write(part, text, aligned) for text, aligned in next(translations)]
            if isinstance(part, Segment)
            else [part] * count
            for part in parts
        ]
        written.append(["".join(rank) for rank in zip(*ranks, strict=True)])
    return written


class PipelineMarkup:
    """
    Translates texts with markup by a pipeline.

    Args:
        pipeline ([`VaswaniText2TextGenerationPipeline`]): the pipeline.
        kind (`str`): kind of markup, see [`parse`].

    Raises:
        ValueError: there is no such kind, or the pipeline's model has no attention to a source.
    """

    def __init__(self, pipeline: Any, kind: str) -> None:
        # There is such a kind, and an attention to a source.
        parse("", kind)
        aligning_layers(pipeline.model)
        self.pipeline, self.kind = pipeline, kind

    def __call__(self, inputs: Any, *_: Any, num_workers: int | None = None, **kwargs: Any) -> Any:
        """Translates what the pipeline takes, with the keywords of a call."""
        if isinstance(inputs, str):
            return self._translate([inputs], kwargs)[0]
        if isinstance(inputs, list):
            return self._translate(inputs, kwargs)
        if isinstance(inputs, Dataset):
            inputs = DataLoader(inputs, batch_size=None, num_workers=num_workers or self.pipeline._num_workers or 0)
        return (self._translate([text], kwargs)[0] for text in inputs)

    def _translate(self, texts: list[Any], kwargs: dict[str, Any]) -> list[list[dict[str, str]]]:
        pipeline = self.pipeline
        for text in texts:
            require_text(text, "a sentence")
        found = translate_markup(
            list(map(pipeline.tags.split, texts)), self.kind, partial(translate_and_align, pipeline, **kwargs)
        )
        return [[{f"{pipeline.return_name}_text": text} for text in candidates] for candidates in found]


class PipelineSplitText:
    """
    Translates by a pipeline, and keeps the placeholders, URLs and addresses of texts that are split into sentences, as
    [`PipelineMarkup`] does. Texts without them, texts that cannot be aligned, and those that are not split are
    translated as they are.

    Args:
        pipeline ([`VaswaniText2TextGenerationPipeline`]): the pipeline.
        translate (`Callable`): translates what the pipeline takes, without regard to markup.
    """

    def __init__(self, pipeline: Any, translate: Callable[..., Any]) -> None:
        self.pipeline, self.translate = pipeline, translate

    def __call__(self, inputs: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """Translates what the pipeline takes, with the keywords of a call."""
        settings = kwargs | {"batch_size": batch_size}
        if not self._is_split(kwargs):
            return self.translate(inputs, *args, **settings)
        if isinstance(inputs, str):
            return self._translate([inputs], settings)[0]
        if isinstance(inputs, list):
            return self._translate(inputs, settings)
        if isinstance(inputs, Dataset):
            workers = kwargs.get("num_workers") or self.pipeline._num_workers or 0
            inputs = DataLoader(inputs, batch_size=None, num_workers=workers)
        # Batches of a stream are those of a list.
        texts, size = iter(inputs), batch_size or self.pipeline._batch_size or 1
        batches = iter(lambda: list(islice(texts, size)), [])
        return (found for batch in batches for found in self._translate(batch, settings))

    def _is_split(self, kwargs: dict[str, Any]) -> bool:
        """Returns whether a call splits texts, of a model whose attention says where a protected text goes."""
        before, _, _ = self.pipeline._sanitize_parameters(**kwargs)
        before = self.pipeline._preprocess_params | before
        config = self.pipeline.model.config
        can_align = config.model_type == VaswaniConfig.model_type and self.pipeline.tokenizer.is_fast
        is_split = before.get("split_sentences", False) and not before.get("is_whole", False)
        # A summary need not have every link of its text.
        return is_split and can_align and self.pipeline.translates

    def _translate(self, texts: list[str], settings: dict[str, Any]) -> list[Any]:
        for text in texts:
            require_text(text, "a sentence")
        has_protected = [len(text) <= MAX_PROTECTED and PROTECTED.search(text) is not None for text in texts]
        found: dict[int, Any] = {}
        for is_kept, translate in ((False, self.translate), (True, PipelineMarkup(self.pipeline, "placeholders"))):
            numbers = [number for number, each in enumerate(has_protected) if each == is_kept]
            if numbers:
                translations = translate([texts[number] for number in numbers], **settings)
                found |= zip(numbers, translations, strict=True)
        return [found[number] for number in range(len(texts))]


def translator_with_markup(
    pipeline: Any, kind: str | None, translate: Callable[..., Any]
) -> PipelineMarkup | PipelineSplitText:
    """Returns what translates texts with this kind of markup, or with none; takes the arguments of both classes."""
    return PipelineSplitText(pipeline, translate) if kind is None else PipelineMarkup(pipeline, kind)
