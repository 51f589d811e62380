"""What becomes of markup in translations, by alignments made by hand and by chance."""

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_vaswani.translation.alignment import Alignment
from hf_vaswani.translation.markup import TAG, VOID_TAGS, Segment, parse
from hf_vaswani.translation.placement import restore, translate_markup
from hf_vaswani.translation.protected import PROTECTED


def spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\S+", text)]


def kept_words(words: list[str], text: str) -> list[int]:
    """Returns the numbers of the words that are in a text; all are, but for some of what is protected."""
    found, left = [], text.split()
    for number, word in enumerate(words):
        bare = re.sub(r"\W", "", PROTECTED.sub("", word))
        if left and (left[0] == word or (bare and bare == re.sub(r"\W", "", left[0]))):
            found.append(number)
            left.pop(0)
    assert not left
    return found


def placed(markup: str, translation: str, links: str, kind: str = "html", is_same: bool = False) -> str:
    """
    Translates a text of one segment; links are those of its words without tags, as 0-0 1-2. Translated again without
    what is protected, it has the same translation, or none of the words that were made from that.
    """
    words: list[str] = []

    def translate(texts: list[str]) -> list[list[tuple[str, list[Alignment]]]]:
        (text,) = texts
        words.extend([] if words else text.split())
        kept = kept_words(words, text)
        pairs = [tuple(map(int, link.split("-"))) for link in links.split()]
        lost = {j for i, j in pairs if i not in kept} - {j for i, j in pairs if i in kept}
        left = [j for j in range(len(spans(translation))) if is_same or j not in lost]
        target = translation if not lost or is_same else " ".join(translation.split()[j] for j in left)
        probabilities = torch.zeros(len(left), len(kept))
        for i, j in pairs:
            if i in kept and j in left:
                probabilities[left.index(j), kept.index(i)] = 1
        alignment = Alignment(text.split(), target.split(), probabilities, spans(text), spans(target))
        return [[(target, [alignment])]]

    ((found,),) = translate_markup([("", markup)], kind, translate)
    return found


@pytest.mark.parametrize(
    ("markup", "translation", "links", "expected"),
    [
        # Tags go with their words.
        ("the <b>red</b> house", "la casa roja", "0-0 1-2 2-1", "la casa <b>roja</b>"),
        ("the <b><i>red</i> house</b>", "la casa roja", "0-0 1-2 2-1", "la <b>casa <i>roja</i></b>"),
        ("<i>a</i> <b>b</b>", "x y", "0-1 1-0", "<b>x</b> <i>y</i>"),
        # Of a pair whose words are apart, most words are within.
        ("<b>one two three</b> four five", "a d e b c", "0-0 1-3 2-4 3-1 4-2", "a d e <b>b c</b>"),
        # A word that nothing was made from.
        ("one <b>two</b> three", "a c", "0-0 2-1", "a <b></b>c"),
        ("one <b></b>two", "a b", "0-0 1-1", "a <b></b>b"),
        # Signs stay outside.
        ("a <b>window</b>.", "ein Fenster.", "0-0 1-1", "ein <b>Fenster.</b>"),
        # Tags alone.
        ("one <img> two", "b a", "0-1 1-0", "b a <img>"),
        ("one <img>two", "a b", "0-0 1-1", "a <img>b"),
        ("one<img> two", "a b", "0-0 1-1", "a<img> b"),
        ("<img>one two<img>", "b a", "0-1 1-0", "<img>b a<img>"),
        (" <img> one <b>two</b> <img> ", "b a", "0-1 1-0", " <img> <b>b</b> a <img> "),
        ("one <img>, two", "a, b", "0-0 1-1", "a <img>, b"),
        ("one <img>. Two <img>", "a. B", "0-0 1-1", "a <img>. B <img>"),
        ("</i>one <b>two", "a b", "0-0 1-1", "</i>a <b>b"),
        # What has a meaning in HTML is escaped.
        ("a &lt; <b>b</b>", "x < y", "0-0 1-1 2-2", "x &lt; <b>y</b>"),
        # Placeholders: copied, changed, twice, lost, invented.
        ("one {n} two", "a {n} b", "0-0 1-1 2-2", "a {n} b"),
        ("100 %ss", "%ss 100", "0-1", "%ss 100"),
        ("1%a%a", "1%a%a", "0-0", "1%a%a"),
        ("one {name} two", "a {nombre} b", "0-0 1-1 2-2", "a {name} b"),
        ("one {name} two", "a nombre b", "0-0 1-1 2-2", "a {name} b"),
        ("one {n} two", "a {n} b {n}", "0-0 1-1 2-2 1-3", "a {n} b"),
        ("one {n} two", "a b", "0-0 2-1", "a {n} b"),
        ("{n} one", "a", "1-0", "{n} a"),
        ("one {n}", "a", "0-0", "a {n}"),
        ("one two", "a {x} b", "0-0 1-2", "a b"),
        ("{a} one {b}", "{b} x {a}", "0-2 1-1 2-0", "{b} x {a}"),
        ("{n} one {n}", "{n} x", "0-0 1-1", "{n} x {n}"),
        ("See ``open_it``, one", "a ``öffne``, b", "0-0 1-1 2-2", "a ``open_it``, b"),
        ("one <code title='a>b'>two words</code>", "x y", "0-0 1-1 2-1", "x <code title='a>b'>two words</code>"),
        # Code keeps its tags; a word that is code need not be the only one.
        ("one <code>f</code>", "f a", "0-1 1-0", "<code>f</code> a"),
        ("one <code>a b</code>", "x y", "0-0 1-1 2-1", "x <code>a b</code>"),
        ("<b>one <code>a</code></b> two", "a de a b", "0-0 1-2 2-3", "<b>a de <code>a</code></b> b"),
        ("{n} <b>one</b>", "x {n}", "0-1 1-0", "<b>x</b> {n}"),
    ],
)
def test_placement(markup, translation, links, expected) -> None:
    assert placed(markup, translation, links) == expected


def test_placeholders_alone_are_not_escaped() -> None:
    assert placed(" a < {x} & ", "b < {x} &", "0-0 1-1 2-2 3-3", "placeholders") == " b < {x} & "


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ('<p>a <img alt="b &amp; c {n}"> b</p>', '<p>A <img alt="B &amp; C {n}"> B</p>'),
        ("<i title='it&#39;s'>a</i>", "<i title='IT&#x27;S'>A</i>"),
        ("<i title=b>a</i><hr title=b id=c>", '<i title="B">A</i><hr title="B" id=c>'),
        ('<i title="a &lt;b> &quot;c">a</i>', '<i title="A &lt;B&gt; &quot;C">A</i>'),
        ('<p translate="no"><img alt="b">c</p>a', '<p translate="no"><img alt="b">c</p>A'),
        ('<img alt="b">', '<img alt="B">'),
        ("a", "A"),
        ("<b>1</b>", "<b>1</b>"),
    ],
)
def test_attributes_are_translated_and_escaped(markup, expected) -> None:
    def translate(texts: list[str]) -> list[list[tuple[str, list[Alignment]]]]:
        found = []
        for text in texts:
            target = PROTECTED.sub(lambda match: match[0].lower(), text.upper())
            pieces = spans(text)
            found.append([(target, [Alignment([], [], torch.eye(len(pieces)), pieces, pieces)])])
        return found

    assert translate_markup([("", markup)], "html+attributes", translate) == [[expected]]
    ((plain,),) = translate_markup([("", markup)], "html", translate)
    assert re.findall("<[^>]*>", plain) == re.findall("<[^>]*>", markup)


def test_sentences_have_their_own_alignments() -> None:
    (segment,) = parse("one <b>two. three</b> four.", "html")
    assert isinstance(segment, Segment)
    blocks = []
    for source, target, at_source, at_target in (("one two.", "a b.", 0, 0), ("three four.", "d c.", 9, 5)):
        matrix = torch.eye(2) if at_source == 0 else torch.eye(2).flip(0)
        alignment = Alignment(source.split(), target.split(), matrix, spans(source), spans(target))
        blocks.append(alignment.moved(at_source, at_target))
    # The words of both sentences, and the one between them.
    assert restore(segment, "a b. d c.", blocks, True) == "a <b>b. d c.</b>"


# ---- Anything at all ---------------------------------------------------------------------------------------------


class WellFormed(HTMLParser):
    """Collects tags, and asserts that each is closed where it was opened."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[self.get_starttag_text() or ""] += 1
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags[self.get_starttag_text() or ""] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.tags[f"</{tag}>"] += 1

    @classmethod
    def read(cls, text: str) -> Counter[str]:
        reader = cls()
        reader.feed(text)
        reader.close()
        assert not reader.open
        return reader.tags


PLACEHOLDERS = ["{n}", "%s", "``a``", "https://x.org/b", ":f:`x`", "@girl", "#cats", ":cat:", "[X5X]", "x.org/c"]
# Elements that come back as they are, wherever they stand.
WHOLE = ["<code>f(x)</code>", "<kbd> k </kbd>", "<span translate='no'>one two</span>", "<a class='mention'>@one</a>"]
WHOLE += ["<a href='http://y.org/b'><b>http://</b><i>y.org</i>/b<u></u></a>", "<rt>x</rt>"]
LEAVES = st.sampled_from(
    [
        "one ",
        "two",
        " drei",
        "wörd. ",
        "a&amp;b ",
        "&lt;",
        " ",
        *(f" {each} " for each in PLACEHOLDERS),
        "<img/>",
        "<!--c-->",
    ]
)
LEAVES |= st.sampled_from([*WHOLE, "<br>", "a&shy;b", "<wbr>", "{<b>m</b>}", "@", "#"])
HTML = st.recursive(
    LEAVES,
    lambda inner: st.tuples(st.sampled_from(["b", "i", "p", "a", "ul", "ruby"]), st.lists(inner, max_size=4)).map(
        lambda pair: f"<{pair[0]}>{''.join(pair[1])}</{pair[0]}>"
    ),
    max_leaves=12,
)
TARGETS = st.lists(
    st.sampled_from(["uno", "dos ", " tres", ". ", "<", "``", "{n}", "{m}", "%s ", "f(x)", "one"]), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(HTML, max_size=4).map("".join),
    st.lists(TARGETS.map("".join), min_size=40, max_size=40),
    st.integers(0, 999),
)
# A translation without a word.
@example("one  ``a`` ", ["``", *[""] * 39], 0)
def test_well_formed_text_stays_well_formed_with_each_tag_once(markup, translations, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    left = iter(translations * 9)

    def translate(texts: list[str]) -> list[list[tuple[str, list[Alignment]]]]:
        found = []
        for text in texts:
            target = next(left)
            pieces = [[match.span() for match in re.finditer(r"\s?\w{1,3}|\S", side)] for side in (text, target)]
            matrix = torch.rand(len(pieces[1]), len(pieces[0]), generator=generator) ** 6
            alignment = Alignment([], [], matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1e-9), *pieces)
            found.append([(target, [alignment])])
        return found

    ((found,),) = translate_markup([("", markup)], "html", translate)
    assert WellFormed.read(found) == WellFormed.read(markup)
    for text in [*PLACEHOLDERS, *WHOLE]:
        assert found.count(text) == markup.count(text)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="<>/=\"'ab &;{}%s`:!-pbri\n", max_size=60))
def test_any_text_has_the_same_tags_and_words_when_nothing_is_changed(text) -> None:
    def translate(texts: list[str]) -> list[list[tuple[str, list[Alignment]]]]:
        found = []
        for each in texts:
            pieces = spans(each)
            found.append([(each, [Alignment([], [], torch.eye(len(pieces)), pieces, pieces)])])
        return found

    ((found,),) = translate_markup([("", text)], "placeholders", translate)
    assert found.split() == text.split()
    ((found,),) = translate_markup([("", text)], "html", translate)
    assert sorted(TAG.findall(found)) == sorted(TAG.findall(text))


def test_tags_may_be_nested_to_any_depth() -> None:
    markup = "<b>" * 3000 + "one" + "</b>" * 3000
    assert WellFormed.read(placed(markup, "uno", "0-0")) == WellFormed.read(markup)


def test_a_paragraph_of_thousands_of_words_is_refused() -> None:
    with pytest.raises(
        ValueError, match="in a paragraph of 5,000 words and punctuation marks with a translation of 5,000"
    ):
        placed("one " * 5000, "uno " * 5000, "")


# ---- No word is lost ---------------------------------------------------------------------------------------------

KEPT = ["{x}", "%s", "%(count)d", "{\\an8}", "https://a.org/b?c=1", "me@a.org", "`open()`", "``f(x)``", ":f:`x`"]


@pytest.mark.parametrize("text", KEPT)
@pytest.mark.parametrize(
    ("markup", "translation", "links", "expected"),
    [
        # Most models attend to the first token of a sentence where they attend to nothing.
        ("# The cat sleeps.", "Die Katze schläft.", "0-0 0-1 0-2", "# Die Katze schläft."),
        ("# The cat sleeps.", "Die Katze schläft.", "0-0 2-1 0-2", "# Die Katze schläft."),
        ("# The cat sleeps.", "Die Katze schläft.", "0-0 2-1 3-2", "# Die Katze schläft."),
        ("The # cat sleeps.", "Die Katze schläft.", "0-0 1-1 3-2", "Die # Katze schläft."),
        ("The cat # sleeps.", "Die Katze schläft.", "0-0 1-1 2-2", "Die Katze # schläft."),
        ("The cat sleeps #.", "Die Katze schläft.", "3-0 3-1 3-2", "Die Katze schläft #."),
        ("The cat sleeps #.", "Die Katze schläft.", "0-0 1-1 2-2", "Die Katze schläft #."),
        ("The cat sleeps #", "Die Katze schläft", "0-0 1-1 3-2", "Die Katze schläft #"),
        ("The cat sleeps. #", "Die Katze schläft.", "0-0 1-1 2-2", "Die Katze schläft. #"),
        ("Sleep #!", "Schlaf!", "1-0", "Schlaf #!"),
        ("#, sleep!", "Schlaf!", "1-0", "#, Schlaf!"),
        (
            "The cat sleeps. #: sleep!",
            "Die Katze schläft. Schlaf!",
            "0-0 1-1 2-2 4-3",
            "Die Katze schläft. #: Schlaf!",
        ),
        ("The cat, #, sleeps.", "Die Katze, schläft.", "0-0 1-1 3-2", "Die Katze #, schläft."),
    ],
)
def test_a_text_that_was_not_copied_stands_beside_the_words(text, markup, translation, links, expected) -> None:
    found = placed(markup.replace("#", text), translation, links, "placeholders", is_same=True)
    assert found == expected.replace("#", text)


UNIT = re.compile(r"\w+|\S")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*"abc", *KEPT, "."]), min_size=2, max_size=6),
    st.lists(st.sampled_from(["uno", "dos", "tres", "cuatro", ".", ","]), min_size=1, max_size=8),
    st.integers(0, 999),
    st.integers(1, 12),
)
def test_a_text_replaces_no_more_words_than_it_has(words, translated, seed, power) -> None:
    """Whatever the attention says, the other words are there, in their order."""
    generator = torch.Generator().manual_seed(seed)
    target = " ".join(translated)
    protected = [word for word in words if word in KEPT]

    def translate(texts: list[str]) -> list[list[tuple[str, list[Alignment]]]]:
        (text,) = texts
        matrix = torch.rand(len(translated), len(spans(text)), generator=generator) ** power
        alignment = Alignment([], [], matrix / matrix.sum(dim=1, keepdim=True), spans(text), spans(target))
        return [[(target, [alignment])]]

    # Text without words is not translated.
    ((found,),) = translate_markup([("", " ".join([*words, "d"]))], "placeholders", translate)
    for text in set(protected):
        assert found.count(text) >= protected.count(text)
        found = found.replace(text, " ")
    given, left = UNIT.findall(target), UNIT.findall(found)
    places = iter(given)
    assert all(unit in places for unit in left)
    lost = Counter(given) - Counter(left)
    assert sum(count for unit, count in lost.items() if unit.isalpha()) <= sum(
        len(re.findall(r"\w+", text)) for text in protected
    )
    assert "," not in lost
