"""States at block ends only, least recently used first: vLLM's `align` mode for hybrid models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.policies.lru import Lru
from bench.replay.history import Ask, Place


class BlockAligned(Lru):
    """A block is as many tokens as weigh what a state weighs, so each offer falls back to the block end before it."""

    name = "block-aligned (vLLM)"

    def path(self, ask: Ask) -> Sequence[Place]:
        return ask.block_path

    def offered(self, ask: Ask) -> Iterable[Place]:
        return ask.block_offers
