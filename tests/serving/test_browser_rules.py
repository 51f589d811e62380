"""The rules of sentences in JavaScript, compared with those of Python by texts: in Python, in node and in Chromium."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from itertools import accumulate, cycle, product
from pathlib import Path
from typing import Any

import pytest
import regex

from hf_vaswani.model import sentences_vaswani as sentences
from hf_vaswani.serving.browser_rules import (
    CHARACTERS,
    FUNCTIONS,
    browser_rules,
    javascript_pattern,
    pattern_of_regex,
    sentence_script,
)

PATTERNS = [name for name, value in vars(sentences).items() if isinstance(value, re.Pattern)]

# ---- Texts -------------------------------------------------------------------------------------------------------

# Words, names, abbreviations, links, placeholders and emoji, and words and letters of many scripts.
WORDS = """a The cat it's co-op iPhone ß ǆ ŉ ª º Dr Prof inkl vs bzw z.B e.g Ph.D XIV 3 12 ٣ ² ½ Ⅷ 10:30 3.5 .5 1,5
https://a.b/c www.a.b cat@house.example mailto:a@b os.path.join config.yaml a.b. {name} %s <b>
&lt; _x_ <2de> <2fr> <2pt_BR>
Мы тут ΠΟΥ Πού είναι वह क्षत्रिय हिन्दी هل جاء می\u200cخواهم החתול ድመቷ Ես տուն ეს ᠪᠢ བོད་ཡིན ភាសាខ្មែរ
។ល។ မြန်မာ 你好 行く。」と 好。”、 はい！」ゟ ー 々 ๆ
ไป เก เ แมว กำ ລາວ 고양이 \u1112\u1161\u11ab 𝓗𝓪 𐐷𐐏 𠀀𠀁 😀 👩🏽‍🚀 🇩🇪🇫🇷 1️⃣ e\u0301 \u0301 ᄀ ㄱ ﾊ ﾞ ༄ ꧁ 𑀅 𒀀 ⁈""".split()
MARKS = [*sentences.MARKS, *".!?.!?…。！？、，,;:;·'\"-–—()[]{}«»“”„‘’「」『』※§€%*_/\\|@#^~`<>"]
HIDDEN = [*sentences.HIDDEN, "\u200c", "\u200d", "\ufe0f", "\u3164", "\u115f"]
SPACES = [*filter(str.isspace, CHARACTERS), "  ", "\r\n", "\n\n\t"]
# A character of each kind, each script and each rule of Unicode for characters as people see them.
PROPERTIES = [f"GCB={each}" for each in ("CN", "EX", "L", "LV", "LVT", "PP", "RI", "SM", "T", "V", "ZWJ")]
PROPERTIES += [
    "Lu",
    "Ll",
    "Lt",
    "Lm",
    "Lo",
    "Mn",
    "Mc",
    "Me",
    "Nd",
    "Nl",
    "No",
    "Po",
    "Pd",
    "Ps",
    "Pe",
    "Pi",
    "Pf",
    "Pc",
]
PROPERTIES += ["Sm", "Sc", "Sk", "So", "Cf", "Co", "Extended_Pictographic", "SB=STerm", "SB=ATerm", "InCB=Linker"]


def text_of(random_: random.Random, rare: Sequence[str]) -> str:
    """Returns a text of some words, which mostly have spaces between them and marks behind."""
    kinds: list[Sequence[str]] = [WORDS, MARKS, SPACES, HIDDEN, rare, [" "], [". "]]
    weights = random_.choice(
        [(8, 2, 1, 1, 1, 6, 2), (4, 4, 1, 1, 2, 0, 0), (2, 2, 2, 2, 4, 1, 1), (8, 1, 0, 0, 0, 8, 2)]
    )
    chosen = random_.choices(kinds, weights, k=random_.choice([2, 5, 12, 30]))
    pieces = [random_.choice(kind) * random_.choice([1, 1, 1, 1, 1, 2, 5]) for kind in chosen]
    return "".join(pieces)


def generated(count: int) -> list[str]:
    """Returns texts of all that a rule speaks of, always the same ones."""
    random_ = random.Random(1)
    of_kinds = [regex.findall(rf"\p{{{each}}}", CHARACTERS) for each in PROPERTIES]
    rare = [character for kind in of_kinds for character in random_.sample(kind, min(len(kind), 40))]
    return [text_of(random_, rare) for _ in range(count)]


def cases_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what the functions are called with: each text with a limit, and other texts as its translations."""
    random_ = random.Random(2)
    cases = []
    for text in texts:
        word = random_.choice(WORDS)
        translations = [random_.choice(["", " ", "Ja.", "好。", "「好。」", "」", "x ", word]) for _ in range(7)]
        repeated = f"{random_.choice(['', 'b '])}{f'{word} ' * random_.randint(2, 6)}{random_.choice(['', 'c', word])}"
        source = random_.choice([word, f"<2de> {word}", "你好你好", "a", text])
        limit, split = random_.choice([None, 4, 9, 16, 40]), random_.random() < 0.7
        cases.append({"text": text, "longest": limit, "split": split, "translations": translations})
        cases[-1] |= {"source": source, "repeated": repeated}
    return cases


# ---- The functions in Python and in JavaScript -------------------------------------------------------------------


class Tokenizer(list):
    """The tokenizer of a vocabulary with language tags."""

    def get_added_vocab(self) -> dict[str, int]:
        return {tag: i for i, tag in enumerate(self)}


LANGUAGES = sentences.LanguageTags(Tokenizer(["<2de>", "<2pt_BR>"]))


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Returns what Python makes of a case, with places in texts as JavaScript counts them."""

    def in_javascript(text: str, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
        units = [0, *accumulate(1 + (character > "\uffff") for character in text)]
        return [[units[start], units[end]] for start, end in spans]

    text, translations = case["text"], cycle(case["translations"])
    front, rest = LANGUAGES.split(text)
    # A token for each character.
    encode = lambda source: {"input_ids": ["", *source]}  # noqa: E731
    parts = sentences.cut(front, rest, encode, case["longest"], case["split"])
    return {
        "spans": in_javascript(text, sentences.sentence_spans(text)),
        "visible": sentences.visible(text),
        "front": front,
        "rest": rest,
        "cut": in_javascript(rest, parts.spans),
        "sources": parts.sources,
        "kept": [sentences.kept(rest[start:end]) for start, end in parts.spans],
        "joined": parts.join([next(translations) for _ in parts.spans]),
        "repeated": sentences.without_repetition(case["source"], [case["repeated"]])[0],
    }


ANSWER = """
function answer({ text, longest, split, translations, source, repeated }) {
  const [front, rest] = splitTag(text, TAGS);
  const parts = cut(front, rest, (source) => [...source].length + 1, longest, split);
  return {
    spans: sentenceSpans(text),
    visible: visible(text),
    front,
    rest,
    cut: parts.spans,
    sources: parts.sources,
    kept: parts.kept,
    joined: parts.join(parts.spans.map((_, i) => translations[i % translations.length])),
    repeated: withoutRepetition(source, repeated),
  };
}
"""
SCRIPT = f"{sentence_script()}{ANSWER.replace('TAGS', json.dumps(LANGUAGES.tokenizer))}"
IN_NODE = """
const fs = require("fs");
const { cases, expression } = JSON.parse(fs.readFileSync(0, "utf8"));
fs.writeFileSync(1, JSON.stringify(eval(expression)));
"""


def run_in_node(tmp_path: Path, expression: str, cases: list[Any]) -> Any:
    """Returns the value of an expression about `cases`."""
    program = tmp_path / "program.js"
    program.write_text(SCRIPT + IN_NODE, "utf-8")
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, and there is none")
    text = json.dumps({"cases": cases, "expression": expression})
    done = subprocess.run([node, program], input=text, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def run_in_browser(browser: Any, expression: str, cases: list[Any]) -> Any:
    page = browser.new_page()
    try:
        # A worker that is made of a string, as that of a page.
        program = f"{SCRIPT};onmessage = ({{ data: cases }}) => postMessage({expression});"
        return page.evaluate(
            """([program, cases]) => new Promise((resolve, reject) => {
              const worker = new Worker(URL.createObjectURL(new Blob([program])));
              worker.onerror = (event) => reject(new Error(event.message));
              worker.onmessage = ({ data }) => resolve(data);
              worker.postMessage(cases);
            })""",
            [program, cases],
        )
    finally:
        page.close()


def assert_equal(cases: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    assert len(answers) == len(cases)
    for case, found in zip(cases, answers, strict=True):
        expected = answer(case)
        if found != expected:
            differing = {key: (expected[key], found[key]) for key in expected if expected[key] != found[key]}
            pytest.fail(f"{json.dumps(case)}: {differing}")


@pytest.mark.process
def test_node_handles_texts_as_python_does(tmp_path) -> None:
    cases = cases_of(generated(20_000))
    assert_equal(cases, run_in_node(tmp_path, "cases.map(answer)", cases))


@pytest.mark.process
@pytest.mark.real_data
def test_node_handles_real_texts_as_python_does(tmp_path, multi30k) -> None:
    lines = [line for path in sorted(multi30k.glob("*")) for line in path.read_text("utf-8").split("\n")[:3000]]
    cases = cases_of(
        ["\n".join(lines[i : i + 2]) + " " + " ".join(lines[i + 2 : i + 5]) for i in range(0, len(lines), 5)]
    )
    assert len(cases) > 1000
    assert_equal(cases, run_in_node(tmp_path, "cases.map(answer)", cases))


@pytest.mark.browser
def test_a_worker_in_a_browser_handles_texts_as_python_does(browser) -> None:
    cases = cases_of(generated(5000))
    assert_equal(cases, run_in_browser(browser, "cases.map(answer)", cases))


# ---- Texts that take long ----------------------------------------------------------------------------------------

LONG = [
    ".",
    "(",
    '"',
    "a.",
    "。",
    "!.",
    "។",
    "។»",
    "»",
    "a",
    "ab.",
    "a-",
    "ab@",
    "a+",
    "x:",
    "a.b@",
    "a\u200f.",
    "\u200b",
]
LONG += [
    "ក!",
    "η;",
    "\u00ad",
    "a ",
    "a. ",
    "A. b@",
    "😀",
    "𝓗",
    "🇩🇪",
    "\u0301",
    "เ",
    "ส",
    "한",
    "क्",
    "👩\u200d",
    "\u0600",
    "ᄀ",
]
AROUND = [("", ""), (". ", ""), ("a", "x"), ("ក", "ក"), ("", "។"), ("<2", "")]
TIMES = """cases.map(([text, ...around]) => {
  const before = performance.now();
  const all = around[0] + text.repeat(Math.ceil(500000 / text.length)) + around[1];
  answer({ text: all, longest: 20000, split: true, translations: ["a. "], source: "a", repeated: all });
  answer({ text: all, longest: null, split: false, translations: ["。"], source: all, repeated: "a" });
  return performance.now() - before;
})"""


@pytest.mark.process
def test_long_runs_are_handled_in_no_time(tmp_path) -> None:
    cases = [[text, *around] for text in LONG for around in AROUND[:1]]
    cases += [[text, *around] for text in LONG[:9] for around in AROUND[1:]]
    times = run_in_node(tmp_path, TIMES, cases)
    assert not [(case, time) for case, time in zip(cases, times, strict=True) if time > 10_000]


# ---- The translation of patterns ---------------------------------------------------------------------------------


def in_python(pattern: str) -> re.Pattern[str]:
    """Returns a pattern of JavaScript as one of Python, whose constructs are written otherwise."""
    pattern = re.sub(r"\\u\{(\w+)\}", lambda match: rf"\U{int(match[1], 16):08x}", pattern)
    return re.compile(
        re.sub(r"\\k<(\w+)>", r"(?P=\1)", pattern.replace("(?<g", "(?P<g").replace("(?<p", "(?P<p")).replace(
            "$", r"\Z"
        )
    )


@pytest.mark.parametrize(
    "source", [r"\s", r"\S", r"\w", r"\W", r"\d", r"\D", r"[^\W\d_ᄀ-ᇿ]", r"[^\s.]", "[^a]", "a", "[]a-c^-]"]
)
def test_a_class_has_the_characters_that_python_finds(source) -> None:
    translated = javascript_pattern(re.compile(source))
    # Without a name of Unicode, which each browser reads as its own version of it.
    assert re.fullmatch(r"\[\^?(\\u\{[0-9a-f]+\}-?)+\]", translated)
    assert in_python(translated).findall(CHARACTERS) == re.findall(source, CHARACTERS)


@pytest.mark.parametrize(
    "source", [r"\p{L}", r"[\p{L}--[\p{Lm}ªº]]", r"[[a-f]&&[^b-d]]", r"\P{P}", r"\w", r"[\p{Sm}||\d]"]
)
def test_a_set_has_the_characters_that_regex_finds(source) -> None:
    pattern = regex.compile(source, regex.V1)
    assert in_python(pattern_of_regex(pattern)).findall(CHARACTERS) == pattern.findall(CHARACTERS)


def test_translated_patterns_find_what_the_patterns_find() -> None:
    texts = [*generated(1500), "x\n", "a a a a a a b", "a a a ab", "ភ។ល។ក"]
    names = [*PATTERNS, "WORDS", "BEHIND_PUNCTUATION", "CHARACTER"]
    for name in names:
        pattern, translated = getattr(sentences, name), in_python(browser_rules()[name])
        for text in texts:
            found = [[match.span() for match in each.finditer(text)] for each in (pattern, translated)]
            assert found[0] == found[1], (name, text)


def test_a_character_is_what_regex_takes_for_one() -> None:
    random_, translated = random.Random(3), in_python(browser_rules()["CHARACTER"])
    kinds = ["Extended_Pictographic", "InCB=Linker", "InCB=Consonant", "InCB=Extend", *PROPERTIES[:11]]
    of_kinds = [regex.findall(rf"\p{{{each}}}", CHARACTERS) for each in kinds] + [list("a\r\n\u0e40\u0e01")]
    for _ in range(50_000):
        text = "".join(random_.choice(random_.choice(of_kinds)) for _ in range(random_.randint(2, 6)))
        assert translated.findall(text) == sentences.CHARACTER.findall(text), ascii(text)


CONSTRUCTS = [
    "a++a",
    "(?:a|ab)++c",
    "a*+b",
    "a{2,3}?b",
    "(a)b\\1{2}",
    "(?<!a)b",
    "(?<=ab)c",
    "a(?=b)|(?!ab)[^c]",
    "(ab?)+?c",
    r"a\Z",
]


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_a_construct_finds_what_it_finds_in_python(source) -> None:
    pattern = re.compile(source)
    translated = in_python(javascript_pattern(pattern))
    for text in map("".join, product("abc", repeat=7)):
        found = [[match.span() for match in each.finditer(text)] for each in (pattern, translated)]
        assert found[0] == found[1], text


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        *((source, 0) for source in (r"\ba", "^a", "a$", "a.", "(?>a)b", "(a)?(?(1)b|c)", "(?i:a)", "(?:(a)|b)\\1")),
        *((source, 0) for source in ("(?:a*)*", "(?:a?){2,}", "(?<=(a))b", "(?<=a{2}+)b", "(?:(a)b)+\\1", r"\Aa")),
        *(("a", flags) for flags in (re.IGNORECASE, re.MULTILINE, re.DOTALL, re.ASCII)),
    ],
)
def test_a_construct_that_is_not_known_is_refused(source, flags) -> None:
    with pytest.raises(ValueError, match="not translated to JavaScript"):
        javascript_pattern(re.compile(source, flags))


@pytest.mark.parametrize(
    "source", [r"\X", "a", "[a]+", "[a]{e<=1}", r"\m[a]", "([a])", "[a]|[b]", "(?i)[a]", "(?r)[a]", "[a]$", "."]
)
def test_a_construct_of_regex_that_is_not_known_is_refused(source) -> None:
    with pytest.raises(ValueError, match="not translated to JavaScript"):
        pattern_of_regex(regex.compile(source, regex.V1))


def test_the_functions_use_every_rule() -> None:
    script = FUNCTIONS.read_text("utf-8")
    used = set(re.findall(r"\bRULES\.(\w+)", script)) | set(re.findall(r'"([A-Z_]+)"', script))
    assert used == set(browser_rules()) and {*PATTERNS} <= used
    # A mark outside the first plane would be two characters of a string in JavaScript.
    assert all(max(rule) <= "\uffff" for rule in browser_rules().values())
    assert "\nimport " not in script and "export " not in script
