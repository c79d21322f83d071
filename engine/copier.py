"""Runs a step's copies to and from host memory: at once, or on a stream of their own beside the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from cache import Copy, Fault, Faults, Tier
from engine.errors import FireDrillError
from engine.plan import CopyBatch, CopyOutcome

CopyAll = Callable[[Sequence[Copy]], object]
"""Runs copies in their order."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copier knows at the end of a step."""

    copied: dict[int, CopyOutcome] = field(default_factory=dict)
    """By the numbers of the batches."""
    under_way: frozenset[int] = frozenset()


class Copier(Protocol):
    """The runner calls `prepare`, queues the step's own work, calls `start`, waits for the tokens, calls `finish`; or
    `abandon` once any of it has raised. Mutable: it belongs to the engine thread."""

    def prepare(self, awaited: frozenset[int]) -> None:
        """The next step begins, and of the batches under way these are still waited for: what is queued from now on
        runs after the others are over."""
        ...

    def start(self, batches: Iterable[CopyBatch]) -> None:
        """Begin these, behind all that the steps before queued. One that fails fails alone."""
        ...

    def finish(self, *, waits: bool) -> CopyReport:
        """The step's own work is done. With `waits`, nothing is under way any more when this returns."""
        ...

    def abandon(self) -> None:
        """Wait until nothing is under way, and forget how it went."""
        ...


class ImmediateCopier:
    """Copies when the step's tokens are there, one batch after the other, and is done when `finish` returns."""

    def __init__(self, copy_all: CopyAll, faults: Faults) -> None:
        """`copy_all` returns when the bytes are there."""
        self._copy_all = copy_all
        self._faults = faults
        self._batches: tuple[CopyBatch, ...] = ()

    def prepare(self, awaited: frozenset[int]) -> None:
        self._batches = ()

    def start(self, batches: Iterable[CopyBatch]) -> None:
        self._batches = tuple(batches)

    def finish(self, *, waits: bool) -> CopyReport:
        return CopyReport({batch.number: self._run(batch) for batch in self._batches})

    def abandon(self) -> None:
        self._batches = ()

    def _run(self, batch: CopyBatch) -> CopyOutcome:
        started = time.perf_counter()
        try:
            refuse_in_drill(batch, self._faults)
            self._copy_all(batch.copies)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is logged and costs this batch's request only
            return CopyOutcome(time.perf_counter() - started, error)
        return CopyOutcome(time.perf_counter() - started)


class Flight(Protocol):
    """Work that was queued on a side stream."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Returns when it is done."""
        ...

    def hold_steps(self) -> None:
        """What the steps' stream is given from now on begins when it is done."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took, once it is done; without what it had to wait for."""
        ...


class SideStream(Protocol):
    """A queue of work on the device beside the stream of the steps."""

    def mark(self) -> Any:
        """What the steps' stream was given so far."""
        ...

    def queue(self, work: Callable[[], object], after: Any) -> Flight:
        """Queue what `work` asks of the device, behind `after`, a mark, and behind what was queued here before."""
        ...

    def wait(self) -> None:
        """Returns when all that was queued here is done."""
        ...


class StreamCopier:
    """Copies on a side stream. A step's copies run beside its own work, and it never waits for them unless it has
    nothing else to do; one that is not done when the tokens are out is told of by a later step.

    What a batch reads and writes stays as it is until the step that tells of it: the books hold it as in flight. A
    batch that they have given up (its request has left, or its demotion gave way) may read and write what is somebody
    else's by now, so the next step's work begins when it is over; other copies come behind it anyway.
    """

    def __init__(self, copy_all: CopyAll, stream: SideStream, faults: Faults) -> None:
        """`copy_all` only queues on the device."""
        self._copy_all = copy_all
        self._stream = stream
        self._faults = faults
        self._under_way: dict[int, Flight] = {}
        self._failed: dict[int, CopyOutcome] = {}
        self._mark: Any = None

    def prepare(self, awaited: frozenset[int]) -> None:
        for number in self._under_way.keys() - awaited:
            self._under_way.pop(number).hold_steps()
        self._mark = self._stream.mark()

    def start(self, batches: Iterable[CopyBatch]) -> None:
        for batch in batches:
            try:
                refuse_in_drill(batch, self._faults)
                self._under_way[batch.number] = self._stream.queue(
                    partial(self._copy_all, batch.copies), after=self._mark
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, it is logged and costs this batch's request only
                # A part of it may have been queued, and once this is told, its units are given back.
                self._stream.wait()
                self._failed[batch.number] = CopyOutcome(0.0, error)

    def finish(self, *, waits: bool) -> CopyReport:
        copied, self._failed = self._failed, {}
        for number, flight in tuple(self._under_way.items()):
            if waits:
                flight.wait()
            if flight.is_done():
                copied[number] = CopyOutcome(flight.seconds)
                del self._under_way[number]
        return CopyReport(copied, frozenset(self._under_way))

    def abandon(self) -> None:
        self._under_way.clear()
        self._failed.clear()
        self._stream.wait()


def refuse_in_drill(batch: CopyBatch, faults: Faults) -> None:
    """Raises FireDrillError for a restore while that drill is on."""
    if Fault.RESTORE_FAIL in faults and batch.copies[0].source.tier is not Tier.DEVICE:
        raise FireDrillError(Fault.RESTORE_FAIL)


class CudaStream:
    """A stream of the GPU, made for its copy engines: nothing that is queued on it takes time from the kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def queue(self, work: Callable[[], object], after: torch.cuda.Event) -> CudaFlight:
        begun, done = _event(is_timed=True), _event(is_timed=True)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            begun.record(self._stream)
            work()
            done.record(self._stream)
        return CudaFlight(self._device, begun, done)

    def wait(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class CudaFlight:
    """What lies between two events of a stream."""

    device: torch.device
    begun: torch.cuda.Event
    done: torch.cuda.Event

    def is_done(self) -> bool:
        return bool(self.done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.done.synchronize()

    def hold_steps(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.done)

    @property
    def seconds(self) -> float:
        return float(self.begun.elapsed_time(self.done)) / 1000


def _event(*, is_timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]
