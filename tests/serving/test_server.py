"""The server's interface, which is LibreTranslate's."""

import asyncio
import copy
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

import transformers
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hf_vaswani.serving import server as serving
from hf_vaswani.serving.batcher import MAX_TEXTS, OverdueError
from hf_vaswani.serving.server import Limits, build_server
from hf_vaswani.translation.alignment import ended_by

from ..conftest import dear
from .served import echo_app, make_pipeline, model_of


@pytest.fixture(scope="module")
def pipeline(teacher) -> Any:
    return transformers.pipeline("translation", model=str(teacher))


@pytest.fixture(scope="module")
def client(pipeline) -> Iterator[Any]:
    with TestClient(build_server({"one": pipeline})) as found:
        yield found


ASKED = {"q": "ab", "source": "en", "target": "de"}


def ask(client: Any, path: str = "/translate", **body: Any) -> Any:
    return client.post(path, json=ASKED | body)


async def answers_to(app: Any, receive: Callable[[], Any]) -> list[Any]:
    """Sends a request to `/translate` as a server does, by its messages, and returns those of the answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/translate", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent


def texts_of(found: Any) -> list[str]:
    return [each["translation_text"] for each in found]


# ---- Translations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text_format", "kept"), [("text", "\n\n"), ("html", "<b>")])
def test_texts_are_translated_sentence_by_sentence_in_their_order(client, pipeline, text_format, kept) -> None:
    texts = ["one two", "", "One two three. Nine six.\n\n  seven", "<p>One <b>two</b>. Nine six.</p>"]
    markup = "html" if text_format == "html" else None
    expected = texts_of(pipeline(texts, split_sentences=True, markup=markup))
    assert len(set(expected)) == 4 and "".join(expected).count(kept) == 1
    assert ask(client, q=texts, format=text_format).json() == {"translatedText": expected}
    for text, translation in zip(texts, expected, strict=True):
        answer = ask(client, q=text, format=text_format)
        assert (answer.status_code, answer.json()) == (200, {"translatedText": translation})
    assert ask(client, q=[]).json() == {"translatedText": []}


@pytest.mark.parametrize("text_format", ["text", "html"])
def test_alternatives(client, pipeline, text_format) -> None:
    markup = "html" if text_format == "html" else None
    found = pipeline("one two", num_return_sequences=4, num_beams=4, split_sentences=True, markup=markup)
    first, *others = texts_of(found)
    expected = {"translatedText": first, "alternatives": others}
    assert ask(client, q="one two", alternatives=3, format=text_format).json() == expected
    several = ask(client, q=["one two", "six"], alternatives=3, format=text_format).json()
    assert several["translatedText"][0] == first and several["alternatives"][0] == others
    assert [len(each) for each in several["alternatives"]] == [3, 3]


@pytest.mark.slow
def test_alternatives_beside_an_engine(pipeline, teacher) -> None:
    pytest.importorskip("ctranslate2")
    greedy = transformers.pipeline("translation", model=str(teacher), engine="ctranslate2", approximate=True)
    with TestClient(build_server({"one": greedy})) as client, TestClient(build_server({"one": pipeline})) as other:
        answers = [ask(each, q="one two", alternatives=3).json() for each in (client, other)]
        assert answers[0] == answers[1] and len(answers[0]["alternatives"]) == 3
        assert client.app.state.batchers[0].translate.pipelines["one"].engine is not None


def test_batches_are_those_of_the_device(pipeline, monkeypatch) -> None:
    servers = [
        build_server({"one": model_of(("en", "de")), "two": model_of(("de", "en"), device=device)})
        for device in ("cpu", "cuda:1")
    ]
    sizes = [[each.max_texts for each in server.state.batchers] for server in servers]
    assert sizes == [[MAX_TEXTS] * 2, [8 * MAX_TEXTS] * 2]


def test_alternatives_have_the_limits_of_the_pipeline(pipeline) -> None:
    with_engine = copy.copy(pipeline)
    with_engine.engine, with_engine.limits = object(), lambda *_: (5, 5, 5)
    found = serving.BatchTranslator({"one": with_engine}).for_alternatives["one"]
    assert found.engine is None and found.limits is with_engine.limits


def record_kinds(client: Any, monkeypatch: Any) -> list[Any]:
    """Returns the kinds that are translated from now on."""
    kinds: list[Any] = []
    translate = client.app.state.batchers[0].translate

    def spy(kind: Any, texts: list[str]) -> Any:
        kinds.append(kind)
        return translate(kind, texts)

    monkeypatch.setattr(client.app.state.batchers[0], "translate", spy)
    return kinds


def test_the_language_is_recognised(monkeypatch) -> None:
    pipeline = make_pipeline(("en", "de"), ("fr", "de"), ("de", "en"))
    with TestClient(build_server({"one": pipeline})) as client:
        kinds = record_kinds(client, monkeypatch)
        french = "Il fait beau aujourd'hui."
        answer = ask(client, q=french, source="auto").json()
        assert answer["detectedLanguage"]["language"] == "fr"
        several = ask(client, q=[french, french], source="auto").json()
        assert [each["language"] for each in several["detectedLanguage"]] == ["fr", "fr"]
        ask(client, q=french, source="DE", target="en")
        assert [kind[:3] for kind in kinds] == [("one", "fr", "de")] * 2 + [("one", "de", "en")]
        (found,) = client.post("/detect", json={"q": french}).json()
        assert found["language"] == "fr" and 50 < found["confidence"] <= 100
        for undecidable in ("12", "https://example.org", "@name #tag"):
            found = client.post("/detect", data={"q": undecidable}).json()
            assert found == [{"language": "en", "confidence": 0.0}]
        (found,) = client.post("/detect", json={"q": [french, french]}).json()
        assert found["language"] == "fr"


def test_each_pair_of_languages_has_its_model(pipeline, monkeypatch) -> None:
    with TestClient(build_server({"one": pipeline, "two": make_pipeline(("de", "en"))})) as client:
        kinds = record_kinds(client, monkeypatch)
        assert ask(client).status_code == ask(client, source="de", target="en").status_code == 200
        assert [kind[:3] for kind in kinds] == [("one", "en", "de"), ("two", "de", "en")]
        assert [each["code"] for each in client.get("/languages").json()] == ["en", "de"]


GERMAN, ENGLISH = "Die Katze schläft auf dem Tisch.", "The cat sleeps on the table."


def test_text_in_the_target_language_is_given_back() -> None:
    app = echo_app(("en", "de"), ("fr", "de"))
    with TestClient(app) as client:
        answer = ask(client, q=GERMAN, source="auto", alternatives=2).json()
        assert answer.pop("detectedLanguage")["language"] == "de"
        assert answer == {"translatedText": GERMAN, "alternatives": []}
        texts = [GERMAN, ENGLISH, "", "Il fait beau aujourd'hui.", "42", GERMAN]
        answer = ask(client, q=texts, source="auto").json()
        expected = [texts[0], f"de: {texts[1]}", "", f"de: {texts[3]}", "42", texts[5]]
        assert [each.removeprefix("de: ") for each in answer["translatedText"]] == texts
        assert [answer["translatedText"][i] for i in (0, 1, 3, 5)] == [expected[i] for i in (0, 1, 3, 5)]
        assert [each["language"] for each in answer["detectedLanguage"]][:2] == ["de", "en"]
        app.state.kinds.clear()
        for source, target in (("de", "de"), ("en", "en-GB"), ("EN", "en")):
            assert ask(client, q=[ENGLISH], source=source, target=target).json() == {"translatedText": [ENGLISH]}
        assert ask(client, q="42", source="auto").json()["translatedText"] == "42" and not app.state.kinds


@pytest.mark.parametrize("text_format", ["text", "html"])
def test_the_language_of_html_is_that_of_its_text(text_format) -> None:
    link = '<a class="mention" href="https://mastodon.example/@girl"><span>The weather</span></a>'
    text = f'<p translate="no">The weather is fine today.</p><p>{GERMAN} <code>{ENGLISH}</code> {link}</p>' * 2
    text = text if text_format == "html" else f"{GERMAN} https://example.org/the/weather/is/fine `and_today_the_cat`"
    with TestClient(echo_app(("en", "de"))) as client:
        answer = ask(client, q=text, source="auto", format=text_format).json()
        assert answer["detectedLanguage"]["language"] == "de" and answer["translatedText"] == text


def test_errors_of_one_language_are_those_of_the_request(monkeypatch) -> None:
    app, texts = echo_app(("en", "de"), ("fr", "de")), [ENGLISH, "Il fait beau aujourd'hui."]

    def fail(kind: Any, texts: list[str]) -> Any:
        if kind[1] == "fr":
            raise ValueError("too long")
        return [[text] for text in texts]

    with TestClient(app) as client:
        monkeypatch.setattr(app.state.batchers[0], "translate", fail)
        answer = ask(client, q=texts, source="auto")
        assert (answer.status_code, answer.json()) == (400, {"error": "The model cannot translate this text."})
        assert ask(client, q=texts[:1], source="auto").status_code == 200
    late = echo_app(("en", "de"), ("fr", "de"), limits=Limits(deadline=0.1))
    with TestClient(late) as client:
        monkeypatch.setattr(late.state.batchers[0], "translate", lambda *_: time.sleep(0.3))
        assert ask(client, q=texts, source="auto").status_code == 503


PLACEHOLDERS = ["one {name} two", "one https://example.org/one two", "one [X5X].", "one two. Nine {x} six.\n\nseven"]


@pytest.mark.parametrize("count", [1, 3])
def test_placeholders_of_plain_text_are_kept(pipeline, count) -> None:
    texts = [PLACEHOLDERS[0], "one two", *PLACEHOLDERS[1:], "nine <b>six</b>"]
    settings = {"num_return_sequences": count, "num_beams": count} if count > 1 else {}
    expected = [
        pipeline(text, split_sentences=True, markup="placeholders" if text in PLACEHOLDERS else None, **settings)
        for text in texts
    ]
    translator = serving.BatchTranslator({"one": pipeline})
    found = translator(("one", "en", "de", "text", count), texts)
    assert found == [texts_of(each) for each in expected]
    for text, translations in zip(texts, found, strict=True):
        for kept in ("{name}", "https://example.org/one", "[X5X]", "{x}"):
            assert all(each.count(kept) == text.count(kept) for each in translations)


@pytest.mark.parametrize("text_format", ["text", "html"])
def test_the_lines_of_one_text_are_translated_together(pipeline, monkeypatch, text_format) -> None:
    generate, rows = pipeline.model.generate, []

    def counted(input_ids: Any, **settings: Any) -> Any:
        rows.append(len(input_ids))
        return generate(input_ids, **settings)

    monkeypatch.setattr(pipeline.model, "generate", counted)
    serving.BatchTranslator({"one": pipeline})(("one", "en", "de", text_format, 1), ["one two\n" * 50])
    assert sum(rows) == 50 and len(rows) <= 2


# ---- Translations that end early ---------------------------------------------------------------------------------


def endless_pipeline() -> Any:
    """One whose search never finds an end."""
    pipeline = make_pipeline(("en", "de"), ("en", "fr"))
    pipeline.model.generation_config.update(max_new_tokens=100_000, num_beams=2)
    return pipeline


def test_a_translation_ends_at_its_deadline() -> None:
    pipeline = endless_pipeline()
    limits = pipeline.model.generation_config.max_new_tokens, 2
    with TestClient(build_server({"one": pipeline}, limits=Limits(deadline=1.0))) as client:
        for more in ({}, {"alternatives": 2}, {"format": "html"}):
            pipeline.model.generation_config.max_new_tokens = limits[0]
            start = time.monotonic()
            answer = ask(client, q="Ab ca. Abc cab.", **more)
            assert answer.status_code == 503
            assert answer.json() == {"error": "The translation was not ready within 1 s."}
            assert client.app.state.batchers[0].is_free(within=10) and time.monotonic() - start < 10
            pipeline.model.generation_config.max_new_tokens = limits[1]
            assert ask(client, **more).status_code == client.get("/health").status_code == 200


def test_the_placing_of_markup_ends_at_the_deadline(pipeline, monkeypatch) -> None:
    generate, is_over = pipeline.model.generate, []

    def generate_to_the_deadline(**settings: Any) -> Any:
        found = generate(**settings)
        is_over.append(True)
        return found

    def check() -> None:
        if is_over:
            raise OverdueError(1)

    monkeypatch.setattr(pipeline.model, "generate", generate_to_the_deadline)
    translator = serving.BatchTranslator({"one": pipeline})
    with ended_by(check):
        assert translator(("one", "en", "de", "text", 1), ["ab"])
    is_over.clear()
    with ended_by(check), pytest.raises(OverdueError):
        translator(("one", "en", "de", "html", 1), ["<b>ab</b>"])


def test_a_translation_ends_when_its_client_is_gone(caplog) -> None:
    app = build_server({"one": endless_pipeline()}, limits=Limits(deadline=None))
    body = json.dumps(ASKED).encode()
    messages = [{"type": "http.request", "body": body}]
    batcher = app.state.batchers[0]

    async def receive() -> Any:
        while not messages and batcher.is_free(within=0):
            await asyncio.sleep(0.001)
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    with caplog.at_level(logging.INFO):
        sent = asyncio.run(asyncio.wait_for(answers_to(app, receive), 30))
    assert "POST /translate 499" in caplog.text and sent[0]["status"] == 499
    assert batcher.is_free(within=10)


def test_an_engine_is_not_called_when_its_time_is_over(pipeline, monkeypatch) -> None:
    called = []

    def engine(**settings: Any) -> None:
        called.append(settings)

    monkeypatch.setattr(pipeline, "engine", engine)
    translator = serving.BatchTranslator({"one": pipeline})
    assert translator(("one", "en", "de", "text", 1), ["one two"])
    # An engine knows no such criteria, and takes no settings that it does not know.
    assert len(called) == 1 and "stopping_criteria" not in called[0]

    def end() -> None:
        raise OverdueError(1)

    with ended_by(end), pytest.raises(OverdueError):
        translator(("one", "en", "de", "text", 1), ["one two"])
    assert len(called) == 1 and pipeline.engine is engine


@pytest.mark.parametrize(
    "text",
    [
        "a\n" * 63 + "qx " * 1600,
        "one. " * 63 + "x" * 4600,
        "\n".join("x" * length for length in range(1, 100)),
        "\n".join(["x" * 2400, "one. " * 20, "ส" * 2400]),
    ],
)
def test_memory_follows_the_characters(pipeline, monkeypatch, text) -> None:
    """Positions of hypotheses in the largest batch, against those of the same characters in lines of one length."""
    positions: list[int] = []
    own, translator = pipeline.model.generation_config.num_beams, serving.BatchTranslator({"one": pipeline})

    def watched(input_ids: Any, **settings: Any) -> Any:
        positions.append(input_ids.numel() * settings.get("num_beams", own))
        return input_ids[:, :2].repeat_interleave(settings.get("num_return_sequences", 1), dim=0)

    def most(text: str, count: int) -> int:
        positions.clear()
        translator(("one", "en", "de", "text", count), [text])
        return max(positions)

    # Lines of one length are not cut.
    monkeypatch.setitem(pipeline._preprocess_params, "longest_sentence", 1024)
    monkeypatch.setattr(pipeline.model, "generate", watched)
    letters = text.replace("\n", "x")
    even = "\n".join(letters[start : start + 77] for start in range(0, len(letters), 77))
    for count in (1, 11):
        assert most(text, count) <= 2 * most(even, count)
    # A batch with alternatives has more hypotheses, of fewer sentences.
    assert most(even, 11) < 3 * most(even, 1) < 11 / own * most(even, 1)


def test_long_requests_return_the_memory_that_they_needed(pipeline, monkeypatch) -> None:
    returned = []
    monkeypatch.setattr(serving, "return_freed_memory", lambda: returned.append(True))
    with TestClient(build_server({"one": pipeline})) as client:
        assert ask(client).status_code == 200 and not returned
        assert ask(client, q="ab\n" * 400).status_code == 200 and len(returned) == 1
        # Those that fail have needed it, too.
        monkeypatch.setattr(pipeline.model, "generate", None)
        assert ask(client, q="ab\n" * 400).status_code == 500 and len(returned) > 1


@pytest.mark.parametrize("number", [0, dear(1)])
def test_a_server_that_does_not_end_translations_is_not_healthy(pipeline, number) -> None:
    with TestClient(build_server({"one": pipeline})) as client:
        client.app.state.batchers[number] = SimpleNamespace(is_overdue=True)
        assert client.get("/health").status_code == client.head("/health").status_code == 503
        assert client.get("/health").json() == {"error": "A translation goes on long after its deadline."}


def test_a_server_whose_device_fails_is_not_healthy(pipeline, monkeypatch) -> None:
    def fail(**settings: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with TestClient(build_server({"one": pipeline})) as client:
        with monkeypatch.context() as broken:
            broken.setattr(pipeline.model, "generate", fail)
            assert ask(client).status_code == 500 and client.get("/health").status_code == 503
            assert "Nothing is translated any more" in client.get("/health").json()["error"]
        assert ask(client).status_code == client.get("/health").status_code == 200
        # Whatever was translated, the device works.
        client.app.state.batchers[1].is_broken = True
        assert client.get("/health").status_code == 503
        assert ask(client).status_code == client.get("/health").status_code == 200


def test_a_short_request_does_not_wait_for_a_long_one(pipeline, monkeypatch) -> None:
    started, released = threading.Event(), threading.Event()

    def wait(kind: Any, texts: list[str]) -> list[list[str]]:
        started.set()
        assert released.wait(20)
        return [[text] for text in texts]

    with TestClient(build_server({"one": pipeline})) as client, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(client.app.state.batchers[1], "translate", wait)
        # In bytes, of all texts together.
        long = threads.submit(ask, client, q=["ä" * 300, "ö" * 300])
        assert started.wait(20)
        assert ask(client, q="ab " * 300).status_code == 200 and not long.done()
        released.set()
        assert long.result().status_code == 200


# ---- Paths and keys ----------------------------------------------------------------------------------------------


def test_paths_and_methods(client) -> None:
    assert client.get("/nowhere").status_code == client.post("/translate/").status_code == 404
    assert client.head("/health").status_code == 200
    answer = client.get("/translate")
    assert (answer.status_code, answer.json()) == (405, {"error": "GET is not for this path."})
    assert client.get("/health").json() == {"status": "ok"}
    # As of an address that ends in a slash.
    assert client.post("http://testserver//translate", json=ASKED).json() == ask(client).json()
    assert (
        client.get("http://testserver//languages").status_code == client.get("/frontend//settings").status_code == 200
    )
    spec = client.get("/spec").json()
    assert {"/translate", "/languages", "/detect", "/health"} <= set(spec["paths"])
    body = spec["paths"]["/translate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["required"]) == {"q", "source", "target"}
    settings = client.get("/frontend/settings").json()
    assert (
        settings["charLimit"] == 5000
        and not settings["filesTranslation"]
        and settings["language"]["target"] == {"code": "de", "name": "German"}
    )


def test_keys(pipeline) -> None:
    with TestClient(build_server({"one": pipeline}, api_keys=["sesame", "öffne"])) as client:
        for path in ("/translate", "/detect"):
            assert ask(client, path).status_code == 403
            assert ask(client, path, api_key="wrong").json() == {"error": "The API key is wrong."}
            assert ask(client, path, api_key="öffne").status_code == 200
            word = "öffne".encode()
            bearers = [{"Authorization": "Bearer sesame"}, {"Authorization": b"bearer " + word}]
            for headers in (*bearers, {"X-API-Key": word}):
                assert client.post(path, json=ASKED, headers=headers).status_code == 200
            assert client.post(path, data=ASKED | {"api_key": "sesame"}).status_code == 200
        assert client.get("/languages").status_code == client.get("/health").status_code == 200
        assert client.get("/frontend/settings").json()["keyRequired"]


def test_a_full_queue_says_when_to_come_back(pipeline, monkeypatch) -> None:
    with TestClient(build_server({"one": pipeline}, limits=Limits(waiting=1))) as client:
        monkeypatch.setattr(client.app.state.batchers[0], "waiting", 1)
        answer = ask(client)
        assert answer.status_code == 429
        assert answer.json() == {"error": f"The server is busy: try again in {answer.headers['retry-after']} s."}
        assert int(answer.headers["retry-after"]) >= 1


def test_a_server_within_another_one(pipeline) -> None:
    app, outer = build_server({"one": pipeline}), FastAPI()
    outer.mount("/mt", app)
    with TestClient(outer) as client:
        for path in ("/mt/translate", "/mt//translate"):
            assert client.post(path, json=ASKED).status_code == 200
        assert client.get("/mt/").status_code == 200
        assert 'hf_vaswani_requests_total{path="/translate",status="200"} 2.0' in client.get("/mt/metrics").text


def test_other_origins_are_let_in_by_name(pipeline) -> None:
    for origins, expected in (((), None), (("https://example.org",), "https://example.org")):
        with TestClient(build_server({"one": pipeline}, origins=origins)) as client:
            answer = client.get("/languages", headers={"Origin": "https://example.org"})
            assert answer.headers.get("access-control-allow-origin") == expected


# ---- What is written down ----------------------------------------------------------------------------------------


def test_text_is_never_logged(pipeline, caplog, monkeypatch) -> None:
    secret = "abc cab"
    with TestClient(build_server({"one": pipeline})) as client, caplog.at_level(logging.DEBUG):
        assert ask(client, q=secret).status_code == 200
        assert client.post("/translate?q=" + secret, json={}).status_code == 400

        def fail(kind: Any, texts: list[str]) -> Any:
            raise KeyError(*texts)

        monkeypatch.setattr(client.app.state.batchers[0], "translate", fail)
        answer = ask(client, q=secret)
        assert (answer.status_code, answer.json()) == (500, {"error": "The server failed."})
    assert "POST /translate 200" in caplog.text and "1 texts, 7 characters" in caplog.text
    assert "KeyError" in caplog.text and "in fail" in caplog.text
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("hf_vaswani"))
    assert secret not in ours and "abc" not in ours


def test_an_app_can_be_started_again(pipeline) -> None:
    app = build_server({"one": pipeline})
    for _ in range(2):
        with TestClient(app) as client:
            assert ask(client).status_code == 200


def test_metrics(pipeline) -> None:
    with TestClient(build_server({"one": pipeline})) as client:
        ask(client, q=["abc", "ab"])
        ask(client, source="xx")
        lines = client.get("/metrics").text.splitlines()
        assert 'hf_vaswani_requests_total{path="/translate",status="200"} 1.0' in lines
        assert 'hf_vaswani_requests_total{path="/translate",status="400"} 1.0' in lines
        assert "hf_vaswani_texts_total 2.0" in lines and "hf_vaswani_characters_total 5.0" in lines
        assert "hf_vaswani_waiting_texts 0.0" in lines
        assert any(line.startswith('hf_vaswani_request_seconds_bucket{le="0.1",path="/translate"}') for line in lines)


def test_the_page_needs_nothing_else(client) -> None:
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "{{" not in answer.text and "http" not in answer.text
    assert client.head("/").status_code == 200
