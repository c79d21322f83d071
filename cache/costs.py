"""A measured cost model: whether copying a prefix back from host memory beats computing it again."""

from __future__ import annotations

import math
from dataclasses import dataclass

_HALF_LIFE_SECONDS = 60.0
_BELIEVED_SECONDS = 60.0
"""Restores that look dearer than computing are not tried, so nothing but time could correct their rate."""


@dataclass(slots=True)
class Rate:
    """Amount per second over the last minutes: sums that halve each minute, so that a long copy weighs more."""

    amount: float = 0.0
    seconds: float = 0.0
    _seen_at: float = 0.0

    def saw(self, amount: float, seconds: float, now: float) -> None:
        """Take in one measurement; nothing for one without an amount or a duration."""
        if amount <= 0 or seconds <= 0:
            return
        kept = math.exp2(-max(now - self._seen_at, 0.0) / _HALF_LIFE_SECONDS)
        self.amount = self.amount * kept + amount
        self.seconds = self.seconds * kept + seconds
        self._seen_at = now

    @property
    def per_second(self) -> float | None:
        """None until something was measured."""
        return self.amount / self.seconds if self.seconds > 0 else None

    def is_stale(self, now: float) -> bool:
        """Whether nothing was measured for so long that the next measurement counts alone."""
        return now - self._seen_at > _BELIEVED_SECONDS


class Costs:
    """What copies and prefills cost here. Mutable: only the engine loop's task may touch it."""

    def __init__(self) -> None:
        self._restores = Rate()
        self._prefills = Rate()
        self._now = 0.0

    def saw_restore(self, size_bytes: int, seconds: float, now: float) -> None:
        self._now = max(self._now, now)
        if self._restores.is_stale(now):
            self._restores = Rate()
        self._restores.saw(size_bytes, seconds, now)

    def saw_prefill(self, tokens: int, seconds: float, now: float) -> None:
        self._now = max(self._now, now)
        self._prefills.saw(tokens, seconds, now)

    @property
    def restore_bytes_per_second(self) -> float | None:
        return self._restores.per_second

    @property
    def prefill_tokens_per_second(self) -> float | None:
        return self._prefills.per_second

    def seconds_to(self, restore_bytes: int, compute_tokens: int) -> float:
        """To copy back and then compute so much. Without a rate for copies they cost nothing, and tokens are all that
        counts: so it is before the first restore, and when the last one is a minute old. One restore that was slow by
        chance would else be the last."""
        copying = None if self._restores.is_stale(self._now) else self.restore_bytes_per_second
        computing = self.prefill_tokens_per_second
        if copying is None or computing is None:
            return float(compute_tokens)
        return restore_bytes / copying + compute_tokens / computing
