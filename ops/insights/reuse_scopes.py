"""Every namespace's watch, and one over all of them: what is lost in one is not hidden by the others, nor is what is
spread thin over many."""

from __future__ import annotations

from collections import OrderedDict

from cache import ReuseReport
from ops.insights.chances import ChanceScale
from ops.insights.reuse_watch import Books, ReuseWatch
from ops.insights.types import ReuseState, worst

MOST_NAMESPACES = 1024


class _Scope:
    """One namespace, or all of them. Mutable."""

    def __init__(self) -> None:
        self.watch = ReuseWatch()
        self._scale = ChanceScale()

    def saw(self, report: ReuseReport, now: float, *, is_host_full: bool) -> None:
        chance = self._scale.weigh(report)
        if chance is not None:
            self.watch.saw(chance, now, is_host_full=is_host_full)

    @property
    def is_quiet(self) -> bool:
        return self.watch.state is ReuseState.HEALTHY and not self.watch.is_suspicious


class ReuseScopes:
    """Bounded: a client that invents salts cannot make it grow. Mutable: only the event loop's thread may touch it."""

    def __init__(self) -> None:
        self._overall = _Scope()
        self._scopes: OrderedDict[str, _Scope] = OrderedDict()
        self._restless: set[str] = set()
        """Namespaces that are not healthy, or suspicious."""

    @property
    def state(self) -> ReuseState:
        return worst(*(watch.state for watch in self._watches()))

    @property
    def is_suspicious(self) -> bool:
        """Whether the books should be looked at, for any of them."""
        return any(watch.is_suspicious for watch in self._watches())

    def saw(self, namespace: str, report: ReuseReport, now: float, *, is_host_full: bool) -> None:
        """Ask `judge` what follows; `is_host_full` is whether host memory has room for one state image at most."""
        scope = self._scopes.pop(namespace, None) or _Scope()
        self._scopes[namespace] = scope
        scope.saw(report, now, is_host_full=is_host_full)
        self._note(namespace)
        self._overall.saw(report, now, is_host_full=is_host_full)
        if len(self._scopes) > MOST_NAMESPACES:
            self._forget_one()

    def judge(self, now: float, books: Books) -> None:
        self._overall.watch.judge(now, books)
        for name in tuple(self._restless):
            self._scopes[name].watch.judge(now, books)
            self._note(name)

    def leak(self, now: float, *, is_leaking: bool) -> None:
        """Pools belong to all."""
        self._overall.watch.leak(now, is_leaking=is_leaking)

    def relieve(self, now: float) -> None:
        for scope in (self._overall, *self._scopes.values()):
            scope.watch.relieve(now)

    def worst_watches(self) -> tuple[list[ReuseWatch], int]:
        """Those in the worst state, the one with most to tell first; and how many namespaces that is, 0 where it is all
        of them together."""
        state = self.state
        if self._overall.watch.state is state:
            return [self._overall.watch], 0
        found = [watch for watch in self._watches() if watch.state is state]
        return sorted(found, key=lambda watch: len(watch.recent), reverse=True), len(found)

    def _watches(self) -> list[ReuseWatch]:
        """All that have something to tell."""
        return [self._overall.watch, *(self._scopes[name].watch for name in self._restless)]

    def _note(self, namespace: str) -> None:
        if self._scopes[namespace].is_quiet:
            self._restless.discard(namespace)
        else:
            self._restless.add(namespace)

    def _forget_one(self) -> None:
        """The one asked longest ago; one that is restless only where all are."""
        quiet = (name for name in self._scopes if name not in self._restless)
        name = next(quiet, next(iter(self._scopes)))
        del self._scopes[name]
        self._restless.discard(name)
