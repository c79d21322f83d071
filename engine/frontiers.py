"""Which places in a prompt become checkpoints while it is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache import CacheOptions, CheckpointKind, Frontier, Known, RequestLease
from engine.request import GenerationRequest

_ANCHOR = CheckpointKind.PRIVATE_LONG_ANCHOR
_MAX_ANCHORS = 4
_CHUNKS_PER_ANCHOR = 2
_LEAST_STATES_FOR_A_BRANCH = 2
"""One for the place and one for the newest turn, which would drive it out else."""


@dataclass(frozen=True, slots=True)
class FrontierRules:
    """How many places are marked besides those that a request names, and which."""

    chunk: int
    """Of the prefill, in tokens: what one segment has at most."""
    max_anchors: int
    """In one prompt, where no slot is vacant."""
    branch_gain: int | None
    """Tokens that a branch saves at least over what covers the way to it; None for no branches."""

    @classmethod
    def of(cls, options: CacheOptions, max_concurrency: int, chunk: int) -> FrontierRules:
        """Where there are no states, every token can be resumed from anyway."""
        if not options.has_state:
            return cls(chunk, 0, None)
        spare_slots = options.state_slots - max_concurrency
        has_branches = spare_slots + options.host_states >= _LEAST_STATES_FOR_A_BRANCH
        return cls(chunk, min(_MAX_ANCHORS, spare_slots // 2), options.page_size if has_branches else None)


def prompt_frontiers(request: GenerationRequest) -> tuple[Frontier, ...]:
    """Those that the request names, inside its prompt; one token is always left to compute. In order, each place once.

    A request that names no turn closure can be resumed at its last token but one, which is where it would be sent
    again, or be continued.
    """
    last = len(request.prompt_token_ids) - 1
    named = {f.tokens: f for f in request.frontiers if 0 < f.tokens <= last}
    if last > 0 and all(f.kind is not CheckpointKind.PRIVATE_TURN_CLOSURE for f in named.values()):
        named.setdefault(last, Frontier(last, CheckpointKind.PRIVATE_TURN_CLOSURE, is_turn=False))
    return tuple(named[tokens] for tokens in sorted(named))


def with_places_on_the_way(
    named: tuple[Frontier, ...], known: Known, cached_tokens: int, rules: FrontierRules, vacant_slots: int = 0
) -> tuple[Frontier, ...]:
    """The named frontiers, the place where the prompt leaves a known way, and a ladder of anchors: as many as the rules
    give, or as there are slots that nobody needs."""
    covered_tokens = max(cached_tokens, known.promised_tokens)
    marked = (*named, *branch(named, known.branch_tokens, covered_tokens, rules.branch_gain))
    return (*marked, *anchors(marked, cached_tokens, rules, vacant_slots - len(marked)))


def branch(
    named: tuple[Frontier, ...], branch_tokens: int, covered_tokens: int, gain: int | None
) -> tuple[Frontier, ...]:
    """Where this prompt leaves what was computed before, if that was seen twice now and nothing else marks the way to
    it: at exactly that token, so that what can be reused later depends on nothing but the text."""
    end = max((f.tokens for f in named), default=0)
    marked = max((f.tokens for f in named if f.tokens <= branch_tokens), default=0)
    if gain is None or not max(covered_tokens, marked) + gain <= branch_tokens < end:
        return ()
    return (Frontier(branch_tokens, CheckpointKind.SHARED_BRANCH),)


def anchors(
    named: tuple[Frontier, ...], cached_tokens: int, rules: FrontierRules, vacant_slots: int = 0
) -> tuple[Frontier, ...]:
    """A ladder in what is computed anew up to the last named frontier, at ends of chunks; the segment that ends nearest
    takes it (`settle_anchors`).

    Evenly spaced, at least two chunks apart and one before that frontier, for a fork or an edit in the middle. Vacant
    slots are filled beyond that, one at each end of a chunk: they cost nobody anything, and are the first to leave.
    """
    chunk, end = rules.chunk, max((f.tokens for f in named), default=0)
    taken = {f.tokens for f in named}
    ends = range((cached_tokens // chunk + 1) * chunk, end - chunk + 1, chunk)
    free = [tokens for tokens in ends if tokens not in taken]
    few = min(rules.max_anchors, len(free) // _CHUNKS_PER_ANCHOR)
    count = max(few, min(vacant_slots, len(free))) if rules.max_anchors else 0
    places = (free[len(free) * (2 * step + 1) // (2 * count)] for step in range(count))
    return tuple(Frontier(tokens, _ANCHOR) for tokens in places)


def next_cut(wanted: Iterable[Frontier], computed_tokens: int, end: int) -> int:
    """Where the next segment ends at the latest: the state of each frontier but an anchor is taken at exactly its
    token."""
    cuts = (f.tokens for f in wanted if f.tokens > computed_tokens and f.kind is not _ANCHOR)
    return min(cuts, default=end)


def settle_anchors(lease: RequestLease, end: int, chunk: int) -> None:
    """Take at `end`, where a segment ends, the anchors that lie before it or less than half a chunk behind it.

    No segment is cut for them: of a prompt that shares its steps with others none ends where it was to, and each cut
    would cost it a step of a few tokens.
    """
    for anchor in [f for f in lease.wanted if f.kind is _ANCHOR and f.tokens < end + chunk / 2]:
        lease.move(anchor, end)
