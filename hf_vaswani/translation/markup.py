"""Text with markup: HTML or placeholders, as segments that are translated and what is kept around and within them."""

import html
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..model.sentences_vaswani import has_words

KINDS = ("html", "placeholders")

# ---- What is not translated --------------------------------------------------------------------------------------

# URLs and addresses; ``code`` and :roles:`of` reStructuredText; `code` of Markdown; {name}, {0!r:>10}, ${name},
# %{name}, {{ name }}; %(name)d, %1$s, %s, %.2f, %lld, %@, %%.
PROTECTED = re.compile(
    r"""
    \b(?:(?:https?|ftp)://|www\.)(?:\([^\s<>"'`()]{0,200}\)|[^\s<>"'`()])+(?<![.,;:!?])
    | \b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+
    | (?::[\w+.-]{1,64}){1,4}:`[^`\s]+`
    | ``[^`\n]+``
    | `[^`\s]+`
    | [$%\#]?\{{1,3}[ ]?[^{}\s]*[ ]?\}{1,3}
    | %(?:\(\w+\)|\d{1,2}\$)[-+\#0]{0,3}\d{0,4}(?:\.\d{1,4})?[hljztL]{0,2}[diouxXeEfFgGcrsap@]
    | (?<!\d)%[-+\#0]{0,3}(?:\d{1,4}|\*)?(?:\.(?:\d{1,4}|\*))?[hljztL]{0,2}[diouxXeEfFgGcrsap@]
    | %%
    """,
    re.VERBOSE,
)
# A word, or any other character but white space.
WORD = re.compile(r"\w+|[^\w\s]")
SPACE = re.compile(r"[ \t\r\n\f]+")

# ---- HTML --------------------------------------------------------------------------------------------------------

# Quotation marks have a meaning behind an equals sign alone.
TAG = re.compile(
    r"""<(?P<slash>/?)(?P<name>[A-Za-z][\w:.-]*+)(?P<attributes>(?:[^<>=]++|=\s*+(?:"[^"]*+"|'[^']*+')?+)*+)>"""
)
ATTRIBUTE = re.compile(r"""([^\s=/"'<>]++)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s>]*+))?+""")
# Comments, processing instructions and declarations, with their ends.
COMMENT_DELIMITERS = {"<!--": "-->", "<?": "?>", "<!": ">"}
# A tag within more than these is kept where it is, without regard to its other half.
MAX_DEPTH = 100
# Tags between which text is a segment of its own; all others are within a sentence.
BLOCK_TAGS = frozenset(
    "address article aside audio base blockquote body br caption center col colgroup dd details dialog dir div dl dt "
    "fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html iframe legend "
    "li link main math menu meta nav noscript ol optgroup option p pre script section select source style summary svg "
    "table tbody td template textarea tfoot th thead title tr track ul video".split()
)
# Those of them whose content is not translated, and tags of such content within a sentence.
RAW_TEXT_TAGS = frozenset("script style pre textarea svg math template".split())
CODE_TAGS = frozenset("code kbd samp var tt".split())
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
        kind (`str`): `"html"`: tags, entities and placeholders; `"placeholders"`: these alone.

    Returns:
        `list[str | Segment]`: in order, the markup that stands between segments, and the segments.

    Raises:
        ValueError: there is no such kind of markup.
    """
    if kind == "html":
        return _parse_html(text)
    if kind not in KINDS:
        raise ValueError(f"markup must be {' or '.join(map(repr, KINDS))}, but it is {kind!r}.")
    builder = _Builder(as_html=False)
    builder.add_text(text)
    return builder.finish(text)


class _Builder:
    """Collects a segment."""

    def __init__(self, as_html: bool = True) -> None:
        self.as_html = as_html
        self.text = ""
        self.protected: list[tuple[int, int, str]] = []
        # The first is no tag: it has the tags that are in no other.
        self.open = [Node("", "", 0, 0)]

    def add_text(self, data: str) -> None:
        """Adds text, whose placeholders are protected."""
        if self.as_html:
            data = SPACE.sub(" ", html.unescape(data))
        for match in PROTECTED.finditer(data):
            start, end = (len(self.text) + place for place in match.span())
            self.protected.append((start, end, html.escape(match[0], quote=False) if self.as_html else match[0]))
        self.text += data

    def add_protected(self, data: str, markup: str) -> None:
        """Adds text that is not translated; without text, its markup is a tag alone."""
        data = SPACE.sub(" ", html.unescape(data))
        if data.strip():
            self.protected.append((len(self.text), len(self.text) + len(data), markup))
            self.text += data
        else:
            self.add_tag(markup)

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
                self.open[-1].nodes.append(node)
                return
        self.add_tag(markup)

    def _unwrap_unclosed(self, depth: int) -> None:
        """Makes first tags that have no second one into tags alone, whose content is that of the tag around them."""
        while len(self.open) > depth:
            node = self.open.pop()
            self.open[-1].nodes += [replace(node, nodes=[]), *node.nodes]

    def finish(self, source: str) -> list[str | Segment]:
        """Returns the segment; or its markup `source`, if it has nothing to translate. Begins the next one."""
        self._unwrap_unclosed(1)
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
        self.text, self.protected, self.open = "", [], [Node("", "", 0, 0)]
        return [segment] if segment.has_words else [source]

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
                end = self.text.find(COMMENT_DELIMITERS[begin], place + len(begin))
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
    builder, tags, ends = _Builder(), _Tags(text), _ends(text)
    place = begin = 0
    while (found := tags.find(place)) is not None:
        start, after, match = found
        builder.add_text(text[place:start])
        place, markup = after, text[start:after]
        name = "" if match is None else match["name"].lower()
        opens = match is not None and not match["slash"]
        is_void = name in VOID_TAGS or markup.endswith("/>")
        keeps = match is not None and (name in RAW_TEXT_TAGS | CODE_TAGS or _keeps_content(match["attributes"]))
        end = ends.get(after) if opens and not is_void and keeps else None
        if name in BLOCK_TAGS:
            parts += builder.finish(text[begin:start])
            begin = place = place if end is None else end[1]
            parts.append(text[start:place])
        elif end is not None:
            builder.add_protected(tags.without(after, end[0]), text[start : end[1]])
            place = end[1]
        elif not name or (opens and is_void):
            builder.add_tag(markup)
        elif opens:
            builder.open_tag(markup)
        else:
            builder.close_tag(name, markup)
    builder.add_text(text[place:])
    return parts + builder.finish(text[begin:])


def _keeps_content(attributes: str) -> bool:
    """Returns whether the attributes of a tag say that its content is not translated."""
    for name, value in ATTRIBUTE.findall(attributes):
        words = value.strip("\"'").lower().split()
        if (name.lower() == "translate" and words == ["no"]) or (name.lower() == "class" and "notranslate" in words):
            return True
    return False


def _ends(text: str) -> dict[int, tuple[int, int]]:
    """Returns where the second tags of pairs are, by the ends of the first ones."""
    found: dict[int, tuple[int, int]] = {}
    pending: defaultdict[str, list[int]] = defaultdict(list)
    for match in TAG.finditer(text):
        name = match["name"].lower()
        left = pending[name]
        if match["slash"]:
            if left:
                found[left.pop()] = match.span()
        # Within a script, there are no tags.
        elif not match[0].endswith("/>") and not (left and name in ("script", "style", "textarea")):
            left.append(match.end())
    return found
