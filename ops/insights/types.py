"""The words of the insights: ids, severities, the states of reuse and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Measured = Mapping[str, int | float | str]
"""Figures by name; what was not measured is absent, never 0."""


class Severity(StrEnum):
    """How soon an operator should look."""

    INFO = "info"
    """Worth knowing; nothing is wrong."""
    NOTICE = "notice"
    """Something could be better, or has mended itself."""
    WARNING = "warning"
    """Users wait longer than they need to, or will."""
    CRITICAL = "critical"
    """What the daemon is for does not work."""


class InsightId(StrEnum):
    """Every insight that there is."""

    REUSE_COLLAPSED = "prefix.reuse_collapsed"
    REUSE_DEGRADED = "prefix.reuse_degraded"
    POOL_PINNED = "cache.pool_pinned"
    LEDGER_VIOLATION = "cache.ledger_violation"
    CAPACITY_SMALL = "cache.capacity_small"
    STRUCTURAL_FLOOR = "cache.structural_floor"
    TIER_INERT = "cache.tier_inert"
    EVICTION_CLIFF = "cache.eviction_cliff"
    HISTORY_REWRITTEN = "client.history_rewritten"
    QUEUE_SATURATED = "queue.saturated"
    QUEUED_BEHIND_CONCURRENCY = "latency.queued_behind_concurrency"
    STALLED_BEHIND_PROMPTS = "latency.stalled_behind_prompts"
    PREEMPTED = "latency.preempted"
    PREFILL_DOMINATED = "latency.prefill_dominated"
    ENGINE_FAULTS = "engine.faults"
    FIRE_DRILL = "engine.fire_drill"


class ReuseState(StrEnum):
    """How reuse of prompts fares."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    COLLAPSED = "collapsed"
    RECOVERING = "recovering"


LEGAL_TRANSITIONS: Mapping[ReuseState, frozenset[ReuseState]] = {
    ReuseState.HEALTHY: frozenset({ReuseState.DEGRADED}),
    ReuseState.DEGRADED: frozenset({ReuseState.HEALTHY, ReuseState.COLLAPSED}),
    ReuseState.COLLAPSED: frozenset({ReuseState.RECOVERING}),
    ReuseState.RECOVERING: frozenset({ReuseState.HEALTHY, ReuseState.COLLAPSED}),
}
"""What may follow. From healthy to collapsed the way leads through degraded: less evidence is enough for that."""

_WORST_FIRST = (ReuseState.COLLAPSED, ReuseState.DEGRADED, ReuseState.RECOVERING, ReuseState.HEALTHY)


def worst(*states: ReuseState) -> ReuseState:
    """The one that an operator should see; healthy where there is none."""
    return min(states, key=_WORST_FIRST.index, default=ReuseState.HEALTHY)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule has to say at one moment: an insight that does not know yet since when."""

    severity: Severity
    title: str
    statement: str
    """In plain words, with the numbers."""
    evidence: Measured
    measured_over: Measured
    """Requests, seconds."""
    recommendation: str
    """What to do, with the command or the flag."""


@dataclass(frozen=True, slots=True)
class Insight:
    """A finding that holds since a moment. No prompt, output, key, salt or namespace is ever in it."""

    id: InsightId
    severity: Severity
    title: str
    statement: str
    evidence: Measured
    measured_over: Measured
    since_unix_ms: int
    recommendation: str
