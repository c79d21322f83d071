"""Reads a request's body: its size, its type, its JSON and its schema, each with an error of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from server.errors import ApiError, from_validation
from server.exact_json import load
from server.schema.dialects import in_own_names

MAX_BODY_BYTES = 32 * 2**20
"""Far above any context that fits; a larger body is refused before it is held in memory."""

logger = logging.getLogger("dalsegno.http")

Model = TypeVar("Model", bound=BaseModel)


async def read_json_object(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError: 415, 413 or 400."""
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
    raw = await _read(request, max_bytes)
    try:
        body, replaced = load(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            400, f"the body is not JSON at line {error.lineno}, column {error.colno}: {error.msg}", code="invalid_json"
        ) from None
    if replaced:
        logger.warning("request %s: %d lone surrogates are no text; U+FFFD stands for each", _id(request), replaced)
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


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


def _id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", "without an id"))


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise too_large
    return bytes(raw)
