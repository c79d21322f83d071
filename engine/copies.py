"""Restores and demotions under way: copies between the device and host memory that steps run beside their segments."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cache import ContextCache, Copy, CopyObject, Demotion, Tier
from engine.plan import CopyBatch, CopyOutcome
from engine.sequence import SequenceRecord, SequenceState

_WEIGHT_OF_THE_LATEST = 0.5
"""In the estimate of how fast copies are."""
_SECONDS_AFTER_A_FAILURE = 1.0
"""Before the next demotion: what cannot be copied is not to be tried at every step."""


class Direction(StrEnum):
    """Which way a transfer goes."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"


@dataclass(slots=True)
class Transfer:
    """What was moved since the start."""

    bytes: int = 0
    seconds: float = 0.0
    count: int = 0
    """KV pages, or state images."""


Transfers = dict[tuple[Direction, CopyObject], Transfer]


def no_transfers() -> Transfers:
    """Every kind of transfer, at 0."""
    return {(direction, what): Transfer() for direction in Direction for what in CopyObject}


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    copies: tuple[Copy, ...]
    done: int = 0
    """How many of them have run."""
    planned: int = 0
    """How many of the next are in the step that runs, or under way."""
    is_under_way: bool = False
    """They were begun by a former step and are not done."""
    sequence: SequenceRecord | None = None
    demotion: Demotion | None = None


@dataclass(slots=True)
class Landed:
    """What came to its end with a step."""

    restored: list[SequenceRecord] = field(default_factory=list)
    """Everything that they need is on the device."""
    lost: list[SequenceRecord] = field(default_factory=list)
    """Their copies failed and their leases are closed."""
    demotions: int = 0
    """Confirmed or cancelled."""

    @property
    def has_changed_something(self) -> bool:
        return bool(self.restored or self.lost or self.demotions)


class CopyJobs:
    """Those under way. Mutable: only the engine loop's task may touch it.

    A job is cut into pieces, so that a step never copies for long: restores first, in the order in which they began.
    """

    def __init__(self, cache: ContextCache, transfers: Transfers | None = None) -> None:
        """`transfers` are those of former ones, to go on counting."""
        self._cache = cache
        self.transfers = no_transfers() if transfers is None else transfers
        self._restores: dict[str, _Job] = {}
        self._demotions: list[_Job] = []
        self._number = 0
        self._demotes_from = 0.0
        self._bytes_per_second: float | None = None

    def begin_restore(self, sequence: SequenceRecord) -> None:
        """Copy what its lease needs from host memory, from the next step on."""
        self._restores[sequence.request_id] = self._job(sequence.held.restore, sequence=sequence)

    def drop_restore(self, request_id: str) -> None:
        """Its lease is about to be closed. Harmless when it restores nothing."""
        self._restores.pop(request_id, None)

    def cancel_demotions(self) -> bool:
        """Give back what those under way hold, for a request needs it; False when there are none."""
        for job in self._demotions:
            self._cancel(job)
        had_some = bool(self._demotions)
        self._demotions.clear()
        return had_some

    @property
    def under_way(self) -> frozenset[int]:
        """The numbers of the batches that former steps began and that are not done."""
        return frozenset(job.number for job in self._jobs if job.is_under_way)

    def plan(self, now: float, most_bytes: int, most_seconds: float) -> tuple[CopyBatch, ...]:
        """What the next step is to copy: at least one copy, if there is any and none is under way, then as long as
        `most_bytes` lasts and likely not longer than `most_seconds`."""
        batches: list[CopyBatch] = []
        if self._bytes_per_second is not None:
            most_bytes = max(1, min(most_bytes, int(self._bytes_per_second * most_seconds)))
        most_bytes -= sum(
            self._cache.options.bytes_of(_piece(job, job.planned)) for job in self._jobs if job.is_under_way
        )
        left = self._plan_pieces([job for job in self._jobs if not job.is_under_way], most_bytes, batches)
        if left > 0 and now >= self._demotes_from:
            begun: list[_Job] = []
            for demotion in self._cache.plan_demotions(now, left):
                if demotion.copies:
                    begun.append(self._job(demotion.copies, demotion=demotion))
                else:
                    # Another's copies hold all of it already.
                    self._cache.confirm_demotion(demotion, now)
            self._demotions += begun
            self._plan_pieces(begun, left, batches)
        return tuple(batches)

    def take_in(self, copied: Mapping[int, CopyOutcome], under_way: Container[int], now: float) -> Landed:
        """What a step has copied, by the numbers of its batches; those in `under_way` are left alone until another
        tells of them, and what was not even begun is planned again."""
        landed = Landed()
        moved_bytes, seconds = 0, 0.0
        for job in self._jobs:
            outcome = copied.get(job.number)
            job.is_under_way = outcome is None and job.number in under_way
            if job.is_under_way:
                continue
            planned, job.planned = job.planned, 0
            if outcome is None or not planned:
                continue
            if outcome.error is not None:
                self._fail(job, landed, now)
                continue
            moved_bytes += self._measure(job, planned, outcome.seconds, now)
            seconds += outcome.seconds
            job.done += planned
            if job.done == len(job.copies):
                self._complete(job, landed, now)
        if seconds > 0:
            latest, known = moved_bytes / seconds, self._bytes_per_second
            self._bytes_per_second = latest if known is None else known + _WEIGHT_OF_THE_LATEST * (latest - known)
        return landed

    def fail_step(self, now: float, *, has_only_copies: bool) -> Landed:
        """A step raised, and nothing is under way any more: nobody knows what was copied. Demotions are called off,
        restores begin their pieces again, unless it was their copies that it raised for."""
        landed = Landed(demotions=len(self._demotions))
        self.cancel_demotions()
        for job in tuple(self._restores.values()):
            planned, job.planned, job.is_under_way = job.planned, 0, False
            if planned and has_only_copies:
                self._fail(job, landed, now)
        return landed

    def check(self, running: Iterable[SequenceRecord]) -> list[str]:
        """One line per violation, empty when jobs, sequences and the cache's own records agree."""
        violations: list[str] = []
        restoring = {each.request_id for each in running if each.state is SequenceState.RESTORING}
        if restoring != self._restores.keys():
            violations.append(f"requests {sorted(restoring)} restore, copies run for {sorted(self._restores)}")
        for name, job in self._restores.items():
            if job.sequence is None or job.sequence.lease is None or job.sequence.lease.restore != job.copies:
                violations.append(f"the copies for request {name!r} are not those of its lease")
        if {id(job.demotion) for job in self._demotions} != {id(each) for each in self._cache.demotions.under_way}:
            violations.append("the demotions that are copied are not those that the cache knows")
        return violations

    @property
    def _jobs(self) -> tuple[_Job, ...]:
        """Restores first, then each in the order in which it began."""
        return (*self._restores.values(), *self._demotions)

    def _job(
        self, copies: tuple[Copy, ...], *, sequence: SequenceRecord | None = None, demotion: Demotion | None = None
    ) -> _Job:
        self._number += 1
        return _Job(self._number, copies, sequence=sequence, demotion=demotion)

    def _plan_pieces(self, jobs: Iterable[_Job], most_bytes: int, batches: list[CopyBatch]) -> int:
        """Appends to `batches`; returns what is left of `most_bytes`."""
        left = most_bytes
        for job in jobs:
            piece: list[Copy] = []
            for copy in job.copies[job.done :]:
                if left <= 0:
                    break
                piece.append(copy)
                left -= self._cache.options.bytes_of([copy])
            job.planned = len(piece)
            if piece:
                batches.append(CopyBatch(job.number, tuple(piece)))
        return left

    def _complete(self, job: _Job, landed: Landed, now: float) -> None:
        if job.sequence is not None:
            del self._restores[job.sequence.request_id]
            self._cache.confirm_restore(job.sequence.held, now)
            landed.restored.append(job.sequence)
        elif job.demotion is not None:
            self._demotions.remove(job)
            self._cache.confirm_demotion(job.demotion, now)
            landed.demotions += 1

    def _fail(self, job: _Job, landed: Landed, now: float) -> None:
        if job.sequence is not None:
            del self._restores[job.sequence.request_id]
            self._cache.fail_restore(job.sequence.held, now)
            landed.lost.append(job.sequence)
        else:
            self._demotions.remove(job)
            self._cancel(job)
            landed.demotions += 1
            self._demotes_from = now + _SECONDS_AFTER_A_FAILURE

    def _cancel(self, job: _Job) -> None:
        if job.demotion is not None:
            self._cache.cancel_demotion(job.demotion)

    def _measure(self, job: _Job, planned: int, seconds: float, now: float) -> int:
        """Returns the bytes that were moved."""
        piece = _piece(job, planned)
        total_bytes = self._cache.options.bytes_of(piece)
        if job.sequence is not None:
            self._cache.costs.saw_restore(total_bytes, seconds, now)
        for what in CopyObject:
            moved = [copy for copy in piece if copy.what is what]
            if moved:
                to_host = moved[0].destination.tier is Tier.HOST
                transfer = self.transfers[Direction.DEVICE_TO_HOST if to_host else Direction.HOST_TO_DEVICE, what]
                moved_bytes = self._cache.options.bytes_of(moved)
                transfer.bytes += moved_bytes
                transfer.seconds += seconds * moved_bytes / total_bytes
                transfer.count += len(moved)
        return total_bytes


def _piece(job: _Job, planned: int) -> tuple[Copy, ...]:
    """So many of the next copies."""
    return job.copies[job.done : job.done + planned]
