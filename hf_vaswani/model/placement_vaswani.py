"""
Markup in translations: tags and placeholders, placed by the attention to the source.

Segments are translated without their tags. Placeholders, URLs and code stay in what the model reads, because many
models copy them; what it did not copy takes the place of the words that were made from it. Tags enclose the target
words that mostly attend to the words between them in the source.
"""

import html
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .alignment_vaswani import Alignment
from .markup_vaswani import PROTECTED, SPACE, UNIT, Node, Segment, all_nodes, parse

Span = tuple[int, int]

# Attention below this says nothing.
LEAST = 0.1
# Sums that differ by less are equal.
CLOSE = 1e-6
# More words on both sides take too long.
MOST_PAIRS = 2**24


@dataclass
class Atom:
    """
    A word or a sign of a translation, or what is not translated.

    Attributes:
        markup (`str`): as it is written.
        space (`str`): the white space in front of it.
        attention (`torch.FloatTensor` of shape `(source,)`): attention to the atoms of the source.
    """

    markup: str
    space: str
    attention: torch.Tensor


class Block(NamedTuple):
    """An alignment of the pieces of a sentence, and where it begins in the segment and in its translation."""

    alignment: Alignment
    source: int = 0
    target: int = 0


def restore(segment: Segment, translation: str, blocks: Sequence[Block], as_html: bool) -> str:
    """
    Puts the markup of a segment into its translation.

    Args:
        segment ([`Segment`]): the segment.
        translation (`str`): the translation of its text.
        blocks (`Sequence[Block]`): the alignments of its sentences.
        as_html (`bool`): escape the signs that have a meaning in HTML.

    Returns:
        `str`: the translation, with each tag and everything that is protected exactly once.
    """
    source = _source_atoms(segment)
    targets = _target_units(translation, set(source.texts.values()))
    if len(targets) * len(source.spans) > MOST_PAIRS:
        raise ValueError(
            f"Markup cannot be placed in a paragraph of {len(source.spans):,} words and signs with a translation of "
            f"{len(targets):,}: split it."
        )
    attention = _attention(blocks, source.spans, [unit.span for unit in targets])
    owners, added = _owners(targets, attention, source)
    atoms = _target_atoms(source, translation, targets, attention, owners, added, as_html)
    written = _Writer(atoms, source.spans).write(segment.nodes, (0, len(atoms)), (0, len(source.spans)))
    return segment.front + "".join(written) + segment.back


class _Source(NamedTuple):
    """
    The atoms of a segment's text: words, signs and what is protected.

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


def _attention(blocks: Sequence[Block], sources: Sequence[Span], targets: Sequence[Span]) -> torch.Tensor:
    """Returns the attention of each target atom to the source's, of shape `(target, source)`; rows sum to 1 or 0."""
    attention = torch.zeros(len(targets), len(sources))
    for block in blocks:
        pieces = block.alignment
        if pieces.probabilities.numel():
            (left, _), (_, right) = pieces.source_spans[0], pieces.source_spans[-1]
            source = _between(sources, left + block.source, right + block.source)
            (left, _), (_, right) = pieces.target_spans[0], pieces.target_spans[-1]
            target = _between(targets, left + block.target, right + block.target)
            columns = _shares(pieces.source_spans, block.source, sources[source])
            rows = _shares(targets[target], -block.target, pieces.target_spans)
            attention[target, source] += rows @ pieces.probabilities @ columns
    return attention / attention.sum(dim=1, keepdim=True).clamp(min=1e-9)


def _between(spans: Sequence[Span], start: int, end: int) -> slice:
    """Returns which spans, of which each begins where the one before has ended, have characters from start to end."""
    return slice(bisect_right(spans, start, key=lambda span: span[1]), bisect_left(spans, (end, 0)))


def _shares(spans: Sequence[Span], offset: int, parts: Sequence[Span]) -> torch.Tensor:
    """Returns the share of each part in the characters of each span, of shape `(spans, parts)`; rows sum to 1 or 0."""
    if not spans or not parts:
        return torch.zeros(len(spans), len(parts))
    left, right = torch.tensor(spans)[:, None] + offset, torch.tensor(parts)
    common = torch.minimum(left[..., 1], right[:, 1]) - torch.maximum(left[..., 0], right[:, 0])
    common = common.clamp(min=0).float()
    return common / common.sum(dim=1, keepdim=True).clamp(min=1e-9)


class Unit(NamedTuple):
    """
    A part of a translation.

    Attributes:
        span (`tuple[int, int]`), text (`str`): its characters.
        kind (`str`): `"copy"` of a protected text, `"foreign"` for a placeholder that the source lacks, or `"word"`.
    """

    span: Span
    text: str
    kind: str = "word"


def _target_units(translation: str, texts: set[str]) -> list[Unit]:
    """Splits a translation into words, signs, copies of protected texts, and placeholders that the source lacks."""
    # Longer texts first, because they may contain shorter ones. A word is no copy within another one.
    ordered = sorted(texts, key=len, reverse=True)
    edges = [(r"(?<!\w)" if text[0].isalnum() else "", r"(?!\w)" if text[-1].isalnum() else "") for text in ordered]
    parts = [re.escape(text).join(edge) for text, edge in zip(ordered, edges, strict=True)]
    copies = re.compile("|".join(parts) or r"(?!)")
    units: list[Unit] = []

    def add_foreign(start: int, end: int) -> None:
        place = start
        while (match := PROTECTED.search(translation, place, end)) is not None:
            # Quotation marks without their other half may enclose anything.
            if SPACE.search(match[0]):
                place = match.start() + 1
                continue
            add_words(start, match.start())
            units.append(Unit(match.span(), match[0], "copy" if match[0] in texts else "foreign"))
            start = place = match.end()
        add_words(start, end)

    def add_words(start: int, end: int) -> None:
        units.extend(Unit(match.span(), match[0]) for match in UNIT.finditer(translation, start, end))

    place = 0
    for match in copies.finditer(translation):
        add_foreign(place, match.start())
        units.append(Unit(match.span(), match[0], "copy"))
        place = match.end()
    add_foreign(place, len(translation))
    return units


# In place of the source atom that a target unit belongs to.
FREE, DROPPED = -1, -2


def _owners(
    targets: Sequence[Unit], attention: torch.Tensor, source: _Source
) -> tuple[list[int], dict[int, list[int]]]:
    """
    Chooses the place of each protected text: a copy of it, a placeholder that the source lacks, or the words that were
    made from it.

    Returns:
        `list[int]`: for each target unit the source atom whose place it is, `FREE`, or `DROPPED`: a copy too many, or
        a placeholder that the source lacks.
        `dict[int, list[int]]`: the other texts, by the unit that they stand in front of. They stand behind the
        translation of what is in front of them in the source.
    """
    texts = source.texts
    owners = [FREE] * len(targets)
    left = set(texts)
    unprotected = Counter({unit.text: source.text.count(unit.text) for unit in targets if unit.kind != "word"})
    unprotected.subtract(texts.values())
    scores = attention.tolist()

    def take(pairs: list[tuple[float, int, int]]) -> None:
        for _, k, j in sorted(pairs, key=lambda pair: -pair[0]):
            if k in left and owners[j] == FREE:
                owners[j] = k
                left.remove(k)

    copies, foreign = ([j for j, unit in enumerate(targets) if unit.kind == kind] for kind in ("copy", "foreign"))
    take([(scores[j][k], k, j) for j in copies for k in left if texts[k] == targets[j].text])
    take([(scores[j][k], k, j) for j in foreign for k in left if scores[j][k] > LEAST])
    for j, unit in enumerate(targets):
        # A word may be there for another reason.
        if owners[j] == FREE and unit.kind != "word" and re.search(r"\W", unit.text):
            # As the second half of "5%s", which is not protected.
            if unprotected[unit.text] > 0:
                unprotected[unit.text] -= 1
            else:
                owners[j] = DROPPED
    for k in sorted(left):
        free = torch.tensor([owner == FREE for owner in owners], dtype=torch.bool)
        if (run := _best_run(attention[:, k], free)) is not None:
            start, end = _with_edges(targets, owners, run, texts[k])
            owners[start:end] = [k] * (end - start)
            left.remove(k)
    added: dict[int, list[int]] = {}
    for k in sorted(left):
        added.setdefault(_gap_behind(k - 1, attention, owners), []).append(k)
    return owners, added


def _with_edges(targets: Sequence[Unit], owners: Sequence[int], run: Span, text: str) -> Span:
    """Extends a run of units by the signs next to it that are part of a text, such as its quotation marks."""
    start, end = run

    def is_part(j: int) -> bool:
        sign = targets[j].text
        return owners[j] == FREE and sign in text and not sign.isalnum()

    while start and targets[start - 1].span[1] == targets[start].span[0] and is_part(start - 1):
        start -= 1
    while end < len(targets) and targets[end].span[0] == targets[end - 1].span[1] and is_part(end):
        end += 1
    return start, end


def _target_atoms(
    source: _Source,
    translation: str,
    targets: Sequence[Unit],
    attention: torch.Tensor,
    owners: Sequence[int],
    added: dict[int, list[int]],
    as_html: bool,
) -> list[Atom]:
    """Makes atoms of a translation, with everything that is protected exactly once."""
    atoms: list[Atom] = []
    one = torch.eye(len(source.spans))
    place, behind = 0, ""
    for j in range(len(targets) + 1):
        for k in added.get(j, ()):
            start, end = source.spans[k]
            around = source.text[:start][-1:], source.text[end:][:1]
            atoms.append(Atom(source.markup[k], behind or ("" if around[0].strip() else " "), one[k]))
            behind = "" if around[1].strip() else " "
        if j == len(targets):
            break
        owner, unit = owners[j], targets[j]
        space = translation[place : unit.span[0]]
        place = unit.span[1]
        if owner == DROPPED or (owner >= 0 and j and owners[j - 1] == owner):
            continue
        space, behind = space or behind, ""
        if owner >= 0:
            atoms.append(Atom(source.markup[owner], space, one[owner]))
        else:
            atoms.append(Atom(html.escape(unit.text, quote=False) if as_html else unit.text, space, attention[j]))
    if atoms:
        atoms[0].space = ""
    return atoms


def _best_run(scores: torch.Tensor, free: torch.Tensor) -> Span | None:
    """
    Returns the neighbouring free atoms with the largest sum of scores above one half, if there are any. Of several
    that are as good, it is the longest of the last.
    """
    if not len(scores):
        return None
    above = torch.where(free, scores.double() - 0.5, torch.tensor(-1.0 - len(scores), dtype=torch.float64))
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), above.cumsum(dim=0)])
    least = sums[:-1].cummin(dim=0).values
    gains = sums[1:] - least
    if gains.max() < CLOSE:
        return None
    last = int((gains >= gains.max() - CLOSE).nonzero()[-1])
    return int((sums[: last + 1] <= least[last] + CLOSE).nonzero()[0]), last + 1


def _gap_behind(k: int, attention: torch.Tensor, owners: list[int]) -> int:
    """Returns the number of target units in front of the place behind the translation of source atom `k`."""
    free = torch.tensor([owner == FREE for owner in owners], dtype=torch.float32)
    for before in range(k, -1, -1):
        if before in owners:
            return len(owners) - owners[::-1].index(before)
        scores = attention[:, before] * free
        if len(scores) and scores.max() > LEAST:
            return int(scores.argmax()) + 1
    return 0


class _Writer:
    """
    Writes atoms with tags.

    Args:
        atoms (`list[Atom]`): the translation.
        sources (`Sequence[tuple[int, int]]`): the characters of the source's atoms.
    """

    def __init__(self, atoms: list[Atom], sources: Sequence[Span]) -> None:
        self.atoms, self.sources, self.ends = atoms, sources, [end for _, end in sources]
        self.attention = torch.stack([atom.attention for atom in atoms]) if atoms else torch.zeros(0, len(sources))

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
                is_last = node.spaced[1] or start == len(self.atoms)
                written.append(" " if is_last else self._space(start))
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
            if run is None and scores.numel() and scores.max() > LEAST:
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
        if inside[0] <= source[0]:
            return target[0]
        if inside[0] >= source[1]:
            return target[1]
        free = torch.zeros(len(self.atoms))
        free[slice(*target)] = 1.0
        scores = self.attention[:, inside[0] - 1] * free
        return int(scores.argmax()) + 1 if len(scores) and scores.max() > 0 else target[0]


def translate_markup(
    texts: Sequence[tuple[str, str]],
    kind: str,
    translate: Callable[[list[str]], list[list[tuple[str, list[Block]]]]],
) -> list[list[str]]:
    """
    Translates texts with markup.

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
    plain = [tag + part.text for tag, parts in parsed for part in parts if isinstance(part, Segment)]
    # Texts without words are repeated, for as many candidates as the empty text has.
    all_found = translate(plain or [""])
    translations, count = iter(all_found), len(all_found[0])
    found = []
    for _, parts in parsed:
        ranks = [
            [restore(part, text, blocks, kind == "html") for text, blocks in next(translations)]
            if isinstance(part, Segment)
            else [part] * count
            for part in parts
        ]
        found.append(["".join(of_rank) for of_rank in zip(*ranks, strict=True)] or [""] * count)
    return found
