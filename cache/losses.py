"""Why the rest of a prompt has to be computed: each lost token gets one reason."""

from __future__ import annotations

from collections.abc import Sequence

from cache.expectation import Expected
from cache.leases import Match
from cache.matching import Known
from cache.tree import Node, Tokens
from cache.types import CheckpointKind, Frontier, LossReason, ReuseReport, Tier

_MOST_NODES_BELOW = 4096


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
        diverged_at = rewritten_at(known, match.tokens, reusable)
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
    )


def rewritten_at(known: Known, tokens: Tokens, reusable_tokens: int) -> int | None:
    """The first token at which a prompt departs from a conversation that it began to repeat; None where it does not.

    The conversation that it leaves goes on to the end of a turn, which the prompt was to contain too. It is the same
    conversation when the prompt repeats a whole turn of it, or the better half of what is its own.
    """
    tree, nodes = known.tree, known.nodes
    if tree is None:
        return None
    position, key = tree.departure(nodes[-1], tokens, len(tokens))
    end_of_turn = None if key is None else _next_closure(nodes[-1], key)
    if end_of_turn is None or not position < min(reusable_tokens, end_of_turn):
        return None
    shared_until = own_until = 0
    for checkpoint in tree.checkpoints_on(nodes, tokens, position):
        if checkpoint.kind.is_shared:
            shared_until = max(shared_until, checkpoint.frontier_tokens)
        else:
            own_until = max(own_until, checkpoint.frontier_tokens)
    repeats_half = 2 * (position - shared_until) >= end_of_turn - shared_until
    return position if own_until > shared_until or repeats_half else None


def _next_closure(node: Node, key: Tokens) -> int | None:
    """The frontier of the first turn that ends on the known way from `node` by `key`."""
    tail = node.checkpoints.get(key)
    if tail is not None:
        return tail.frontier_tokens if tail.kind is CheckpointKind.PRIVATE_TURN_CLOSURE else None
    below: Node | None = node.children.get(key)
    for _ in range(_MOST_NODES_BELOW):
        if below is None:
            return None
        ends = [c.frontier_tokens for c in below.checkpoints.values() if c.kind is CheckpointKind.PRIVATE_TURN_CLOSURE]
        if ends:
            return min(ends)
        below = next(reversed(below.children.values()), None)
    return None
