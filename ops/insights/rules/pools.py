"""Pools that are held while nobody works, and pools that empty at once."""

from __future__ import annotations

from collections import Counter

from cache import PoolCounts, Tier
from engine.events import LoopRestarted
from engine.snapshot import EngineSnapshot
from ops.insights.rules.base import Rule, admin, counted
from ops.insights.types import Finding, InsightId, Severity

_IDLE_SECONDS = 10.0
_BUSY_SECONDS = 30.0
_CLIFF_HELD_SECONDS = 600.0
_CLIFF_LEAST_UNITS = 8
_AFTER_RESET_SECONDS = 5.0
_CLIFF_LEAST_EVICTIONS = 8
"""A single long conversation may well hold half of a small pool."""

POOL_NAMES = {
    "device_kv_pages": "KV pages on the device",
    "device_state_slots": "state slots on the device",
    "host_units": "units of host memory",
    "host_state_slots": "state images in host memory",
}


class PoolPinned(Rule):
    """Units that requests hold although there is no such request."""

    id = InsightId.POOL_PINNED

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._since.clear()

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        stuck = {pool: units for pool, units in self._held(snapshot).items() if units > 0}
        self._since = {pool: self._since.get(pool, now) for pool in stuck}
        is_idle = not (snapshot.running or snapshot.waiting)
        limit = _IDLE_SECONDS if is_idle else _BUSY_SECONDS
        long_enough = {pool: units for pool, units in stuck.items() if now - self._since[pool] >= limit}
        if not long_enough:
            return None
        what = " and ".join(f"{units:,} {POOL_NAMES[pool]}" for pool, units in long_enough.items())
        whom = "no request runs or waits" if is_idle else f"{counted(snapshot.running, 'request')} cannot hold so many"
        seconds = max(now - self._since[pool] for pool in long_enough)
        return Finding(
            severity=Severity.WARNING,
            title="Memory is held by requests that are gone",
            statement=f"{what} have been held for {seconds:.0f} s, though {whom}. They cannot be used for anything.",
            evidence={f"pinned_{pool}": units for pool, units in long_enough.items()} | {"running": snapshot.running},
            measured_over={"seconds": round(seconds, 1)},
            recommendation=f"Audit the books: {admin('/admin/cache/audit')}; restart the daemon if that gives nothing "
            "back.",
        )

    @staticmethod
    def _held(snapshot: EngineSnapshot) -> dict[str, int]:
        """Units beyond what the requests there are can account for."""
        if not (snapshot.running or snapshot.waiting):
            return {pool: counts.pinned for pool, counts in snapshot.pools.items()}
        # A request has one slot to run in, and pins at most one checkpoint that it is resumed from.
        most = 2 * (snapshot.running + snapshot.waiting)
        slots = snapshot.state_slots.pinned
        return {"device_state_slots": slots if slots > most else 0}


class EvictionCliff(Rule):
    """Half of what a pool remembered is gone from one second to the next. State images in host memory are not looked at
    alone: they give way to the KV of a long conversation, which is as it should be."""

    id = InsightId.EVICTION_CLIFF

    def __init__(self) -> None:
        self._last: dict[str, PoolCounts] = {}
        self._falls: dict[str, tuple[float, int, int]] = {}
        """By pool: when, from how many cached units to how many."""
        self._evicted: Counter[str] = Counter()
        self._explained: Counter[str] = Counter()
        """Units that were handed out, and what whole victims gave back beyond that, since the start."""
        self._reset_at: float | None = None

    def saw_reset(self, tiers: tuple[Tier, ...], now: float) -> None:
        self._reset_at = now

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._last.clear()
        self._falls.clear()

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        evicted: Counter[str] = Counter()
        for (pool, _), number in snapshot.cache.evictions.items():
            evicted[pool] += number
        if self._reset_at is not None and now - self._reset_at < _AFTER_RESET_SECONDS:
            self._last.clear()
        pools = {pool: counts for pool, counts in snapshot.pools.items() if pool != "host_state_slots"}
        explained = snapshot.cache.granted + snapshot.cache.surplus
        for pool, counts in pools.items():
            before, left = self._last.get(pool), evicted[pool] - self._evicted[pool]
            passed_on = explained[pool] - self._explained[pool]
            if before is not None and left >= _CLIFF_LEAST_EVICTIONS and _has_fallen(before, counts, passed_on):
                self._falls[pool] = (now, before.cached, counts.cached)
        self._evicted, self._explained = evicted, explained
        self._last = pools
        self._falls = {pool: fall for pool, fall in self._falls.items() if now - fall[0] < _CLIFF_HELD_SECONDS}
        if not self._falls:
            return None
        falls = "; ".join(
            f"{POOL_NAMES[pool]} from {before:,} to {after:,}" for pool, (_, before, after) in self._falls.items()
        )
        evidence = {
            f"{pool}_{when}": units
            for pool, (_, before, after) in self._falls.items()
            for when, units in (("before", before), ("after", after))
        }
        return Finding(
            severity=Severity.WARNING,
            title="A pool lost half of what it remembered at once",
            statement=f"Within a second the remembered part of a pool fell by half or more: {falls}. No request took "
            "the room, and nobody had asked for a reset.",
            evidence=evidence,
            measured_over={"seconds": 1},
            recommendation="See `pressure` in the event log and `evictions` in GET /admin/cache for what was dropped; "
            "if it comes again, keep the event log and report it.",
        )


def _has_fallen(before: PoolCounts, after: PoolCounts, passed_on: int) -> bool:
    """By half, beyond what requests and copies took for themselves, and may have given back since."""
    taken = max(0, after.pinned + after.in_flight - before.pinned - before.in_flight)
    lost = before.cached - after.cached - max(taken, passed_on)
    return before.cached >= _CLIFF_LEAST_UNITS and lost >= before.cached / 2
