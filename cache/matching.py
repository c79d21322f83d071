"""How the longest reusable prefix of a prompt is found in a tree; pins nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cache.checkpoints import Checkpoint
from cache.pages import Page
from cache.tree import PrefixTree, Tokens
from cache.types import ROOT_PATH, CheckpointKind


@dataclass(frozen=True, slots=True)
class Found:
    """What a prompt can resume from: full pages, a page of which only the leading tokens fit, a checkpoint."""

    cached_tokens: int = 0
    path: str = ROOT_PATH
    pages: tuple[Page, ...] = ()
    tail: tuple[Page, int] | None = None
    checkpoint: Checkpoint | None = None
    remembered_tokens: int = 0
    """Leading tokens whose KV is there, resumable or not."""


def find_checkpoint(tree: PrefixTree, tokens: Tokens, limit_tokens: int) -> Found:
    """For a model with recurrent states: the deepest checkpoint, for a state cannot be rolled back."""
    nodes = tree.walk(tokens, limit_tokens)
    remembered = nodes[-1].depth * tree.page_size
    checkpoint = tree.deepest_checkpoint(nodes, tokens, limit_tokens)
    if checkpoint is None:
        return Found(remembered_tokens=remembered)
    frontier = checkpoint.frontier_tokens
    return Found(
        cached_tokens=frontier,
        path=checkpoint.kind,
        pages=tuple(node.page for node in nodes[1 : checkpoint.node.depth + 1] if node.page is not None),
        tail=(checkpoint.tail_page, len(checkpoint.tail)) if checkpoint.tail_page is not None else None,
        checkpoint=checkpoint,
        remembered_tokens=max(remembered, frontier),
    )


def find_pages(tree: PrefixTree, tokens: Tokens, limit_tokens: int) -> Found:
    """For attention alone: as many tokens as the tree shares, for KV can be cut at any token."""
    nodes = tree.walk(tokens, limit_tokens)
    tail = tree.longest_partial(nodes[-1], tokens, limit_tokens)
    cached = nodes[-1].depth * tree.page_size + (tail[1] if tail else 0)
    nearest = tree.deepest_checkpoint(nodes, tokens, limit_tokens)
    if cached == 0:
        return Found()
    is_exact = nearest is not None and nearest.frontier_tokens == cached
    return Found(
        cached_tokens=cached,
        path=nearest.kind if nearest is not None and is_exact else CheckpointKind.SHARED_BRANCH,
        pages=tuple(node.page for node in nodes if node.page is not None),
        tail=tail,
        checkpoint=nearest,
        remembered_tokens=cached,
    )
