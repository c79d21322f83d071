"""All that was ever asked, as with unlimited memory: what a prompt shares with it, and which places were offered."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from bench.replay.requests import SimRequest, Symbols
from cache import CheckpointKind, Frontier, shared_tokens
from engine.frontiers import FrontierRules, anchors, branch, prompt_frontiers
from engine.request import GenerationRequest


class Place(NamedTuple):
    """A prefix that could be resumed: equal numbers are equal prefixes."""

    number: int
    tokens: int


class Offer(NamedTuple):
    """A place whose state a request can leave behind."""

    place: Place
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as policies see it: each place, and whatever it costs to hold one, is the same to all of them."""

    number: int
    seconds: float
    prompt_tokens: int
    path: tuple[Place, ...]
    """Places inside its prompt that requests before it offered, shortest first; the last is what is achievable."""
    offers: tuple[Offer, ...]
    """Those that this request passes, shortest first, whether offered before or not."""
    block_path: tuple[Place, ...] = ()
    """The same where states stand at ends of blocks only: each offer falls back to the block end before it."""
    block_offers: tuple[Place, ...] = ()

    @property
    def achievable_tokens(self) -> int:
        return self.path[-1].tokens if self.path else 0


@dataclass(frozen=True, slots=True)
class OfferRules:
    """Which frontiers are offered, in symbols."""

    places: FrontierRules
    """Where anchors and branches stand: a branch where the prompt leaves what was asked before."""
    block: int
    """Of an engine whose states stand at ends of blocks."""


def named_frontiers(request: SimRequest) -> tuple[Frontier, ...]:
    """Those that the scheduler sees in it, in symbols."""
    return prompt_frontiers(GenerationRequest("", request.prompt, frontiers=request.frontiers))


class _Node:
    """What follows one common prefix: a path without a fork. Mutable: only its History may touch it."""

    __slots__ = ("block_number", "children", "edge", "end", "number")

    def __init__(self, edge: Symbols, end: int) -> None:
        self.edge = edge
        self.end = end
        """Symbols from the start of the prompt to the end of this node."""
        self.children: dict[int, _Node] = {}
        self.number: int | None = None
        """Of the place at its end, once that was offered."""
        self.block_number: int | None = None
        """The same, of a place that was offered because a block ends there."""


class History:
    """A radix tree for each namespace. Mutable: `ask` adds to it."""

    def __init__(self, rules: OfferRules, tokens_per_symbol: int) -> None:
        self._rules = rules
        self._tokens_per_symbol = tokens_per_symbol
        self._roots: dict[str, _Node] = {}
        self._numbers = count()
        self.symbols = 0
        """Distinct ones so far: with unlimited memory, so much KV is held."""

    def ask(self, request: SimRequest) -> Ask:
        """Look a request up, then remember its prompt, its answer and its offers."""
        root = self._roots.setdefault(request.namespace, _Node((), 0))
        limit = len(request.prompt) - 1
        nodes, shared = self._walk(root, request.prompt)
        inside = [node for node in nodes if node.end <= limit]
        path = tuple(self._place(node.number, node.end) for node in inside if node.number is not None)
        block_path = tuple(self._place(node.block_number, node.end) for node in inside if node.block_number is not None)
        known = path[-1].tokens // self._tokens_per_symbol if path else 0
        sequence = request.prompt + request.answer
        self._insert(root, sequence)
        frontiers = self._frontiers(request, known, min(shared, limit))
        block = self._rules.block
        block_ends = sorted({f.tokens // block * block for f in frontiers} - {0})
        offers = tuple(Offer(self._offer(root, sequence, f.tokens), f.kind) for f in frontiers)
        block_offers = tuple(self._offer_block(root, sequence, end) for end in block_ends)
        seconds, tokens = request.arrival_seconds, request.prompt_tokens
        return Ask(request.number, seconds, tokens, path, offers, block_path, block_offers)

    def _place(self, number: int, end: int) -> Place:
        return Place(number, end * self._tokens_per_symbol)

    def _offer(self, root: _Node, sequence: Symbols, end: int) -> Place:
        node = self._node_at(root, sequence, end)
        if node.number is None:
            node.number = next(self._numbers)
        return self._place(node.number, end)

    def _offer_block(self, root: _Node, sequence: Symbols, end: int) -> Place:
        node = self._node_at(root, sequence, end)
        if node.block_number is None:
            node.block_number = next(self._numbers)
        return self._place(node.block_number, end)

    def _frontiers(self, request: SimRequest, known: int, shared: int) -> list[Frontier]:
        named = named_frontiers(request)
        marked = (*named, *branch(named, shared, known, self._rules.places.branch_gain))
        ladder = anchors(marked, known, self._rules.places)
        found = {f.tokens: f for f in (*ladder, *marked)}
        end = len(request.prompt) + len(request.answer) - 1
        if request.answer and end not in found:
            found[end] = Frontier(end, CheckpointKind.PRIVATE_ENDPOINT)
        return [found[tokens] for tokens in sorted(found)]

    @staticmethod
    def _walk(root: _Node, symbols: Symbols) -> tuple[list[_Node], int]:
        """The nodes that the symbols pass whole, and how many symbols they share with all that is there."""
        nodes: list[_Node] = []
        node = root
        while True:
            child = node.children.get(symbols[node.end]) if node.end < len(symbols) else None
            if child is None:
                return nodes, node.end
            if symbols[node.end : child.end] != child.edge:
                return nodes, node.end + shared_tokens(symbols[node.end : child.end], child.edge)
            nodes.append(child)
            node = child

    def _insert(self, root: _Node, symbols: Symbols) -> None:
        nodes, shared = self._walk(root, symbols)
        if shared == len(symbols):
            return
        node = nodes[-1] if nodes else root
        if shared > node.end:
            node = self._split(node, symbols[node.end], shared)
        node.children[symbols[shared]] = _Node(symbols[shared:], len(symbols))
        self.symbols += len(symbols) - shared

    def _node_at(self, root: _Node, symbols: Symbols, depth: int) -> _Node:
        nodes, _ = self._walk(root, symbols[:depth])
        node = nodes[-1] if nodes else root
        return node if node.end == depth else self._split(node, symbols[node.end], depth)

    @staticmethod
    def _split(parent: _Node, first: int, depth: int) -> _Node:
        """Cut the child that begins with `first` so that a node ends at `depth`."""
        child = parent.children[first]
        cut = depth - parent.end
        upper = _Node(child.edge[:cut], depth)
        child.edge = child.edge[cut:]
        upper.children[child.edge[0]] = child
        parent.children[first] = upper
        return upper
