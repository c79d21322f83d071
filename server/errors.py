"""Every failure as OpenAI writes it: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from engine.errors import (
    ChatTemplateError,
    EngineError,
    EngineUnavailableError,
    QueueTimeoutError,
    RequestError,
    ServerOverloadedError,
)
from server.paths import nothing_at
from server.responses import JsonResponse

RETRY_AFTER_SECONDS = 1

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OBJECT_ERRORS = frozenset({"model_type", "model_attributes_type", "dict_type"})


class ApiError(Exception):
    """A failure to tell a client about. The message never holds what the client sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JsonResponse:
        return JsonResponse(self.body(), status_code=self.status, headers=self.headers)


def from_engine(error: EngineError) -> ApiError:
    """The HTTP form of what the engine refused."""
    match error:
        case ServerOverloadedError():
            return ApiError(429, str(error), code=error.code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        case QueueTimeoutError() | EngineUnavailableError():
            return ApiError(503, str(error), code=error.code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case ChatTemplateError():
            return ApiError(400, str(error), param="messages", code="chat_template_error")
        case _:
            return ApiError(500, "the engine failed on this request", code="internal_error")


def from_validation(
    error: ValidationError | RequestValidationError, body: Any = None, sent_as: Mapping[str, str] | None = None
) -> ApiError:
    """The first thing that pydantic found, without the value: it may be part of a prompt. `sent_as`: the names that
    the client gave to fields which are called otherwise here."""
    if isinstance(error, RequestValidationError):
        # Of a parameter, whose place is `query` or `path`; a route reads its body itself.
        found = error.errors()
        param = _dotted(list(found[0]["loc"][1:])) or None
    else:
        # Lists fail at their first wrong element (see AtMost), so there are a few at most.
        found = error.errors(include_input=False)
        field, *inner = _real_location(found[0]["loc"], body) or [""]
        param = _dotted([(sent_as or {}).get(str(field), field), *inner]) or None
    said = "Input should be an object" if found[0]["type"] in _OBJECT_ERRORS else found[0]["msg"]
    message = f"{param}: {said}" if param else said
    return ApiError(400, message, param=param, code="invalid_value")


def install_error_handlers(app: FastAPI) -> None:
    """Give every exception that can leave a route OpenAI's shape."""

    async def on_api_error(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, ApiError)
        return _answer(request, error)

    async def on_engine_error(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, EngineError)
        return _answer(request, from_engine(error))

    async def on_validation_error(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, RequestValidationError)
        return _answer(request, from_validation(error))

    async def on_http_error(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, HTTPException)
        allowed = Headers(error.headers).get("allow", "another method")
        messages = {
            404: nothing_at(request.url.path),
            405: f"{request.method} is not allowed here; expected {allowed}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return _answer(request, ApiError(error.status_code, message, headers=error.headers))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(EngineError, on_engine_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)


def _answer(request: Request, error: ApiError) -> JsonResponse:
    """Leaves the code where the boundary looks for it."""
    request.state.error_code = error.code
    return error.response()


def _real_location(location: tuple[int | str, ...], body: Any) -> list[int | str]:
    """Without the names that pydantic puts between the fields for the members of a union."""
    real: list[int | str] = []
    for position, part in enumerate(location):
        is_field = isinstance(body, dict) and part in body
        is_element = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_field or is_element:
            body = body[part]
            real.append(part)
        elif position == len(location) - 1 and isinstance(body, dict):
            real.append(part)
    return real


def _dotted(location: list[int | str]) -> str:
    """("messages", 0, "content") -> "messages[0].content", as OpenAI writes it."""
    dotted = ""
    for part in location:
        dotted += f"[{part}]" if isinstance(part, int) else f".{part}" if dotted else str(part)
    return dotted
