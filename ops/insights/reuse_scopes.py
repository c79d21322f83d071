"""Every namespace's watch, and one over all of them: what is lost in one is not hidden by the others, nor is what is
spread thin over many."""

from __future__ import annotations

from collections import OrderedDict

from cache import ReuseReport
from ops.insights.reuse_watch import ReuseWatch
from ops.insights.types import ReuseState, worst

MOST_NAMESPACES = 1024


class ReuseScopes:
    """Bounded: a client that invents salts cannot make it grow. Mutable: only the event loop's thread may touch it."""

    def __init__(self) -> None:
        self._overall = ReuseWatch()
        self._watches: OrderedDict[str, ReuseWatch] = OrderedDict()
        self._unwell: set[str] = set()

    @property
    def state(self) -> ReuseState:
        return worst(self._overall.state, *(self._watches[name].state for name in self._unwell))

    def saw(self, namespace: str, report: ReuseReport, now: float, *, is_host_full: bool) -> None:
        watch = self._watches.pop(namespace, None) or ReuseWatch()
        self._watches[namespace] = watch
        watch.saw(report, now, is_host_full=is_host_full)
        self._note(namespace)
        self._overall.saw(report, now, is_host_full=is_host_full)
        if len(self._watches) > MOST_NAMESPACES:
            self._forget_one()

    def leak(self, now: float, *, is_leaking: bool) -> None:
        """Pools belong to all."""
        self._overall.leak(now, is_leaking=is_leaking)

    def relieve(self, now: float) -> None:
        self._overall.relieve(now)
        for name in tuple(self._unwell):
            self._watches[name].relieve(now)
            self._note(name)

    def passed(self, now: float) -> None:
        self._overall.passed(now)
        for name in tuple(self._unwell):
            self._watches[name].passed(now)
            self._note(name)

    def worst_watches(self) -> tuple[list[ReuseWatch], int]:
        """Those in the worst state, the one with most to tell first; and how many namespaces that is, 0 where it is all
        of them together."""
        state = self.state
        if self._overall.state is state:
            return [self._overall], 0
        found = [self._watches[name] for name in self._unwell if self._watches[name].state is state]
        return sorted(found, key=lambda watch: len(watch.recent), reverse=True), len(found)

    def _note(self, namespace: str) -> None:
        if self._watches[namespace].state is ReuseState.HEALTHY:
            self._unwell.discard(namespace)
        else:
            self._unwell.add(namespace)

    def _forget_one(self) -> None:
        """The one asked longest ago; one that is not healthy only where all are."""
        well = (name for name in self._watches if name not in self._unwell)
        name = next(well, next(iter(self._watches)))
        del self._watches[name]
        self._unwell.discard(name)
