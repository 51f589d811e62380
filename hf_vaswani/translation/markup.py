"""Text with markup: HTML or placeholders, as segments that are translated and what is kept around and within them."""

import html
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..model import sentences_vaswani
from ..model.sentences_vaswani import INVISIBLE, has_words
from .protected import CJK, PROTECTED

KINDS = ("html", "html+attributes", "placeholders")

Span = tuple[int, int]

# A word, which may have signs in it that no model reads, or any other character but white space.
WORD = re.compile(rf"\w+(?:(?:{INVISIBLE.pattern})++\w+)*|[^\w\s]")
SPACE = re.compile(r"[ \t\r\n\f]+")

IDEOGRAPH = re.compile(f"[{CJK}]")
# Line breaks of plain text, also as programs for subtitles write them between two sentences: behind a mark, or in
# front of the dash of the next speaker.
LINE_BREAK = re.compile(
    r"""(?:(?<=[.!?…。！？♪])|(?<=[.!?…。！？]["'”’»)]))[ ]?<(?i:br)[ ]?/?>|<(?i:br)[ ]?/?>(?=[ ]?[-–—♪])"""
    rf"|{sentences_vaswani.LINE_BREAK.pattern}"
)

# ---- HTML --------------------------------------------------------------------------------------------------------

# Quotation marks have a meaning behind an equals sign alone. <0> is a tag of React's.
TAG = re.compile(
    r"""<(?P<slash>/?)(?P<name>[A-Za-z][\w:.-]*+|\d{1,4}(?=\s*/?>))"""
    r"""(?P<attributes>(?:[^<>=]++|=\s*+(?:"[^"]*+"|'[^']*+')?+)*+)>"""
)
ATTRIBUTE = re.compile(r"""([^\s=/"'<>]++)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s>]*+))?+""")
# Comments, processing instructions, declarations and the tags of templates, with their ends.
COMMENT_DELIMITERS = {"<!--": "-->", "<![CDATA[": "]]>", "<?": "?>", "<!": ">", "<%": "%>"}
# A tag within more than these is kept where it is, without regard to its other half.
MAX_DEPTH = 100
# Tags between which text is a segment of its own; all others are within a sentence.
BLOCK_TAGS = frozenset(
    "address article aside audio base blockquote body br button caption center col colgroup dd details dialog dir "
    "div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html "
    "iframe label legend li link main math menu meta nav noscript ol optgroup option p pre script section select "
    "source style summary svg table tbody td template textarea tfoot th thead title tr track ul video".split()
)
# Those of them whose content is not translated, tags of such content within a sentence, and annotations, which a
# sentence does not have.
RAW_TEXT_TAGS = frozenset("script style pre textarea svg math template".split())
CODE_TAGS = frozenset("code kbd samp var tt".split())
# Nothing that is protected is on both sides of these.
WORD_TAGS = frozenset("a ruby".split())
RUBY_TAGS = frozenset("rt rp".split())
# Attributes that people read, and the names of descriptions of a page.
READ_ATTRIBUTES = frozenset("alt title placeholder label aria-label aria-description".split())
DESCRIPTIONS = frozenset(
    "description og:title og:description og:image:alt twitter:title twitter:description twitter:image:alt".split()
)
VOID_TAGS = frozenset("area base br col embed frame hr img input link meta param source track wbr".split())


@dataclass
class Node:
    """
    A pair of tags, or a tag alone, within a segment.

    Attributes:
        before (`str`), after (`str`): the tags; a tag alone has nothing after it.
        start (`int`), end (`int`): the characters of the segment's text that it encloses.
        nodes (`list[Node]`): the tags within it.
        spaced (`tuple[bool, bool]`): whether white space is in front of a tag alone, and behind it.
    """

    before: str
    after: str
    start: int
    end: int
    nodes: list["Node"] = field(default_factory=list)
    spaced: tuple[bool, bool] = (False, False)


@dataclass
class Segment:
    """
    A text that is translated.

    Attributes:
        text (`str`): the text without tags.
        protected (`list[tuple[int, int, str]]`): the characters that are not translated, and how they are written.
        nodes (`list[Node]`): the tags.
        front (`str`), back (`str`): white space around the text.
    """

    text: str = ""
    protected: list[tuple[int, int, str]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    front: str = ""
    back: str = ""

    @property
    def has_words(self) -> bool:
        """True if it has words outside of what is protected."""
        ends = [0, *(end for _, end, _ in self.protected)]
        starts = [*(start for start, _, _ in self.protected), len(self.text)]
        return any(has_words(self.text[end:start]) for end, start in zip(ends, starts, strict=True))


def parse(text: str, kind: str) -> list[str | Segment]:
    """
    Splits a text with markup into what is kept and what is translated.

    Args:
        text (`str`): the text.
        kind (`str`): `"html"` and `"html+attributes"`: tags, entities and placeholders; `"placeholders"`: these alone.

    Returns:
        `list[str | Segment]`: in order, the markup that stands between segments, and the segments.

    Raises:
        ValueError: there is no such kind of markup.
    """
    if kind not in KINDS:
        raise ValueError(f"markup must be {', '.join(map(repr, KINDS[:-1]))} or {KINDS[-1]!r}, but it is {kind!r}.")
    if kind != "placeholders":
        return _parse_html(text)
    return _parse_lines(text, _Builder(as_html=False))


def _parse_lines(text: str, builder: "_Builder") -> list[str | Segment]:
    """Splits a text without tags, whose lines are segments. What is protected may have several lines."""
    parts: list[str | Segment] = []
    # Messages of ICU are the only ones.
    spans = [match.span() for match in PROTECTED.finditer(text)] if "{" in text else []
    begin = 0
    for match in (*LINE_BREAK.finditer(text), None):
        start, end = (len(text),) * 2 if match is None else match.span()
        place = bisect_right(spans, start, key=lambda span: span[1])
        if place < len(spans) and spans[place][0] < start:
            continue
        builder.add_text(text[begin:start])
        parts += [*builder.finish(text[begin:start]), text[start:end]]
        begin = end
    return [part for part in parts if part] or [text]


class _Builder:
    """Collects a segment."""

    def __init__(self, as_html: bool = True) -> None:
        self.as_html = as_html
        self._begin()

    def _begin(self) -> None:
        self.text = ""
        self.protected: list[tuple[int, int, str]] = []
        # The first is no tag: it has the tags that are in no other.
        self.open = [Node("", "", 0, 0)]
        # Start and end of the texts between tags, by stretches in which what is protected may have tags within it.
        self.stretches: list[list[Span]] = [[]]
        self.braces = 0
        self.rubies: list[Span] = []

    def add_text(self, data: str) -> None:
        """Adds text, whose placeholders are protected."""
        if self.as_html:
            data = SPACE.sub(" ", html.unescape(data))
        if data:
            if not self.braces and (data[0].isspace() or self.text[-1:].isspace()):
                self.separate()
            self.braces = max(0, self.braces + data.count("{") - data.count("}"))
            self.stretches[-1].append((len(self.text), len(self.text) + len(data)))
            self.text += data

    def add_protected(self, data: str, markup: str) -> None:
        """Adds text that is not translated; without text, its markup is a tag alone."""
        data = SPACE.sub(" ", html.unescape(data))
        if not data.strip():
            self.add_tag(markup)
            return
        start = len(self.text)
        if self.text[-1:] in ("@", "#") and self.open[-1].start < start:
            # Some programs write the sign of a name in front of its link.
            start, markup = start - 1, self.text[-1] + markup
        self.protected.append((start, len(self.text) + len(data), markup))
        self.text += data
        self.separate()

    def separate(self) -> None:
        """Begins a stretch: nothing that is protected is on both sides."""
        self.stretches.append([])

    def add_tag(self, markup: str) -> None:
        """Adds a tag alone."""
        self.open[-1].nodes.append(Node(markup, "", len(self.text), len(self.text)))

    def open_tag(self, markup: str) -> None:
        """Adds the first tag of a pair."""
        if len(self.open) > MAX_DEPTH:
            self.add_tag(markup)
        else:
            self.open.append(Node(markup, "", len(self.text), len(self.text)))

    def close_tag(self, name: str, markup: str) -> None:
        """Adds the second tag of a pair; without a first one, it is a tag alone."""
        begins = (f"<{name}", re.compile(r"[\s/>]"))
        for depth in range(len(self.open) - 1, 0, -1):
            before = self.open[depth].before.lower()
            if before.startswith(begins[0]) and begins[1].match(before, len(begins[0])):
                self._unwrap_unclosed(depth + 1)
                node = self.open.pop()
                node.after, node.end = markup, len(self.text)
                if self.protected and self.protected[-1][:2] == (node.start, node.end) and not node.nodes:
                    self.protected[-1] = (node.start, node.end, node.before + self.protected[-1][2] + markup)
                else:
                    self.open[-1].nodes.append(node)
                if name == "ruby":
                    self._add_ruby(node)
                return
        self.add_tag(markup)

    def _add_ruby(self, node: Node) -> None:
        """Adds annotated words, unless they are blank or something within them is protected."""
        if self.text[node.start :].strip() and not (self.protected and self.protected[-1][1] > node.start):
            while self.rubies and self.rubies[-1][0] >= node.start:
                self.rubies.pop()
            self.rubies.append((node.start, node.end))

    def _unwrap_unclosed(self, depth: int) -> None:
        """Makes first tags that have no second one into tags alone, whose content is that of the tag around them."""
        while len(self.open) > depth:
            node = self.open.pop()
            self.open[-1].nodes += [replace(node, nodes=[]), *node.nodes]

    def finish(self, source: str) -> list[str | Segment]:
        """Returns the segment; or its markup `source`, if it has nothing to translate. Begins the next one."""
        self._unwrap_unclosed(1)
        self._protect()
        text = self.text.strip()
        front = self.text.index(text)
        end = front + len(text)
        alone = sorted((node for node in all_nodes(self.open[0].nodes) if not node.after), key=lambda node: node.start)
        # Around a tag alone, the text has white space twice, or in front of a full stop.
        spurious = sorted(
            {node.start - 1 for node in alone if front < node.start < end and self._is_spurious(node.start)}
        )
        segment = Segment("", [], self.open[0].nodes, self.text[:front], self.text[end:])
        if text and alone and alone[0].start < front:
            # White space behind a tag stays there.
            places = [*(node.start for node in alone if node.start < front), front]
            for node, begin, after in zip(alone, places, places[1:], strict=False):
                node.before += self.text[begin:after]
            segment.front = self.text[: places[0]]
        if text and alone and alone[-1].start > end:
            segment.back = self.text[alone[-1].start :]

        def place(at: int) -> int:
            return min(max(at - front, 0), len(text)) - bisect_left(spurious, at)

        starts, ends = [front, *(at + 1 for at in spurious)], [*spurious, end]
        segment.text = "".join(self.text[begin:stop] for begin, stop in zip(starts, ends, strict=True))
        segment.protected = [(place(start), place(end), markup) for start, end, markup in self.protected]
        for node in all_nodes(segment.nodes):
            around = self.text[: node.start][-1:], self.text[node.start :][:1]
            node.spaced = (not around[0].strip(), not around[1].strip())
            node.start, node.end = place(node.start), place(node.end)
        self._begin()
        return [segment] if segment.has_words else [source]

    def _protect(self) -> None:
        """Protects text between tags, text that has tags within it, and annotated words that are quoted."""
        for start, end in self._quoted() if self.rubies else ():
            self._take(start, end)
        for stretch in self.stretches:
            first, last = (stretch[0][0], stretch[-1][1]) if len(stretch) > 1 else (0, 0)
            for match in PROTECTED.finditer(self.text[first:last]):
                start, end = first + match.start(), first + match.end()
                if stretch[bisect_right(stretch, start, key=lambda each: each[0]) - 1][1] < end:
                    self._take(start, end, match.lastgroup == "host")
        taken = sorted(self.protected)
        for first, last in (chunk for stretch in self.stretches for chunk in stretch):
            for match in PROTECTED.finditer(self.text[first:last]):
                start, end = first + match.start(), first + match.end()
                place = bisect_right(taken, start, key=lambda each: each[1])
                if place == len(taken) or end <= taken[place][0]:
                    self._take(start, end)
        self._protect_numbers()
        self.protected.sort()

    def _protect_numbers(self) -> None:
        """Protects tags around nothing but a number, such as that of a footnote."""
        taken, last = sorted(self.protected), 0
        for node in list(all_nodes(self.open[0].nodes)):
            content = self.text[node.start : node.end]
            place = bisect_right(taken, node.start, key=lambda each: each[1])
            is_free = last <= node.start and (place == len(taken) or node.end <= taken[place][0])
            if is_free and any(map(str.isdigit, content)) and not has_words(content) and content == content.strip():
                self._take(node.start, node.end)
                last = node.end

    def _quoted(self) -> list[Span]:
        """Returns the annotated words (ruby) of a sentence that has no other words in their script."""
        starts, ends = [start for start, _ in self.rubies], [end for _, end in self.rubies]
        around = "".join(
            self.text[end:start] for end, start in zip([0, *ends], [*starts, len(self.text)], strict=True)
        )
        return self.rubies if has_words(around) and not IDEOGRAPH.search(around) else []

    def _take(self, start: int, end: int, is_word: bool = False) -> None:
        """
        Protects text with the pairs of tags within it and around nothing else, which are written as they were. It is
        not protected if one half of a pair is outside, or, for a word that may be two, if there is a pair within it.
        """
        nodes = self.open[0].nodes
        while True:
            first = bisect_right(nodes, start, key=lambda node: node.end)
            around = nodes[first] if first < len(nodes) else None
            if around is None or around.start > start or around.end < end or around.end - around.start == end - start:
                break
            nodes = around.nodes
        last = bisect_left(nodes, end, key=lambda node: node.start)
        inside = nodes[first:last]
        if any(
            node.start < start or node.end > end or (is_word and 0 < node.end - node.start < end - start)
            for node in inside
        ):
            return
        del nodes[first:last]
        self.protected.append((start, end, self._written(start, end, inside)))

    def _written(self, start: int, end: int, nodes: Sequence[Node]) -> str:
        """Returns a part of the text with these tags."""
        parts = []
        for node in nodes:
            parts += [self._escaped(start, node.start), node.before]
            parts += [self._written(node.start, node.end, node.nodes), node.after]
            start = node.end
        return "".join([*parts, self._escaped(start, end)])

    def _escaped(self, start: int, end: int) -> str:
        return html.escape(self.text[start:end], quote=False) if self.as_html else self.text[start:end]

    def _is_spurious(self, place: int) -> bool:
        """Returns whether there is white space in front of a place that should not be there, without a tag."""
        behind = self.text[place]
        return self.text[place - 1].isspace() and (behind.isspace() or behind in ".,;:!?…")


def all_nodes(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yields tags and the tags within them."""
    for node in nodes:
        yield node
        yield from all_nodes(node.nodes)


class _Tags:
    """Finds the tags, comments and declarations of a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        # Beginnings of comments and declarations that have no end behind them.
        self.unclosed: set[str] = set()

    def find(self, place: int) -> tuple[int, int, re.Match[str] | None] | None:
        """Returns start and end of the first one from a place on, and the match if it is a tag; `None` at the end."""
        while (place := self.text.find("<", place)) >= 0:
            if (match := TAG.match(self.text, place)) is not None:
                return place, match.end(), match
            begin = next((each for each in COMMENT_DELIMITERS if self.text.startswith(each, place)), None)
            if begin is not None and begin not in self.unclosed:
                # <!--> is a comment.
                end = self.text.find(COMMENT_DELIMITERS[begin], place + 2)
                if end >= 0:
                    return place, end + len(COMMENT_DELIMITERS[begin]), None
                self.unclosed.add(begin)
            place += 1
        return None

    def without(self, start: int, end: int) -> str:
        """Returns a part of the text without them."""
        parts = []
        while (found := self.find(start)) is not None and found[0] < end:
            parts.append(self.text[start : found[0]])
            start = found[1]
        return "".join([*parts, self.text[start:end]])


def _parse_html(text: str) -> list[str | Segment]:
    parts: list[str | Segment] = []
    builder, tags = _Builder(), _Tags(text)
    if tags.find(0) is None:
        # Programs send plain text as HTML, too.
        return _parse_lines(text, builder)
    place = begin = 0
    for start, after, end, match in _markup(tags):
        builder.add_text(text[place:start])
        place, markup = end, text[start:end]
        name = "" if match is None else match["name"].lower()
        opens = match is not None and not match["slash"]
        if name in WORD_TAGS:
            builder.separate()
        if name in BLOCK_TAGS:
            parts += [*builder.finish(text[begin:start]), markup]
            begin = end
        elif end > after and name not in RUBY_TAGS:
            builder.add_protected(tags.without(after, text.rindex("<", start, end)), markup)
        elif end > after or not name or (opens and (name in VOID_TAGS or markup.endswith("/>"))):
            builder.add_tag(markup)
        elif opens:
            builder.open_tag(markup)
        else:
            builder.close_tag(name, markup)
    builder.add_text(text[place:])
    return parts + builder.finish(text[begin:])


def _markup(tags: _Tags) -> Iterator[tuple[int, int, int, re.Match[str] | None]]:
    """
    Yields for each tag, comment and declaration where it starts, where it ends, where what is kept with it ends, and
    the match if it is a tag. What is kept with a tag is its element, or nothing.
    """
    ends = _ends(tags.text)
    place = 0
    while (found := tags.find(place)) is not None:
        start, after, match = found
        place = after
        if match is not None and after in ends and _is_kept(match, partial(tags.without, after, ends[after][0])):
            place = ends[after][1]
        yield start, after, place, match


def _is_kept(tag: re.Match[str], content: Callable[[], str]) -> bool:
    """Returns whether the content of an element is not translated."""
    name, attributes = tag["name"].lower(), _attributes(tag["attributes"])
    if name in RAW_TEXT_TAGS | CODE_TAGS | RUBY_TAGS or _forbids(attributes):
        return True
    if name != "a":
        return False
    # Names, and links whose text is their address or its beginning.
    if not {"mention", "hashtag"}.isdisjoint(attributes.get("class", "").lower().split()):
        return True
    shown = html.unescape(content()).strip().rstrip("….")
    return re.fullmatch(r"\S*[./]\S*", shown) is not None and shown in attributes.get("href", "")


def _forbids(attributes: dict[str, str]) -> bool:
    """Returns whether attributes say that their element is not translated."""
    return (
        attributes.get("translate", "").strip().lower() == "no"
        or "notranslate" in attributes.get("class", "").lower().split()
    )


def _attributes(text: str) -> dict[str, str]:
    """Returns the attributes of a tag and their values; of two with one name, the first has a meaning."""
    found: dict[str, str] = {}
    for name, value in ATTRIBUTE.findall(text):
        found.setdefault(name.lower(), html.unescape(value.strip("\"'")))
    return found


def parse_attributes(text: str) -> list[str | Segment]:
    """Splits HTML into values of attributes, which are translated, and the rest; none of it is escaped in segments."""
    parts: list[str | Segment] = []
    builder = _Builder(as_html=False)
    place = 0
    for _, _, _, tag in _markup(_Tags(text)):
        if tag is None or tag["slash"] or _forbids(attributes := _attributes(tag["attributes"])):
            continue
        for match in ATTRIBUTE.finditer(text, *tag.span("attributes")):
            if not _is_read(tag["name"].lower(), match[1].lower(), attributes):
                continue
            quote = match[2][:1] if match[2] and match[2][0] in "\"'" else ""
            if re.search(r"\{[{%]|<%", match[2] or ""):
                # The expression of a template may have quotes of its own.
                continue
            builder.add_text(html.unescape(match[2].strip(quote) if quote else match[2] or ""))
            (value,) = builder.finish("")
            if isinstance(value, Segment):
                parts += [text[place : match.start(2)] + (quote or '"'), value, quote or '"']
                place = match.end(2)
    return [*parts, text[place:]]


def _is_read(tag: str, name: str, attributes: dict[str, str]) -> bool:
    """Returns whether people read the value of an attribute."""
    if name == "content":
        described = attributes.get("name", attributes.get("property", ""))
        return tag == "meta" and described.lower() in DESCRIPTIONS
    if name == "value":
        return tag == "input" and attributes.get("type", "").lower() in ("button", "submit", "reset")
    # Style sheets have titles, too.
    return name in READ_ATTRIBUTES and tag not in ("link", "style")


def _ends(text: str) -> dict[int, Span]:
    """Returns where the second tags of pairs are, by the ends of the first ones."""
    found: dict[int, Span] = {}
    pending: defaultdict[str, list[int]] = defaultdict(list)
    for match in TAG.finditer(text):
        name = match["name"].lower()
        left = pending[name]
        if name == "ruby" or (name in RUBY_TAGS and not match["slash"]):
            # Annotations may lack their second tag.
            for other in (each for each in RUBY_TAGS if pending[each]):
                found[pending[other].pop()] = (match.start(), match.start())
        if match["slash"] and left:
            found[left.pop()] = match.span()
        # Within a script, there are no tags.
        if not (match["slash"] or match[0].endswith("/>") or (left and name in ("script", "style", "textarea"))):
            left.append(match.end())
    return found
