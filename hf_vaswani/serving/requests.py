"""Requests to the server: fields of a query string, of JSON or of a form, with their limits and API keys."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl

from ..extras import extra

with extra("serve"):
    from fastapi import Request
    from pydantic import BaseModel, Field, ValidationError
    from starlette.formparsers import MultiPartException, MultiPartParser

MAX_ALTERNATIVES = 10
# In bytes: what a request may have beside its texts, and of each character, which JSON can write as "\ud83d\ude00".
REQUEST_OVERHEAD, BYTES_PER_CHARACTER = 65_536, 12
# In seconds, to send the body of a request.
BODY_TIMEOUT = 30.0
# Largest number of fields in a form.
MAX_FIELDS = 20
JSON, FORMS = "application/json", ("application/x-www-form-urlencoded", "multipart/form-data")

Body = TypeVar("Body", bound="RequestBody")


class RefusedError(Exception):
    """A request is answered by this status and sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class RequestBody(BaseModel):
    """Body of a request, as JSON or as a form."""

    q: Any
    api_key: str | None = Field(None, description="a text: the API key, where the server asks for one")

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

    q: str | list[str] = Field(description="a text, or a list of texts in one language")


@dataclass(frozen=True)
class Limits:
    """
    What a server accepts.

    Attributes:
        characters (`int`): in a text.
        texts (`int`): in a request.
        waiting (`int`): texts that wait for their translation, those of short requests and others each; beyond them,
            requests are answered by 429.
        deadline (`float`, *optional*): in seconds, for a translation; one that is not ready then is answered by 503.
    """

    characters: int = 5000
    texts: int = 100
    waiting: int = 1000
    deadline: float | None = 30.0

    @property
    def max_bytes(self) -> int:
        """Largest size of a request: the longest text, however it is written, or so many texts of as many bytes."""
        return REQUEST_OVERHEAD + self.characters * max(BYTES_PER_CHARACTER, self.texts)

    def check(self, texts: list[str]) -> None:
        """Raises a [`RefusedError`] if the texts of a request are too long, too many or not valid Unicode."""
        if len(texts) > self.texts:
            raise RefusedError(400, f"There are {len(texts)} texts, but at most {self.texts} are accepted.")
        if (characters := max(map(len, texts), default=0)) > self.characters:
            raise RefusedError(
                400, f"The text has {characters:,} characters, but at most {self.characters:,} are accepted."
            )
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise RefusedError(400, "The text is no Unicode: it has an unpaired surrogate.") from error


async def read(request: Request, kind: type[Body], limits: Limits, keys: Collection[bytes]) -> Body:
    """Reads a request, and checks its fields, its key and its texts."""
    fields = await read_fields(request, await read_bytes(request, limits.max_bytes))
    needed = [name for name, field in kind.model_fields.items() if field.is_required()]
    try:
        # Programs send null or "" for what they leave out.
        asked = kind.model_validate(
            {n: field for n, field in fields.items() if field not in (None, "") or n in needed}
        )
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        meaning = kind.model_fields[name].description
        missing = error.errors()[0]["type"] == "missing"
        raise RefusedError(400, f"{name} {'is missing: it is' if missing else 'must be'} {meaning}.") from error
    check_key(request, asked.api_key, keys)
    limits.check(asked.texts)
    return asked


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
    """Reads the fields of a request: those of its query string, and those of its body, JSON or a form."""
    pairs = _decode(request.scope["query_string"], "query string")
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    fields: dict[str, Any] = {}
    if body.strip():
        # curl -d sends JSON as a form, too.
        if media not in FORMS or body.lstrip().startswith(b"{"):
            fields = _read_json(body)
        else:
            pairs += _decode(body, "form") if media == FORMS[0] else await _read_parts(request, body)
    if len(dict(pairs)) < len(pairs):
        raise RefusedError(400, "A field is given twice: a list of texts needs JSON.")
    # An empty field is one that is left out, but a text may be empty.
    return {name: value for name, value in pairs if value or name == "q"} | fields


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        # Some programs write lines and tabs of a text as they are.
        fields = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "The body is neither JSON nor a form.") from error
    if not isinstance(fields, dict):
        raise RefusedError(400, 'The body must be an object, as in {"q": "Hello", "source": "en", ...}.')
    return fields


def _decode(data: bytes, name: str) -> list[tuple[str, str]]:
    """Decodes a query string or a form like one. The standard has percent signs, and curl -d sends text as it is."""
    try:
        return parse_qsl(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise RefusedError(400, f"The {name} cannot be read: it must be UTF-8, without files.") from error


async def _read_parts(request: Request, body: bytes) -> list[tuple[str, Any]]:
    """Reads a form in several parts."""

    async def parts() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        parser = MultiPartParser(request.headers, parts(), max_files=0, max_fields=MAX_FIELDS, max_part_size=len(body))
        return (await parser.parse()).multi_items()
    except (ValueError, MultiPartException) as error:
        raise RefusedError(400, "The form cannot be read: it must be UTF-8, without files.") from error


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
