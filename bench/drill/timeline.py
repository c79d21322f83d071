"""What happened in a drill and when, and what should have happened and did not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Mark(StrEnum):
    """What kind of moment it is."""

    NOTE = "note"
    WELL = "well"
    FAULT = "fault"
    """Something was made to fail."""
    ALARM = "alarm"
    """The daemon has noticed."""
    HEAL = "heal"
    """Something was done about it."""
    FAILED = "failed"
    """The drill expected something else."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of the timeline, and what there is to say about it."""

    seconds: float
    """Since the drill began."""
    requests: int
    """That had been answered by then."""
    mark: Mark
    what: str
    details: tuple[str, ...] = ()


@dataclass(slots=True)
class Timeline:
    """Tells each moment as it comes. Mutable."""

    tell: Callable[[Moment], None]
    requests: int = 0
    """How many have been answered; whoever asks them counts."""
    failures: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def add(self, mark: Mark, what: str, *details: str) -> None:
        self.tell(Moment(self.seconds, self.requests, mark, what, details))

    def expect(self, is_so: bool, otherwise: str) -> None:
        """Note a failure, in words, unless it is so."""
        if not is_so:
            self.failures.append(otherwise)
            self.add(Mark.FAILED, otherwise)
