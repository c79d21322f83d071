"""How much of a pool each namespace keeps, so that none can push out one that has less than its share."""

from __future__ import annotations


class Held:
    """Units of one pool that each namespace keeps beyond its requests; those without any are left out. Mutable: only
    the engine loop's task may touch it."""

    def __init__(self) -> None:
        self._units: dict[str, int] = {}
        self.total = 0

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, namespace: str) -> int:
        return self._units.get(namespace, 0)

    def by_namespace(self) -> dict[str, int]:
        """A copy."""
        return dict(self._units)

    def change(self, namespace: str, units: int) -> None:
        """So many more, or fewer."""
        now = self[namespace] + units
        self.total += units
        if now:
            self._units[namespace] = now
        else:
            self._units.pop(namespace, None)

    def favours(self, own: str, over: str) -> bool:
        """Whether what is one namespace's is not to give way to the other: it has no more than an equal share, and that
        one no less."""
        if own == over or len(self) < 2:
            return False
        share = self.total / len(self)
        return self[own] <= share <= self[over]

    def owing(self, namespace: str, units: int, capacity: int) -> str | None:
        """Who keeps most, when it is more than an equal share of the pool and `namespace` would keep no more than that
        with so many units on top; else None."""
        sharers = len(self) + (namespace not in self._units)
        share = capacity / sharers
        if sharers < 2 or self[namespace] + units > share:
            return None
        most = max(self._units, key=self._units.__getitem__)
        return most if self[most] > share and most != namespace else None
