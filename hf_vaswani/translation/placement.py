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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from ..model.pipeline_vaswani import require_text
from .alignment import AlignedPart, aligning_layers, end_if_over, translate_and_align
from .markup import PROTECTED, SPACE, UNIT, Node, Segment, all_nodes, check_kind, parse

Span = tuple[int, int]

# Weaker attention is no link.
MIN_ATTENTION = 0.1
# Sums that differ by less are a tie.
TIE_TOLERANCE = 1e-6
# Products of the words on both sides; more take too long.
MAX_PAIRS = 2**24
PUNCTUATION = re.compile(r"[^\w\s]+")
OPENING = "([{¿¡„‚«‹“‘"


@dataclass
class Atom:
    """
    A word or a punctuation mark of a translation, or what is not translated.

    Attributes:
        markup (`str`): as it is written.
        space (`str`): the white space in front of it.
        attention (`torch.FloatTensor` of shape `(source,)`): attention to the atoms of the source.
    """

    markup: str
    space: str
    attention: torch.Tensor


def restore(segment: Segment, translation: str, aligned: Sequence[AlignedPart], as_html: bool) -> str:
    """
    Puts the markup of a segment into its translation.

    Args:
        segment ([`Segment`]): the segment.
        translation (`str`): the translation of its text.
        aligned (`Sequence[AlignedPart]`): the alignments of its sentences.
        as_html (`bool`): escape the characters that have a meaning in HTML.

    Returns:
        `str`: the translation, with each tag and everything that is protected exactly once.
    """
    places = _places(segment, translation, aligned)
    atoms = _target_atoms(translation, places, as_html)
    sources = places.source.spans
    written = _Writer(atoms, places.source).write(segment.nodes, (0, len(atoms)), (0, len(sources)))
    return segment.front + "".join(written) + segment.back


class _Places(NamedTuple):
    """
    The places of what is protected in a translation.

    Attributes:
        source ([`_Source`]), targets (`list[TargetUnit]`): the atoms of the source and of the translation.
        attention (`torch.FloatTensor` of shape `(target, source)`): of these to those.
        owners (`list[int]`), added (`dict[int, list[int]]`): as [`_owners`] returns them.
    """

    source: "_Source"
    targets: "list[TargetUnit]"
    attention: torch.Tensor
    owners: list[int]
    added: dict[int, list[int]]


def _places(segment: Segment, translation: str, aligned: Sequence[AlignedPart]) -> _Places:
    """Finds the places of what is protected; see [`restore`]."""
    end_if_over()
    source = _source_atoms(segment)
    targets = _target_units(translation, set(source.texts.values()))
    if len(targets) * len(source.spans) > MAX_PAIRS:
        raise ValueError(
            f"Markup cannot be placed in a paragraph of {len(source.spans):,} words and punctuation marks with a "
            f"translation of {len(targets):,}: split it."
        )
    spans = [unit.span for unit in targets]
    attention = _attention(aligned, source.spans, spans)
    sentences = [_within(part, source.spans, spans) for part in aligned if part.alignment.probabilities.numel()]
    return _Places(source, targets, attention, *_owners(targets, attention, source, sentences))


class _Source(NamedTuple):
    """
    The atoms of a segment's text: words, punctuation marks and what is protected.

    Attributes:
        text (`str`): the text.
        spans (`list[tuple[int, int]]`): the characters of each atom.
        texts (`dict[int, str]`), markup (`dict[int, str]`): the texts of those that are protected, and how they are
            written.
    """

    text: str
    spans: list[Span]
    texts: dict[int, str]
    markup: dict[int, str]


def _source_atoms(segment: Segment) -> _Source:
    """Splits the text of a segment. A tag within a word splits it, too."""
    cuts = sorted({place for node in all_nodes(segment.nodes) for place in (node.start, node.end)})
    spans: list[Span] = []
    written: dict[int, str] = {}
    place = 0
    for start, end, markup in [*segment.protected, (len(segment.text),) * 2 + ("",)]:
        for match in UNIT.finditer(segment.text, place, start):
            ends = [*(cut for cut in cuts if match.start() < cut < match.end()), match.end()]
            spans += zip([match.start(), *ends], ends, strict=False)
        if start < end:
            written[len(spans)] = markup
            spans.append((start, end))
        place = end
    return _Source(segment.text, spans, {k: segment.text[slice(*spans[k])] for k in written}, written)


def _attention(aligned: Sequence[AlignedPart], sources: Sequence[Span], targets: Sequence[Span]) -> torch.Tensor:
    """Returns the attention of each target atom to the source's, of shape `(target, source)`; rows sum to 1 or 0."""
    attention = torch.zeros(len(targets), len(sources))
    for part in aligned:
        pieces = part.alignment
        if pieces.probabilities.numel():
            source, target = (slice(*each) for each in _within(part, sources, targets))
            columns = _shares(pieces.source_spans, part.source, sources[source])
            rows = _shares(targets[target], -part.target, pieces.target_spans)
            attention[target, source] += rows @ pieces.probabilities @ columns
    return attention / attention.sum(dim=1, keepdim=True).clamp(min=1e-9)


def _within(part: AlignedPart, sources: Sequence[Span], targets: Sequence[Span]) -> tuple[Span, Span]:
    """Returns which atoms of the source and of the translation have characters of a part."""
    pieces = part.alignment
    return (
        _between(sources, pieces.source_spans[0][0] + part.source, pieces.source_spans[-1][1] + part.source),
        _between(targets, pieces.target_spans[0][0] + part.target, pieces.target_spans[-1][1] + part.target),
    )


def _between(spans: Sequence[Span], start: int, end: int) -> Span:
    """Returns which spans, of which each begins where the one before has ended, have characters from start to end."""
    return bisect_right(spans, start, key=lambda span: span[1]), bisect_left(spans, (end, 0))


def _shares(spans: Sequence[Span], offset: int, parts: Sequence[Span]) -> torch.Tensor:
    """Returns the share of each part in the characters of each span, of shape `(spans, parts)`; rows sum to 1 or 0."""
    if not spans or not parts:
        return torch.zeros(len(spans), len(parts))
    left, right = torch.tensor(spans)[:, None] + offset, torch.tensor(parts)
    common = torch.minimum(left[..., 1], right[:, 1]) - torch.maximum(left[..., 0], right[:, 0])
    common = common.clamp(min=0).float()
    return common / common.sum(dim=1, keepdim=True).clamp(min=1e-9)


class TargetUnit(NamedTuple):
    """
    A part of a translation.

    Attributes:
        span (`tuple[int, int]`), text (`str`): its characters.
        kind (`str`): `"copy"` of a protected text, `"foreign"` for a placeholder that the source lacks, or `"word"`.
    """

    span: Span
    text: str
    kind: str = "word"


def _target_units(translation: str, texts: set[str]) -> list[TargetUnit]:
    """Splits a translation into words, punctuation, copies of protected texts, and placeholders the source lacks."""
    # Longer texts first, because they may contain shorter ones. A word is no copy within another one.
    ordered = sorted(texts, key=len, reverse=True)
    edges = [(r"(?<!\w)" if text[0].isalnum() else "", r"(?!\w)" if text[-1].isalnum() else "") for text in ordered]
    parts = [re.escape(text).join(edge) for text, edge in zip(ordered, edges, strict=True)]
    copies = re.compile("|".join(parts) or r"(?!)")
    units: list[TargetUnit] = []

    def add_foreign(start: int, end: int) -> None:
        place = start
        while (match := PROTECTED.search(translation, place, end)) is not None:
            # Quotation marks without their other half may enclose anything.
            if SPACE.search(match[0]):
                place = match.start() + 1
                continue
            add_words(start, match.start())
            units.append(TargetUnit(match.span(), match[0], "copy" if match[0] in texts else "foreign"))
            start = place = match.end()
        add_words(start, end)

    def add_words(start: int, end: int) -> None:
        units.extend(TargetUnit(match.span(), match[0]) for match in UNIT.finditer(translation, start, end))

    place = 0
    for match in copies.finditer(translation):
        add_foreign(place, match.start())
        units.append(TargetUnit(match.span(), match[0], "copy"))
        place = match.end()
    add_foreign(place, len(translation))
    return units


# In place of the source atom that a target unit belongs to.
FREE, DROPPED = -1, -2


def _owners(
    targets: Sequence[TargetUnit],
    attention: torch.Tensor,
    source: _Source,
    sentences: Sequence[tuple[Span, Span]],
) -> tuple[list[int], dict[int, list[int]]]:
    """
    Chooses the place of each protected text: a copy of it, a placeholder that the source lacks, or what remains of it.
    No word of the translation is lost: where a text has no such place for sure, it is added.

    Returns:
        `list[int]`: for each target unit the source atom whose place it is, `FREE`, or `DROPPED`: a copy too many, or
        a placeholder that the source lacks.
        `dict[int, list[int]]`: the texts that are added, by the unit that they stand in front of.
    """
    texts = source.texts
    owners = [FREE] * len(targets)
    left = set(texts)
    unprotected = Counter({unit.text: source.text.count(unit.text) for unit in targets if unit.kind != "word"})
    unprotected.subtract(texts.values())
    scores = {j: attention[j].tolist() for j, unit in enumerate(targets) if unit.kind != "word"}

    def take(pairs: list[tuple[float, int, int]]) -> None:
        for _, k, j in sorted(pairs, key=lambda pair: -pair[0]):
            if k in left and owners[j] == FREE:
                owners[j] = k
                left.remove(k)

    copies, foreign = ([j for j, unit in enumerate(targets) if unit.kind == kind] for kind in ("copy", "foreign"))
    # A word may be there for another reason; a text with punctuation can only be a copy.
    alike = [(scores[j][k], k, j) for j in copies for k in left if texts[k] == targets[j].text]
    take([pair for pair in alike if pair[0] > MIN_ATTENTION or re.search(r"\W", texts[pair[1]])])
    take([(scores[j][k], k, j) for j in foreign for k in left if scores[j][k] > MIN_ATTENTION])
    for j, unit in enumerate(targets):
        if owners[j] == FREE and unit.kind != "word" and re.search(r"\W", unit.text):
            # As the second half of "5%s", which is not protected.
            if unprotected[unit.text] > 0:
                unprotected[unit.text] -= 1
            else:
                owners[j] = DROPPED
    ranges = {k: _sentence(k, sentences, len(source.spans), len(targets)) for k in left}
    for k in sorted(left):
        if (run := _remains(k, *ranges[k], targets, owners, attention, source)) is not None:
            start, end = _with_edges(targets, owners, run, texts[k])
            owners[start:end] = [k] * (end - start)
            left.remove(k)
    added: dict[int, list[int]] = {}
    for k in sorted(left):
        added.setdefault(_gap(k, *ranges[k], targets, owners, attention, source), []).append(k)
    return owners, added


def _sentence(k: int, sentences: Sequence[tuple[Span, Span]], sources: int, targets: int) -> tuple[Span, Span]:
    """Returns the sentence that has a source atom, in the atoms of the source and in the units of the translation."""
    whole = ((0, sources), (0, targets))
    return next((each for each in sentences if each[0][0] <= k < each[0][1]), whole)


def _remains(
    k: int,
    inside: Span,
    translated: Span,
    targets: Sequence[TargetUnit],
    owners: Sequence[int],
    attention: torch.Tensor,
    source: _Source,
) -> Span | None:
    """
    Returns the units of a translation that are left of a protected text, as "name" of "{name}", and give it their
    place: parts of the text that no word of the source may need. `None` if there are none.
    """
    text = source.texts[k]
    pieces = Counter(match[0].casefold() for match in UNIT.finditer(text))
    free = torch.tensor(
        [
            owner == FREE and (_is_word(unit.text) or unit.text in pieces)
            for owner, unit in zip(owners, targets, strict=True)
        ],
        dtype=torch.bool,
    )
    if (run := _best_run(attention[:, k], free)) is None:
        return None
    start, end = run
    while start < end and not _is_word(targets[start].text) and targets[start].text not in _edges(text)[0]:
        start += 1
    while start < end and not _is_word(targets[end - 1].text) and targets[end - 1].text not in _edges(text)[1]:
        end -= 1
    taken = Counter(unit.text.casefold() for unit in targets[start:end])
    words = [j for j in range(*translated) if owners[j] == FREE and _is_word(targets[j].text)]
    if start == end or not taken <= pieces or _is_within_word(targets, start) or _is_within_word(targets, end):
        return None
    around = [i for i in range(*inside) if i not in source.texts and _is_word(source.text[slice(*source.spans[i])])]
    if around and words:
        # For each word of the source, the word that most probably translates it.
        columns = attention[words][:, around]
        best, places = columns.max(dim=0)
        if any(
            start <= words[place] < end for place, score in zip(places, best, strict=True) if score > TIE_TOLERANCE
        ):
            return None
    return start, end


def _is_word(text: str) -> bool:
    return any(map(str.isalnum, text))


def _is_within_word(targets: Sequence[TargetUnit], j: int) -> bool:
    """Returns whether two neighbouring units, of which this is the second, are parts of a word, as vowel signs are."""
    if not 0 < j < len(targets) or targets[j - 1].span[1] != targets[j].span[0]:
        return False
    return all(unicodedata.category(letter)[0] in "LMN" for letter in (targets[j - 1].text[-1], targets[j].text[0]))


def _edges(text: str) -> tuple[str, str]:
    """Returns the punctuation that a text begins with, and those that it ends with."""
    first, last = (PUNCTUATION.match(each) for each in (text, text[::-1]))
    return first[0] if first else "", last[0] if last else ""


def _with_edges(targets: Sequence[TargetUnit], owners: Sequence[int], run: Span, text: str) -> Span:
    """Extends a run of units by the punctuation beside it that the text begins or ends with, such as quotes."""
    start, end = run
    first, last = _edges(text)
    while start and owners[start - 1] == FREE and _touch(targets, start) and targets[start - 1].text in first:
        start -= 1
    while end < len(targets) and owners[end] == FREE and _touch(targets, end) and targets[end].text in last:
        end += 1
    return start, end


def _touch(targets: Sequence[TargetUnit], j: int) -> bool:
    return targets[j - 1].span[1] == targets[j].span[0]


def _target_atoms(translation: str, places: _Places, as_html: bool) -> list[Atom]:
    """Makes atoms of a translation, with everything that is protected exactly once."""
    source, targets, attention, owners, added = places
    atoms: list[Atom] = []
    one = torch.eye(len(source.spans))
    place = 0
    # The character in front; whether it is of a protected text; and that text if it was added just now.
    last, is_protected, beside = "", False, FREE
    for j in range(len(targets) + 1):
        for k in added.get(j, ()):
            atoms.append(Atom(source.markup[k], _space_beside(source, k, last, is_protected, behind=False), one[k]))
            last, is_protected, beside = source.texts[k][-1], True, k
        if j == len(targets):
            break
        owner, unit = owners[j], targets[j]
        space = translation[place : unit.span[0]]
        place = unit.span[1]
        if owner == DROPPED or (owner >= 0 and j and owners[j - 1] == owner):
            continue
        if beside >= 0 and not space:
            space = _space_beside(source, beside, unit.text[0], owner >= 0, behind=True)
        elif beside >= 0 and owner == FREE and source.text[source.spans[beside][1] :][:1].isalnum():
            # As "px" in "{n}px".
            space = "" if int(attention[j].argmax()) == beside + 1 else space
        if owner >= 0:
            atoms.append(Atom(source.markup[owner], space, one[owner]))
        else:
            atoms.append(Atom(html.escape(unit.text, quote=False) if as_html else unit.text, space, attention[j]))
        last, is_protected, beside = unit.text[-1], owner >= 0, FREE
    if atoms:
        atoms[0].space = ""
    return atoms


def _space_beside(source: _Source, k: int, character: str, is_protected: bool, behind: bool) -> str:
    """
    Returns the white space between a protected text that is added to a translation and a neighbour: as in the source,
    where the neighbours are of one kind.

    Args:
        source ([`_Source`]), k (`int`): the source, and the atom that is added.
        character (`str`): the nearest character of the neighbour, or nothing at the beginning.
        is_protected (`bool`): the neighbour is a protected text, too.
        behind (`bool`): it stands behind.
    """
    start, end = source.spans[k]
    of_source = source.text[end:][:1] if behind else source.text[:start][-1:]
    is_mark = not character.isalnum()
    if of_source.strip():
        is_close = of_source.isalnum() != is_mark or (behind and is_mark)
    else:
        is_close = not is_protected and is_mark and (character in OPENING) != behind
        # All other marks stand behind a word.
        is_close = is_close and (behind or character in OPENING)
    return "" if is_close or not character else " "


def _gap(
    k: int,
    inside: Span,
    translated: Span,
    targets: Sequence[TargetUnit],
    owners: list[int],
    attention: torch.Tensor,
    source: _Source,
) -> int:
    """
    Returns the number of target units in front of the place of a protected text that is added: at the beginning or the
    end of its sentence if it is there in the source, else behind the translation of what is in front of it.
    """

    def atoms(start: int, end: int) -> list[str]:
        return [source.text[slice(*source.spans[i])] for i in range(start, end) if i not in source.texts]

    before, behind = atoms(inside[0], k), atoms(k + 1, inside[1])
    first, last = translated
    # The marks at the end of the sentence.
    end = last
    while end > first and (owners[end - 1] > k or (owners[end - 1] == FREE and not _is_word(targets[end - 1].text))):
        end -= 1
    if not any(map(_is_word, before)):
        while first < last and (0 <= owners[first] < k or (owners[first] == FREE and targets[first].text in before)):
            first += 1
        return first
    if not any(map(_is_word, behind)):
        is_last = not behind and not _is_word(before[-1])
        return last if is_last else end
    gap = min(max(_gap_behind(k - 1, attention, owners), first), end)
    while gap < end and _is_within_word(targets, gap):
        gap += 1
    return gap


def _best_run(scores: torch.Tensor, free: torch.Tensor) -> Span | None:
    """
    Returns the neighbouring free atoms with the largest sum of scores above one half, if there are any. Of several
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


def _gap_behind(k: int, attention: torch.Tensor, owners: list[int]) -> int:
    """Returns the number of target units in front of the place behind the translation of source atom `k`."""
    free = torch.tensor([owner == FREE for owner in owners], dtype=torch.float32)
    for before in range(k, -1, -1):
        end_if_over()
        if before in owners:
            return len(owners) - owners[::-1].index(before)
        scores = attention[:, before] * free
        if len(scores) and scores.max() > MIN_ATTENTION:
            return int(scores.argmax()) + 1
    return 0


class _Writer:
    """
    Writes atoms with tags.

    Args:
        atoms (`list[Atom]`): the translation.
        source ([`_Source`]): the atoms of the source.
    """

    def __init__(self, atoms: list[Atom], source: _Source) -> None:
        self.atoms, self.source, self.sources = atoms, source, source.spans
        self.ends = [end for _, end in self.sources]
        self.attention = torch.stack([atom.attention for atom in atoms]) if atoms else torch.zeros(0, len(self.ends))
        self.words = torch.tensor([_is_word(atom.markup) for atom in atoms], dtype=torch.bool)

    def write(self, nodes: Sequence[Node], target: Span, source: Span) -> list[str]:
        """
        Returns atoms with the tags around them.

        Args:
            nodes (`Sequence[Node]`): the tags, without those inside of them.
            target (`tuple[int, int]`): the target atoms, from start to end.
            source (`tuple[int, int]`): the source atoms that `nodes` are among.
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
                is_apart = node.spaced[1] or start == len(self.atoms) or not self.words[start]
                written.append(" " if is_apart else self._space(start))
            written += [node.before, *self.write(node.nodes, (start, end), self._inside(node)), node.after]
            place = end
        return written + self._plain(place, target[1])

    def _space(self, j: int) -> str:
        """Returns the white space in front of an atom, the first time."""
        space, self.atoms[j].space = self.atoms[j].space, ""
        return space

    def _plain(self, start: int, end: int) -> list[str]:
        return [self._space(j) + self.atoms[j].markup for j in range(start, end)]

    def _inside(self, node: Node) -> Span:
        """Returns the source atoms within a pair of tags."""
        first = bisect_left(self.sources, (node.start, 0))
        return first, max(first, bisect_right(self.ends, node.end))

    def _places(self, nodes: Sequence[Node], target: Span, source: Span) -> list[tuple[int, int, int]]:
        """Returns the target atoms that each pair of tags encloses, and the places of the others; none overlap."""
        free = torch.zeros(len(self.atoms), dtype=torch.bool)
        free[slice(*target)] = True
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
        """Returns the place of a tag that encloses no atoms: behind the translation of what it stands behind."""
        end_if_over()
        if inside[0] <= source[0]:
            return target[0]
        if inside[0] >= source[1]:
            return target[1]
        free = torch.zeros(len(self.atoms), dtype=torch.bool)
        free[slice(*target)] = True
        before, behind = (not _is_punctuation(self.source, k) for k in (inside[0] - 1, inside[0]))
        # A mark such as a full stop attends to words as well.
        scores = self.attention[:, inside[0]] * (free & ~self.words)
        if before and not behind and len(scores) and scores.max() > MIN_ATTENTION:
            return int(scores.argmax())
        scores = self.attention[:, inside[0] - 1] * (free & self.words if before else free)
        return int(scores.argmax()) + 1 if len(scores) and scores.max() > 0 else target[0]


def _is_punctuation(source: _Source, k: int) -> bool:
    return k not in source.texts and not _is_word(source.text[slice(*source.spans[k])])


class _Shortened(NamedTuple):
    """
    The text of a segment without some of what is protected.

    Attributes:
        text (`str`): the text.
        places (`list[int]`): where each of its characters is in the segment's text.
    """

    text: str
    places: list[int]

    def aligned(self, part: AlignedPart) -> AlignedPart:
        """Returns an alignment of this text as one of the segment's text."""
        spans = []
        for start, end in part.alignment.source_spans:
            start, end = start + part.source, end + part.source
            # The space in front of a piece may be far from it there.
            start = min(start + len(self.text[start:end]) - len(self.text[start:end].lstrip()), end - 1)
            spans.append((self.places[start], self.places[end - 1] + 1))
        return AlignedPart(replace(part.alignment, source_spans=spans), 0, part.target)


def _shortened(segment: Segment, places: _Places) -> _Shortened:
    """Leaves out the protected texts that were added to a translation, because the model did not copy them."""
    text = segment.text
    # The places of the characters that stay; two words that would touch get a space between them.
    left: list[int] = []
    letters = list(text)
    place = 0
    for start, end in sorted(places.source.spans[k] for added in places.added.values() for k in added):
        left += range(place, start)
        place, behind = end, text[end : end + 1]
        if not left:
            place += behind.isspace()
        elif not behind or behind.isspace() or not (behind.isalnum() or behind in OPENING):
            while left and text[left[-1]].isspace():
                left.pop()
            # As in "Hello, {name}!"
            while left and behind.strip() and text[left[-1]] in ",;:":
                left.pop()
        elif text[left[-1]].isalnum() and behind.isalnum():
            left.append(start)
            letters[start] = " "
    left += range(place, len(text))
    return _Shortened("".join(letters[i] for i in left), left)


def translate_markup(
    texts: Sequence[tuple[str, str]],
    kind: str,
    translate: Callable[[list[str]], list[list[tuple[str, list[AlignedPart]]]]],
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
    parsed = [(tag, parse(text, kind)) for tag, text in texts]
    segments = [(tag, part) for tag, parts in parsed for part in parts if isinstance(part, Segment)]
    # Texts without words are repeated, for as many candidates as the empty text has.
    found = translate([tag + segment.text for tag, segment in segments] or [""])
    count = len(found[0])
    again: dict[int, _Shortened] = {}
    for number, (_, segment) in enumerate(segments):
        if segment.protected and (places := _places(segment, *found[number][0])).added:
            again[number] = _shortened(segment, places)
    shorter = translate([segments[number][0] + each.text for number, each in again.items()]) if again else []
    for (number, each), candidates in zip(again.items(), shorter, strict=True):
        found[number] = [(text, list(map(each.aligned, aligned))) for text, aligned in candidates]
    translations = iter(found)
    written = []
    for _, parts in parsed:
        ranks = [
            [restore(part, text, aligned, kind == "html") for text, aligned in next(translations)]
            if isinstance(part, Segment)
            else [part] * count
            for part in parts
        ]
        written.append(["".join(of_rank) for of_rank in zip(*ranks, strict=True)] or [""] * count)
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
        check_kind(kind)
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
