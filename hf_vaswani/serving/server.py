"""A server with LibreTranslate's interface, made with FastAPI: many clients, one batch."""

import asyncio
import copy
import json
import logging
import os
import secrets
import time
import traceback
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl

from ..extras import extra
from ..memory import return_freed_memory
from ..model.pipeline_vaswani import VaswaniTranslationPipeline
from ..translation.alignment import ended_by
from .batcher import MAX_TEXTS, Batcher, EndCriteria, OverdueError, QueueFullError
from .directions import AUTO, Directions, Guess, LanguageError, language_name

with extra("serve"):
    import prometheus_client
    from fastapi import FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, JSONResponse, Response
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess
    from pydantic import BaseModel, Field, ValidationError
    from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("server.html")
MAX_ALTERNATIVES = 10
# In bytes: what a request may have beside its text, and of each character, which JSON can write as "\ud83d\ude00".
REQUEST_OVERHEAD, BYTES_PER_CHARACTER = 65_536, 12
# Most bytes of the texts of a short request: no token has less than a byte.
MAX_SHORT_BYTES = 1000
# In seconds, to send the body of a request.
BODY_TIMEOUT = 30.0
# Innermost stack frames that are logged of a failure.
FRAMES = 4
# nginx's status for a client that is gone; nobody sees it but the log.
CLIENT_IS_GONE = 499

PATHS = ("/", "/translate", "/languages", "/detect", "/health", "/spec", "/metrics", "/frontend/settings")
# Largest number of fields in a form.
MAX_FIELDS = 20
JSON, FORMS = "application/json", ("application/x-www-form-urlencoded", "multipart/form-data")

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class Limits:
    """
    What a server accepts.

    Attributes:
        characters (`int`): of the texts of a request.
        texts (`int`): in a request.
        waiting (`int`): texts that wait for their translation, those of short requests and others each; beyond them,
            requests are answered by 429.
        deadline (`float`, *optional*): in seconds, for a translation; one that is not ready then is answered by 503.
    """

    characters: int = 5000
    texts: int = 100
    waiting: int = 1000
    deadline: float | None = 30.0

    def check(self, texts: list[str]) -> None:
        """Raises a [`RefusedError`] if the texts of a request are too long, too many or not valid Unicode."""
        if len(texts) > self.texts:
            raise RefusedError(400, f"There are {len(texts)} texts, but at most {self.texts} are accepted.")
        characters = sum(map(len, texts))
        if characters > self.characters:
            raise RefusedError(
                400, f"The text has {characters:,} characters, but at most {self.characters:,} are accepted."
            )
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise RefusedError(400, "The text is no Unicode: it has an unpaired surrogate.") from error


class TranslateRequest(BaseModel):
    """Body of `/translate`, as JSON or as a form."""

    q: str | list[str] = Field(description="a text, or a list of texts")
    source: str = Field(description="the code of the source language, or auto")
    target: str = Field(description="the code of the target language")
    format: Literal["text", "html"] = Field("text", description="text, or html whose tags are kept")
    alternatives: int = Field(
        0, ge=0, le=MAX_ALTERNATIVES, description="a number of further translations, from 0 to 10"
    )
    api_key: str | None = Field(None, description="API key, where the server asks for one")


class DetectRequest(BaseModel):
    """Body of `/detect`, as JSON or as a form."""

    q: str = Field(description="a text")
    api_key: str | None = Field(None, description="API key, where the server asks for one")


class Metrics:
    """Metrics for Prometheus, served at `/metrics`. Workers add up theirs in the folder PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self) -> None:
        # Each worker has a file of its own; an app of a program has a registry of its own.
        shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self.registry = registry = CollectorRegistry()
        prefix = "hf_vaswani"
        self.requests = Counter(f"{prefix}_requests", "Requests", ["path", "status"], registry=registry)
        self.characters = Counter(f"{prefix}_characters", "Translated characters", registry=registry)
        self.texts = Counter(f"{prefix}_texts", "Translated texts", registry=registry)
        self.seconds = Histogram(f"{prefix}_request_seconds", "Seconds of a request", ["path"], registry=registry)
        self.batches = Histogram(
            f"{prefix}_batch_texts", "Texts of a batch", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.waiting = Gauge(
            f"{prefix}_waiting_texts", "Texts that wait", multiprocess_mode="livesum", registry=registry
        )
        if shared:
            self.registry = CollectorRegistry()
            WorkersCollector(self.registry)


class WorkersCollector(multiprocess.MultiProcessCollector):
    """Adds up the metrics of all workers, except those of a file that one of them left damaged when it died."""

    def collect(self) -> list[Any]:
        """Returns the metrics."""
        files = sorted(map(str, Path(self._path).glob("*.db")))
        # The library knows no error of its own.
        with suppress(Exception):
            return self._checked(files)
        found, readable = list[Any](), list[str]()
        for file in files:
            try:
                found = self._checked([*readable, file])
                readable.append(file)
            except Exception as error:
                logger.warning(f"{Path(file).name} has no metrics: {type(error).__name__}.")
        return found

    def _checked(self, files: list[str]) -> list[Any]:
        """Returns the metrics of files; raises an error if they cannot be read, added up or written as text."""
        found = list(self.merge(files))
        prometheus_client.generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=lambda: found)))
        return found


class RequestLog:
    """
    Counts and logs requests, without their text, and answers those that fail.

    Args:
        app (ASGI application): the app.
        metrics ([`Metrics`]): where they are counted.
        paths (`Collection[str]`): the paths that are named; all others are `other`.
    """

    def __init__(self, app: Any, metrics: Metrics, paths: Collection[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_on)
        except Exception as error:
            log_failure(error)
            if status == 0:
                await refusal(500, "The server failed.")(scope, receive, send_on)
        path, seconds = scope["path"] if scope["path"] in self.paths else "other", time.perf_counter() - start
        status = status or CLIENT_IS_GONE
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        size = scope.get("state", {}).get("size", "")
        logger.info(f"{scope['method']} {path} {status} {1000 * seconds:.0f} ms{size}")


def log_failure(error: Exception) -> None:
    """Logs where an error was raised. Its message may have the text of a request in it."""
    places = "".join(traceback.format_tb(error.__traceback__, limit=-FRAMES))
    logger.error(f"{type(error).__name__}, whose message may have text in it and is left out:\n{places}")


class BodyLimit:
    """
    Reads the whole body of each request before the app does: at most so many bytes, in limited time.

    Args:
        app (ASGI application): the app.
        most_bytes (`int`): of a body.
    """

    def __init__(self, app: Any, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes a request on with its body, or answers it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = b""
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.most_bytes:
                        answer = refusal(413, f"The request is larger than {self.most_bytes:,} bytes.")
                        await answer(scope, receive, send)
                        return
        except TimeoutError:
            await refusal(408, f"The request did not arrive within {BODY_TIMEOUT:.0f} s.")(scope, receive, send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)


def refusal(status: int, why: str, **headers: str) -> JSONResponse:
    """Returns an error as LibreTranslate's clients expect it."""
    # It may quote a language code that is no Unicode.
    why = why.encode("utf-8", "replace").decode()
    return JSONResponse({"error": why}, status, {name.replace("_", "-"): value for name, value in headers.items()})


class RefusedError(Exception):
    """A request is answered by an error, with these headers."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status, self.headers = status, headers


async def _refuse(_: Request, error: Any) -> Response:
    return refusal(error.status, str(error), **error.headers)


async def _refuse_by_status(request: Request, error: Any) -> Response:
    """Answers in a sentence what FastAPI refuses by itself."""
    why = {
        404: f"There is nothing here, but at {', '.join(PATHS)}.",
        405: f"{request.method} is not for this path.",
    }
    return refusal(error.status_code, why.get(error.status_code, str(error.detail)), **(error.headers or {}))


def check_key(request: Request, given: str | None, keys: Collection[bytes]) -> None:
    """
    Checks the API key of a request, if there are any keys.

    Args:
        request (`Request`): the request, whose headers may have the key.
        given (`str`, *optional*): the key in its body.
        keys (`Collection[bytes]`): the keys, in UTF-8.

    Raises:
        RefusedError: there is no key, or a wrong one.
    """
    if not keys:
        return
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    # Headers are decoded byte by byte.
    headers = [request.headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    sent = [(given or "").encode("utf-8", "replace"), *(header.encode("latin-1") for header in headers)]
    if not any(sent):
        raise RefusedError(403, "An API key is needed: send it as api_key, or in the header Authorization: Bearer.")
    # All are compared, so that the time says nothing about them.
    if not sum(secrets.compare_digest(one, key) for one in sent for key in keys):
        raise RefusedError(403, "The API key is wrong.")


class BatchTranslator:
    """
    Translates texts of one kind in a thread of the [`Batcher`].

    Args:
        pipelines (`Mapping[str, VaswaniTranslationPipeline]`): the models, by their names.
        returns_memory (`bool`): whether to return freed memory after each batch, which takes some 10 ms.

    Attributes:
        end_if_over (`Callable[[], bool]`): asked between the steps of a search, before each batch of an engine, and
            while markup is placed; it raises an error to end the translation. That of its [`Batcher`], which is made
            of the translator.
    """

    def __init__(self, pipelines: Mapping[str, VaswaniTranslationPipeline], *, returns_memory: bool = False) -> None:
        self.returns_memory = returns_memory
        self.end_if_over: Callable[[], bool] = lambda: False
        self.pipelines = {name: self._in_time(pipeline) for name, pipeline in pipelines.items()}
        # Engines search by other rules, or greedily.
        self.for_alternatives = {
            name: pipeline
            if pipeline.engine is None
            else VaswaniTranslationPipeline(pipeline.model, pipeline.tokenizer, device=pipeline.device)
            for name, pipeline in pipelines.items()
        }

    def _in_time(self, pipeline: VaswaniTranslationPipeline) -> VaswaniTranslationPipeline:
        """Returns a pipeline whose engine, if it has one, is not called any more when its time is over."""
        engine = pipeline.engine
        if engine is None:
            return pipeline

        def in_time(stopping_criteria: Any = None, **settings: Any) -> Any:
            # No engine is ended in the middle of a batch.
            self.end_if_over()
            return engine(**settings)

        found = copy.copy(pipeline)
        found.engine = in_time
        return found

    def __call__(self, kind: tuple[str, str, str, str, int], texts: list[str]) -> list[list[str]]:
        """
        Translates texts.

        Args:
            kind (`tuple`): name of the model, source and target language, `"text"` or `"html"`, and the number of
                translations.
            texts (`list[str]`): the texts.

        Returns:
            `list[list[str]]`: the translations of each text, best first.
        """
        name, source, target, text_format, count = kind
        pipeline = (self.pipelines if count == 1 else self.for_alternatives)[name]
        settings: dict[str, Any] = {}
        if count > 1:
            # The model's own search may be narrower.
            beams = pipeline.model.generation_config.num_beams or 1
            settings = {"num_return_sequences": count, "num_beams": max(count, beams)}
        try:
            with ended_by(self.end_if_over):
                found = pipeline(
                    texts,
                    src_lang=source,
                    tgt_lang=target,
                    split_sentences=True,
                    markup="html" if text_format == "html" else None,
                    batch_size=MAX_TEXTS,
                    stopping_criteria=[EndCriteria(self.end_if_over)],
                    **settings,
                )
        finally:
            if self.returns_memory:
                return_freed_memory()
        return [
            [each["translation_text"] for each in (candidates if isinstance(candidates, list) else [candidates])]
            for candidates in found
        ]


def build_server(
    pipelines: Mapping[str, VaswaniTranslationPipeline],
    *,
    directions: Collection[tuple[str, str]] = (),
    limits: Limits | None = None,
    api_keys: Collection[str] = (),
    origins: Collection[str] = (),
) -> FastAPI:
    """
    Builds the server.

    Args:
        pipelines (`Mapping[str, VaswaniTranslationPipeline]`): the models, by their names.
        directions (`Collection[tuple[str, str]]`): source and target languages of a model whose config names none.
        limits ([`Limits`], *optional*): what is accepted.
        api_keys (`Collection[str]`): keys, one of which is needed to translate; by default, none is needed.
        origins (`Collection[str]`): web pages of these origins may use the server from a browser; `"*"` for all.

    Returns:
        `FastAPI`: an ASGI application.

    Raises:
        ValueError: it is unknown which languages a model translates.
    """
    limits = limits or Limits()
    known = Directions(pipelines, list(directions))
    metrics = Metrics()
    batchers: list[Batcher] = []

    def observe(texts: int) -> None:
        metrics.batches.observe(texts)
        # The device works.
        for batcher in batchers:
            batcher.is_broken = False

    def observe_waiting(_: int) -> None:
        metrics.waiting.set(sum(batcher.waiting for batcher in batchers))

    # One for short requests, which do not wait for the others: both translate at the same time.
    for is_long in (False, True):
        translator = BatchTranslator(pipelines, returns_memory=is_long)
        batchers.append(Batcher(translator, limits.waiting, observe, observe_waiting, limits.deadline))
        translator.end_if_over = batchers[-1].end_if_over
    keys = [key.encode() for key in api_keys]

    # FastAPI's pages of documentation load their scripts from another host.
    app = FastAPI(
        title="hf_vaswani",
        description="Translation with LibreTranslate's interface.",
        version="1",
        openapi_url="/spec",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={RefusedError: _refuse, HTTPException: _refuse_by_status},
    )
    app.state.batchers = batchers
    most_bytes = REQUEST_OVERHEAD + BYTES_PER_CHARACTER * limits.characters

    app.add_middleware(BodyLimit, most_bytes=most_bytes)
    app.add_middleware(RequestLog, metrics=metrics, paths=PATHS)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])

    @app.post("/translate", openapi_extra=_body_of(TranslateRequest))
    async def translate(request: Request) -> Response:
        """Translates a text, or each text of a list."""
        asked = await _read(request, TranslateRequest)
        check_key(request, asked.api_key, keys)
        texts = [asked.q] if isinstance(asked.q, str) else asked.q
        limits.check(texts)
        request.state.size = f", {len(texts)} texts, {sum(map(len, texts)):,} characters"
        guess = None
        try:
            if asked.source.lower() == AUTO:
                guess = known.source_of(texts, asked.target)
            name, source, target = known.find(guess.language if guess else asked.source, asked.target)
        except LanguageError as error:
            raise RefusedError(400, str(error)) from error
        kind = (name, source, target, asked.format, asked.alternatives + 1)
        batcher = batchers[sum(len(text.encode()) for text in texts) > MAX_SHORT_BYTES]
        work = asyncio.ensure_future(batcher.submit(kind, texts))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=CLIENT_IS_GONE)
            found = work.result()
        except QueueFullError as error:
            raise RefusedError(429, str(error), Retry_After=str(error.retry_after)) from error
        except OverdueError as error:
            raise RefusedError(503, str(error)) from error
        except ValueError as error:
            # Such as a text that is too long for the positions of the model.
            log_failure(error)
            raise RefusedError(400, "The model cannot translate this text.") from error
        finally:
            for task in (work, gone):
                task.cancel()
        metrics.texts.inc(len(texts))
        metrics.characters.inc(sum(map(len, texts)))
        return JSONResponse(_answer(asked, found, guess))

    @app.get("/languages")
    async def languages() -> list[dict[str, Any]]:
        """Returns the source languages, each with its target languages."""
        return known.languages()

    @app.post("/detect", openapi_extra=_body_of(DetectRequest))
    async def detect(request: Request) -> list[dict[str, Any]]:
        """Recognises the language of a text."""
        asked = await _read(request, DetectRequest)
        check_key(request, asked.api_key, keys)
        limits.check([asked.q])
        guess = known.detect(asked.q)
        return [] if guess is None else [asdict(guess)]

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Says that the server works: it translates, and ends translations in time."""
        if any(batcher.is_overdue for batcher in batchers):
            raise RefusedError(503, "A translation goes on long after its deadline.")
        if any(batcher.is_broken for batcher in batchers):
            raise RefusedError(503, "Nothing is translated any more: the log says where it failed.")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def read_metrics() -> Response:
        """Returns what Prometheus collects."""
        forget_dead_workers()
        return Response(
            prometheus_client.generate_latest(metrics.registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
        )

    @app.get("/frontend/settings", include_in_schema=False)
    async def settings() -> dict[str, Any]:
        """Returns what LibreTranslate's own clients ask for."""
        (source, target), *_ = known.pairs
        return {
            "apiKeys": bool(api_keys),
            "keyRequired": bool(api_keys),
            "charLimit": limits.characters,
            "frontendTimeout": 500,
            "language": {
                "source": {"code": source, "name": language_name(source)},
                "target": {"code": target, "name": language_name(target)},
            },
            "suggestions": False,
            "supportedFilesFormat": [],
        }

    @app.api_route("/", methods=["GET", "HEAD"], response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        """Returns a page to translate in a browser."""
        targets = {code: language_name(code) for code in known.targets}
        facts = {"languages": known.languages(), "targets": targets, "needsKey": bool(api_keys)}
        facts |= {"mostCharacters": limits.characters}
        text = PAGE.read_text(encoding="utf-8").replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c"))
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    return app


def _body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Describes the body of a request for `/spec`."""
    schema = {"schema": kind.model_json_schema()}
    return {"requestBody": {"required": True, "content": dict.fromkeys((JSON, *FORMS), schema)}}


def forget_dead_workers() -> None:
    """Takes the texts that wait in dead workers out of the metrics."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    for file in Path(folder).glob("gauge_livesum_*.db") if folder else ():
        number = file.stem.rpartition("_")[2]
        try:
            os.kill(int(number), 0)
        # Workers have one user: a process of another one has the number of a worker that is dead.
        except (ProcessLookupError, PermissionError):
            # Another worker may have done it.
            with suppress(OSError):
                multiprocess.mark_process_dead(int(number))
        except (ValueError, OverflowError):
            # It is no worker's.
            continue


async def _disconnected(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, kind: type[T]) -> T:
    """Reads the body of a request, JSON or a form."""
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    values: Any
    body = await request.body()
    # curl -d sends JSON as a form, too.
    if media in FORMS and not body.lstrip().startswith(b"{"):
        try:
            if media == FORMS[0]:
                # The standard has everything in percent signs, and curl -d sends it as it is.
                fields: list[Any] = parse_qsl(
                    body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS
                )
            else:
                fields = (await request.form(max_files=0, max_fields=MAX_FIELDS)).multi_items()
        except (ValueError, HTTPException) as error:
            raise RefusedError(400, "The form cannot be read: it must be UTF-8, without files.") from error
        values = dict(fields)
        if len(values) < len(fields):
            raise RefusedError(400, "A field of the form is given twice: a list of texts needs JSON.")
        # An empty field is one that is left out, but a text may be empty.
        values = {name: value for name, value in values.items() if value or name == "q"}
    else:
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, "The body is neither JSON nor a form.") from error
    if not isinstance(values, dict):
        raise RefusedError(400, 'The body must be an object, as in {"q": "Hello", "source": "en", ...}.')
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        meaning = kind.model_fields[name].description
        missing = error.errors()[0]["type"] == "missing"
        raise RefusedError(400, f"{name} {'is missing: it is' if missing else 'must be'} {meaning}.") from error


def _answer(asked: TranslateRequest, found: list[list[str]], guess: Guess | None) -> dict[str, Any]:
    """Formats translations as LibreTranslate does."""
    best, others = [each[0] for each in found], [each[1:] for each in found]
    is_single = isinstance(asked.q, str)
    answer: dict[str, Any] = {"translatedText": best[0] if is_single else best}
    if asked.alternatives:
        answer["alternatives"] = others[0] if is_single else others
    if guess is not None:
        answer["detectedLanguage"] = asdict(guess) if is_single else [asdict(guess)] * len(best)
    return answer
