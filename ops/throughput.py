"""What was done between two looks at the engine, and the last hour of it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from cache import ROOT_PATH, CacheStats, CheckpointKind, LossReason, PoolCounts, SkipReason
from engine.copies import Direction
from engine.snapshot import EngineSnapshot
from ops.events import (
    ContextCacheState,
    Event,
    EventKind,
    MedianSeconds,
    PoolUnits,
    Pressure,
    RequestCounts,
    RequestDone,
    SchedulerState,
    Throughput,
    TokenCounts,
    TransferCounts,
    Transfers,
)

KEPT_SAMPLES = 720
"""An hour of them, at one every 5 s."""

_MOST_DONE = 4096
"""Answers of one interval whose times are kept; of more, the last ones."""

_Totals = Mapping[str, float]


class ThroughputMeter:
    """Takes the difference of two snapshots. Mutable: only the event loop's thread may touch it."""

    def __init__(self, *, host_unit_bytes: int, interval_seconds: float, now: float) -> None:
        """From `now` on, a time on any clock that never goes back; the engine's totals are those of a new one."""
        self.interval_seconds = interval_seconds
        self._host_unit_bytes = host_unit_bytes
        self._since = now
        self._before: _Totals = {}
        self._requests = dict.fromkeys(_COUNTED.values(), 0)
        self._done: deque[RequestDone] = deque(maxlen=_MOST_DONE)

    def saw(self, event: Event) -> None:
        """To be shown every event; it counts those of requests."""
        if isinstance(event, RequestDone):
            self._done.append(event)
        name = _COUNTED.get(event.KIND)
        if name is not None:
            self._requests[name] += 1

    def is_due(self, now: float) -> bool:
        """Whether the interval is over."""
        return now - self._since >= self.interval_seconds

    def sample(self, snapshot: EngineSnapshot, now: float) -> Throughput:
        """What was done since the last call, whenever that was, and how things stand."""
        totals = _totals(snapshot)
        done = {name: _grown(total, self._before.get(name, 0)) for name, total in totals.items()}
        sample = Throughput(
            interval_seconds=max(0.0, now - self._since),
            tokens=TokenCounts(*(int(done[name]) for name in ("prefill", "decode", "recomputed"))),
            requests=RequestCounts(**self._requests),
            scheduler=SchedulerState(snapshot.running, snapshot.waiting, snapshot.prefilling, snapshot.decoding),
            median_seconds=_medians(self._done),
            context_cache=self._context_cache(snapshot, done),
        )
        self._since, self._before = now, totals
        self._requests = dict.fromkeys(_COUNTED.values(), 0)
        self._done.clear()
        return sample

    def _context_cache(self, snapshot: EngineSnapshot, done: _Totals) -> ContextCacheState:
        return ContextCacheState(
            occupancy=self._pools(snapshot, lambda counts: counts.capacity - counts.free),
            capacity=self._pools(snapshot, lambda counts: counts.capacity),
            pinned=self._pools(snapshot, lambda counts: counts.pinned),
            in_flight=self._pools(snapshot, lambda counts: counts.in_flight),
            selections=_named("selections", _PATHS, done),
            reused_tokens=int(done["reused"]),
            achievable_tokens=int(done["achievable"]),
            expected_tokens=int(done["expected"]),
            lost_tokens=_named("lost", LossReason, done),
            pressure=_pressure(done),
            transfers=Transfers(*(_transfers(direction, done) for direction in _DIRECTIONS)),
        )

    def _pools(self, snapshot: EngineSnapshot, measure: Callable[[PoolCounts], int]) -> PoolUnits:
        return PoolUnits(
            device_state_slots=measure(snapshot.state_slots),
            host_state_slots=measure(snapshot.host_state_slots),
            kv_pages=measure(snapshot.kv_pages),
            host_bytes=measure(snapshot.host_units) * self._host_unit_bytes,
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One sample in the history."""

    timestamp_unix_ms: int
    sample: Throughput


class History:
    """The last samples, oldest first. Mutable: only the event loop's thread may touch it."""

    def __init__(self, capacity: int = KEPT_SAMPLES) -> None:
        self._points: deque[Point] = deque(maxlen=capacity)

    def add(self, timestamp_unix_ms: int, sample: Throughput) -> None:
        """Keep a sample, in the place of the oldest when there are too many."""
        self._points.append(Point(timestamp_unix_ms, sample))

    def since(self, unix_ms: int = 0) -> list[Point]:
        """Those after this moment: ask again with the time of the last one to get what is new."""
        newer = list(takewhile(lambda point: point.timestamp_unix_ms > unix_ms, reversed(self._points)))
        return newer[::-1]


_PATHS = (ROOT_PATH, *CheckpointKind)
_DIRECTIONS = (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE)
_COUNTED: Mapping[EventKind, str] = {
    EventKind.REQUEST_START: "started",
    EventKind.REQUEST_DONE: "done",
    EventKind.REQUEST_ERROR: "errors",
    EventKind.REQUEST_REJECTED: "rejected",
}


def _medians(done: Iterable[RequestDone]) -> MedianSeconds:
    queues = [each.timings_seconds.queue for each in done]
    hits = [each.timings_seconds.ttft for each in done if each.result.reuse != ROOT_PATH]
    roots = [each.timings_seconds.ttft for each in done if each.result.reuse == ROOT_PATH]
    stalls = [each.timings_seconds.stalled for each in done]
    return MedianSeconds(_median(queues), _median(hits), _median(roots), _median(stalls))


def _median(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return statistics.median(known) if known else None


def _grown(now: float, before: float) -> float:
    """Never negative: a total that has become smaller began anew."""
    return now - before if now >= before else now


def _totals(snapshot: EngineSnapshot) -> dict[str, float]:
    """Every total by a name of its own, as numbers that stay what they are while the engine goes on."""
    cache = snapshot.cache
    totals: dict[str, float] = {
        "prefill": snapshot.prefill_tokens_total,
        "decode": snapshot.decode_tokens_total,
        "recomputed": snapshot.recomputed_tokens_total,
        "preemptions": snapshot.suspensions_total,
        "reused": cache.reused_tokens,
        "achievable": cache.achievable_tokens,
        "expected": cache.expected_tokens,
        "dropped": cache.checkpoints_dropped,
        "demoted": cache.checkpoints_demoted,
        "restores": cache.restores,
        "restore_failures": cache.restore_failures,
    }
    totals |= {f"selections.{path}": cache.selections[path] for path in _PATHS}
    totals |= {f"lost.{reason}": cache.lost_tokens[reason] for reason in LossReason}
    totals |= {f"skipped.{reason}": cache.publish_skipped[reason] for reason in SkipReason}
    totals |= {f"evictions.{kind}": _evictions(cache, kind) for kind in CheckpointKind}
    for direction in _DIRECTIONS:
        moved = [transfer for (way, _), transfer in snapshot.transfers.items() if way is direction]
        totals[f"{direction}.bytes"] = sum(transfer.bytes for transfer in moved)
        totals[f"{direction}.seconds"] = sum(transfer.seconds for transfer in moved)
        totals[f"{direction}.count"] = sum(transfer.count for transfer in moved)
    return totals


def _evictions(cache: CacheStats, kind: CheckpointKind) -> int:
    return sum(count for (_, evicted), count in cache.evictions.items() if evicted is kind)


def _named(family: str, names: Iterable[str], done: _Totals) -> dict[str, int]:
    return {str(name): int(done[f"{family}.{name}"]) for name in names}


def _pressure(done: _Totals) -> Pressure:
    evictions = _named("evictions", CheckpointKind, done)
    return Pressure(
        evictions=evictions,
        private_owners_evicted=sum(evictions[kind] for kind in CheckpointKind if not kind.is_shared),
        shared_owners_evicted=sum(evictions[kind] for kind in CheckpointKind if kind.is_shared),
        checkpoints_dropped=int(done["dropped"]),
        checkpoints_demoted=int(done["demoted"]),
        publish_skipped=_named("skipped", SkipReason, done),
        restores=int(done["restores"]),
        restore_failures=int(done["restore_failures"]),
        preemptions=int(done["preemptions"]),
    )


def _transfers(direction: Direction, done: _Totals) -> TransferCounts:
    return TransferCounts(
        bytes=int(done[f"{direction}.bytes"]),
        seconds=done[f"{direction}.seconds"],
        count=int(done[f"{direction}.count"]),
    )
