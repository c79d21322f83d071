"""Whether reuse holds in one namespace: a sequential test over the requests that could have reused something."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from cache import ReuseReport
from ops.insights.chances import Chance, ChanceScale
from ops.insights.types import LEGAL_TRANSITIONS, ReuseState

_TOLERATED_LOSS = 0.5
"""Of what was to be expected: a share that is lost in the long run and does not alarm at once."""
_DEGRADED_AT = 1.4
_COLLAPSED_AT = 1.9
"""Four total losses in a row, of requests of the usual size: 4 x (1 - 0.5)."""
_TOLERATED_SLOW = 0.2
_SLOW_DEGRADED_AT = 5.0
"""A smaller share that stays lost."""
_ROOTS_WITH_FULL_HOST = 5
_GOOD = 0.25
"""A request that loses no more than this is a good one."""
_RECOVERING_AT = 1.4
"""Three good requests in a row."""
_HEALTHY_AT = 4.0
"""Eight good requests without a loss between, from the first on."""
_QUIET_SECONDS = 900.0
"""Without a request that could have reused anything, nothing is known any more after so long."""
_KEPT_CHANCES = 32


class Cause(StrEnum):
    """What made reuse other than healthy."""

    NONE = "none"
    LOSS = "loss"
    """Requests lost what was to be expected."""
    LEAK = "leak"
    """Units do not come back to their pool."""


@dataclass(slots=True)
class _Bounded:
    """A sum that never falls below 0: of evidence, for or against. Mutable."""

    value: float = 0.0

    def add(self, amount: float) -> float:
        self.value = max(0.0, self.value + amount)
        return self.value


class ReuseWatch:
    """Mutable: fed by whoever owns it, in the order of time."""

    def __init__(self) -> None:
        self.state = ReuseState.HEALTHY
        self.cause = Cause.NONE
        self.recent: deque[Chance] = deque(maxlen=_KEPT_CHANCES)
        self.losses_in_a_row = 0
        self.good_in_a_row = 0
        self._changed_at = 0.0
        """When it was last in another state, or a request could have reused something."""
        self._scale = ChanceScale()
        self._fast = _Bounded()
        self._slow = _Bounded()
        self._good = _Bounded()
        self._roots_in_a_row = 0

    def saw(self, report: ReuseReport, now: float, *, is_host_full: bool) -> None:
        """One request was let in."""
        chance = self._scale.weigh(report)
        if chance is None:
            return
        self.recent.append(chance)
        self._changed_at = now
        self.losses_in_a_row = self.losses_in_a_row + 1 if chance.is_loss else 0
        self.good_in_a_row = self.good_in_a_row + 1 if chance.loss <= _GOOD else 0
        is_lost_root = chance.is_root and chance.lost_tokens > 0
        self._roots_in_a_row = self._roots_in_a_row + 1 if is_lost_root and is_host_full else 0
        fast = self._fast.add(chance.weight * (chance.loss - _TOLERATED_LOSS))
        slow = self._slow.add(chance.weight * (chance.loss - _TOLERATED_SLOW))
        good = self._good.add(
            chance.weight * (_TOLERATED_LOSS - chance.loss) if chance.loss <= _GOOD else -chance.weight
        )
        is_lost = fast >= _COLLAPSED_AT or self._roots_in_a_row >= _ROOTS_WITH_FULL_HOST
        match self.state:
            case ReuseState.HEALTHY | ReuseState.DEGRADED:
                if fast >= _DEGRADED_AT or slow >= _SLOW_DEGRADED_AT or is_lost:
                    self._move(ReuseState.DEGRADED, now, Cause.LOSS)
                if is_lost:
                    self._move(ReuseState.COLLAPSED, now, Cause.LOSS)
                elif good >= _RECOVERING_AT and fast == 0 and self.cause is Cause.LOSS and slow < _SLOW_DEGRADED_AT / 2:
                    self._move(ReuseState.HEALTHY, now, Cause.NONE)
            case ReuseState.COLLAPSED if good >= _RECOVERING_AT:
                self.relieve(now)
            case ReuseState.RECOVERING if is_lost:
                self._move(ReuseState.COLLAPSED, now, Cause.LOSS)
            case ReuseState.RECOVERING if good >= _HEALTHY_AT:
                self._move(ReuseState.HEALTHY, now, Cause.NONE)
            case _:
                pass

    def leak(self, now: float, *, is_leaking: bool) -> None:
        """What the books and the pools say: units that nobody holds do not come back."""
        if is_leaking and self.state is ReuseState.HEALTHY:
            self._move(ReuseState.DEGRADED, now, Cause.LEAK)
        elif not is_leaking and self.state is ReuseState.DEGRADED and self.cause is Cause.LEAK:
            self._move(ReuseState.HEALTHY, now, Cause.NONE)

    def relieve(self, now: float) -> None:
        """Its cause may be gone: an audit gave units back, a tier was reset, or requests hit again."""
        if self.state is ReuseState.COLLAPSED:
            self._fast.value = self._slow.value = 0.0
            self._roots_in_a_row = 0
            self._move(ReuseState.RECOVERING, now, self.cause)

    def passed(self, now: float) -> None:
        """Time has passed, with or without requests."""
        if now - self._changed_at < _QUIET_SECONDS:
            return
        if self.state is ReuseState.COLLAPSED:
            self.relieve(now)
        elif self.state is ReuseState.RECOVERING or (self.state is ReuseState.DEGRADED and self.cause is Cause.LOSS):
            self._move(ReuseState.HEALTHY, now, Cause.NONE)

    def _move(self, state: ReuseState, now: float, cause: Cause) -> None:
        if state is self.state:
            return
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise ValueError(f"reuse cannot go from {self.state} to {state}")
        self.state, self._changed_at, self.cause = state, now, cause
        if state is not ReuseState.RECOVERING:
            self._good.value = 0.0
        if state is ReuseState.HEALTHY:
            self._fast.value = self._slow.value = 0.0
            self._roots_in_a_row = 0
