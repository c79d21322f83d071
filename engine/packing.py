"""How the prompts that are being computed share a step. Pure: the scheduler and its simulation call the same function.

A short prompt passes a long one, for the long one hardly notices and the short one would wait many times its own time.
It passes only one that has more than twice as much left: two of a size would both be late if they took turns. The
oldest keeps half of each step whatever comes, so it ends, and so does the one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_PASSES_AT_TIMES = 2
"""How much longer than its own is what a prompt may pass."""


class Prefill(NamedTuple):
    """What a prompt still has to compute, after reuse."""

    remaining_tokens: int
    """To its first token."""
    piece_tokens: int
    """To the next place at which its state is wanted, or to its first token: most that one segment may hold."""


def share_step(prefills: Sequence[Prefill], budget_tokens: int) -> list[int]:
    """The tokens that each computes in the next step; 0 for those that wait. `prefills` are in the order of arrival.

    Nothing of the budget is left while somebody's piece is cut.
    """
    if not prefills:
        return []
    shares = [0] * len(prefills)
    oldest, *_ = prefills
    line = sorted(range(1, len(prefills)), key=lambda index: prefills[index].remaining_tokens)
    passing = [
        index for index in line if prefills[index].remaining_tokens * _PASSES_AT_TIMES <= oldest.remaining_tokens
    ]
    left = budget_tokens - min(oldest.piece_tokens, -(-budget_tokens // 2))
    for index in passing:
        shares[index] = min(prefills[index].piece_tokens, left)
        left -= shares[index]
    shares[0] = min(oldest.piece_tokens, budget_tokens - sum(shares))
    left = budget_tokens - sum(shares)
    for index in line:
        more = min(prefills[index].piece_tokens - shares[index], left)
        shares[index] += more
        left -= more
    return shares
