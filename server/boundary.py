"""The outermost layer around every request: its id, the API key, one log line, and no exception beyond it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.daemon import ERROR_CODE, GENERATING_PATHS
from server.errors import ApiError
from server.isolation import KEY_NUMBER
from server.trust import Trust, is_on_this_machine

OPEN_PATHS = frozenset({"/", "/health", "/livez", "/readyz", "/ping", "/version", "/docs", "/openapi.json"})
"""Probes, documentation and the page of the dashboard, which holds no data, are open to everybody."""

DASHBOARD_PREFIX = "/dashboard/"
"""What that page is made of."""

OPERATOR_PATHS = frozenset({"/metrics", "/insights", "/insights/stream"})
"""What both a client's key and the operator's open."""

ADMIN_PREFIX = "/admin/"
"""What an operator may do; the keys of clients do not open it."""

CLIENT_LEFT = 499
"""What the log says when nobody waited for the answer; nginx's number."""

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

logger = logging.getLogger("dalsegno.http")


class RequestBoundary:
    """ASGI middleware; holds the API keys (none: open to all), the admin key (empty: admin is for clients on this
    machine), whom to believe without one, and no other state.

    `on_end` is told each request's scope, status and seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str] = (),
        admin_key: str = "",
        trust: Trust | None = None,
        on_end: Callable[[Scope, int, float], None] | None = None,
    ) -> None:
        self._app = app
        self._trust = trust or Trust()
        self._on_end = on_end
        self._keys = tuple(key.encode() for key in api_keys)
        self._admin_keys = (admin_key.encode(),) if admin_key else ()

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
            self._check_key(scope, headers)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            scope["state"][ERROR_CODE] = error.code
            await error.response()(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_LEFT
        except asyncio.CancelledError:
            status = CLIENT_LEFT
            raise
        except Exception as error:
            logger.error("request %s failed inside the daemon", request_id, exc_info=error)
            if status == 0:
                failure = ApiError(
                    500, "the daemon failed on this request; its log names the place", code="internal_error"
                )
                await failure.response()(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - started
            _log(scope, request_id, status, seconds)
            if self._on_end is not None:
                self._on_end(scope, status, seconds)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError (401) without the key that the path asks for, and (403) where it asks for none but the
        request comes from where it may not."""
        path = get_route_path(scope)
        if path in OPEN_PATHS or path.startswith(DASHBOARD_PREFIX):
            return
        if not path.startswith(ADMIN_PREFIX):
            if self._keys:
                number = _key_number(headers, self._keys)
                if number is None and path in OPERATOR_PATHS and _key_number(headers, self._admin_keys) is not None:
                    return
                if number is None:
                    raise _key_needed("API")
                scope["state"][KEY_NUMBER] = number
                return
        elif self._admin_keys:
            if _key_number(headers, self._admin_keys) is None:
                raise _key_needed("admin")
            return
        elif not is_on_this_machine(scope, headers):
            raise ApiError(
                403,
                f"{ADMIN_PREFIX} answers clients on this machine only, and no proxy; to open it, start the daemon with "
                "--admin-key",
            )
        self._trust.check(scope, headers, has_named_pages=not path.startswith(ADMIN_PREFIX))


def _key_number(headers: Headers, keys: Sequence[bytes]) -> int | None:
    """Which of the keys was sent, if any; in a time that does not tell how much of one was right."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in keys]
    return matches.index(True) if any(matches) else None


def _key_needed(kind: str) -> ApiError:
    return ApiError(
        401,
        f"a valid {kind} key is needed: send it as authorization: Bearer KEY or as x-api-key",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _VALID_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    """One line; the route's pattern and not the path, which a client may fill with anything.

    What is polled is only of interest when one looks for it, and what generates has events of its own.
    """
    route = getattr(scope.get("route"), "path", "no route")
    is_look = scope["method"] in ("GET", "HEAD") and (
        route in OPEN_PATHS | OPERATOR_PATHS or route.startswith((ADMIN_PREFIX, DASHBOARD_PREFIX))
    )
    level = logging.DEBUG if is_look or route in GENERATING_PATHS else logging.INFO
    outcome = ", ended in an error," if scope["state"].get("has_failed") else ""
    logger.log(level, "%s %s %d%s in %.3f s (%s)", scope["method"], route, status, outcome, seconds, request_id)
