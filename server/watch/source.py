"""Asks a running daemon for everything that it tells about itself, at one moment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from engine.errors import EngineError
from server.daemon_url import base_url
from server.watch.bodies import (
    Body,
    CacheBody,
    HealthBody,
    HistoryBody,
    InsightsBody,
    RequestsBody,
)

WINDOW_SECONDS = 600.0
"""How far back the watcher looks."""

_SHOWN_REQUESTS = 50
_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_CLOSED = (401, 403)

Metrics = Mapping[str, float]
"""By `name{label="value"}`, as the page writes it."""


class UnreachableError(EngineError):
    """Nobody answers, or it is no dalsegno."""


@dataclass(frozen=True, slots=True)
class Keys:
    """None where there is none."""

    api: str | None = None
    admin: str | None = None


@dataclass(slots=True)
class Reading:
    """What a daemon told. Filled while it is read; a part is None where the daemon did not tell it, and `closed` or
    `missing` then says why."""

    url: str
    read_unix_ms: int
    """By the daemon's clock, to the second, where it tells."""
    health: HealthBody
    insights: InsightsBody | None = None
    cache: CacheBody | None = None
    history: HistoryBody | None = None
    requests: RequestsBody | None = None
    metrics: Metrics | None = None
    closed: dict[str, int] = field(default_factory=dict)
    """Paths that another key would open, with the status of the refusal."""
    missing: dict[str, str] = field(default_factory=dict)
    """Paths that gave nothing to read, and why."""
    raw: dict[str, Any] = field(default_factory=dict)
    """Every body as it came."""

    def as_json(self) -> dict[str, Any]:
        """Everything, for scripts."""
        return {
            "url": self.url,
            "read_unix_ms": self.read_unix_ms,
            **self.raw,
            "closed": self.closed,
            "missing": self.missing,
        }


class DaemonSource:
    """Reads one daemon. Close it with `close`."""

    def __init__(self, url: str, keys: Keys, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`url` may end in /v1 and may leave out http://. `transport` is another way to the daemon, for tests."""
        self.url = base_url(url)
        headers = {"user-agent": "dalsegno-watch"}
        self._api = _header(keys.api or keys.admin)
        self._admin = _header(keys.admin)
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def read(self, since_unix_ms: int = 0) -> Reading:
        """Everything there is to know now, and of the history what came after. Raises UnreachableError."""
        reading = await self._read_health()
        since = max(since_unix_ms, reading.read_unix_ms - round(WINDOW_SECONDS * 1000))
        await asyncio.gather(
            self._read_json(reading, "insights", "/insights", InsightsBody, self._api),
            self._read_json(reading, "cache", "/admin/cache", CacheBody, self._admin),
            self._read_json(reading, "history", f"/admin/history?since={since}", HistoryBody, self._admin),
            self._read_json(reading, "requests", f"/admin/requests?limit={_SHOWN_REQUESTS}", RequestsBody, self._admin),
            self._read_metrics(reading),
        )
        return reading

    async def _read_health(self) -> Reading:
        try:
            response = await self._http.get(f"{self.url}/health")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(f"no daemon answers at {self.url}: {_reason(error)}") from error
        try:
            body = response.json()
            return Reading(self.url, _clock(response), HealthBody.model_validate(body), raw={"health": body})
        except ValueError as error:
            raise UnreachableError(
                f"{self.url}/health does not answer as dalsegno does (status {response.status_code}); check the URL"
            ) from error

    async def _read_json(
        self, reading: Reading, name: str, path: str, kind: type[Body], key: Mapping[str, str]
    ) -> None:
        response = await self._get(reading, path, key)
        if response is None:
            return
        try:
            body = json.loads(response.content)
            setattr(reading, name, kind.model_validate(body))
        except ValidationError as error:
            place = ".".join(str(part) for part in error.errors()[0]["loc"])
            reading.missing[path.partition("?")[0]] = f"is of another version: it differs at {place}"
        except ValueError:
            reading.missing[path.partition("?")[0]] = "is no JSON"
        else:
            reading.raw[name] = body

    async def _read_metrics(self, reading: Reading) -> None:
        response = await self._get(reading, "/metrics", self._api)
        if response is None:
            return
        try:
            reading.metrics = reading.raw["metrics"] = parse_metrics(response.text)
        except ValueError:
            reading.missing["/metrics"] = "is no page for Prometheus"

    async def _get(self, reading: Reading, path: str, key: Mapping[str, str]) -> httpx.Response | None:
        shown = path.partition("?")[0]
        try:
            response = await self._http.get(f"{self.url}{path}", headers=key)
        except httpx.HTTPError as error:
            reading.missing[shown] = _reason(error)
            return None
        if response.status_code in _CLOSED:
            reading.closed[shown] = response.status_code
            return None
        if response.is_error:
            reading.missing[shown] = f"answered {response.status_code}"
            return None
        return response


def parse_metrics(page: str) -> dict[str, float]:
    """Every sample of a page. Raises ValueError where it is none."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def _header(key: str | None) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _clock(response: httpx.Response) -> int:
    try:
        return round(parsedate_to_datetime(response.headers["date"]).timestamp() * 1000)
    except (KeyError, ValueError):
        return round(time.time() * 1000)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
