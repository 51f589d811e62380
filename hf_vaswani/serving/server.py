"""A server with LibreTranslate's interface, made with FastAPI: many clients, one batch."""

import asyncio
import copy
import json
import logging
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Collection, Coroutine, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from ..extras import extra
from ..memory import return_freed_memory
from ..model.pipeline_vaswani import VaswaniTranslationPipeline
from ..translation.alignment import end_if_over
from ..translation.budgets import times_on
from ..translation.markup import Segment, parse
from .batcher import MAX_TEXTS, Batcher, EndCriteria, OverdueError, QueueFullError
from .directions import AUTO, Direction, Directions, Guess, LanguageError, language_name
from .metrics import Metrics
from .requests import FORMS, JSON, Body, DetectRequest, Limits, RefusedError, TranslateRequest, read

with extra("serve"):
    from fastapi import APIRouter, Depends, FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, JSONResponse, Response
    from fastapi.routing import APIRoute
    from prometheus_client import CONTENT_TYPE_LATEST
    from pydantic import BaseModel
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("server.html")
# Most bytes of the texts of a short request: no token has less than a byte.
MAX_SHORT_BYTES = 1000
# Innermost stack frames that are logged of a failure.
FRAMES = 4
# nginx's status for a client that is gone; nobody sees it but the log.
CLIENT_IS_GONE = 499

Scope: TypeAlias = MutableMapping[str, Any]
T = TypeVar("T")


# ---- Errors and the log ------------------------------------------------------------------------------------------


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
        # Addresses are often written with a slash at the end, to which a program adds its own.
        scope["path"] = re.sub("/{2,}", "/", scope["path"])

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
        seconds, path = time.perf_counter() - start, scope["path"].removeprefix(scope.get("root_path", ""))
        path = path if path in PATHS else "other"
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
            name: pipeline if pipeline.engine is None else _without_engine(pipeline)
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
        settings: dict[str, Any] = {"src_lang": source, "tgt_lang": target}
        if count > 1:
            # The model's own search may be narrower.
            beams = pipeline.model.generation_config.num_beams or 1
            settings |= {"num_return_sequences": count, "num_beams": max(count, beams)}
        try:
            found = pipeline(
                texts,
                split_sentences=True,
                markup="html" if text_format == "html" else None,
                # The lines of a single text with markup are translated together, too.
                batch_size=MAX_TEXTS * times_on(pipeline.device),
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


def _without_engine(pipeline: VaswaniTranslationPipeline) -> VaswaniTranslationPipeline:
    """Returns a pipeline of the same model whose batches have the same limits."""
    found = VaswaniTranslationPipeline(pipeline.model, pipeline.tokenizer, device=pipeline.device)
    found.limits = pipeline.limits
    return found


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
        times = max(times_on(pipeline.device) for pipeline in pipelines.values())
        self.batchers = [
            Batcher(
                BatchTranslator(pipelines, returns_memory=is_long),
                limits.waiting,
                self._observe,
                self._observe_waiting,
                limits.deadline,
                times,
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
        return await read(request, kind, self.limits, self.keys)

    async def translate(self, asked: TranslateRequest) -> tuple[list[list[str]], list[Guess] | None]:
        """
        Translates the texts of a request, in batches with those of other requests.

        Returns:
            `list[list[str]]`: the translations of each text, best first, or itself alone if it is given back.
            `list[Guess]`, *optional*: the languages of the texts, if they were to be recognised.
        """
        texts = asked.texts
        # To recognise the languages of a long list takes a while.
        directions, guesses = await asyncio.to_thread(self._resolve, asked)
        found = [[text] for text in texts]
        numbers: defaultdict[Direction, list[int]] = defaultdict(list)
        for number, direction in enumerate(directions):
            if direction is not None:
                numbers[direction].append(number)
        batcher = self.batchers[sum(len(text.encode()) for text in texts) > MAX_SHORT_BYTES]

        async def translate(direction: Direction, several: list[int]) -> None:
            kind = (*direction, asked.format, asked.alternatives + 1)
            for number, each in zip(several, await batcher.submit(kind, [texts[i] for i in several]), strict=True):
                found[number] = each

        try:
            async with asyncio.TaskGroup() as tasks:
                for direction, several in numbers.items():
                    tasks.create_task(translate(direction, several))
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if not isinstance(error, ValueError):
                raise error from None
            # Such as a text that is too long for the positions of the model.
            log_failure(error)
            raise RefusedError(400, "The model cannot translate this text.") from error
        self.metrics.texts.inc(len(texts))
        self.metrics.characters.inc(sum(map(len, texts)))
        return found, guesses

    def _resolve(self, asked: TranslateRequest) -> tuple[list[Direction | None], list[Guess] | None]:
        texts = asked.texts
        if asked.source.lower() == AUTO:
            texts = [_words_of(text, asked.format) for text in texts]
        return self.directions.resolve(texts, asked.source, asked.target)


def _words_of(text: str, text_format: str) -> str:
    """Returns what of a text is translated, by which its language is recognised."""
    words = []
    for part in parse(text, "html" if text_format == "html" else "placeholders"):
        if isinstance(part, Segment):
            place = 0
            for start, end, _ in part.protected:
                words.append(part.text[place:start])
                place = end
            words.append(part.text[place:])
    return " ".join(words)


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
    request.state.size = f", {len(asked.texts)} texts, {sum(map(len, asked.texts)):,} characters"
    found, guesses = await unless_gone(request, service.translate(asked))
    # A text has one answer, and a list a list of each.
    answer: dict[str, Any] = {"translatedText": [best for best, *_ in found]}
    if asked.alternatives:
        answer["alternatives"] = [others for _, *others in found]
    if guesses is not None:
        answer["detectedLanguage"] = guesses
    return JSONResponse({name: each[0] for name, each in answer.items()} if isinstance(asked.q, str) else answer)


@router.get("/languages")
async def languages(service: Shared) -> list[dict[str, Any]]:
    """Returns the languages, each with its target languages."""
    return service.directions.languages()


@router.post("/detect", openapi_extra=_body_of(DetectRequest))
async def detect(request: Request, service: Shared) -> list[dict[str, Any]]:
    """Recognises the language of a text."""
    asked = await service.read(request, DetectRequest)
    return [dict(service.directions.detect("\n".join(_words_of(text, "text") for text in asked.texts)))]


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
        "filesTranslation": False,
        "supportedFilesFormat": [],
    }


@router.api_route("/", methods=["GET", "HEAD"], response_class=HTMLResponse, include_in_schema=False)
async def page(service: Shared) -> HTMLResponse:
    """Returns a page to translate in a browser."""
    facts = {
        "languages": service.directions.languages(),
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
