"""A server with LibreTranslate's interface, made with FastAPI: many clients, one batch."""

import asyncio
import copy
import json
import logging
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from ..extras import extra
from ..memory import return_freed_memory
from ..model.pipeline_vaswani import VaswaniTranslationPipeline
from ..translation.alignment import end_if_over
from .batcher import MAX_TEXTS, Batcher, EndCriteria, OverdueError, QueueFullError
from .directions import Directions, LanguageError, language_name
from .metrics import Metrics

with extra("serve"):
    from fastapi import APIRouter, Depends, FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, JSONResponse, Response
    from fastapi.routing import APIRoute
    from prometheus_client import CONTENT_TYPE_LATEST
    from pydantic import BaseModel, Field, ValidationError
    from starlette.exceptions import HTTPException
    from starlette.formparsers import MultiPartException, MultiPartParser
    from starlette.requests import ClientDisconnect

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
# Largest number of fields in a form.
MAX_FIELDS = 20
JSON, FORMS = "application/json", ("application/x-www-form-urlencoded", "multipart/form-data")

Scope: TypeAlias = MutableMapping[str, Any]
T = TypeVar("T")
Body = TypeVar("Body", bound="RequestBody")


# ---- Requests ----------------------------------------------------------------------------------------------------


class RequestBody(BaseModel):
    """Body of a request, as JSON or as a form."""

    q: Any
    api_key: str | None = Field(None, description="API key, where the server asks for one")

    @property
    def texts(self) -> list[str]:
        """The texts of the request."""
        return [self.q] if isinstance(self.q, str) else self.q


class TranslateRequest(RequestBody):
    """Body of `/translate`, as JSON or as a form."""

    q: str | list[str] = Field(description="a text, or a list of texts")
    source: str = Field(description="the code of the source language, or auto")
    target: str = Field(description="the code of the target language")
    format: Literal["text", "html"] = Field("text", description="text, or html whose tags are kept")
    alternatives: int = Field(
        0, ge=0, le=MAX_ALTERNATIVES, description="a number of further translations, from 0 to 10"
    )


class DetectRequest(RequestBody):
    """Body of `/detect`, as JSON or as a form."""

    q: str = Field(description="a text")


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


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """Reads the body of a request: at most so many bytes, in limited time."""
    body = b""
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise RefusedError(413, f"The request is larger than {max_bytes:,} bytes.")
    except TimeoutError as error:
        raise RefusedError(408, f"The request did not arrive within {BODY_TIMEOUT:.0f} s.") from error
    return body


async def read_fields(request: Request, body: bytes) -> dict[str, Any]:
    """Reads the fields of a body, JSON or a form."""
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # curl -d sends JSON as a form, too.
    if media not in FORMS or body.lstrip().startswith(b"{"):
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, "The body is neither JSON nor a form.") from error
        if not isinstance(fields, dict):
            raise RefusedError(400, 'The body must be an object, as in {"q": "Hello", "source": "en", ...}.')
        return fields
    pairs: list[tuple[str, Any]]
    try:
        if media == FORMS[0]:
            # The standard has everything in percent signs, and curl -d sends it as it is.
            pairs = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
        else:

            async def parts() -> AsyncGenerator[bytes, None]:
                yield body

            parser = MultiPartParser(request.headers, parts(), max_files=0, max_fields=MAX_FIELDS)
            pairs = (await parser.parse()).multi_items()
    except (ValueError, MultiPartException) as error:
        raise RefusedError(400, "The form cannot be read: it must be UTF-8, without files.") from error
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RefusedError(400, "A field of the form is given twice: a list of texts needs JSON.")
    # An empty field is one that is left out, but a text may be empty.
    return {name: value for name, value in fields.items() if value or name == "q"}


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


# ---- Errors and the log ------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A request is answered by this status and sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def refusal(status: int, why: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns an error as LibreTranslate's clients expect it."""
    # It may quote a language code that is no Unicode.
    return JSONResponse({"error": why.encode("utf-8", "replace").decode()}, status, headers)


async def answer_error(request: Request, error: Any) -> Response:
    """Answers a request by an error that says what is wrong with it, or that the server is busy."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_IS_GONE)
    if isinstance(error, HTTPException):
        # FastAPI refuses these by itself.
        known = {
            404: f"There is nothing here, but at {', '.join(PATHS)}.",
            405: f"{request.method} is not for this path.",
        }
        return refusal(error.status_code, known.get(error.status_code, str(error.detail)), error.headers)
    if isinstance(error, QueueFullError):
        return refusal(429, str(error), {"Retry-After": str(error.retry_after)})
    status = error.status if isinstance(error, RefusedError) else 503 if isinstance(error, OverdueError) else 400
    return refusal(status, str(error))


ERRORS = (RefusedError, LanguageError, QueueFullError, OverdueError, ClientDisconnect, HTTPException)


class RequestLog:
    """
    Counts and logs requests, without their text, and answers those that fail.

    Args:
        app (ASGI application): the app.
        metrics ([`Metrics`]): where they are counted; paths that the server does not have are `other`.
    """

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def send_on(message: MutableMapping[str, Any]) -> None:
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
        path, seconds = scope["path"] if scope["path"] in PATHS else "other", time.perf_counter() - start
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        size = scope.get("state", {}).get("size", "")
        logger.info(f"{scope['method']} {path} {status} {1000 * seconds:.0f} ms{size}")


def log_failure(error: Exception) -> None:
    """Logs where an error was raised. Its message may have the text of a request in it."""
    places = "".join(traceback.format_tb(error.__traceback__, limit=-FRAMES))
    logger.error(f"{type(error).__name__}, whose message may have text in it and is left out:\n{places}")


# ---- Translating -------------------------------------------------------------------------------------------------


class BatchTranslator:
    """
    Translates texts of one kind in a thread of the [`Batcher`]. It asks [`end_if_over`] between the steps of a search
    and before each batch of an engine.

    Args:
        pipelines (`Mapping[str, VaswaniTranslationPipeline]`): the models, by their names.
        returns_memory (`bool`): whether to return freed memory after each batch, which takes some 10 ms.
    """

    def __init__(self, pipelines: Mapping[str, VaswaniTranslationPipeline], *, returns_memory: bool = False) -> None:
        self.returns_memory = returns_memory
        self.pipelines = {name: _in_time(pipeline) for name, pipeline in pipelines.items()}
        # Engines search by other rules, or greedily.
        self.for_alternatives = {
            name: pipeline
            if pipeline.engine is None
            else VaswaniTranslationPipeline(pipeline.model, pipeline.tokenizer, device=pipeline.device)
            for name, pipeline in pipelines.items()
        }

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
            found = pipeline(
                texts,
                src_lang=source,
                tgt_lang=target,
                split_sentences=True,
                markup="html" if text_format == "html" else None,
                batch_size=MAX_TEXTS,
                stopping_criteria=[EndCriteria(end_if_over)],
                **settings,
            )
        finally:
            if self.returns_memory:
                return_freed_memory()
        return [
            [each["translation_text"] for each in (candidates if isinstance(candidates, list) else [candidates])]
            for candidates in found
        ]


def _in_time(pipeline: VaswaniTranslationPipeline) -> VaswaniTranslationPipeline:
    """Returns a pipeline whose engine, if it has one, is not called any more when its time is over."""
    engine = pipeline.engine
    if engine is None:
        return pipeline

    def in_time(stopping_criteria: Any = None, **settings: Any) -> Any:
        # No engine is ended in the middle of a batch.
        end_if_over()
        return engine(**settings)

    found = copy.copy(pipeline)
    found.engine = in_time
    return found


class Service:
    """
    What the routes share: models, limits, keys and metrics.

    Args:
        pipelines, directions, limits, api_keys: as in [`build_server`].

    Attributes:
        batchers (`list[Batcher]`): one for short requests, which do not wait for the others, and one for those: both
            translate at the same time.
    """

    def __init__(
        self,
        pipelines: Mapping[str, VaswaniTranslationPipeline],
        directions: Collection[tuple[str, str]],
        limits: Limits,
        api_keys: Collection[str],
    ) -> None:
        self.directions, self.limits = Directions(pipelines, list(directions)), limits
        self.keys = [key.encode() for key in api_keys]
        self.metrics = Metrics()
        self.batchers = [
            Batcher(
                BatchTranslator(pipelines, returns_memory=is_long),
                limits.waiting,
                self._observe,
                self._observe_waiting,
                limits.deadline,
            )
            for is_long in (False, True)
        ]

    def _observe(self, texts: int) -> None:
        self.metrics.batches.observe(texts)
        # The device works.
        for batcher in self.batchers:
            batcher.is_broken = False

    def _observe_waiting(self, _: int) -> None:
        self.metrics.waiting.set(sum(batcher.waiting for batcher in self.batchers))

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Reads the body of a request, and checks its fields, its key and its texts."""
        max_bytes = REQUEST_OVERHEAD + BYTES_PER_CHARACTER * self.limits.characters
        fields = await read_fields(request, await read_bytes(request, max_bytes))
        try:
            asked = kind.model_validate(fields)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            meaning = kind.model_fields[name].description
            missing = error.errors()[0]["type"] == "missing"
            raise RefusedError(400, f"{name} {'is missing: it is' if missing else 'must be'} {meaning}.") from error
        check_key(request, asked.api_key, self.keys)
        self.limits.check(asked.texts)
        return asked

    async def translate(self, kind: tuple[str, str, str, str, int], texts: list[str]) -> list[list[str]]:
        """Translates texts, see [`BatchTranslator`], in a batch with those of other requests."""
        batcher = self.batchers[sum(len(text.encode()) for text in texts) > MAX_SHORT_BYTES]
        try:
            found = await batcher.submit(kind, texts)
        except ValueError as error:
            # Such as a text that is too long for the positions of the model.
            log_failure(error)
            raise RefusedError(400, "The model cannot translate this text.") from error
        self.metrics.texts.inc(len(texts))
        self.metrics.characters.inc(sum(map(len, texts)))
        return found


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Waits for work whose result a client waits for; when the client goes, it is ended by `ClientDisconnect`."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()


# ---- Routes ------------------------------------------------------------------------------------------------------


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Shared: TypeAlias = Annotated[Service, Depends(_service)]
router = APIRouter()


def _body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Describes the body of a request for `/spec`."""
    schema = {"schema": kind.model_json_schema()}
    return {"requestBody": {"required": True, "content": dict.fromkeys((JSON, *FORMS), schema)}}


@router.post("/translate", openapi_extra=_body_of(TranslateRequest))
async def translate(request: Request, service: Shared) -> Response:
    """Translates a text, or each text of a list."""
    asked = await service.read(request, TranslateRequest)
    texts = asked.texts
    request.state.size = f", {len(texts)} texts, {sum(map(len, texts)):,} characters"
    direction, guess = service.directions.resolve(texts, asked.source, asked.target)
    work = service.translate((*direction, asked.format, asked.alternatives + 1), texts)
    found = await unless_gone(request, work)
    # A text has one answer, and a list a list of each.
    is_single = isinstance(asked.q, str)
    best, others = [each[0] for each in found], [each[1:] for each in found]
    answer: dict[str, Any] = {"translatedText": best[0] if is_single else best}
    if asked.alternatives:
        answer["alternatives"] = others[0] if is_single else others
    if guess is not None:
        answer["detectedLanguage"] = guess if is_single else [guess] * len(best)
    return JSONResponse(answer)


@router.get("/languages")
async def languages(service: Shared) -> list[dict[str, Any]]:
    """Returns the source languages, each with its target languages."""
    return service.directions.languages()


@router.post("/detect", openapi_extra=_body_of(DetectRequest))
async def detect(request: Request, service: Shared) -> list[dict[str, Any]]:
    """Recognises the language of a text."""
    asked = await service.read(request, DetectRequest)
    guess = service.directions.detect(asked.q)
    return [] if guess is None else [dict(guess)]


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(service: Shared) -> dict[str, str]:
    """Says that the server works: it translates, and ends translations in time."""
    if any(batcher.is_overdue for batcher in service.batchers):
        raise RefusedError(503, "A translation goes on long after its deadline.")
    if any(batcher.is_broken for batcher in service.batchers):
        raise RefusedError(503, "Nothing is translated any more: the log says where it failed.")
    return {"status": "ok"}


@router.get("/metrics", response_class=Response)
async def read_metrics(service: Shared) -> Response:
    """Returns what Prometheus collects."""
    return Response(service.metrics.as_text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/frontend/settings", include_in_schema=False)
async def settings(service: Shared) -> dict[str, Any]:
    """Returns what LibreTranslate's own clients ask for."""
    codes = zip(("source", "target"), next(iter(service.directions.pairs)), strict=True)
    return {
        "apiKeys": bool(service.keys),
        "keyRequired": bool(service.keys),
        "charLimit": service.limits.characters,
        "frontendTimeout": 500,
        "language": {side: {"code": code, "name": language_name(code)} for side, code in codes},
        "suggestions": False,
        "supportedFilesFormat": [],
    }


@router.api_route("/", methods=["GET", "HEAD"], response_class=HTMLResponse, include_in_schema=False)
async def page(service: Shared) -> HTMLResponse:
    """Returns a page to translate in a browser."""
    facts = {
        "languages": service.directions.languages(),
        "targets": {code: language_name(code) for code in service.directions.targets},
        "needsKey": bool(service.keys),
        "mostCharacters": service.limits.characters,
    }
    text = PAGE.read_text(encoding="utf-8").replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c"))
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


SPEC = "/spec"
PATHS = (*dict.fromkeys(route.path for route in router.routes if isinstance(route, APIRoute)), SPEC)


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
    service = Service(pipelines, directions, limits or Limits(), api_keys)
    # FastAPI's pages of documentation load their scripts from another host.
    app = FastAPI(
        title="hf_vaswani",
        description="Translation with LibreTranslate's interface.",
        version="1",
        openapi_url=SPEC,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys(ERRORS, answer_error),
    )
    app.state.service, app.state.batchers = service, service.batchers
    app.include_router(router)
    app.add_middleware(RequestLog, metrics=service.metrics)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    return app
