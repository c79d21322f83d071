"""Whether reuse holds in one namespace: sequential tests over the requests that could have reused something.

Each request that could have reused something adds to a few sums, in the manner of Page's CUSUM test ("Continuous
inspection schemes", Biometrika 41, 1954): its loss less what is tolerated, and never below 0. Long good times are not
saved up, so that a collapse after a year is found as soon as one after a minute.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from ops.insights.chances import Chance
from ops.insights.types import LEGAL_TRANSITIONS, ReuseState

_KEPT_CHANCES = 32
_GOOD_LOSS = 0.25
"""A request that loses no more than this share is a good one."""
_BAD_LOSS = 0.6
"""Tolerated by the quick tests: only an almost unbroken row of losses adds up."""
_DOUBTFUL_COLLAPSED_AT = 1.9
"""Five total losses in a row, while it is not known that the books are sound."""
_DOUBTFUL_DEGRADED_AT = 1.1
"""Three of them."""
_SUSPICIOUS_AT = 0.7
"""Two of them: time for an audit."""
_FEW_FAULTS = 0.05
_FAULTS_DEGRADED_AT = 1.8
"""Two losses within 20 chances that no rule about what gives way could have caused: healthy traffic has hardly any."""
_MANY_FAULTS = 0.3
_FAULTS_COLLAPSED_AT = 2.7
"""Four of them in a row (0.7 each), or most of the chances for some time."""
_SUSPICIOUS_ROOTS = 3
_ROOTS_AT_FULL_HOST = 5
"""Computed from the first token, one after the other, while host memory has room for one state at most."""
_SLOW_TOLERATED = 0.5
_SLOW_DEGRADED_AT = 10.0
"""Books are sound and pools are full: others were kept instead. 20 in a row that lose something are no mere trade, and
what was lost in a good bet is none of them."""
_SLOW_COLLAPSED_AT = 20.0
"""The same, by the quick sum: 50 total losses in a row."""
_GOOD_STEP = 0.5
_RECOVERING_AT = 1.4
"""Three good requests in a row."""
_HEALED_AT = 2.9
"""Six good requests in a row end a degradation."""
_HEALTHY_AT = 3.9
"""Eight good requests in a row end a recovery."""
QUIET_SECONDS = 900.0
"""Nothing is known any more after so long without a request that could have reused something."""


class Books(StrEnum):
    """What is known of the books of the pools while requests lose what they should have found."""

    SOUND = "sound"
    """An audit since then found nothing amiss: what was lost gave way to others."""
    UNKNOWN = "unknown"
    """Nothing was suspicious, or an audit is on its way."""
    DOUBTFUL = "doubtful"
    """An audit found something that it could not mend, or none has come."""


class Cause(StrEnum):
    """What made reuse other than healthy."""

    NONE = "none"
    LOSS = "loss"
    """Requests lost what was to be expected."""
    LEAK = "leak"
    """Units do not come back to their pool."""


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
        self._roots_in_a_row = 0
        self._any = self._owed = self._slow = self._few_faults = self._many_faults = 0.0
        """Sums of losses: all of them; those that no good bet took, twice; those that are sure to be a fault, twice."""
        self._good = 0.0

    @property
    def is_suspicious(self) -> bool:
        """Whether the books should be looked at."""
        return self._any >= _SUSPICIOUS_AT or self._roots_in_a_row >= _SUSPICIOUS_ROOTS

    def saw(self, chance: Chance, now: float, *, is_host_full: bool) -> None:
        """One more request that could have reused something; ask `judge` what follows."""
        self.recent.append(chance)
        self._changed_at = now
        loss, weight = chance.loss, chance.weight
        self.losses_in_a_row = self.losses_in_a_row + 1 if chance.is_loss else 0
        self._roots_in_a_row = self._roots_in_a_row + 1 if chance.is_loss and chance.is_root and is_host_full else 0
        self._any = max(0.0, self._any + weight * (loss - _BAD_LOSS))
        self._slow = max(0.0, self._slow + weight * ((1.0 if chance.is_owed else chance.owed_loss) - _SLOW_TOLERATED))
        self._owed = max(0.0, self._owed + weight * (chance.owed_loss - _BAD_LOSS))
        fault = chance.fault_weight
        self._few_faults = max(0.0, self._few_faults + (fault * (1 - _FEW_FAULTS) if fault else -weight * _FEW_FAULTS))
        self._many_faults = max(
            0.0, self._many_faults + (fault * (1 - _MANY_FAULTS) if fault else -weight * _MANY_FAULTS)
        )
        is_good = loss <= _GOOD_LOSS and not fault
        self.good_in_a_row = self.good_in_a_row + 1 if is_good else 0
        good = weight * _GOOD_STEP if is_good else -_HEALTHY_AT * max(weight, fault)
        self._good = max(0.0, self._good + good)

    def judge(self, now: float, books: Books) -> None:
        """Move to the state that all seen so far calls for."""
        is_collapsed = self._is_collapsed(books)
        match self.state:
            case ReuseState.HEALTHY if is_collapsed or self._is_degraded(books):
                self._move(ReuseState.DEGRADED, now, Cause.LOSS)
                if is_collapsed:
                    self._move(ReuseState.COLLAPSED, now, Cause.LOSS)
            case ReuseState.DEGRADED if is_collapsed:
                self._move(ReuseState.COLLAPSED, now, Cause.LOSS)
            case ReuseState.DEGRADED if self.cause is Cause.LOSS and self._good >= _HEALED_AT:
                self._move(ReuseState.HEALTHY, now, Cause.NONE)
            case ReuseState.COLLAPSED if self._good >= _RECOVERING_AT:
                self._move(ReuseState.RECOVERING, now, self.cause)
            case ReuseState.RECOVERING if is_collapsed:
                self._move(ReuseState.COLLAPSED, now, Cause.LOSS)
            case ReuseState.RECOVERING if self._good >= _HEALTHY_AT:
                self._move(ReuseState.HEALTHY, now, Cause.NONE)
            case _:
                self._let_rest(now)

    def leak(self, now: float, *, is_leaking: bool) -> None:
        """What the books and the pools say: whether units that nobody uses do not come back."""
        if is_leaking and self.state is ReuseState.HEALTHY:
            self._move(ReuseState.DEGRADED, now, Cause.LEAK)
        elif not is_leaking and self.state is ReuseState.DEGRADED and self.cause is Cause.LEAK:
            self._move(ReuseState.HEALTHY, now, Cause.NONE)

    def relieve(self, now: float) -> None:
        """What caused the losses so far may be gone: an audit gave units back, or a tier was reset."""
        self._forget()
        if self.state is ReuseState.COLLAPSED:
            self._move(ReuseState.RECOVERING, now, self.cause)

    def _is_collapsed(self, books: Books) -> bool:
        is_doubtful = books is Books.DOUBTFUL and (
            self._any >= _DOUBTFUL_COLLAPSED_AT or self._roots_in_a_row >= _ROOTS_AT_FULL_HOST
        )
        return is_doubtful or self._many_faults >= _FAULTS_COLLAPSED_AT or self._owed >= _SLOW_COLLAPSED_AT

    def _is_degraded(self, books: Books) -> bool:
        is_doubtful = books is Books.DOUBTFUL and self._any >= _DOUBTFUL_DEGRADED_AT
        return is_doubtful or self._few_faults >= _FAULTS_DEGRADED_AT or self._slow >= _SLOW_DEGRADED_AT

    def _let_rest(self, now: float) -> None:
        """Without requests that could reuse something, neither good nor bad can be shown."""
        if self.state is ReuseState.HEALTHY or now - self._changed_at < QUIET_SECONDS:
            return
        if self.state is ReuseState.COLLAPSED:
            self._move(ReuseState.RECOVERING, now, self.cause)
        elif self.state is ReuseState.RECOVERING or self.cause is Cause.LOSS:
            self._move(ReuseState.HEALTHY, now, Cause.NONE)

    def _move(self, state: ReuseState, now: float, cause: Cause) -> None:
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise ValueError(f"reuse cannot go from {self.state} to {state}")
        self.state, self._changed_at, self.cause = state, now, cause
        if state in (ReuseState.RECOVERING, ReuseState.HEALTHY):
            self._forget()
        else:
            self._good = 0.0

    def _forget(self) -> None:
        """What was lost so far; what was good so far still counts."""
        self._any = self._owed = self._slow = self._few_faults = self._many_faults = 0.0
        self._roots_in_a_row = 0
