"""Whether a plain cache of the same size would do better: then its rule is followed, until it loses as much."""

from __future__ import annotations

_DUE_SHARE = 0.25
"""Of the tokens that such a cache holds: so many lost to it, net of what was won, and its rule is followed."""


class Regret:
    """Tokens that a plain cache, which drops what was used longest ago, would have saved beyond what was saved.

    The ranking by value bets on what it has learned. Traffic can turn against it: when all conversations end at once
    and others begin, the dead ones are worth more until they have aged. So the sum of what the bets lost against the
    plain cache, less what they won, never below 0, is bounded: when it is due, what that cache would not hold gives
    way first. Its rule has an enemy too, a rotation of more than fit, so what it loses there pays the sum back.

    Mutable: only the engine loop's task may touch it.
    """

    def __init__(self) -> None:
        self.is_due = False
        """Whether what the plain cache would hold is spared."""
        self._tokens = 0

    def saw(self, *, cached_tokens: int, plain_tokens: int, achievable_tokens: int, held_tokens: int) -> None:
        """One request: what it reused, what it would have reused of a plain cache, what was ever computed of it, and
        how much that cache holds."""
        most = int(_DUE_SHARE * held_tokens)
        lost = plain_tokens - cached_tokens
        if self.is_due:
            lost = max(lost, 0) - max(achievable_tokens - plain_tokens, 0)
        self._tokens = max(0, min(self._tokens + lost, most))
        if self._tokens == 0:
            self.is_due = False
        elif self._tokens == most:
            self.is_due = True

    def clear(self) -> None:
        self.is_due = False
        self._tokens = 0
