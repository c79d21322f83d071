"""What goes wrong in a labelled stream: each fault is put into the real cache where a real one would happen."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from bench.labelled.drive import Drive
from cache import Holder, LossReason, PoolExhaustedError, ReuseReport, SkipReason, UnitState
from cache.matching import Found

_LEAK_EVERY_SECONDS = 4.0


class FaultKind(StrEnum):
    """The values of the table's first column."""

    REFUSE_PUBLISH = "nothing is kept any more"
    DROP_STATE = "states are lost as soon as they are kept"
    RESTORE_FAIL = "copies from host memory fail"
    LEAK_HOST_HEALED = "host memory leaks, audits heal"
    LEAK_HOST = "host memory leaks, nothing heals"
    LEAK_SLOTS = "device slots leak one by one to N-1 of N"
    STUCK_SLOTS = "N-1 of N device slots are stuck at once"
    PINNED_SLOTS = "device slots stay pinned by requests that are gone"
    LEAK_PAGES = "KV pages leak"
    INDEX_FORGETS = "the index finds nothing: every match is a root"
    ONE_NAMESPACE = "one namespace of several finds nothing"
    ONE_REFUSED = "of one namespace of several nothing is kept"
    ONLY_SHARED = "only system prompts are kept, and hit"
    VACANT_ONLY = "a full pool takes nothing new"
    HALF_REFUSED = "every other checkpoint is refused"
    NEWEST_LEAVE = "what was used last leaves first"
    """Beyond reach of the detector: books are sound, pools are full, and only the order of leaving is worse."""


OF_ONE_NAMESPACE = (FaultKind.ONE_NAMESPACE, FaultKind.ONE_REFUSED)
NEEDS_HOST = (FaultKind.RESTORE_FAIL, FaultKind.LEAK_HOST, FaultKind.LEAK_HOST_HEALED)

_SAYS_SO = {
    FaultKind.REFUSE_PUBLISH: LossReason.PUBLISH_SKIPPED,
    FaultKind.ONE_REFUSED: LossReason.PUBLISH_SKIPPED,
    FaultKind.ONLY_SHARED: LossReason.PUBLISH_SKIPPED,
    FaultKind.VACANT_ONLY: LossReason.PUBLISH_SKIPPED,
    FaultKind.HALF_REFUSED: LossReason.PUBLISH_SKIPPED,
    FaultKind.RESTORE_FAIL: LossReason.RESTORE_FAILED,
}


def is_caused_by(kind: FaultKind, report: ReuseReport) -> bool:
    """Whether a request lost something for the fault's sake; where the reason does not say, every loss counts."""
    return kind not in _SAYS_SO or report.lost.get(_SAYS_SO[kind], 0) > 0


def put_in(kind: FaultKind, drive: Drive, rng: random.Random) -> str | None:
    """From now on. Returns the only namespace that suffers, None where all do."""
    if kind not in OF_ONE_NAMESPACE:
        _MAKERS[kind](drive, rng)
        return None
    victim = rng.choice([each for each in drive.namespaces if each])
    if kind is FaultKind.ONE_NAMESPACE:
        _forget_namespace(drive, victim)
    else:
        _refuse(drive, lambda lease, _kind: lease.namespace == victim)
    return victim


def take_out(drive: Drive) -> None:
    """The cause of a fault of the cache's own is gone."""
    drive.faults.switch(())


def _switch(name: str) -> Callable[[Drive, random.Random], None]:
    return lambda drive, _rng: drive.faults.switch([name])


def _leak_slots(drive: Drive, rng: random.Random) -> None:
    _leak(drive, UnitState.CACHED, _LEAK_EVERY_SECONDS * rng.uniform(0.5, 3.0))


def _stick_slots(drive: Drive, _rng: random.Random) -> None:
    _leak(drive, UnitState.CACHED, 0.0)


def _pin_slots(drive: Drive, rng: random.Random) -> None:
    _leak(drive, UnitState.PINNED, _LEAK_EVERY_SECONDS * rng.uniform(0.5, 2.0))


def _leak(drive: Drive, state: UnitState, every_seconds: float) -> None:
    """One slot at a time, until requests have one left beyond those that they run in."""
    tiers, left = drive.cache.tiers, drive.checkpoint_slots - 1
    for number in range(left):

        def take(_drive: Drive) -> None:
            if tiers.slots.free or len(tiers.store.slots):
                tiers.take_slot(Holder(state, "gone"), "")

        if every_seconds:
            drive.at(drive.now + number * every_seconds, take)
        else:
            take(drive)


def _leak_pages(drive: Drive, rng: random.Random) -> None:
    """A twentieth at a time, until three in ten are left."""
    tiers = drive.cache.tiers
    portion, pause = max(1, tiers.pages.capacity // 20), _LEAK_EVERY_SECONDS * rng.uniform(0.5, 2.0)

    def take(_drive: Drive) -> None:
        tiers.free_pages(portion, "")
        try:
            tiers.pages.lease(Holder(UnitState.PINNED, "gone"), min(portion, tiers.pages.free))
        except PoolExhaustedError:
            return

    for number in range(14):
        drive.at(drive.now + number * pause, take)


def _forget_index(drive: Drive, _rng: random.Random) -> None:
    cache: Any = drive.cache
    find = cache._find
    cache._find = lambda namespace, tokens: Found(known=find(namespace, tokens).known)


def _forget_namespace(drive: Drive, lost: str) -> None:
    cache: Any = drive.cache
    find = cache._find

    def find_or_not(namespace: str, tokens: Any) -> Found:
        found = find(namespace, tokens)
        return Found(known=found.known) if namespace == lost else found

    cache._find = find_or_not


def _keep_only_shared(drive: Drive, _rng: random.Random) -> None:
    _refuse(drive, lambda _lease, kind: not kind.is_shared)


def _refuse_half(drive: Drive, rng: random.Random) -> None:
    _refuse(drive, lambda _lease, _kind: rng.random() < 0.5)


def _take_only_vacant(drive: Drive, _rng: random.Random) -> None:
    _refuse(drive, lambda _lease, _kind: not drive.cache.slots.free)


def _refuse(drive: Drive, refuses: Callable[[Any, Any], bool]) -> None:
    """Checkpoints of some kinds, or at some moments, are not kept, and the cache says so as it does for others."""
    cache: Any = drive.cache
    why_not, publish = cache._why_not, cache.retention.publish

    def why_not_now(lease: Any, frontier: Any) -> SkipReason | None:
        reason: SkipReason | None = why_not(lease, frontier)
        return SkipReason.SLOTS_WORTH_MORE if reason is None and refuses(lease, frontier.kind) else reason

    def publish_or_not(lease: Any, tokens: Any, kind: Any, slot: Any, now: float) -> None:
        is_captured = slot is not None and lease.slot is None and not lease.is_open
        if is_captured and refuses(lease, kind):
            slot.close()
            return
        publish(lease, tokens, kind, slot, now)

    cache._why_not = why_not_now
    cache.retention.publish = publish_or_not


def _newest_leave(drive: Drive, _rng: random.Random) -> None:
    tiers: Any = drive.cache.tiers

    def victim(line: Any, namespace: str | None = None) -> Any:
        there = [each for each in tiers.store if each in line]
        return max(there, key=lambda each: each.last_used_at, default=None)

    tiers.victim = victim


_MAKERS: dict[FaultKind, Callable[[Drive, random.Random], None]] = {
    FaultKind.REFUSE_PUBLISH: _switch("refuse_publish"),
    FaultKind.DROP_STATE: _switch("drop_state"),
    FaultKind.RESTORE_FAIL: _switch("restore_fail"),
    FaultKind.LEAK_HOST_HEALED: _switch("leak_host_state"),
    FaultKind.LEAK_HOST: _switch("leak_host_state"),
    FaultKind.LEAK_SLOTS: _leak_slots,
    FaultKind.STUCK_SLOTS: _stick_slots,
    FaultKind.PINNED_SLOTS: _pin_slots,
    FaultKind.LEAK_PAGES: _leak_pages,
    FaultKind.INDEX_FORGETS: _forget_index,
    FaultKind.ONLY_SHARED: _keep_only_shared,
    FaultKind.VACANT_ONLY: _take_only_vacant,
    FaultKind.HALF_REFUSED: _refuse_half,
    FaultKind.NEWEST_LEAVE: _newest_leave,
}
