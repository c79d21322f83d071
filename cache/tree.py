"""The prefix tree of one namespace: a node is a full KV page keyed by its exact tokens; hashes only find, tokens
decide."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from cache.pages import Page

if TYPE_CHECKING:
    from cache.checkpoints import Checkpoint

Tokens = tuple[int, ...]


class Node:
    """A full page below its parent; the root has no page. Mutable: only the engine loop's task may touch it."""

    __slots__ = ("checkpoints", "children", "depth", "key", "keys", "page", "parent")

    def __init__(self, parent: Node | None, key: Tokens, page: Page | None) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Tokens, Node] = {}
        self.checkpoints: dict[Tokens, Checkpoint] = {}
        """By their tails: the tokens between this node's end and the checkpoint's frontier, fewer than a page."""
        self.keys: list[Tokens] = []
        """The keys of the children and of the checkpoints' tails, sorted: neighbours share the longest beginnings."""

    @property
    def is_bare(self) -> bool:
        return not self.children and not self.checkpoints

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PrefixTree:
    """All that is remembered under one namespace. Mutable: only the engine loop's task may touch it."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(None, (), None)

    def walk(self, tokens: Tokens, limit_tokens: int) -> list[Node]:
        """The nodes, from the root on, whose tokens are a prefix of tokens[:limit_tokens]. The root is always the
        first."""
        size = self.page_size
        nodes = [self.root]
        for start in range(0, limit_tokens - size + 1, size):
            child = nodes[-1].children.get(tokens[start : start + size])
            if child is None:
                break
            nodes.append(child)
        return nodes

    def deepest_checkpoint(self, nodes: Sequence[Node], tokens: Tokens, limit_tokens: int) -> Checkpoint | None:
        """The checkpoint with the greatest frontier <= limit_tokens on a walked path whose tail is in the tokens
        too."""
        for node in reversed(nodes):
            start = node.depth * self.page_size
            longest = min(limit_tokens - start, self.page_size - 1)
            lengths = {len(tail) for tail in node.checkpoints}
            for length in sorted(lengths, reverse=True):
                if length <= longest:
                    found = node.checkpoints.get(tokens[start : start + length])
                    if found is not None:
                        return found
        return None

    def longest_partial(self, node: Node, tokens: Tokens, limit_tokens: int) -> tuple[Page, int] | None:
        """The page below `node` that shares the most leading tokens with what follows there, and how many; None for
        none."""
        start = node.depth * self.page_size
        rest = tokens[start : min(limit_tokens, start + self.page_size)]
        position = bisect_left(node.keys, rest)
        best: tuple[Page, int] | None = None
        for key in node.keys[max(position - 1, 0) : position + 1]:
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(key, rest, strict=False)))
            page = self._page_of(node, key)
            if page is not None and shared and (best is None or shared > best[1]):
                best = (page, shared)
        return best

    def insert(self, tokens: Tokens, pages: Sequence[Page]) -> Node:
        """Make sure that every full page of `tokens` is a node, with `pages` for those that are not yet; returns the
        last."""
        size = self.page_size
        node = self.root
        for index in range(len(tokens) // size):
            key = tokens[index * size : (index + 1) * size]
            child = node.children.get(key)
            if child is None:
                page = pages[index]
                page.ref()
                child = Node(node, key, page)
                node.children[key] = child
                insort(node.keys, key)
            node = child
        return node

    def attach(self, node: Node, tail: Tokens, checkpoint: Checkpoint) -> None:
        """Hang a checkpoint on a node."""
        node.checkpoints[tail] = checkpoint
        if tail:
            insort(node.keys, tail)

    def detach(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint off its node, and remove what of the path nothing needs any more."""
        node = checkpoint.node
        del node.checkpoints[checkpoint.tail]
        if checkpoint.tail:
            _remove_key(node, checkpoint.tail)
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Remove `node` and its ancestors for as long as they are bare, dropping their pages."""
        while node.is_bare and node.parent is not None and node.page is not None:
            parent = node.parent
            del parent.children[node.key]
            _remove_key(parent, node.key)
            node.page.unref()
            node = parent

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @staticmethod
    def _page_of(node: Node, key: Tokens) -> Page | None:
        child = node.children.get(key)
        if child is not None:
            return child.page
        checkpoint = node.checkpoints.get(key)
        return checkpoint.tail_page if checkpoint is not None else None


def _remove_key(node: Node, key: Tokens) -> None:
    del node.keys[bisect_left(node.keys, key)]
