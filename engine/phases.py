"""Where a request's time goes: each moment from its submission to its end is charged to exactly one phase."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a request's time is spent on."""

    QUEUE = "queue"
    """It waited to be let in for the first time."""
    RESTORE = "restore"
    """What it reuses was copied to where it goes on."""
    STALLED = "stalled"
    """It was let in, but others' prompts were computed; of a step that prompts share, their share of the time."""
    PREFILL = "prefill"
    """Its prompt was computed, up to its first token."""
    PREEMPTED = "preempted"
    """It was set aside for others, and then brought to where it had been."""
    DECODE = "decode"
    """Steps in which it got a token after the first."""


class PhaseClock:
    """The seconds of each phase; together they are all the time since the submission. Mutable: one per request."""

    __slots__ = ("_until", "seconds")

    def __init__(self, submitted_at: float) -> None:
        self.seconds = dict.fromkeys(Phase, 0.0)
        self._until = submitted_at

    def charge(self, phase: Phase, now: float, share: float = 1.0) -> None:
        """The time since the last charge, or this share of it; the rest is left for the next charge."""
        self.charge_most(phase, now, (now - self._until) * share)

    def charge_most(self, phase: Phase, now: float, most_seconds: float) -> None:
        """So much of the time since the last charge, if there is so much; the rest is left for the next charge."""
        seconds = max(0.0, min(most_seconds, now - self._until))
        self.seconds[phase] += seconds
        self._until += seconds
