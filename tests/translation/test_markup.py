"""What is translated of text with markup, and what is protected."""

import time

import pytest

from hf_vaswani.translation.markup import Segment, parse, parse_attributes


def plain(text: str, kind: str = "html") -> list[str]:
    return [part.text for part in parse(text, kind) if isinstance(part, Segment)]


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("<p>One <b>two</b>.</p><p>Three&nbsp;&amp;\n four</p>", ["One two.", "Three\xa0& four"]),
        ("One<br>two<img src='>'> three <!-- <b> --> four", ["One", "two three four"]),
        ("<script>if (a < b) f('<p>one</p>')</script><style>p {}</style><pre>two</pre>three", ["three"]),
        ("Use <code>a &lt; <i>b</i></code> <span translate=no>now</span>", ["Use a < b now"]),
        ("<div class='x notranslate'>one <div>two</div></div>three", ["three"]),
        ("<p>{name} &mdash; 5</p><p>%s: {x}</p>", []),
        ("a < b > c <2de> d", ["a < b > c <2de> d"]),
        ("<B>one</b> <x id='1'/>two</x>", ["one two"]),
        ("<script><!-- <b </script><p>one</p> <!-- two --><p>three</p>", ["one", "three"]),
        ("one <code title='a>b'>two</code>&nbsp;", ["one two"]),
        ("<img> one <img> two <img>. three <br/><img>, four <b> five</b> ", ["one two. three", ", four  five"]),
        ('<a title=it\'s>one</a> <a href=/o\'neil b="\'>">two</a><img alt="5" tall">', ["one two"]),
        ("<b data-translate='no' title='translate=no' class='x-notranslate'>one</b>", ["one"]),
        # Comments, sections and templates end where theirs do.
        ("<!DOCTYPE html><![CDATA[<p>a > b]]><!--[if IE]><p>c</p><![endif]--><p>one", ["one"]),
        ("one <!--> two <!---> three <%= a > b %> four <?php if ($a > 1) ?>.", ["one two three four."]),
        ("<P CLASS=a CLASS=b>one <B>two</P>three<BR/>four <I>five</I>", ["one two", "three", "four five"]),
        ("<svg><text>one</text></svg><textarea>two</textarea>three &#233;&#xe9;&eacute;", ["three ééé"]),
        ("<button>one</button><button>two</button><label>three</label>four", ["one", "two", "three", "four"]),
        ("one wo<wbr>rd", ["one word"]),
        ("one <0>two</0> <1/>three 3 <4 5> 6", ["one two three 3 <4 5> 6"]),
        # Annotations are beside what they annotate.
        ("<ruby>東京<rp>(</rp><rt>とうきょう</rt><rp>)</rp></ruby>で<ruby>雪<rt>ゆき</ruby>だ", ["東京で雪だ"]),
        ("", []),
    ],
)
def test_what_is_translated(markup, expected) -> None:
    assert plain(markup) == expected
    # What is not translated is as it was.
    if not expected:
        assert "".join(map(str, parse(markup, "html"))) == markup


def test_placeholders_are_a_kind_without_tags() -> None:
    assert plain(" <b>{x} a</b> &amp; ", "placeholders") == ["<b>{x} a</b> &amp;"]
    assert parse("", "placeholders") == [""]
    with pytest.raises(
        ValueError, match="markup must be 'html', 'html.attributes' or 'placeholders', but it is 'xml'"
    ):
        parse("a", "xml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One two<br />three.", ["One two<br />three."]),
        ("One two.<br />Three.", ["One two.", "Three."]),
        ("One?<BR>“Two!” <br/>Three", ["One?", "“Two!”", "Three"]),
        ("- One<br />- two<br />three", ["- One", "- two<br />three"]),
        ("<br />One.<br />", ["<br />One."]),
        ("一。<br />二", ["一。", "二"]),
        (" ... <br /> {x} <br />- 2", []),
    ],
)
def test_lines_of_subtitles(text, expected) -> None:
    assert plain(text, "placeholders") == expected
    kept = [part for part in parse(text, "placeholders") if isinstance(part, str)]
    assert sum(len(part) for part in kept) + sum(map(len, expected)) == len(text.replace("  ", " "))


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    "beginning", ["<!--", "<?", "<code>", "<b>", "`", "{", "a.", ":a", '<a "', "<pre>", "%0", "<%", "<ruby>", "<rt>"]
)
def test_what_never_ends_is_text(beginning) -> None:
    """A hundred thousand characters take less than the minutes of a search from each of them."""
    text = beginning * (100_000 // len(beginning))
    assert "".join(part if isinstance(part, str) else part.text for part in parse(text, "html")) == text


@pytest.mark.parametrize("text", ["42", "10:30", "😀", "★", "—", "&#8203;", "&shy;", "42 {n}", "{name}: 5 %s"])
def test_segments_without_words_are_kept(text) -> None:
    markup = f"<p>one</p><p>{text}</p><li><b>{text}</b></li>"
    assert plain(markup) == ["one"]
    assert "".join(part if isinstance(part, str) else part.text for part in parse(markup, "html")) == markup


def protected(markup: str) -> list[str]:
    """Returns how what is protected is written, and asserts that there are no tags besides it."""
    (segment,) = (part for part in parse(markup, "html") if isinstance(part, Segment))
    assert not segment.nodes
    return [written for _, _, written in segment.protected]


MASTODON = (
    '<a href="https://hotels.example/blue" target="_blank" rel="nofollow noopener"><span class="invisible">https://</span>'
    '<span class="ellipsis">hotels.example/</span><span class="invisible">blue</span></a>'
)


@pytest.mark.parametrize(
    "kept",
    [
        # As Mastodon, Pleroma, Misskey, Friendica and Lemmy write links, names and tags.
        MASTODON,
        MASTODON.replace('href="https://hotels.example/blue"', ""),
        '<a href="https://hotels.example/blue/sky">hotels.example/blue/s…</a>',
        '<a href="https://hotels.example/?a=1&amp;b=2">https://hotels.example/?a=1&amp;b=2</a>',
        '<span class="h-card"><a href="https://a.example/@girl" class="u-url mention">@<span>girl</span></a></span>',
        '<span class="h-card" translate="no"><a href="https://a.example/@girl" class="u-url mention">@<span>'
        "girl</span></a></span>",
        '<a href="https://a.example/@girl" class="u-url mention">@girl@a.example</a>',
        '@<a href="https://a.example/girl" class="u-url mention"><span>girl</span></a>',
        '<a href="https://a.example/tags/cats" class="mention hashtag" rel="tag">#<span>cats</span></a>',
        '<a class="hashtag" data-tag="cats" href="https://a.example/tag/cats" rel="tag ugc">#cats</a>',
        '<a href="https://a.example/tags/cats" rel="tag">#cats</a>',
        '<a href="https://a.example/c/cats">!cats@a.example</a>',
        # Any tags within.
        "<span>@<b>girl</b></span>",
        "#<b>cats</b>",
        "<i>https://</i><b>hotels.example</b>/<i></i>blue",
        "https://<wbr>hotels.example/<wbr><!-- one -->blue",
        "{<b>name</b>}",
        "{n, plural, one {<b>#</b> cat} other {<b>#</b> cats}}",
        "<b><i>{name}</i></b>",
        "``f(<i>x</i>)``",
    ],
)
def test_tags_within_what_is_protected_stay_there(kept) -> None:
    assert protected(f"<p>One {kept} two.</p>") == [kept]
    assert protected(f"<p>{kept} one, {kept}</p>") == [kept, kept]


@pytest.mark.parametrize(
    ("markup", "kept"),
    [
        # Half a pair.
        ("<b>See https://a.example</b>/path", ["https://a.example"]),
        # What touches an address is a word of its own.
        ("<b>Home</b><i>cats.com/x</i>", ["<i>cats.com/x</i>"]),
        ("<a>Home</a><a>https://a.example</a>", ["<a>https://a.example</a>"]),
        ("<i>See <a>#<span>cats</span></a>and dogs</i>", ["<a>#<span>cats</span></a>"]),
        # Words of which the address has the letters.
        ('<a href="https://a.example/cats">cats</a> and <a href="/either/or">either</a>', []),
    ],
)
def test_tags_around_more_are_placed(markup, kept) -> None:
    (segment,) = parse(markup, "html")
    assert isinstance(segment, Segment) and segment.nodes
    assert [written for _, _, written in segment.protected] == kept


@pytest.mark.parametrize(
    ("markup", "is_quoted"),
    [
        ("The word # is old.", True),
        ("Слово # here", True),
        ("古い#です。", False),
        ("#", False),
        ("#, #", False),
    ],
)
def test_annotated_words_are_translated_with_their_language(markup, is_quoted) -> None:
    ruby = "<ruby>漢字<rp>(</rp><rt>かんじ</rt><rp>)</rp></ruby>"
    (segment,) = parse(markup.replace("#", ruby), "html")
    assert isinstance(segment, Segment) and segment.text == markup.replace("#", "漢字")
    assert [written for _, _, written in segment.protected] == ([ruby] if is_quoted else [])
    assert bool(segment.nodes) != is_quoted


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ('<p>one <img alt="A cat" src="a cat"><a title=\'Her dog\' href=x>two</a></p>', ["A cat", "Her dog"]),
        ("<INPUT PLACEHOLDER=Name VALUE=Anna><input type=submit value='Send it'>", ["Name", "Send it"]),
        ('<button aria-label="Close">x</button><option label="One">1<track label=Two>', ["Close", "One", "Two"]),
        ('<meta name="description" content="A page"><meta property="og:title" content="Two">', ["A page", "Two"]),
        ('<meta name="viewport" content="width"><meta charset="utf-8"><link title="Print" rel=stylesheet>', []),
        ('<textarea placeholder="Say it">Not this</textarea><code title="A list">x</code>', ["Say it", "A list"]),
        ('<svg aria-label="A picture"><text title="Not this"></text></svg>', ["A picture"]),
        ("<img alt='Tom &amp; Ada &quot;one&#34;'><img alt=\"it&#39;s > {n}\">", ['Tom & Ada "one"', "it's > {n}"]),
        ('<img alt><img alt=""><img alt="42"><img alt="{n}">', []),
        ('<div translate="no" title="one"><img alt="two"></div><img class=notranslate alt="two">', []),
        ('<!-- <img alt="one"> --><img alt="two', []),
    ],
)
def test_attributes_that_people_read(markup, expected) -> None:
    parts = parse_attributes(markup)
    assert [part.text for part in parts if isinstance(part, Segment)] == expected
    if not expected:
        assert "".join(map(str, parts)) == markup


LINES = [
    "  The cat {x}.",
    "\tdogs",
    "42",
    "",
    "{b} sleeps",
    "a {n, plural,\n one {# x}\n other {# y}} b",
    "www.a.example",
]


@pytest.mark.parametrize("kind", ["placeholders", "html", "html+attributes"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r", "\u2028", "\x85", "\n\n"])
def test_each_line_of_plain_text_is_a_segment(kind, line_break) -> None:
    """A placeholder that is left out beside a line break must not take it along."""
    parts = parse(line_break.join(LINES), kind)
    segments = [part.text for part in parts if isinstance(part, Segment)]
    expected = [line.strip() for line in LINES if line not in ("42", "", "www.a.example")]
    as_html = kind != "placeholders"
    assert segments == ([each.replace("\n ", " ").replace("\n", " ") for each in expected] if as_html else expected)
    written = "".join(part if isinstance(part, str) else f"{part.front}{part.text}{part.back}" for part in parts)
    if as_html:
        assert written.count(line_break) == line_break.join(LINES).count(line_break) - (2 if line_break == "\n" else 0)
    else:
        assert written == line_break.join(LINES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<p>The cat<sup>1</sup> sleeps.<sup>[2]</sup></p>", ["<sup>1</sup>", "<sup>[2]</sup>"]),
        ("<b>42</b> cats", ["<b>42</b>"]),
        ("In (<a href=x><i>2024</i></a>) it", ["<a href=x><i>2024</i></a>"]),
        ("<a href=x><i>20</i>24</a> it", ["<a href=x><i>20</i>24</a>"]),
        ("<b>4 cats</b> <i>!</i> <i> 5 </i> <code>6</code>", ["<code>6</code>"]),
        ("<a>https://a.example/<b>42</b></a> it", ["<a>https://a.example/<b>42</b></a>"]),
    ],
)
def test_tags_around_a_number_keep_it(text, expected) -> None:
    assert [
        written for part in parse(text, "html") if isinstance(part, Segment) for *_, written in part.protected
    ] == (expected)


def test_many_lines_and_numbers_take_no_longer() -> None:
    for text in ("<b>1</b> a ", "<b><i>1</i></b>", "a\n{x} b\n", "{n, plural,\n one {a}}\n"):
        for kind in ("html", "placeholders"):
            start = time.process_time()
            parse(text * 20_000, kind)
            assert time.process_time() - start < 20
