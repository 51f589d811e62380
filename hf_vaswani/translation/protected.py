"""Recognizes text that is not translated by its form: addresses, names such as @name and #tag, and placeholders."""

import re

# Letters and digits of the scripts that domains are written in, besides those of Chinese, Japanese and Korean.
LETTER = r"0-9A-Za-z\u00c0-\u052f"
# A URL ends at white space, quotes, brackets without their other half, punctuation that is not ASCII, emoji, and
# letters of Chinese, Japanese and Korean, which follow it without a space.
END = (
    r"\s<>\"'`(){}\[\]|\\^«»¿¡،؛؟۔।॥\u1100-\u11ff\u2000-\u2bff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    r"\ufe30-\ufe4f\uff00-\uffef\U0001f000-\U0001faff\U00020000-\U0003ffff"
)
CJK = (
    r"\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u318f\u31a0-\u9fff\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Punctuation is within a URL, but does not end it.
MARKS = ".,;:!?*"
URL = rf"""(?:[^{END}{MARKS}]++|[{MARKS}]++(?=[^{END}{MARKS}])|\([^{END}]{{0,200}}\)|\[[^{END}]{{0,200}}\]
    |\{{[^{END}]{{0,200}}\}}|'(?=\w{{1,64}}_))"""
# Vowel signs and accents, which are no letters in a regular expression.
SIGNS = (
    r"\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u06d6-\u06ed\u0900-\u0963\u0966-\u0df3\u0e31-\u0e4e\u0eb1-"
    r"\u0ecd\u0f18-\u0fbc\u102b-\u1049\u1056-\u109d\u17b4-\u17d3"
)


def _either_case(names: str) -> str:
    """Returns an expression for any of these names in small or in capital letters: "end.Net" is no domain."""
    return "|".join([*names.split(), *names.upper().split()])


# Domains that are known without a path, and those that need one: others are words without a space between them.
TOP = _either_case(
    "com org net edu gov info biz io dev app xyz social br ch cn cz de dk eu fr gg hu jp kr kz nl pl ru tr tv tw ua "
    "uk za рф укр"
)
TOP_WITH_PATH = _either_case(
    "ac ai blog cafe chat cloud club design digital email fun games group lab life link live media mobi moe money "
    "name network news ninja one online page plus pro pub rocks run shop site space store studio systems team tech "
    "today tools top wiki work works world zone"
)
HOST = rf"[{LETTER}-]{{1,63}}+(?:\.[{LETTER}-]{{1,63}}+)+"

PROTECTED = re.compile(
    rf"""
    # Addresses begin with a letter or digit, and have one of these signs behind their first word.
    (?<![{LETTER}])(?=[{LETTER}_+-]{{1,64}}+[.:@/])(?:
        # Any scheme; a host may have letters of any script.
        [A-Za-z][A-Za-z0-9+-]{{1,30}}+://(?:[\w-]{{1,63}}\.)?(?:[{CJK}]{{1,63}}\.)*{URL}++
        | (?i:www)\d?\.{URL}++
        | (?:mailto|MAILTO|xmpp|urn|geo|magnet|bitcoin):(?=[\w?@.+-]){URL}++
        | (?:tel|sms):\+?\d[\d().-]+\d
        | data:[a-z]{{1,20}}/[\w.+-]{{1,64}}+[;,]{URL}++
        | (?P<host>
            [{LETTER}_][{LETTER}_.+-]{{0,63}}+@{HOST}
            | (?<![@./\\_-])(?:
                (?:[{LETTER}][{LETTER}-]{{0,62}}+\.){{1,8}}(?:
                    (?:(?<=..\.)(?:{TOP})|(?:com?|org|net|ac|gov|edu)\.[a-z]{{2}})(?![{LETTER}_@])
                        (?::\d{{2,5}})?(?:/{URL}*+|[?\#]{URL}++)?
                    | (?:{TOP_WITH_PATH}|[a-z]{{2}}|[A-Z]{{2}})(?::\d{{2,5}})?/{URL}++
                )
                | \d{{1,3}}(?:\.\d{{1,3}}){{3}}(?![{LETTER}_]|\.\d)(?::\d{{1,5}})?(?:/{URL}*+)?
                | localhost(?::\d{{1,5}}|(?=/\w)){URL}*+
            )
        )
    )
    # ``code`` and :roles:`of` reStructuredText; `code` of Markdown.
    | (?::[\w+.-]{{1,64}}){{1,4}}:`[^`\s]+`
    | ```[^`\n]+```
    | ``[^`\n]+``
    | `[^`\s]+`
    # Names: @name, @name@host, !group@host, #tag, :emoji:.
    | (?P<name>
        @(?<![{LETTER}_.+/@-]@)[A-Za-z_](?:[\w.-]{{0,62}}[A-Za-z0-9_])?(?:[@:]{HOST})?
        | !(?<![\w!]!)[\w-]{{1,64}}+@{HOST}
        | \#(?<![{LETTER}_&/\#]\#)[\d_]*+[^\W\d_][\w{SIGNS}]*+\#?
        | :(?<![{LETTER}_:]:)(?:[+-]1|[\d_-]*+[A-Za-z][\w+-]{{1,64}}+):(?:\:[\w+-]{{2,64}}+:)*+(?![{LETTER}_:`])
    )
    # {{% tags %}}, {{{{ expressions }}}}, {{n, plural, one {{# file}} other {{# files}}}}, {{0:N2}}, {{\pos(1, 2)}}.
    | \{{[%\#!][^{{}}\n]{{0,500}}[%\#!]\}}
    | [$\#]?\{{{{2,3}}(?:[^{{}}\n]|\{{[^{{}}\n]{{0,200}}\}}){{0,500}}+\}}{{2,3}}
    | \{{\s*+[\w.-]{{1,64}}+\s*+,\s*+(?:plural|select|selectordinal|number|date|time|choice|spellout|ordinal|duration
        |list)\s*+(?:,(?:[^{{}}]++|\{{(?:[^{{}}]++|\{{(?:[^{{}}]++|\{{(?:[^{{}}]++|\{{[^{{}}]*+\}})*+\}})*+\}})*+\}})*+)?\}}
    | \{{\d{{1,3}}[,:][^{{}}\n]{{0,64}}\}}
    | \{{(?:\\[^{{}}\\\s(]{{1,64}}+(?:\([^{{}}()\n]{{0,200}}\))?)++\}}
    # {{name}}, {{0!r:>10}}, ${{name}}, %{{name}}, #{{name}}.
    | [$%\#]?\{{{{1,3}}[ ]?[^{{}}\s]*+[ ]?\}}{{1,3}}
    # $t(key), $name, $1; @:key; <%= name %>; <0>; __name__; [X5X].
    | \$(?<![\w$]\$)(?:t\([^()\n]{{1,200}}\)|[A-Za-z_]\w*+(?:(?:->|\.)[a-z_]\w*+)*+\$?|[1-9](?!\w|[.,]\d))
    | @(?:\.\w{{1,64}}+)?:(?:[\w.-]{{0,200}}\w|\([^()\s]{{1,200}}\)|\{{[^{{}}\s]{{1,200}}\}})
    | <%(?:[^%<\n]|%(?!>)|<(?!%))*+%>
    | </?\d{{1,4}}[ ]?/?>
    | <(?i:br)[ ]?/?>
    | __(?<!\w__)[A-Za-z](?:\w{{0,64}}?[A-Za-z0-9])?__(?!\w)
    | \[X[ ]?\d{{1,9}}[ ]?X\]
    # %name%, %%name%%, %#@name@, %<name>s, %(name)d, %1$s, %s, %.2f, %lld, %@, %1, %L1, %n, %%. The first
    # letter of a word, as in "%-formatting" and "%change", is no conversion.
    | %%\w{{1,64}}+%%
    | %(?<![\w%]%)[A-Za-z_][\w.-]{{0,64}}+%(?![\w%])
    | %\#@\w{{1,64}}+@
    | %<\w{{1,64}}+>[-+\#0]{{0,3}}\d{{0,4}}(?:\.\d{{1,4}})?[a-zA-Z]
    | %(?:\(\w+\)|\d{{1,2}}\$)[-+\#0]{{0,3}}\d{{0,4}}(?:\.\d{{1,4}})?[hljztL]{{0,2}}[diouxXeEfFgGcrsap@]
    | (?<!\d)%(?!-[A-Za-z]{{2}})[-+\#0]{{0,3}}(?:\d{{1,4}}|\*)?(?:\.(?:\d{{1,4}}|\*))?[hljztL]{{0,2}}
        (?:[dsuf@](?![A-Za-z]{{4}})|[ioxXeEFgGcrap](?![A-Za-z]))
    | %(?<![\w%]%)L?(?:[1-9]\d?(?![\w%])|n(?!\w))
    | %%
    # &amp;
    | &(?:\#\d{{1,7}}|\#[xX][\da-fA-F]{{1,6}}|[A-Za-z][A-Za-z\d]{{1,30}}+);
    """,
    re.VERBOSE,
)
