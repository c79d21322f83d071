"""LRU in a radix tree whose interior states can be dropped alone: the tombstones of SGLang's hybrid radix cache."""

from __future__ import annotations

from bench.policies.lru import Lru
from bench.replay.history import Ask, Place


class RadixLru(Lru):
    """Using a place uses every held place above it too, each just before what is below it.

    With KV unlimited a tombstone costs nothing, so what is left of SGLang's rule (`MambaRadixCache`) is this order: an
    interior state goes before the leaves that were used with it, and never because of its own age alone.
    """

    name = "radix LRU (SGLang)"

    def used(self, place: Place, ask: Ask) -> None:
        for above in self.path(ask):
            if above.tokens < place.tokens and above.number in self.held:
                super().used(above, ask)
        super().used(place, ask)
