"""What a watcher shows, made of what the daemon told: reuse over the last minutes, and one row for each request."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from server.watch.bodies import PointBody, PoolBody, RequestBody
from server.watch.source import WINDOW_SECONDS, Metrics, Reading

_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Point:
    """What was reused and generated until a moment, since the point before."""

    at_unix_ms: int
    achieved_tokens: int
    achievable_tokens: int
    expected_tokens: int | None
    """Of a sound cache of the same size; None where the daemon does not tell."""
    generated_tokens: int
    lost: Mapping[str, int]
    paths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reuse:
    """The points of a time, oldest first, and in words which time that is."""

    span: str
    points: tuple[Point, ...] = ()
    has_course: bool = True
    """Whether the points tell how it went, and not only a sum."""

    @property
    def achieved_tokens(self) -> int:
        return sum(point.achieved_tokens for point in self.points)

    @property
    def achievable_tokens(self) -> int:
        return sum(point.achievable_tokens for point in self.points)

    @property
    def expected_tokens(self) -> int | None:
        known = [point.expected_tokens for point in self.points if point.expected_tokens is not None]
        return sum(known) if known else None

    @property
    def lost(self) -> dict[str, int]:
        return _added(point.lost for point in self.points)

    @property
    def paths(self) -> dict[str, int]:
        return _added(point.paths for point in self.points)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request; figures are of its first answer, None where it has not come so far."""

    request_id: str
    path: str
    lost: str
    """The most of what had to be computed, and why."""
    cached_tokens: int | None
    prompt_tokens: int | None
    ttft_seconds: float | None
    tokens_per_second: float | None
    outcome: str


@dataclass(slots=True)
class Watch:
    """What has been read of one daemon. Mutable: show it each reading."""

    reading: Reading | None = None
    _points: deque[Point] = field(default_factory=deque)
    _totals: deque[tuple[int, dict[str, int]]] = field(default_factory=deque)

    @property
    def newest_unix_ms(self) -> int:
        """Of the daemon's own history; what came before need not be read again. 0 before the first point."""
        return self._points[-1].at_unix_ms if self._points else 0

    def saw(self, reading: Reading) -> None:
        """Points of its history that are known already must not be in it again."""
        self.reading = reading
        oldest_unix_ms = reading.read_unix_ms - WINDOW_SECONDS * 1000
        if reading.history is not None:
            self._points.extend(map(_point, reading.history.points))
        while self._points and self._points[0].at_unix_ms < oldest_unix_ms:
            self._points.popleft()
        if reading.metrics is None:
            return
        totals = _totals_of(reading.metrics)
        if self._totals and any(totals.get(name, 0) < value for name, value in self._totals[-1][1].items()):
            self._totals.clear()  # another life of the daemon
        self._totals.append((reading.read_unix_ms, totals))
        while self._totals[0][0] < oldest_unix_ms:
            self._totals.popleft()

    def reuse(self) -> Reuse | None:
        """From the daemon's own history where it is open, else from its counters; None where both are closed."""
        if self.reading is None:
            return None
        if self.reading.history is not None:
            return Reuse(f"last {WINDOW_SECONDS / 60:.0f} min", tuple(self._points))
        if not self._totals:
            return None
        if len(self._totals) == 1:
            at, totals = self._totals[0]
            return Reuse("since it started", (_difference(at, {}, totals),), has_course=False)
        points = tuple(_difference(at, before, now) for (_, before), (at, now) in pairwise(self._totals))
        return Reuse("since you look", points)

    def pools(self) -> dict[str, PoolBody]:
        """Those that hold anything at all."""
        if self.reading is None:
            return {}
        cache = self.reading.cache
        found = _pools_of(self.reading.metrics or {}) if cache is None else cache.pools
        return {name: pool for name, pool in found.items() if pool.capacity > 0}

    def requests(self) -> list[RequestRow] | None:
        """Newest first; None where the daemon does not tell."""
        if self.reading is None or self.reading.requests is None:
            return None
        return [_row(request, self.reading.read_unix_ms) for request in self.reading.requests.requests]

    def running_and_waiting(self) -> tuple[int, int] | None:
        if self.reading is None:
            return None
        cache, metrics = self.reading.cache, self.reading.metrics or {}
        if cache is not None and cache.requests_running is not None and cache.requests_waiting is not None:
            return cache.requests_running, cache.requests_waiting
        if "dalsegno_requests_running" not in metrics:
            return None
        return int(metrics["dalsegno_requests_running"]), int(metrics.get("dalsegno_requests_waiting", 0))

    def model(self) -> str:
        """What is served; empty where the daemon does not tell."""
        metrics = (self.reading.metrics if self.reading else None) or {}
        for name in metrics:
            if name.startswith("dalsegno_model_info{"):
                return _labels(name).get("model", "")
        return ""


def by_time(points: Sequence[Point], values: Sequence[float], columns: int, end_unix_ms: int) -> list[float]:
    """The sum of the values in each of at most `columns` equal parts of the window that ends at `end_unix_ms`."""
    window_ms = WINDOW_SECONDS * 1000
    gaps = sorted(later.at_unix_ms - earlier.at_unix_ms for earlier, later in pairwise(points))
    # A part of so many intervals that none has a point more than its neighbour.
    interval_ms = max(1, gaps[len(gaps) // 2]) if gaps else 1
    part_ms = -(-window_ms / columns // interval_ms) * interval_ms
    sums = [0.0] * max(1, min(columns, int(window_ms // part_ms)))
    for point, value in zip(points, values, strict=True):
        back = max(0, int((end_unix_ms - point.at_unix_ms) // part_ms))
        if back < len(sums):
            sums[-1 - back] += value
    return sums


def _point(body: PointBody) -> Point:
    cache = body.context_cache
    return Point(
        at_unix_ms=body.timestamp_unix_ms,
        achieved_tokens=cache.reused_tokens,
        achievable_tokens=cache.achievable_tokens,
        expected_tokens=cache.expected_tokens,
        generated_tokens=body.tokens.decode,
        lost=cache.lost_tokens,
        paths=cache.selections,
    )


_ACHIEVED = "dalsegno_reuse_achieved_tokens_total"
_ACHIEVABLE = "dalsegno_reuse_achievable_tokens_total"
_EXPECTED = "dalsegno_reuse_expected_tokens_total"
_GENERATED = "dalsegno_generation_tokens_total"
_LOST = "dalsegno_reuse_lost_tokens_total{"
_SELECTIONS = "dalsegno_reuse_selections_total{"


def _totals_of(metrics: Metrics) -> dict[str, int]:
    wanted = (_ACHIEVED, _ACHIEVABLE, _EXPECTED, _GENERATED, _LOST, _SELECTIONS)
    return {name: int(value) for name, value in metrics.items() if name.startswith(wanted)}


def _difference(at_unix_ms: int, before: Mapping[str, int], now: Mapping[str, int]) -> Point:
    grown = {name: value - before.get(name, 0) for name, value in now.items()}

    def labelled(prefix: str) -> dict[str, int]:
        return {"".join(_labels(name).values()): grew for name, grew in grown.items() if name.startswith(prefix)}

    return Point(
        at_unix_ms=at_unix_ms,
        achieved_tokens=grown.get(_ACHIEVED, 0),
        achievable_tokens=grown.get(_ACHIEVABLE, 0),
        expected_tokens=grown.get(_EXPECTED),
        generated_tokens=grown.get(_GENERATED, 0),
        lost=labelled(_LOST),
        paths=labelled(_SELECTIONS),
    )


def _pools_of(metrics: Metrics) -> dict[str, PoolBody]:
    found: dict[str, dict[str, int]] = {}
    for name, value in metrics.items():
        labels = _labels(name)
        if name.startswith("dalsegno_cache_units{"):
            found.setdefault(labels["pool"], {})[labels["state"]] = int(value)
        elif name.startswith("dalsegno_cache_capacity{"):
            found.setdefault(labels["pool"], {})["capacity"] = int(value)
    names = set(PoolBody.model_fields)
    return {pool: PoolBody.model_validate(units) for pool, units in found.items() if names <= units.keys()}


def _labels(name: str) -> dict[str, str]:
    return dict(_LABEL.findall(name))


def _row(request: RequestBody, now_unix_ms: int) -> RequestRow:
    answer = request.answers[0] if request.answers else None
    result = answer.result if answer else None
    timings = answer.timings_seconds if answer else None
    speed = None
    if result is not None and timings is not None and timings.decode and result.completion_tokens > 1:
        speed = (result.completion_tokens - 1) / timings.decode
    outcome = request.outcome or "running"
    if request.outcome is None and request.started_unix_ms is not None:
        outcome = f"running {max(0, now_unix_ms - request.started_unix_ms) / 1000:,.0f} s"
    if outcome == "ok" and answer is not None and answer.finish_reason:
        outcome = answer.finish_reason
    return RequestRow(
        request_id=request.request_id,
        path=result.reuse if result else "",
        lost=_most(result.lost) if result else "",
        cached_tokens=result.cached_tokens if result else None,
        prompt_tokens=result.prompt_tokens if result else None,
        ttft_seconds=timings.ttft if timings else None,
        tokens_per_second=speed,
        outcome=outcome,
    )


def _most(lost: Mapping[str, int]) -> str:
    reason = max(lost, key=lambda name: lost[name], default="")
    return f"{reason} {lost[reason]:,}" if reason else ""


def _added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums by name, largest first; what is 0 is left out."""
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0) + value
    return {name: value for name, value in sorted(sums.items(), key=lambda item: -item[1]) if value}
