"""Recency plus FLOP efficiency: the eviction rule of Marconi (Pan et al., MLSys 2025, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.policies.protocol import SlotPolicy
from bench.replay.history import Ask, Place

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Above 1, the entry that saves most would never go, however long nobody has come back for it."""


class Marconi(SlotPolicy):
    """Evicts the smallest recency + alpha x FLOP efficiency, both scaled to 0..1 over what is held.

    Every state weighs the same and KV is unlimited, so the efficiency of a place is the computing that it saves over
    the held place above it, which is linear in tokens but for attention's part; tokens stand for it.
    """

    name = "recency + length (Marconi)"

    def __init__(self, slots: int, alpha: float) -> None:
        super().__init__(slots)
        self.alpha = alpha
        rows = slots + 1
        self._used_at = np.zeros(rows)
        self._saved_tokens = np.zeros(rows)
        self._numbers = np.zeros(rows, np.int64)
        self._row: dict[int, int] = {}
        self._free = list(range(rows))

    @classmethod
    def fitted(cls, slots: int, asks: Sequence[Ask]) -> Marconi:
        """With the alpha that reuses most of these requests, as Marconi finds it by replaying what it has seen."""

        def hit_tokens(alpha: float) -> int:
            policy = cls(slots, alpha)
            return sum(policy.serve(ask) for ask in asks)

        return cls(slots, max(ALPHAS, key=hit_tokens))

    def used(self, place: Place, ask: Ask) -> None:
        self._used_at[self._row[place.number]] = ask.number

    def taken(self, place: Place, ask: Ask) -> None:
        row = self._row[place.number] = self._free.pop()
        passed = (*ask.path, *(offer.place for offer in ask.offers))
        above = (each.tokens for each in passed if each.tokens < place.tokens and each.number in self.held)
        self._saved_tokens[row] = place.tokens - max(above, default=0)
        self._used_at[row], self._numbers[row] = ask.number, place.number

    def victim(self, ask: Ask, newest: Place) -> int:
        score = _scaled(self._used_at) + self.alpha * _scaled(self._saved_tokens)
        return int(self._numbers[np.argmin(score)])

    def dropped(self, number: int) -> None:
        self._free.append(self._row.pop(number))


def _scaled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    least, most = values.min(), values.max()
    return (values - least) / (most - least) if most > least else np.zeros_like(values)
