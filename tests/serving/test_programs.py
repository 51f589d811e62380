"""
Requests as programs send them, and what they read of the answers. The programs' own sentences are not here, but their
methods, paths, headers, fields and markup are.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from fastapi.testclient import TestClient

from hf_vaswani.serving.server import Limits

from .served import echo_app

JSON, FORM = {"Content-Type": "application/json"}, {"Content-Type": "application/x-www-form-urlencoded"}
ENGLISH, GERMAN = "The cat sleeps on the table.", "Die Katze schläft auf dem Tisch."


def multipart(**fields: str) -> bytes:
    """Returns a form as a browser sends it, between lines of `--x`."""
    part = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    return ("".join(part.format(*each) for each in fields.items()) + "--x--\r\n").encode()


@dataclass
class Recorded:
    """
    A request, and what its program reads.

    Attributes:
        program, method, path, headers, body: the request.
        reads (`tuple`): keys and indices of what is read of the answer.
        finds: what it reads.
    """

    program: str
    path: str
    body: Any
    reads: tuple[str | int, ...]
    finds: Any
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    method: str = "POST"

    def __str__(self) -> str:
        return f"{self.program} {self.path[:20]} {str(self.body)[:30]}"


def asks(**fields: Any) -> str:
    """Returns the body of a request from English to German."""
    return json.dumps({"q": ENGLISH, "source": "en", "target": "de"} | fields)


WEBLATE = JSON | {"Referer": "https://weblate.example/", "Accept": "application/json; charset=utf-8"}
MASTODON = JSON | {
    "User-Agent": "Mastodon/4.5.0 (http.rb/5.3.1; +https://mastodon.example/)",
    "Accept-Encoding": "gzip",
    "Digest": "SHA-256=0",
}
URLLIB = FORM | {"Accept-Encoding": "identity", "User-Agent": "Python-urllib/3.12"}
NO_BODY = {"Accept-Encoding": "gzip, deflate", "Accept": "*/*", "Content-Length": "0"}
POST = (
    '<p>The cat sleeps. <a href="https://mastodon.example/tags/cats" class="mention hashtag" rel="tag">#<span>cats'
    '</span></a> <span translate="no">:cat:</span></p>'
)
MARKED = ["Save [X5X]", "The [X4X] sees the [X12X] and the dog.", "Save all"]
MULTIPART = {"Content-Type": "multipart/form-data; boundary=x", "Origin": "https://example.org"}

RECORDED = [
    # The check of its settings, and strings with placeholders.
    Recorded("Weblate", "/translate", asks(api_key="", q=["test"]), ("translatedText",), ["de: test"], WEBLATE),
    Recorded(
        "Weblate",
        "/translate",
        asks(api_key="", q=MARKED),
        ("translatedText",),
        [f"de: {text}" for text in MARKED],
        WEBLATE,
    ),
    Recorded(
        "Mastodon",
        "/translate",
        asks(q=[POST, "The dog", "Yes", ""], format="html", api_key=None),
        ("translatedText",),
        [f"de: {text}" for text in (POST, "The dog", "Yes", "")],
        MASTODON,
    ),
    Recorded(
        "Mastodon, language unknown",
        "/translate",
        asks(q=[f"<p>{GERMAN}</p>"], source="auto", format="html", api_key=None),
        ("detectedLanguage", 0, "language"),
        "de",
        MASTODON,
    ),
    Recorded(
        "libretranslatepy",
        "/translate",
        "q=The+cat+sleeps+on+the+table.&source=en&target=de",
        ("translatedText",),
        f"de: {ENGLISH}",
        URLLIB,
    ),
    Recorded("libretranslatepy", "/detect", "q=Die+Katze+schl%C3%A4ft.", (0, "language"), "de", URLLIB),
    # A GET with an empty body.
    Recorded("libretranslatepy", "/languages", "", (0, "code"), "en", URLLIB, "GET"),
    Recorded(
        "deep-translator",
        "/translate?q=The+cat+%26+the+dog+sleep.&source=en&target=de&format=text&api_key=none",
        None,
        ("translatedText",),
        "de: The cat & the dog sleep.",
        NO_BODY,
    ),
    Recorded("deep-translator", "/detect?q=Die+Katze+schl%C3%A4ft.", None, (0, "language"), "de", NO_BODY),
    # Lines of a subtitle.
    Recorded(
        "Subtitle Edit",
        "/translate",
        '{"q": "The cat sleeps<br />on the table.", "source": "en", "target": "de"}',
        ("translatedText",),
        "de: The cat sleeps<br />on the table.",
        JSON | {"accept": "application/json"},
    ),
    Recorded(
        "Lingarr",
        "/translate",
        '{"q":"The teacher\\u0027s cat \\u2026","source":"en","target":"de","format":"text","api_key":""}',
        ("translatedText",),
        "de: The teacher's cat …",
        JSON | {"Accept": "application/json"},
    ),
    # Its address ended in a slash.
    Recorded("Lingarr", "//translate", asks(format="text", api_key=None), ("translatedText",), f"de: {ENGLISH}"),
    Recorded(
        "Akkoma",
        "/translate",
        asks(q=f"<p>{GERMAN}</p>", source="auto", format="html", api_key=None),
        ("detectedLanguage", "language"),
        "de",
    ),
    Recorded(
        "SearXNG", "/translate", asks(alternatives=3), ("alternatives",), [f"de{i}: {ENGLISH}" for i in (1, 2, 3)]
    ),
    Recorded(
        "LibreTranslate's page",
        "/translate",
        multipart(q=ENGLISH, source="auto", target="de", format="text", alternatives="3", api_key=""),
        ("detectedLanguage", "language"),
        "en",
        MULTIPART,
    ),
    # It detects first, and a key that is not set is empty.
    Recorded("Discourse", "/detect", "q=Die+Katze+schl%C3%A4ft+auf+dem+Tisch.&api_key=", (0, "language"), "de", FORM),
    Recorded("Discourse", "/detect", "q=&api_key=", (0, "language"), "en", FORM),
    Recorded(
        "Discourse",
        "/translate",
        "q=%3Cp%3EThe+cat+sleeps.%3C%2Fp%3E%0A&source=en&target=de&format=html&api_key=",
        ("translatedText",),
        "de: <p>The cat sleeps.</p>\n",
        FORM,
    ),
    Recorded(
        "a plug-in for subtitles",
        "/translate",
        asks(q=["The cat", "The dog"] * 25, source="en", format="text"),
        ("translatedText", 49),
        "de: The dog",
    ),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with TestClient(echo_app(("en", "de"))) as found:
        yield found


def play(client: Any, recorded: Recorded) -> Any:
    url = f"http://testserver{recorded.path}"
    return client.request(recorded.method, url, content=recorded.body, headers=recorded.headers)


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_a_program_gets_what_it_reads(client, recorded) -> None:
    answer = play(client, recorded)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    found = answer.json()
    for key in recorded.reads:
        found = found[key]
    assert found == recorded.finds


# ---- Languages ---------------------------------------------------------------------------------------------------


def weblate_pair(codes: set[str], source: str, target: str) -> tuple[str, str] | None:
    """Returns the codes that Weblate sends for a pair of its own ones, or `None` if it takes it for unsupported."""

    def possible(code: str) -> list[str]:
        parts = code.split("_")
        return ["-".join(parts[:count]) for count in range(len(parts), 0, -1)]

    pairs = [(first, second) for first in possible(source) for second in possible(target)]
    return next((pair for pair in pairs if codes.issuperset(pair) and pair[0] != pair[1]), None)


@pytest.mark.parametrize(
    ("model", "source", "target", "sent"),
    [
        (("en", "de"), "en", "de", ("en", "de")),
        (("en", "de"), "en_US", "de_AT", ("en", "de")),
        (("en", "pt_BR"), "en", "pt_BR", ("en", "pt-BR")),
        (("en", "pt-br"), "en", "pt_BR", ("en", "pt-BR")),
        (("en", "pb"), "en", "pt_BR", ("en", "pt-BR")),
        (("en", "pt"), "en", "pt_BR", ("en", "pt")),
        (("en", "zh"), "en", "zh_Hans", ("en", "zh")),
        (("en", "zh_Hans"), "en", "zh_Hans", ("en", "zh-Hans")),
        (("en", "zt"), "en", "zh_Hant", ("en", "zh-Hant")),
        (("zh_hant", "en"), "zh_Hant", "en", ("zh-Hant", "en")),
        (("eng", "deu"), "en", "de", ("en", "de")),
        (("en", "de"), "en", "fr", None),
        (("en", "zh_Hans"), "en", "zh_Hant", None),
    ],
)
def test_weblate_finds_a_language_and_its_model(model, source, target, sent) -> None:
    app = echo_app(model)
    with TestClient(app) as client:
        codes = {language["code"] for language in client.get("/languages", headers=WEBLATE).json()}
        assert weblate_pair(codes, source, target) == sent
        if sent is not None:
            body = {"api_key": "", "q": ["test"], "source": sent[0], "target": sent[1]}
            assert client.post("/translate", json=body, headers=WEBLATE).status_code == 200
            assert app.state.kinds[0][1:3] == model


def test_mastodon_knows_what_can_be_translated() -> None:
    with TestClient(echo_app(("en", "de"), ("fr", "de"), ("de", "pt_BR"))) as client:
        languages = client.get("/languages", headers=MASTODON).json()
        targets = {each["code"]: [code for code in each["targets"] if code != each["code"]] for each in languages}
        assert targets == {"en": ["de"], "fr": ["de"], "de": ["pt-BR"], "pt-BR": []}


# ---- Limits and errors -------------------------------------------------------------------------------------------


def test_a_list_of_weblate_has_no_common_limit() -> None:
    with TestClient(echo_app(("en", "de"))) as client:
        texts = [f"{number} {'The cat sleeps. ' * 300}" for number in range(20)]
        body = {"api_key": "", "q": texts, "source": "en", "target": "de"}
        answer = client.post("/translate", json=body, headers=WEBLATE)
        assert answer.json()["translatedText"] == [f"de: {text}" for text in texts]


# As Mastodon tells them apart: too many requests, a quota, anything else; Weblate then asks nothing for half an hour.
def test_a_program_is_refused_only_for_its_key() -> None:
    with TestClient(echo_app(("en", "de"), api_keys=["sesame"], limits=Limits(100))) as client:
        keys = {None: 403, "": 403, "wrong": 403, "sesame": 200}
        assert {key: client.post("/translate", content=asks(api_key=key)).status_code for key in keys} == keys
        for body in (asks(target="fr"), asks(q="x" * 101), asks(format="markdown"), asks(q=None)):
            fields = json.loads(body) | {"api_key": "sesame"}
            answer = client.post("/translate", json=fields)
            assert answer.status_code == 400 and isinstance(answer.json()["error"], str)
        url = "/translate?q=The+cat&source=en&target=de&api_key="
        assert client.post(url + "sesame").status_code == 200 and client.post(url + "wrong").status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/translate", {"source": "en", "target": "de"}, 400),
        ("POST", "/translate", {"q": "a", "source": "en", "target": "zz"}, 400),
        ("POST", "/translate", {"q": "a", "source": "en", "target": "de", "format": "pdf"}, 400),
        ("POST", "/translate", {"q": "a", "source": "en", "target": "de", "alternatives": "x"}, 400),
        ("GET", "/translate", None, 405),
        ("POST", "/detect", None, 400),
        ("GET", "/detect", None, 405),
        ("POST", "/health", None, 405),
        ("POST", "/languages", None, 405),
        ("POST", "/suggest", {"q": "a", "s": "b", "source": "en", "target": "de"}, 404),
        ("POST", "/translate_file", {"source": "en", "target": "de"}, 404),
    ],
)
def test_errors_have_the_form_of_libretranslate(client, method, path, body, status) -> None:
    for settings in ({"data": body}, {"json": body}) if method == "POST" else ({},):
        answer = client.request(method, path, **settings)
        assert answer.status_code == status and answer.json().keys() == {"error"}
