"""Where a prompt rewrites a conversation that was known: only a turn that it repeats makes it the same conversation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from cache.checkpoints import Checkpoint
from cache.matching import Known
from cache.tree import Node, Tokens
from cache.types import CheckpointKind, Frontier

_MOST_NODES_BELOW = 4096
_MOST_ANSWER_TOKENS = 4096
_OPENING_TOKENS = 3
"""Of what opens an answer, those that are looked for: what follows them may depend on whether the model is to think."""
_ENOUGH_TOKENS = 8
"""Of an answer, in the middle of what was computed for it: the thinking before it is not sent back."""


def rewritten_at(known: Known, tokens: Tokens, wanted: Sequence[Frontier]) -> int | None:
    """The first token at which a prompt departs from a conversation that it began to repeat; None where it does not.

    The conversation that it leaves goes on to the end of a turn, which the prompt was to contain too. It is the same
    conversation when the prompt has come past the end of an earlier turn of it, or goes on with the answer that was
    given to the turn that it left. A raw prompt has no turns.
    """
    tree, nodes = known.tree, known.nodes
    turn = max((f.tokens for f in wanted if f.kind is CheckpointKind.PRIVATE_TURN_CLOSURE and f.is_turn), default=0)
    if tree is None or not turn:
        return None
    position, key = tree.departure(nodes[-1], tokens, len(tokens))
    left = None if key is None else _next_closure(nodes[-1], key)
    if left is None or not position < min(turn, left.frontier_tokens):
        return None
    on_the_way = tree.checkpoints_on(nodes, tokens, position)
    is_known_turn = any(c.kind is CheckpointKind.PRIVATE_TURN_CLOSURE for c in on_the_way)
    return position if is_known_turn or _repeats_the_answer(left, tokens, position, turn) else None


def _next_closure(node: Node, key: Tokens) -> Checkpoint | None:
    """The first turn that ends on the known way from `node` by `key`."""
    tail = node.checkpoints.get(key)
    if tail is not None:
        return tail if tail.kind is CheckpointKind.PRIVATE_TURN_CLOSURE else None
    below: Node | None = node.children.get(key)
    for _ in range(_MOST_NODES_BELOW):
        if below is None:
            return None
        ends = [c for c in below.checkpoints.values() if c.kind is CheckpointKind.PRIVATE_TURN_CLOSURE]
        if ends:
            return min(ends, key=lambda closure: closure.frontier_tokens)
        below = next(reversed(below.children.values()), None)
    return None


def _repeats_the_answer(left: Checkpoint, tokens: Tokens, position: int, turn: int) -> bool:
    """Whether the prompt, whose own last turn ends at `turn`, goes on from `position` with the answer to `left`."""
    opening = tokens[turn : turn + _OPENING_TOKENS]
    opens = _place_of(opening, tokens[:turn], max(position - len(opening) + 1, 0))
    if opens is None:
        return False
    said, known = tokens[opens + len(opening) : turn], _what_follows(left)
    prompted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, tokens[turn:], strict=False)))
    answer = known[prompted:]
    beginning, some = answer[:_ENOUGH_TOKENS], said[:_ENOUGH_TOKENS]
    if beginning and said[: len(beginning)] == beginning:
        return True
    return len(some) == _ENOUGH_TOKENS and _place_of(some, answer, 0) is not None


def _place_of(piece: Tokens, tokens: Tokens, start: int) -> int | None:
    """Where `piece` stands for the first time in the tokens from `start` on."""
    while piece and piece[0] in tokens[start:]:
        start = tokens.index(piece[0], start)
        if tokens[start : start + len(piece)] == piece:
            return start
        start += 1
    return None


def _what_follows(checkpoint: Checkpoint) -> Tokens:
    """The tokens that are known behind a checkpoint, by the way that was computed last."""
    found: Tokens = ()
    node, behind = checkpoint.node, checkpoint.tail
    while len(found) < _MOST_ANSWER_TOKENS:
        key = next((key for key in reversed(node.children) if key[: len(behind)] == behind), None)
        if key is None:
            tails = (tail for tail in node.checkpoints if tail[: len(behind)] == behind)
            return (*found, *max(tails, key=len, default=behind)[len(behind) :])
        found += key[len(behind) :]
        node, behind = node.children[key], ()
    return found
