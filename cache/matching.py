"""How the best reusable prefix of a prompt is found in a tree, and what is known of it beyond; pins nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.checkpoints import Checkpoint
from cache.costs import Costs
from cache.replicas import Replica
from cache.tree import Node, PrefixTree, Tokens
from cache.types import ROOT_PATH, CacheOptions, CheckpointKind, LossReason, Tier

_TURN = CheckpointKind.PRIVATE_TURN_CLOSURE


@dataclass(frozen=True, slots=True)
class Known:
    """What was computed of a prompt before, kept or not."""

    tree: PrefixTree | None = None
    tokens: int = 0
    """Leading tokens that were computed before."""
    branch_tokens: int = 0
    """Where the prompt leaves a way, known or just being computed, that goes on otherwise; 0 where there is none."""
    nodes: tuple[Node, ...] = ()
    """The walked path from the root, ghosts included."""
    achievable_tokens: int = 0
    """The longest prefix that could be resumed if nothing had been lost."""
    promised_tokens: int = 0
    """The same, without what was lost and is no turn: who computes the way to that anew may mark it anew."""
    lost: Checkpoint | None = None
    """The lost checkpoint there, if it is one that was lost."""
    reason: LossReason = LossReason.EVICTED_KV
    """Why less than the achievable can be resumed."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a prompt can resume from: full pages, a page of which only the leading tokens fit, a checkpoint."""

    cached_tokens: int = 0
    path: str = ROOT_PATH
    pages: tuple[Replica, ...] = ()
    """Of the path, each where it is nearest."""
    tail: tuple[Replica, int] | None = None
    checkpoint: Checkpoint | None = None
    known: Known = Known()

    def parting_at(self, tokens: int) -> Found:
        """The same, where the prompt leaves a way there that is just being computed, unless it leaves one later."""
        if tokens <= self.known.branch_tokens:
            return self
        return replace(self, known=replace(self.known, branch_tokens=tokens))


def find_checkpoint(tree: PrefixTree, tokens: Tokens, limit_tokens: int, options: CacheOptions, costs: Costs) -> Found:
    """For a model with recurrent states: the checkpoint from which the prompt is computed soonest, as a rule the
    deepest, for a state cannot be rolled back."""
    nodes = tree.walk(tokens, limit_tokens)
    on_path = list(tree.checkpoints_on(nodes, tokens, limit_tokens))
    live = [checkpoint for checkpoint in on_path if checkpoint.loss is None]
    best = soonest(live, len(tokens), options, costs)
    departure_tokens, key = tree.departure(nodes[-1], tokens, limit_tokens)
    leaves = key is not None and departure_tokens - nodes[-1].depth * tree.page_size < len(key)
    known = Known(
        tree=tree,
        tokens=departure_tokens,
        branch_tokens=departure_tokens if leaves else 0,
        nodes=tuple(nodes),
        achievable_tokens=on_path[0].frontier_tokens if on_path else 0,
        promised_tokens=next((c.frontier_tokens for c in on_path if c.loss is None or c.kind is _TURN), 0),
        lost=on_path[0] if on_path and on_path[0].loss is not None else None,
        reason=(on_path[0].loss or LossReason.STRUCTURAL) if on_path else LossReason.STRUCTURAL,
    )
    if best is None:
        return Found(known=known)
    return Found(
        cached_tokens=best.frontier_tokens,
        path=best.kind,
        pages=_copies(nodes[1 : best.node.depth + 1]),
        tail=(best.tail_copy, len(best.tail)) if best.tail_copy is not None else None,
        checkpoint=best,
        known=known,
    )


def find_pages(tree: PrefixTree, tokens: Tokens, limit_tokens: int, options: CacheOptions, costs: Costs) -> Found:
    """For attention alone: as many tokens as the tree has, for KV can be cut at any token."""
    nodes = tree.walk(tokens, limit_tokens)
    kept = [node for node in nodes if not node.is_ghost]
    is_worth_it = costs.seconds_to(options.page_bytes, 0) <= costs.seconds_to(0, tree.page_size)
    usable = kept if is_worth_it else [node for node in kept if node.page is not None or node.parent is None]
    tail = tree.longest_partial(usable[-1], tokens, limit_tokens)
    if tail is not None and tail[0].tier is not Tier.DEVICE and not is_worth_it:
        tail = None
    cached = usable[-1].depth * tree.page_size + (tail[1] if tail else 0)
    on_path = list(tree.checkpoints_on(nodes, tokens, limit_tokens))
    nearest = next((c for c in on_path if c.loss is None and c.frontier_tokens <= cached), None)
    achievable = max([nodes[-1].depth * tree.page_size, cached, *(c.frontier_tokens for c in on_path[:1])])
    lost = on_path[0] if on_path and on_path[0].loss is not None else None
    known = Known(
        tree=tree,
        tokens=achievable,
        nodes=tuple(nodes),
        achievable_tokens=achievable,
        lost=lost,
        reason=(lost.loss or LossReason.EVICTED_KV) if lost is not None else _reason_below(nodes[-1], is_worth_it),
    )
    if cached == 0:
        return Found(known=known)
    is_exact = nearest is not None and nearest.frontier_tokens == cached
    return Found(
        cached_tokens=cached,
        path=nearest.kind if nearest is not None and is_exact else CheckpointKind.SHARED_BRANCH,
        pages=_copies(usable[1:]),
        tail=tail,
        checkpoint=nearest,
        known=known,
    )


def host_tokens(found: Found, options: CacheOptions) -> int:
    """Of the cached tokens, those that could not be reused without host memory."""
    if options.has_state and found.checkpoint is not None and found.checkpoint.slot is None:
        return found.cached_tokens
    near = sum(page.tier is Tier.DEVICE for page in found.pages) * options.page_size
    tail = found.tail[1] if found.tail is not None and found.tail[0].tier is Tier.DEVICE else 0
    return found.cached_tokens - near - tail


def restore_bytes(checkpoint: Checkpoint, options: CacheOptions) -> int:
    """Bytes that have to come from host memory before it can be resumed."""
    pages, node = 0, checkpoint.node
    while node.parent is not None and node.page is None:
        pages, node = pages + 1, node.parent
    if checkpoint.tail and checkpoint.tail_page is None:
        pages += 1
    has_far_state = options.has_state and checkpoint.slot is None
    return pages * options.page_bytes + (options.state_bytes if has_far_state else 0)


def soonest(live: Sequence[Checkpoint], prompt_tokens: int, options: CacheOptions, costs: Costs) -> Checkpoint | None:
    """The deepest, unless to copy it back takes longer than to compute on from one further up, or from the start."""
    best: Checkpoint | None = None
    least = costs.seconds_to(0, prompt_tokens)
    for checkpoint in reversed(live):
        size_bytes = restore_bytes(checkpoint, options)
        seconds = costs.seconds_to(size_bytes, prompt_tokens - checkpoint.frontier_tokens)
        if seconds < least:
            best, least = checkpoint, seconds
    return best


def _copies(nodes: Sequence[Node]) -> tuple[Replica, ...]:
    return tuple(copy for node in nodes if (copy := node.copy) is not None)


def _reason_below(node: Node, is_worth_it: bool) -> LossReason:
    """Why a page that is known is not used: what is lost below it says so."""
    if not is_worth_it and not node.is_ghost:
        return LossReason.STRUCTURAL
    while node.children and not node.checkpoints:
        node = next(iter(node.children.values()))
    return next((c.loss for c in node.checkpoints.values() if c.loss is not None), LossReason.EVICTED_KV)
