"""Why the rest of a prompt has to be computed: each lost token gets one reason."""

from __future__ import annotations

from collections.abc import Sequence

from cache.expectation import Expected
from cache.leases import Match
from cache.rewriting import rewritten_at
from cache.types import Frontier, LossReason, ReuseReport, Tier


def report(match: Match, wanted: Sequence[Frontier], expected: Expected, *, has_reuse: bool) -> ReuseReport:
    """What the request reuses and why the rest, up to its own last frontier, is computed."""
    prompt, cached = len(match.tokens), match.cached_tokens
    reusable = max((f.tokens for f in wanted if f.tokens < prompt), default=prompt - 1)
    lost: dict[str, int] = {}
    covered, diverged_at = cached, None
    steps: list[tuple[LossReason, int]] = []
    if not has_reuse:
        steps.append((LossReason.BYPASS, reusable))
    else:
        known = match.known
        diverged_at = rewritten_at(known, match.tokens, wanted)
        steps.append((expected.reason, expected.tokens))
        steps.append((known.reason, known.achievable_tokens))
        steps.append((LossReason.NO_CHECKPOINT, max(known.tokens, diverged_at or 0)))
        steps.append((LossReason.COLD if diverged_at is None else LossReason.DIVERGED, reusable))
    for reason, end in steps:
        end = min(end, reusable)
        if end > covered:
            lost[reason] = lost.get(reason, 0) + end - covered
            covered = end
    return ReuseReport(
        path=match.path,
        prompt_tokens=prompt,
        cached_tokens=cached,
        achievable_tokens=max(cached, match.known.achievable_tokens if has_reuse else 0),
        source={
            Tier.DEVICE: cached - match.host_tokens,
            Tier.HOST: match.host_tokens,
            Tier.DISK: 0,
        },
        lost=lost,
        diverged_at=diverged_at,
        expected_tokens=expected.tokens,
        fault_tokens=max(0, expected.fault_tokens - cached),
        bet_tokens=max(0, expected.bet_tokens - cached),
    )
