"""A side stream whose work is done when it is told: what a GPU may do at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class LateFlight:
    """`stream` does its work in the order in which it was queued; whoever waits for it makes it do so."""

    stream: LateStream
    work: Callable[[], object]
    seconds: float = 0.5
    done: bool = False

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        while not self.done:
            self.stream.do_next()

    def hold_steps(self) -> None:
        """The steps here are immediate, so what they wait for is over at once."""
        self.stream.held.append(self)
        self.wait()


class LateStream:
    """Mutable: `held` are the flights that the steps had to wait for, `waits` counts waiting for all."""

    def __init__(self) -> None:
        self.queued: deque[LateFlight] = deque()
        self.held: list[LateFlight] = []
        self.marks = 0
        self.after: list[int] = []
        self.waits = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def queue(self, work: Callable[[], object], after: int) -> LateFlight:
        self.after.append(after)
        flight = LateFlight(self, work)
        self.queued.append(flight)
        return flight

    def wait(self) -> None:
        self.waits += 1
        while self.queued:
            self.do_next()

    def do_next(self) -> None:
        flight = self.queued.popleft()
        flight.work()
        flight.done = True
