"""`GET /`, `/docs` and `/dashboard/*`: the pages for people. They hold no data, so they need no key."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api_page import render_api_page
from server.errors import ApiError

PAGE = "index.html"

CHART_LIBRARY = "plotly.min.js"
"""Plotly's own bundle, served out of the package `plotly` as it was installed."""

CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = f"default-src 'self'; {_NOTHING_ELSE}; object-src 'none'"
"""Nothing from another host, nothing inline."""
API_PAGE_POLICY = f"default-src 'none'; img-src 'self'; style-src 'self'; {_NOTHING_ELSE}"
"""No script at all."""

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
"""A browser asks each time whether its copy is still good."""

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is sent."""

    content: bytes
    compressed: bytes
    content_type: str
    digest: str


@router.head("/")
@router.get("/")
def page(request: Request) -> Response:
    """The dashboard."""
    return _answer(request, PAGE)


@router.head("/dashboard/{name}")
@router.get("/dashboard/{name}")
def asset(request: Request, name: str) -> Response:
    """A style sheet, a script or a picture of the dashboard."""
    return _answer(request, name)


@router.head("/docs")
@router.get("/docs")
def api_page(request: Request) -> Response:
    """The API, to read."""
    app = request.app
    if not hasattr(app.state, "api_page"):
        app.state.api_page = _asset(render_api_page(app.openapi()).encode(), ".html")
    return _send(request, app.state.api_page, API_PAGE_POLICY)


def _answer(request: Request, name: str) -> Response:
    """Raises ApiError (404) for every name but those of the known files."""
    if name not in _known_files():
        raise ApiError(404, "no such file; the dashboard is at /", code="not_found")
    return _send(request, _read(name), PAGE_POLICY)


def _send(request: Request, found: Asset, policy: str) -> Response:
    is_compressed = "gzip" in request.headers.get("accept-encoding", "")
    tag = f'"{found.digest}{"-gzip" if is_compressed else ""}"'
    headers = HEADERS | {"content-security-policy": policy, "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if is_compressed:
        headers["content-encoding"] = "gzip"
    content = found.compressed if is_compressed else found.content
    headers |= {"content-type": found.content_type, "content-length": str(len(content))}
    return Response(b"" if request.method == "HEAD" else content, headers=headers)


@cache
def _known_files() -> Mapping[str, Traversable]:
    """By the name that a browser asks for."""
    own = {each.name: each for each in (files("ops") / "dashboard").iterdir() if _suffix(each.name) in CONTENT_TYPES}
    return own | {CHART_LIBRARY: files("plotly") / "package_data" / CHART_LIBRARY}


@cache
def _read(name: str) -> Asset:
    return _asset(_known_files()[name].read_bytes(), _suffix(name))


def _asset(content: bytes, suffix: str) -> Asset:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return Asset(content, gzip.compress(content, mtime=0), CONTENT_TYPES[suffix], digest)


def _suffix(name: str) -> str:
    return name[name.rfind(".") :] if "." in name else ""
