"""The bytes of one KV page in one tier and who refers to them: the prefix tree, tails of checkpoints, block tables,
copies."""

from __future__ import annotations

from cache.pools import Holder, Lease, UnitState
from cache.types import Tier, UnitHandle

_TREE = Holder(UnitState.CACHED, "tree")


class Replica:
    """Leased units with their references. Mutable: only the engine loop's task may touch it.

    Pinned or in flight while a request or a copy refers to it, cached while only the tree or a checkpoint does, free
    (and gone) when nobody does. A page never changes below a token that was published; the request that owns it appends
    after that token.
    """

    __slots__ = ("cached_refs", "lease", "pins", "tier")

    def __init__(self, lease: Lease, tier: Tier) -> None:
        """Takes over `lease`; its holder, a request or a copy, is the first pin."""
        self.lease = lease
        self.tier = tier
        self.cached_refs = 0
        self.pins: dict[Holder, int] = {lease.holder: 1}

    @property
    def unit(self) -> int:
        """Its unit, where it has one: device KV pages."""
        return self.lease.units[0]

    @property
    def handle(self) -> UnitHandle:
        return UnitHandle(self.tier, self.lease.units)

    def pin(self, holder: Holder) -> None:
        """Add one reference of a request or a copy."""
        if not self.pins:
            self.lease.rename(holder)
        self.pins[holder] = self.pins.get(holder, 0) + 1

    def unpin(self, holder: Holder) -> None:
        """Drop one reference of a request or a copy. Raises KeyError when it has none."""
        left = self.pins[holder] - 1
        if left:
            self.pins[holder] = left
            return
        del self.pins[holder]
        self._settle()

    def ref(self) -> None:
        """Add one reference of the tree or of a checkpoint's tail."""
        self.cached_refs += 1

    def unref(self) -> None:
        """Drop one reference of the tree or of a checkpoint's tail."""
        if self.cached_refs < 1:
            raise ValueError(f"units {self.lease.units} of {self.tier} have no cached reference to drop")
        self.cached_refs -= 1
        if not self.cached_refs:
            self._settle()

    def _settle(self) -> None:
        if self.pins:
            self.lease.rename(next(iter(self.pins)))
        elif self.cached_refs:
            self.lease.rename(_TREE)
        else:
            self.lease.close()
