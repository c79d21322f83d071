"""Which places in a prompt become checkpoints while it is computed."""

from __future__ import annotations

from cache import CheckpointKind, Frontier, Known
from engine.request import GenerationRequest

MAX_ANCHORS = 4
_CHUNKS_PER_ANCHOR = 2


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
    named: tuple[Frontier, ...], known: Known, cached_tokens: int, chunk: int, at_most: int
) -> tuple[Frontier, ...]:
    """The named frontiers, the place where the prompt leaves a known way, and a ladder of `at_most`
    anchors: none of the latter two where that is 0."""
    if at_most == 0:
        return named
    covered_tokens = max(cached_tokens, known.achievable_tokens)
    marked = (*named, *branch(named, known.branch_tokens, covered_tokens, chunk))
    return (*marked, *anchors(marked, cached_tokens, chunk, at_most))


def branch(named: tuple[Frontier, ...], known_tokens: int, covered_tokens: int, chunk: int) -> tuple[Frontier, ...]:
    """Where this prompt leaves what was computed before, if that was seen twice now and nothing else marks the place:
    the last end of a chunk within it, where a segment ends anyway. A checkpoint, be it lost, covers the way to it."""
    tokens = known_tokens // chunk * chunk
    end = max((f.tokens for f in named), default=0)
    marked = max((f.tokens for f in named if f.tokens <= known_tokens), default=0)
    if not max(covered_tokens, marked) < tokens < end:
        return ()
    return (Frontier(tokens, CheckpointKind.SHARED_BRANCH),)


def anchors(named: tuple[Frontier, ...], cached_tokens: int, chunk: int, at_most: int) -> tuple[Frontier, ...]:
    """A ladder in what is computed anew up to the last named frontier, at ends of chunks, where segments end anyway.

    Evenly spaced, at least two chunks apart and one before that frontier, for a fork or an edit in the middle.
    """
    end = max((f.tokens for f in named), default=0)
    taken = {f.tokens for f in named}
    ends = range((cached_tokens // chunk + 1) * chunk, end - chunk + 1, chunk)
    free = [tokens for tokens in ends if tokens not in taken]
    count = min(at_most, len(free) // _CHUNKS_PER_ANCHOR)
    places = (free[len(free) * (2 * step + 1) // (2 * count)] for step in range(count))
    return tuple(Frontier(tokens, CheckpointKind.PRIVATE_LONG_ANCHOR) for tokens in places)
