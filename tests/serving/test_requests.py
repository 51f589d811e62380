"""Requests that programs send to a server, in each form that it takes, and those that it refuses."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from fastapi.testclient import TestClient

from hf_vaswani.serving import requests
from hf_vaswani.serving.requests import Limits

from .served import echo_app


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with TestClient(echo_app(("en", "de"), limits=Limits(50, 5))) as found:
        yield found


ASKED = {"q": "ab", "source": "en", "target": "de"}


# ---- What is taken -----------------------------------------------------------------------------------------------

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
LANGUAGES = "&source=en&target=de"
URL = "/translate?source=en&target=de"


@pytest.mark.parametrize(
    ("text", "path", "request_body"),
    [
        ("abc", "/translate", {"data": {"q": "abc", "source": "en", "target": "de", "alternatives": "0"}}),
        ("abc", "/translate", {"files": {"q": (None, "abc"), "source": (None, "en"), "target": (None, "de")}}),
        # As curl -d sends it.
        ("abc", "/translate", {"content": '{"q": "abc", "source": "en", "target": "de"}', "headers": FORM}),
        ("Mädchen", "/translate", {"content": f"q=Mädchen{LANGUAGES}".encode(), "headers": FORM}),
        ("Mädchen", "/translate", {"content": f"q=M%C3%A4dchen{LANGUAGES}", "headers": FORM}),
        ("", "/translate", {"content": f"q={LANGUAGES}&alternatives=&api_key=", "headers": FORM}),
        # In the query string, whole or in part.
        ("a b+c&d", f"{URL}&q=a+b%2Bc%26d", {}),
        ("Mädchen", f"{URL}&q=M%C3%A4dchen&format=text&api_key=", {}),
        ("a\nb", f"{URL}&q=a%0Ab", {"headers": FORM}),
        ("abc", f"{URL}&q=abc", {"headers": {"Content-Type": "application/json"}}),
        ("abc", URL, {"content": "q=abc", "headers": FORM}),
        ("abc", URL, {"files": {"q": (None, "abc")}}),
        ("abc", URL, {"json": {"q": "abc"}}),
        # The body is what JSON says.
        ("abc", "/translate?q=x&source=fr&target=fr", {"json": ASKED | {"q": "abc"}}),
        # What is left out may be sent as null or as nothing.
        ("abc", "/translate", {"json": {**ASKED, "q": "abc", "format": None, "alternatives": None, "api_key": None}}),
        ("abc", "/translate", {"json": {**ASKED, "q": "abc", "format": "", "alternatives": "", "api_key": ""}}),
        ("abc", "/translate", {"json": {**ASKED, "q": "abc", "alternatives": "0", "secret": "x", "more": [1]}}),
        ("a\tb\nc", "/translate", {"content": b'{"q": "a\tb\nc", "source": "en", "target": "de"}'}),
        # JSON may begin with a byte order mark, and its type may say anything else.
        ("abc", "/translate", {"content": b"\xef\xbb\xbf" + json.dumps(ASKED | {"q": "abc"}).encode()}),
        ("ä", "/translate", {"json": ASKED | {"q": "ä"}, "headers": {"Content-Type": "text/plain; charset=UTF-8"}}),
    ],
    ids=str,
)
def test_forms(client, text, path, request_body) -> None:
    answer = client.post(path, **request_body)
    assert (answer.status_code, answer.json()) == (200, {"translatedText": f"de: {text}"})


def test_the_limit_of_characters_is_that_of_each_text(client) -> None:
    texts = ["x" * 50] * 5
    assert client.post("/translate", json=ASKED | {"q": texts}).json()["translatedText"] == [f"de: {texts[0]}"] * 5


# ---- What is refused ---------------------------------------------------------------------------------------------


def asked(**body: Any) -> dict[str, str]:
    return {"content": json.dumps(ASKED | body)}


NO_JSON = "The body is neither JSON nor a form."
NO_FORM = "The form cannot be read: it must be UTF-8, without files."
NO_QUERY = NO_FORM.replace("form", "query string")
TWICE = "A field is given twice: a list of texts needs JSON."


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (asked(source="fr"), "fr-de is not translated here, only en-de."),
        (asked(source="auto", target="fr"), "Nothing is translated into fr here, only into de."),
        (asked(source="\ud800"), "?-de is not translated here, only en-de."),
        (asked(q=5), "q must be a text, or a list of texts."),
        (asked(q=["a", None]), "q must be a text, or a list of texts."),
        (asked(format="pdf"), "format must be text, or html whose tags are kept."),
        (asked(alternatives=11), "alternatives must be a number of further translations, from 0 to 10."),
        (asked(alternatives="many"), "alternatives must be a number of further translations, from 0 to 10."),
        (asked(target=None), "target must be the code of the target language."),
        (asked(q="x" * 51), "The text has 51 characters, but at most 50 are accepted."),
        (asked(q=["x", "x" * 51]), "The text has 51 characters, but at most 50 are accepted."),
        (asked(q=["x"] * 6), "There are 6 texts, but at most 5 are accepted."),
        (asked(q="x\ud800"), "The text is no Unicode: it has an unpaired surrogate."),
        ({"content": b""}, "q is missing: it is a text, or a list of texts."),
        (asked(q=None), "q must be a text, or a list of texts."),
        (asked(q={"text": "a"}), "q must be a text, or a list of texts."),
        (asked(source=""), "-de is not translated here, only en-de."),
        ({"content": b"nonsense"}, NO_JSON),
        ({"content": b"\xff"}, NO_JSON),
        ({"content": b"[" * 50_000}, NO_JSON),
        ({"content": b'"text"'}, 'The body must be an object, as in {"q": "Hello", "source": "en", ...}.'),
        ({"json": {"source": "en", "target": "de"}}, "q is missing: it is a text, or a list of texts."),
        ({"files": {"q": ("q.txt", b"abc")}}, NO_FORM),
        # A comma is missing.
        ({"content": b'{"q": "a", "source": "en", "target": "de" "api_key": "b" }'}, NO_JSON),
        ({"content": b"q=M\xe4dchen" + LANGUAGES.encode(), "headers": FORM}, NO_FORM),
        ({"content": b"q=M%E4dchen" + LANGUAGES.encode(), "headers": FORM}, NO_FORM),
        ({"content": f"q=a&q=b{LANGUAGES}", "headers": FORM}, TWICE),
        ({"params": {"q": ["a", "b"]}}, TWICE),
        ({"params": {"q": "a"}, "content": f"q=a{LANGUAGES}", "headers": FORM}, TWICE),
        ({"params": {str(number): "" for number in range(21)}}, NO_QUERY),
    ],
    ids=lambda value: str(value)[:90],
)
def test_bad_requests_are_one_sentence(client, request_body, message) -> None:
    answer = client.post("/translate", **request_body)
    assert (answer.status_code, answer.json()) == (400, {"error": message})


def test_large_bodies(monkeypatch) -> None:
    monkeypatch.setattr(requests, "REQUEST_OVERHEAD", 1000)
    with TestClient(echo_app(("en", "de"), limits=Limits(100, 5))) as client:
        answer = client.post("/translate", content=b"x" * 3000)
        assert (answer.status_code, answer.json()) == (413, {"error": "The request is larger than 2,200 bytes."})
        assert 'hf_vaswani_requests_total{path="/translate",status="413"} 1.0' in client.get("/metrics").text
        # A text of so many characters is accepted however JSON writes them.
        text = json.dumps({"q": "😀" * 100, "source": "en", "target": "de"})
        assert len(text) > 1200 and client.post("/translate", content=text).status_code == 200


@pytest.mark.parametrize("texts", [12, 40])
def test_many_long_texts_fit_into_a_request(monkeypatch, texts) -> None:
    monkeypatch.setattr(requests, "REQUEST_OVERHEAD", 1000)
    with TestClient(echo_app(("en", "de"), limits=Limits(1000, texts))) as client:
        body = {**ASKED, "q": ["x" * 1000] * (texts - 1)}
        assert client.post("/translate", json=body).status_code == 200
        answer = client.post("/translate", json=ASKED | {"q": ["é" * 1000] * texts})
        assert (answer.status_code, answer.json()) == (
            413,
            {"error": f"The request is larger than {texts + 1},000 bytes."},
        )


def test_a_body_that_does_not_arrive(monkeypatch) -> None:
    monkeypatch.setattr(requests, "BODY_TIMEOUT", 0.05)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/translate", "headers": [], "query_string": b""}
    asyncio.run(echo_app(("en", "de"))(scope, lambda: asyncio.sleep(60), send))
    assert sent[0]["status"] == 408 and json.loads(sent[1]["body"]).keys() == {"error"}
