"""Recency plus FLOP efficiency: the eviction rule of Marconi (Pan et al., MLSys 2025, section 4.2)."""

from __future__ import annotations

import numpy as np

from bench.policies.protocol import SlotPolicy
from bench.replay.history import Ask, Place

ALPHAS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


class Marconi(SlotPolicy):
    """Evicts the smallest recency + alpha x FLOP efficiency, both scaled to 0..1 over what is held.

    Every state weighs the same and KV is unlimited, so the efficiency of a place is the computing it saves over the
    place above it that is held, which is linear in tokens but for attention's part; tokens stand for it.
    """

    name = "recency + length (Marconi)"

    def __init__(self, slots: int, alpha: float, *, from_parent: bool = True) -> None:
        super().__init__(slots)
        self.alpha = alpha
        self._from_parent = from_parent
        self._at = np.zeros(slots + 1)
        self._saved_tokens = np.zeros(slots + 1)
        self._numbers = np.full(slots + 1, -1)
        self._row: dict[int, int] = {}
        self._free = list(range(slots + 1))

    def used(self, place: Place, ask: Ask) -> None:
        self._at[self._row[place.number]] = ask.number

    def taken(self, place: Place, ask: Ask) -> None:
        row = self._row[place.number] = self._free.pop()
        above = 0
        if self._from_parent:
            offered = (offer.place for offer in ask.offers)
            above = max(
                (p.tokens for p in (*ask.path, *offered) if p.tokens < place.tokens and p.number in self.held),
                default=0,
            )
        self._at[row], self._saved_tokens[row], self._numbers[row] = ask.number, place.tokens - above, place.number

    def victim(self, ask: Ask, newest: Place) -> int:
        score = _scaled(self._at) + self.alpha * _scaled(self._saved_tokens)
        return int(self._numbers[np.argmin(score)])

    def dropped(self, number: int) -> None:
        self._free.append(self._row.pop(number))


def _scaled(values: np.ndarray) -> np.ndarray:
    least, most = values.min(), values.max()
    return (values - least) / (most - least) if most > least else np.zeros_like(values)
