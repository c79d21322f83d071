"""One KV page and who refers to it: the prefix tree, the tails of checkpoints, and the block tables of requests."""

from __future__ import annotations

from cache.pools import Holder, Lease, Pool, UnitState


class Page:
    """A leased page with its references. Mutable: only the engine loop's task may touch it.

    Pinned while a request refers to it, cached while only the tree or a checkpoint does, free (and gone) when nobody
    does. A page never changes below a token that was published; the request that owns it appends after that token.
    """

    __slots__ = ("_lease", "cached_refs", "pins")

    def __init__(self, pool: Pool, request_id: str) -> None:
        self._lease: Lease = pool.lease(Holder(UnitState.PINNED, request_id), 1)
        self.cached_refs = 0
        self.pins: dict[str, int] = {request_id: 1}

    @property
    def unit(self) -> int:
        return self._lease.units[0]

    @property
    def lease(self) -> Lease:
        return self._lease

    def pin(self, request_id: str) -> None:
        """Add one reference of a request."""
        if not self.pins:
            self._lease.rename(Holder(UnitState.PINNED, request_id))
        self.pins[request_id] = self.pins.get(request_id, 0) + 1

    def unpin(self, request_id: str) -> None:
        """Drop one reference of a request. Raises KeyError when it has none."""
        left = self.pins[request_id] - 1
        if left:
            self.pins[request_id] = left
            return
        del self.pins[request_id]
        self._settle()

    def ref(self) -> None:
        """Add one reference of the tree or of a checkpoint's tail."""
        self.cached_refs += 1

    def unref(self) -> None:
        """Drop one reference of the tree or of a checkpoint's tail."""
        if self.cached_refs < 1:
            raise ValueError(f"page {self.unit} has no cached reference to drop")
        self.cached_refs -= 1
        self._settle()

    def _settle(self) -> None:
        if self.pins:
            self._lease.rename(Holder(UnitState.PINNED, next(iter(self.pins))))
        elif self.cached_refs:
            self._lease.rename(Holder(UnitState.CACHED, "tree"))
        else:
            self._lease.close()
