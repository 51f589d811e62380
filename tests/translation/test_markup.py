"""What is translated of text with markup, and what is protected."""

import pytest

from hf_vaswani.translation.markup import PROTECTED, Segment, parse


def kept(text: str) -> list[str]:
    return [match[0] for match in PROTECTED.finditer(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello {name}, {0!r:>10} ${x} {{y}} {}", ["{name}", "{0!r:>10}", "${x}", "{{y}}", "{}"]),
        ("%s of %d, %1$s, %(name)s, %.2f, %-5d, %*d", ["%s", "%d", "%1$s", "%(name)s", "%.2f", "%-5d", "%*d"]),
        ("50% of it, 100%sure, 5 % done, 1 {b c} d", []),
        ("%dx%d %dms %(n)sGB %lld %@ 100%%", ["%d", "%d", "%d", "%(n)s", "%lld", "%@", "%%"]),
        ("%{name} #{name} {{ name }} {{{name}}}", ["%{name}", "#{name}", "{{ name }}", "{{{name}}}"]),
        (
            "See :func:`len`, :py:class:`~a.B`, ``x = 1`` and `code`.",
            [":func:`len`", ":py:class:`~a.B`", "``x = 1``", "`code`"],
        ),
        ("See :ref:`the text <label>`.", []),
        (
            "Go to https://x.org/a_(b)?c=d#e. Write to me.you@x.org, too.",
            ["https://x.org/a_(b)?c=d#e", "me.you@x.org"],
        ),
        ("a {b c} d, f(x), a@b", []),
    ],
)
def test_what_is_protected(text, expected) -> None:
    assert kept(text) == expected


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
    with pytest.raises(ValueError, match="markup must be 'html' or 'placeholders', but it is 'xml'"):
        parse("a", "xml")


@pytest.mark.variants(2)
@pytest.mark.parametrize("beginning", ["<!--", "<?", "<code>", "<b>", "`", "{", "a.", ":a", '<a "', "<pre>", "%0"])
def test_what_never_ends_is_text(beginning) -> None:
    """A hundred thousand characters take less than the minutes of a search from each of them."""
    text = beginning * (100_000 // len(beginning))
    assert "".join(part if isinstance(part, str) else part.text for part in parse(text, "html")) == text


@pytest.mark.parametrize("text", ["42", "10:30", "😀", "★", "—", "&#8203;", "&shy;", "42 {n}", "{name}: 5 %s"])
def test_segments_without_words_are_kept(text) -> None:
    markup = f"<p>one</p><p>{text}</p><li><b>{text}</b></li>"
    assert plain(markup) == ["one"]
    assert "".join(part if isinstance(part, str) else part.text for part in parse(markup, "html")) == markup
