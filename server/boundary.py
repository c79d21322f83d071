"""The outermost layer around every request: its id, the API key, one log line, and no exception beyond it."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/docs", "/docs/oauth2-redirect", "/openapi.json"})
"""Probes and documentation need no key."""

CLIENT_LEFT = 499
"""What the log says when nobody waited for the answer; nginx's number."""

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

logger = logging.getLogger("dalsegno.http")


class RequestBoundary:
    """ASGI middleware; holds the API keys (none: open to all) and no other state.

    `on_end` is told each request's path, status, seconds, and whether its stream ended in an error event.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str] = (), on_end: Callable[[str, int, float, bool], None] | None = None
    ) -> None:
        self._app = app
        self._on_end = on_end
        self._keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_LEFT
        except Exception as error:
            logger.error("request %s failed inside the daemon", request_id, exc_info=error)
            if status == 0:
                failure = ApiError(
                    500, "the daemon failed on this request; its log names the place", code="internal_error"
                )
                await failure.response()(scope, receive, send_with_id)
        seconds = time.monotonic() - started
        _log(scope, request_id, status, seconds)
        if self._on_end is not None:
            self._on_end(scope["path"], status, seconds, bool(scope["state"].get("has_failed")))

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: send it as authorization: Bearer KEY or as x-api-key",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _VALID_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    """One line; the route's pattern and not the path, which a client may fill with anything."""
    route = getattr(scope.get("route"), "path", "no route")
    level = logging.DEBUG if route in OPEN_PATHS else logging.INFO
    outcome = ", ended in an error," if scope["state"].get("has_failed") else ""
    logger.log(level, "%s %s %d%s in %.3f s (%s)", scope["method"], route, status, outcome, seconds, request_id)
