"""The prefix tree of one namespace: a node is a full KV page keyed by its exact tokens; hashes only find, tokens
decide. A node without a replica is a ghost: known, and not kept."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from cache.held import Held
from cache.replicas import Replica
from cache.types import Tier

if TYPE_CHECKING:
    from cache.checkpoints import Checkpoint

Tokens = tuple[int, ...]


def shared_tokens(one: Tokens, other: Tokens) -> int:
    """How many leading tokens are equal, by halving: comparing slices is quick."""
    if one[:1] != other[:1]:
        return 0
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Node:
    """A full page below its parent; the root has no page. Mutable: only the engine loop's task may touch it.

    In each tier the nodes with a replica reach up to the root without a gap: a node keeps its replica as long as a
    child has one, or a checkpoint resides here.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "depth",
        "ghost_keys",
        "host",
        "host_holds",
        "key",
        "keys",
        "page",
        "page_holds",
        "parent",
        "tail_lengths",
    )

    def __init__(self, parent: Node | None, key: Tokens) -> None:
        self.parent = parent
        self.key = key
        self.page: Replica | None = None
        """On the device."""
        self.host: Replica | None = None
        self.page_holds = 0
        """Children with a page on the device, and checkpoints that reside there down to here."""
        self.host_holds = 0
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Tokens, Node] = {}
        self.checkpoints: dict[Tokens, Checkpoint] = {}
        """By their tails: the tokens between this node's end and the checkpoint's frontier, fewer than a page."""
        self.tail_lengths: dict[int, int] = {}
        """How many of them have a tail of that length."""
        self.keys: list[Tokens] = []
        """The keys of the children and of the checkpoints' tails of which there are bytes, sorted: neighbours share the
        longest beginnings."""
        self.ghost_keys: list[Tokens] = []
        """The same of those of which there are none."""

    @property
    def is_bare(self) -> bool:
        return not self.children and not self.checkpoints

    @property
    def is_ghost(self) -> bool:
        return self.page is None and self.host is None and self.parent is not None

    @property
    def copy(self) -> Replica | None:
        """The nearest replica."""
        return self.page if self.page is not None else self.host

    def checkpoints_along(self, rest: Tokens) -> Iterator[Checkpoint]:
        """Those whose tails `rest` begins with; the longest first."""
        for length in sorted(self.tail_lengths, reverse=True):
            found = self.checkpoints.get(rest[:length]) if length <= len(rest) else None
            if found is not None:
                yield found

    def goes_on_behind(self, tail: Tokens) -> bool:
        """Whether anything is known that goes on from there."""
        size = len(tail)
        return any(len(key) > size and key[:size] == tail for keys in (self.children, self.checkpoints) for key in keys)

    def holds(self, tier: Tier) -> int:
        return self.page_holds if tier is Tier.DEVICE else self.host_holds

    def add_hold(self, tier: Tier, change: int) -> int:
        """Returns how many there are then."""
        if tier is Tier.DEVICE:
            self.page_holds += change
        else:
            self.host_holds += change
        return self.holds(tier)

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


@dataclass(slots=True)
class NodeCounts:
    """Nodes of all trees. Mutable: only the engine loop's task may touch it."""

    nodes: int = 0
    ghosts: int = 0


class PrefixTree:
    """All that is known under one namespace. Mutable: only the engine loop's task may touch it."""

    def __init__(self, page_size: int, counts: NodeCounts, namespace: str, held: Mapping[Tier, Held]) -> None:
        """What all trees count together: their nodes, and the pages of each namespace by tier."""
        self.page_size = page_size
        self.root = Node(None, ())
        self.counts = counts
        self.has_returns = False
        """Whether a request ever went on from what another had left here."""
        self._namespace = namespace
        self._held = held

    # -- looking

    def walk(self, tokens: Tokens, limit_tokens: int) -> list[Node]:
        """The nodes, from the root on, whose tokens are a prefix of tokens[:limit_tokens]. The root is always the
        first; ghosts come last.
        """
        size = self.page_size
        nodes = [self.root]
        children = self.root.children
        for start in range(0, limit_tokens - size + 1, size):
            child = children.get(tokens[start : start + size])
            if child is None:
                break
            nodes.append(child)
            children = child.children
        return nodes

    def checkpoints_on(self, nodes: Sequence[Node], tokens: Tokens, limit_tokens: int) -> Iterator[Checkpoint]:
        """Checkpoints on a walked path whose frontier and tail lie in tokens[:limit_tokens], deepest first."""
        for node in reversed(nodes):
            if not node.checkpoints:
                continue
            start = node.depth * self.page_size
            yield from node.checkpoints_along(tokens[start : min(limit_tokens, start + self.page_size - 1)])

    def longest_partial(self, node: Node, tokens: Tokens, limit_tokens: int) -> tuple[Replica, int] | None:
        """The page below `node` that shares the most leading tokens with what follows there, and how many; None for
        none."""
        best: tuple[Replica, int] | None = None
        for key, shared in self._nearest(node, node.keys, tokens, limit_tokens):
            page = self._copy_of(node, key)
            if page is not None and shared and (best is None or shared > best[1]):
                best = (page, shared)
        return best

    def departure(self, node: Node, tokens: Tokens, limit_tokens: int) -> tuple[int, Tokens | None]:
        """Where a prompt leaves what is known below `node`, in tokens from its start, and the key that it leaves."""
        start, best, leaves = node.depth * self.page_size, 0, None
        for keys in (node.keys, node.ghost_keys):
            for key, shared in self._nearest(node, keys, tokens, limit_tokens):
                if shared > best or leaves is None:
                    best, leaves = shared, key
        return start + best, leaves

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- growing and pruning

    def insert(self, tokens: Tokens) -> Node:
        """Make sure that every full page of `tokens` is a node; those that are new are ghosts. Returns the last."""
        size = self.page_size
        node = self.root
        for start in range(0, len(tokens) - size + 1, size):
            key = tokens[start : start + size]
            child = node.children.get(key)
            if child is None:
                child = Node(node, key)
                node.children[key] = child
                insort(node.ghost_keys, key)
                self.counts.nodes += 1
                self.counts.ghosts += 1
            node = child
        return node

    def attach(self, node: Node, tail: Tokens, checkpoint: Checkpoint) -> None:
        """Hang a checkpoint on a node."""
        node.checkpoints[tail] = checkpoint
        node.tail_lengths[len(tail)] = node.tail_lengths.get(len(tail), 0) + 1
        if tail:
            insort(node.ghost_keys if checkpoint.tail_copy is None else node.keys, tail)

    def detach(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint off its node, and remove what of the path nothing needs any more."""
        node, tail = checkpoint.node, checkpoint.tail
        del node.checkpoints[tail]
        node.tail_lengths[len(tail)] -= 1
        if not node.tail_lengths[len(tail)]:
            del node.tail_lengths[len(tail)]
        if tail:
            _remove(node.ghost_keys if checkpoint.tail_copy is None else node.keys, tail)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.is_bare and node.is_ghost and node.parent is not None:
            parent = node.parent
            del parent.children[node.key]
            _remove(parent.ghost_keys, node.key)
            self.counts.nodes -= 1
            self.counts.ghosts -= 1
            node = parent

    # -- replicas

    def hold(self, node: Node, tier: Tier, replicas: Sequence[Replica], above: int = 0) -> None:
        """Add one reference to the node's replica in `tier`; where there is none, it and its ancestors take theirs from
        `replicas`, which are in the order of the path and begin below depth `above`."""
        while node.parent is not None:
            if node.add_hold(tier, 1) > 1:
                return
            replica = replicas[node.depth - 1 - above]
            replica.ref()
            self._change(node, tier, replica)
            node = node.parent

    def let_go(self, node: Node, tier: Tier) -> None:
        """Drop one reference to the node's replica in `tier`; replicas without one go, here and further up."""
        lowest = node
        while node.parent is not None:
            replica = node.page if tier is Tier.DEVICE else node.host
            if replica is None:
                raise ValueError(f"a node at depth {node.depth} has no replica on {tier} to let go of")
            if node.add_hold(tier, -1):
                break
            replica.unref()
            self._change(node, tier, None)
            node = node.parent
        self._prune(lowest)

    def change_tail(self, checkpoint: Checkpoint, change: Callable[[], None]) -> None:
        """Let `change` alter which replicas the checkpoint's tail page has, and keep the sorted keys in step."""
        had, before = checkpoint.tail_copy is not None, _tails(checkpoint)
        change()
        has, node = checkpoint.tail_copy is not None, checkpoint.node
        for tier, count in _tails(checkpoint).items():
            if count != before[tier]:
                self._held[tier].change(self._namespace, count - before[tier])
        if had is not has and node.checkpoints.get(checkpoint.tail) is checkpoint:
            _remove(node.keys if had else node.ghost_keys, checkpoint.tail)
            insort(node.keys if has else node.ghost_keys, checkpoint.tail)

    def _change(self, node: Node, tier: Tier, replica: Replica | None) -> None:
        was_ghost, parent = node.is_ghost, node.parent
        if tier is Tier.DEVICE:
            node.page = replica
        else:
            node.host = replica
        self._held[tier].change(self._namespace, -1 if replica is None else 1)
        if node.is_ghost is was_ghost or parent is None:
            return
        self.counts.ghosts += 1 if node.is_ghost else -1
        _remove(parent.keys if node.is_ghost else parent.ghost_keys, node.key)
        insort(parent.ghost_keys if node.is_ghost else parent.keys, node.key)

    def _nearest(
        self, node: Node, keys: list[Tokens], tokens: Tokens, limit_tokens: int
    ) -> Iterator[tuple[Tokens, int]]:
        start = node.depth * self.page_size
        rest = tokens[start : min(limit_tokens, start + self.page_size)]
        position = bisect_left(keys, rest)
        for key in keys[max(position - 1, 0) : position + 1]:
            yield key, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(key, rest, strict=False)))

    @staticmethod
    def _copy_of(node: Node, key: Tokens) -> Replica | None:
        child = node.children.get(key)
        if child is not None:
            return child.copy
        checkpoint = node.checkpoints.get(key)
        return checkpoint.tail_copy if checkpoint is not None else None


def _tails(checkpoint: Checkpoint) -> dict[Tier, int]:
    return {Tier.DEVICE: int(checkpoint.tail_page is not None), Tier.HOST: int(checkpoint.host_tail is not None)}


def _remove(keys: list[Tokens], key: Tokens) -> None:
    del keys[bisect_left(keys, key)]
