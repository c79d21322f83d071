"""What runs beside the steps: checkpoints on their way to host memory and back, each as long as its bytes take."""

from __future__ import annotations

from collections import Counter, deque

from bench.replay.cost_model import CostModel
from cache import ContextCache, Demotion, RequestLease

_BATCH_SECONDS = 0.1
"""How much of the way to host memory is planned at once."""


class BackgroundCopies:
    """Two ways, each one copy at a time, in order. Mutable: only its SimServer may touch it."""

    def __init__(self, cache: ContextCache, model: CostModel, moved_bytes: Counter[str]) -> None:
        self._cache = cache
        self._model = model
        self._moved_bytes = moved_bytes
        self._demotions: deque[tuple[float, Demotion]] = deque()
        """With the moment at which each is done, soonest first."""
        self._way_back_free_at = 0.0

    def begin_restore(self, lease: RequestLease, now: float) -> float:
        """Bring back what a request is resumed from; returns when it will be there."""
        moved = self._cache.options.bytes_of(lease.restore)
        self._moved_bytes["host to device"] += moved
        seconds = moved / self._model.host_to_device_bytes_per_second
        self._way_back_free_at = max(self._way_back_free_at, now) + seconds
        self._cache.costs.saw_restore(moved, seconds, self._way_back_free_at)
        return self._way_back_free_at

    def settle(self, now: float) -> None:
        """Confirm the demotions that are done by now, each at its time, and begin those that follow them."""
        while self._demotions and self._demotions[0][0] <= now:
            done_at, demotion = self._demotions.popleft()
            self._cache.confirm_demotion(demotion, done_at)
            self.demote(done_at)

    def demote(self, now: float) -> None:
        """Begin to copy what is next to leave the device, unless others are on their way."""
        if self._demotions:
            return
        rate = self._model.device_to_host_bytes_per_second
        for demotion in self._cache.plan_demotions(now, int(rate * _BATCH_SECONDS)):
            now += demotion.size_bytes / rate
            self._moved_bytes["device to host"] += demotion.size_bytes
            self._demotions.append((now, demotion))

    def drain(self, now: float) -> float:
        """Let everything come to its end; returns when it has."""
        while self._demotions:
            now = max(now, self._demotions[0][0])
            self.settle(now)
        return now
