"""Text with markup: HTML or placeholders, as segments that are translated and what is kept around and within them."""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

KINDS = ("html", "placeholders")

# ---- What is not translated --------------------------------------------------------------------------------------

# URLs and addresses; ``code`` and :roles:`of` reStructuredText; `code` of Markdown; {name}, {0!r:>10}, ${name},
# {{name}}; %s, %1$s, %(name)d, %.2f.
PROTECTED = re.compile(
    r"""
    \b(?:https?|ftp)://[^\s<>"'`]*[\w/\#=&%-]
    | \b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+
    | (?::[\w+.-]{1,64}){1,4}:`[^`\s]+`
    | ``[^`\n]+``
    | `[^`\s]+`
    | \$?\{\{?[^{}\s]*\}\}?
    | %(?:\(\w+\)|\d+\$)?[-+\#0]*(?:\d+|\*)?(?:\.(?:\d+|\*))?[diouxXeEfFgGcrsa](?!\w)
    """,
    re.VERBOSE,
)
# A word, or any other sign.
UNIT = re.compile(r"\w+|[^\w\s]")
SPACE = re.compile(r"[ \t\r\n\f]+")

# ---- HTML --------------------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""
    (?P<other> <!--.*?--> | <![^>]*> | <\?.*?\?> )
    | < (?P<slash>/?) (?P<name>[A-Za-z][\w:.-]*) (?P<attributes>(?: [^<>"'] | "[^"]*" | '[^']*' )*) >
    """,
    re.VERBOSE | re.DOTALL,
)
# Tags between which text is a segment of its own; all others are within a sentence.
BLOCK_TAGS = frozenset(
    "address article aside audio base blockquote body br caption center col colgroup dd details dialog dir div dl dt "
    "fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html iframe legend "
    "li link main math menu meta nav noscript ol optgroup option p pre script section select source style summary svg "
    "table tbody td template textarea tfoot th thead title tr track ul video".split()
)
# Those of them whose content is not translated, and tags of such content within a sentence.
OPAQUE = frozenset("script style pre textarea svg math template".split())
CODE = frozenset("code kbd samp var tt".split())
EMPTY = frozenset("area base br col embed frame hr img input link meta param source track wbr".split())
NOT_TRANSLATED = re.compile(
    r"""\btranslate\s*=\s*["']?no\b|\bclass\s*=\s*(?:["'][^"']*)?\bnotranslate\b""", re.IGNORECASE
)


@dataclass
class Node:
    """
    A pair of tags, or a tag alone, within a segment.

    Attributes:
        before (`str`), after (`str`): the tags; a tag alone has nothing after it.
        start (`int`), end (`int`): the characters of the segment's text that it encloses.
        nodes (`list[Node]`): the tags within it.
        spaced (`tuple[bool, bool]`): whether white space is in front of a tag alone, and behind it.
        is_pair (`bool`): it is not a tag alone.
    """

    before: str
    after: str
    start: int
    end: int
    nodes: list["Node"] = field(default_factory=list)
    spaced: tuple[bool, bool] = (False, False)
    is_pair: bool = True


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
        """Whether anything in it is to be translated."""
        start = 0
        for begin, end, _ in [*self.protected, (len(self.text), len(self.text), "")]:
            if re.search(r"[^\W\d_]", self.text[start:begin]):
                return True
            start = end
        return False


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
    check_kind(kind)
    if kind == "placeholders":
        builder = _Builder(as_html=False)
        builder.add_text(text)
        return builder.finish(text)
    return _parse_html(text)


def check_kind(kind: str) -> None:
    """Raises a `ValueError` if there is no such kind of markup."""
    if kind not in KINDS:
        raise ValueError(f"markup must be {' or '.join(map(repr, KINDS))}, but it is {kind!r}.")


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
        self.open[-1].nodes.append(self._node(markup, is_pair=False))

    def open_tag(self, markup: str) -> None:
        """Adds the first tag of a pair."""
        self.open.append(self._node(markup, is_pair=True))

    def _node(self, markup: str, is_pair: bool) -> Node:
        return Node(markup, "", len(self.text), len(self.text), is_pair=is_pair)

    def close_tag(self, name: str, markup: str) -> None:
        """Adds the second tag of a pair; without a first one, it is a tag alone."""
        begins = (f"<{name}", re.compile(r"[\s/>]"))
        for depth in range(len(self.open) - 1, 0, -1):
            before = self.open[depth].before.lower()
            if before.startswith(begins[0]) and begins[1].match(before, len(begins[0])):
                self._leave(depth + 1)
                node = self.open.pop()
                node.after, node.end = markup, len(self.text)
                self.open[-1].nodes.append(node)
                return
        self.add_tag(markup)

    def _leave(self, depth: int) -> None:
        """Makes first tags that have no second one into tags alone, whose content is that of the tag around them."""
        while len(self.open) > depth:
            node = self.open.pop()
            self.open[-1].nodes += [replace(node, nodes=[], is_pair=False), *node.nodes]

    def finish(self, source: str) -> list[str | Segment]:
        """Returns the segment; or its markup `source`, if it has nothing to translate. Begins the next one."""
        self._leave(1)
        text = self.text.strip(" \t\r\n\f")
        front = self.text.index(text)
        segment = Segment(text, [], self.open[0].nodes, self.text[:front], self.text[front + len(text) :])

        def place(of_all: int) -> int:
            return min(max(of_all - front, 0), len(text))

        segment.protected = [(place(start), place(end), markup) for start, end, markup in self.protected]
        for node in all_nodes(segment.nodes):
            around = self.text[: node.start][-1:], self.text[node.start :][:1]
            node.spaced = (not around[0].strip(), not around[1].strip())
            node.start, node.end = place(node.start), place(node.end)
        self.text, self.protected, self.open = "", [], [Node("", "", 0, 0)]
        return [segment] if segment.has_words else [source]


def all_nodes(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yields tags and the tags within them."""
    for node in nodes:
        yield node
        yield from all_nodes(node.nodes)


def _parse_html(text: str) -> list[str | Segment]:
    parts: list[str | Segment] = []
    builder = _Builder()
    place = begin = 0
    while (match := TOKEN.search(text, place)) is not None:
        builder.add_text(text[place : match.start()])
        place, markup = match.end(), match[0]
        name = (match["name"] or "").lower()
        first = bool(name) and not match["slash"]
        ends_itself = name in EMPTY or markup.endswith("/>")
        opaque = (
            first and not ends_itself and (name in OPAQUE or NOT_TRANSLATED.search(match["attributes"]) is not None)
        )
        end = _end_of(text, name, place) if opaque or (first and name in CODE and not ends_itself) else None
        if name in BLOCK_TAGS:
            parts += builder.finish(text[begin : match.start()])
            begin = place = place if end is None else end[1]
            parts.append(text[match.start() : place])
        elif end is not None:
            builder.add_protected(TOKEN.sub("", text[place : end[0]]), text[match.start() : end[1]])
            place = end[1]
        elif not name or (first and ends_itself):
            builder.add_tag(markup)
        elif first:
            builder.open_tag(markup)
        else:
            builder.close_tag(name, markup)
    builder.add_text(text[place:])
    return parts + builder.finish(text[begin:])


def _end_of(text: str, name: str, place: int) -> tuple[int, int] | None:
    """Returns where the second tag of a pair is, or `None` if there is none."""
    depth = 1
    for match in re.compile(rf"<(/?){re.escape(name)}(?=[\s/>])[^>]*>", re.IGNORECASE).finditer(text, place):
        # Scripts are no markup.
        depth += -1 if match[1] else (not match[0].endswith("/>") and name not in ("script", "style", "textarea"))
        if not depth:
            return match.span()
    return None
