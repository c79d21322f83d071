"""How likely a checkpoint is used again (a place holder until the value function lands)."""

from __future__ import annotations


class ReturnRates:
    """Nothing learnt."""

    def returned(self, entry: object, idle_seconds: float) -> None:
        pass

    def expired(self, entry: object, idle_seconds: float) -> None:
        pass
