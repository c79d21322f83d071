"""Events as lines of the log: for people one sentence each, where there is something to say."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import structlog

from ops.events import (
    Audit,
    Event,
    InsightCleared,
    InsightOpened,
    Record,
    RequestDone,
    RequestError,
    RequestRejected,
    RequestStart,
    Result,
    ServerStart,
    ServerStop,
    Throughput,
    TimingsSeconds,
)
from ops.insights.types import Severity

RECORD_KEY = "record"
"""Where a line of the log has its event: as JSON the event is written in its place (`ops/log.py`)."""

LOGGER_NAME = "dalsegno.events"

_WORTH_TELLING_SECONDS = 0.05

_LEVEL_OF_SEVERITY: Mapping[Severity, int] = {
    Severity.INFO: logging.INFO,
    Severity.NOTICE: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.CRITICAL: logging.ERROR,
}


class Console:
    """A sink that writes to the log, by structlog. It has no state."""

    def __init__(self) -> None:
        self._logger: structlog.stdlib.BoundLogger = structlog.get_logger(LOGGER_NAME)

    def write(self, record: Record) -> None:
        """Nothing is written of what found or did nothing."""
        level = level_of(record.event)
        if level is not None:
            self._logger.log(level, sentence(record.event), **{RECORD_KEY: record})


def level_of(event: Event) -> int | None:
    """How severe it is; None for what nobody needs to see."""
    match event:
        case Throughput():
            return logging.INFO if _has_done_something(event) else None
        case Audit():
            return logging.WARNING if event.has_found_something else None
        case InsightOpened():
            return _LEVEL_OF_SEVERITY[event.insight.severity]
        case RequestError():
            return logging.WARNING
        case RequestStart():
            return logging.DEBUG
        case RequestRejected():
            return logging.WARNING if event.status >= 500 else logging.INFO
        case ServerStart() | ServerStop() | RequestDone() | InsightCleared():
            return logging.INFO


def sentence(event: Event) -> str:
    """One line for people."""
    match event:
        case ServerStart():
            return (
                f"serving {event.model} ({event.architecture}) on {event.backend} after {event.startup_seconds:.1f} s"
            )
        case ServerStop():
            how = "every request came to its end" if event.is_drained else "some requests were cut off"
            return f"stopped by {event.reason} after {_duration(event.uptime_seconds)}; {how}"
        case RequestStart():
            return f"queued {event.endpoint} ({event.request_id})"
        case RequestDone():
            parts = [event.result.finish_reason, *_of_answer(event.result, event.timings_seconds), event.endpoint]
            return f"{', '.join(parts)} ({event.request_id})"
        case RequestError():
            parts = [f"failed: {event.code}", *_of_answer(event.result, event.timings_seconds), event.endpoint]
            return f"{', '.join(parts)} ({event.request_id})"
        case RequestRejected():
            code = f" {event.code}" if event.code else ""
            return f"refused {event.endpoint}: {event.status}{code} ({event.request_id})"
        case Throughput():
            return _of_interval(event)
        case InsightOpened():
            insight = event.insight
            return f"{insight.severity.value}: {insight.id.value}: {insight.statement} {insight.recommendation}"
        case InsightCleared():
            return f"cleared after {_duration(event.active_seconds)}: {event.insight.id.value}: {event.insight.title}"
        case Audit():
            given_back = ", ".join(f"{units:,} units of {pool}" for pool, units in event.reclaimed.items())
            return (
                f"an audit found {event.violations:,} violation{'' if event.violations == 1 else 's'}, "
                f"{event.remaining:,} of them not mended; given back: {given_back or 'nothing'}"
            )


def _of_answer(result: Result, timings: TimingsSeconds) -> list[str]:
    """Path, reuse, time to the first token, speed; what is not known is left out."""
    parts = []
    if result.reuse is not None:
        parts.append(f"{result.reuse} {result.cached_tokens or 0:,}/{result.prompt_tokens:,} cached")
    else:
        parts.append(f"prompt {result.prompt_tokens:,}")
    if timings.ttft is not None:
        parts.append(f"TTFT {_duration(timings.ttft)}")
    elif timings.queue is not None:
        parts.append(f"queued {_duration(timings.queue)}")
    speed = ""
    if timings.decode and result.completion_tokens:
        speed = f" at {result.completion_tokens / timings.decode:,.1f} tok/s"
    parts.append(f"{result.completion_tokens:,} tokens{speed}")
    for seconds, what in ((timings.stalled, "stalled"), (timings.preempted, "preempted")):
        if seconds is not None and seconds >= _WORTH_TELLING_SECONDS:
            parts.append(f"{what} {_duration(seconds)}")
    if timings.total is not None:
        parts.append(f"total {_duration(timings.total)}")
    return parts


def _has_done_something(event: Throughput) -> bool:
    cache = event.context_cache
    return bool(
        event.tokens.prefill
        or event.tokens.decode
        or sum(cache.selections.values())
        or sum(cache.pressure.evictions.values())
    )


def _of_interval(event: Throughput) -> str:
    seconds, cache = event.interval_seconds or 1.0, event.context_cache
    used, whole = cache.occupancy, cache.capacity
    pools = [
        f"KV pages {_share(used.kv_pages, whole.kv_pages)}",
        f"state slots {_share(used.device_state_slots, whole.device_state_slots)}",
        f"host memory {_share(used.host_bytes // 2**20, whole.host_bytes // 2**20)} MiB",
    ]
    parts = [
        f"prefill {event.tokens.prefill / seconds:,.0f} tok/s, decode {event.tokens.decode / seconds:,.0f} tok/s",
        f"{event.scheduler.running:,} running, {event.scheduler.waiting:,} waiting",
        f"reused {cache.reused_tokens:,} of {cache.achievable_tokens:,} achievable tokens",
        ", ".join(pools),
    ]
    evictions = sum(cache.pressure.evictions.values())
    if evictions:
        parts.append(f"{evictions:,} evictions")
    return "; ".join(parts)


def _share(used: int, whole: int) -> str:
    return f"{used:,}/{whole:,}"


def _duration(seconds: float) -> str:
    """In the unit that people would say it in."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
