"""Reads a request's body: its type, its size, its JSON and its schema, each bounded before the next looks at it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from server.errors import ApiError, from_validation
from server.exact_json import PIECE_BYTES, Loaded, Raw, load
from server.limits import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, MAX_STRINGS, BodyLimits
from server.schema.dialects import in_own_names

_SMALL_BYTES = 2**15
"""A body of this size is read in a few milliseconds whatever it holds: not worth another thread."""

_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_ALL_SQUARE = bytes.maketrans(b"{}", b"[]")

logger = logging.getLogger("dalsegno.http")

Model = TypeVar("Model", bound=BaseModel)

_thread = ThreadPoolExecutor(1, "dalsegno-body")
"""For large bodies. One thread and no more: each call of the JSON parser keeps the interpreter's lock to its end, and
two of them in turn would keep the event loop out for twice as long."""


async def read_body(request: Request, validate: Callable[[dict[str, Any]], Model]) -> Model:
    """What `validate` makes of the body, a JSON object. Raises ApiError: 415, 413, 400, or what `validate` raises."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # Without one it may be a page's in a browser, which may send this type to nobody but its own origin.
        message = "the body must be JSON and say so: send content-type: application/json (curl: --json, or -H)"
        raise ApiError(415, message, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        # What a few bytes unpack to has no bound.
        message = "a compressed body is not read; send it as it is, without content-encoding"
        headers = {"accept-encoding": "identity"}
        raise ApiError(415, message, code="unsupported_media_type", headers=headers)
    limits: BodyLimits = request.app.state.daemon.body_limits
    raw = await _receive(request, limits.max_bytes)
    request.state.body_bytes = len(raw)

    def read() -> Model:
        body, replaced = load_object(raw, limits)
        if replaced:
            logger.warning("request %s: %d lone surrogates are no text; U+FFFD stands for each", _id(request), replaced)
        return validate(body)

    if len(raw) <= _SMALL_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(_thread, read)


def parse(schema: type[Model], body: dict[str, Any], sent_as: Mapping[str, str] | None = None) -> Model:
    """The body as `schema`. Raises ApiError (400) that names the first wrong field, as it was sent, and never its
    value."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body, sent_as or {}) from None


def parse_request(schema: type[Model], body: dict[str, Any]) -> Model:
    """The same for a body whose fields may be those of other servers."""
    fields, sent_as = in_own_names(schema, body)
    return parse(schema, fields, sent_as)


def load_object(raw: Raw, limits: BodyLimits) -> Loaded:
    """The bytes as a JSON object within the limits. Raises ApiError (400)."""
    is_too_deep = check_structure(raw, limits)
    try:
        loaded = load(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            400, f"the body is not JSON at line {error.lineno}, column {error.colno}: {error.msg}", code="invalid_json"
        ) from None
    if is_too_deep:
        raise _too_much(f"more than {MAX_DEPTH} arrays and objects inside each other")
    body = loaded.value
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if len(body) > MAX_KEYS:
        raise _too_much(f"more than {MAX_KEYS} fields")
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > limits.max_messages:
        raise _too_much(f"more than {limits.max_messages:,} messages (--max-messages)", "messages")
    return loaded


def check_structure(raw: Raw, limits: BodyLimits) -> bool:
    """Count what the parser would make objects of, without making any: some passes over each piece of the bytes, each
    in C, and none beyond the piece in which a limit is passed.

    Raises ApiError (400) for too many values. Returns whether it is too deep, if it is JSON at all.
    """
    quotes = openings = closings = commas = 0
    kept = []
    for piece in _pieces(raw):
        escaped = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Between two quotes is a string: every second part is outside of all, and the first where none is open.
        parts = escaped.split(b'"')
        structure = b"".join(parts[quotes % 2 :: 2]).translate(None, _NO_STRUCTURE)
        quotes += len(parts) - 1
        openings += structure.count(b"[") + structure.count(b"{")
        closings += structure.count(b"]") + structure.count(b"}")
        commas += structure.count(b",")
        if quotes > 2 * MAX_STRINGS:
            raise _too_much(f"more than {MAX_STRINGS:,} strings")
        if max(openings, closings) > MAX_CONTAINERS:
            raise _too_much(f"more than {MAX_CONTAINERS:,} arrays and objects")
        if openings + commas > limits.max_values:
            raise _too_much(f"more than {limits.max_values:,} values")
        kept.append(structure)
    # Each turn takes the innermost level away; whether a bracket has its match is the parser's affair.
    nested = b"".join(kept).translate(_ALL_SQUARE, b",")
    for _ in range(MAX_DEPTH):
        if not nested:
            return False
        nested = nested.replace(b"[]", b"")
    return bool(nested)


def _pieces(raw: Raw) -> Iterator[Raw]:
    """Other threads have their turn between two of them; none ends inside of an escape."""
    start = 0
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = raw[start : start + PIECE_BYTES + 1]
        yield piece
        start += len(piece)


def _id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", "without an id"))


def _too_much(what: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"the body has {what}", param=param, code="invalid_value")


async def _receive(request: Request, max_bytes: int) -> bytearray:
    too_large = ApiError(
        413,
        f"the body is larger than {max_bytes:,} bytes; for larger ones start the daemon with --max-body-mib",
        code="request_too_large",
    )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise too_large
    return raw
