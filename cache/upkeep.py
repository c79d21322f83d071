"""What an operator, or a fault, does to what is remembered: reset a tier, take out what cannot be trusted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cache.checkpoints import Checkpoint
from cache.replicas import Replica
from cache.tiers import Tiers
from cache.types import LossReason, Tier


@dataclass(slots=True)
class ResetCounts:
    """What a reset of one tier did, in checkpoints."""

    dropped: int = 0
    pinned: int = 0
    """Left where they are, for a request or a copy uses them."""


def reset(tiers: Tiers, wanted: Iterable[Tier]) -> dict[Tier, ResetCounts]:
    """Drop from the `wanted` tiers every checkpoint that nobody uses. What is then nowhere is as if never seen; what
    was lost before is forgotten with the device."""
    asked = set(wanted)
    counts = {tier: ResetCounts() for tier in Tier if tier in asked}
    for checkpoint in tuple(tiers.store):
        is_on_device = checkpoint.slot is not None or checkpoint.device_pages > 0
        for tier, is_here in ((Tier.DEVICE, is_on_device), (Tier.HOST, checkpoint.is_in_host)):
            if tier not in counts or not is_here:
                continue
            if checkpoint.pins:
                counts[tier].pinned += 1
                continue
            counts[tier].dropped += 1
            if tier is Tier.DEVICE:
                tiers.drop_device(checkpoint, LossReason.COLD)
            else:
                tiers.drop_host(checkpoint, LossReason.COLD)
        if checkpoint.loss is not None:
            tiers.ghosts.forget(checkpoint)
    if Tier.DEVICE in counts:
        tiers.ghosts.clear()
    return counts


def quarantine(tiers: Tiers, checkpoint: Checkpoint | None, reason: LossReason) -> bool:
    """Nobody is to find it any more; when the last reader has left, its bytes are given back. False when it is gone
    already."""
    if checkpoint is None or checkpoint not in tiers.store:
        return False
    tiers.stats.quarantined += 1
    if checkpoint.pins == 0:
        tiers.lose(checkpoint, reason)
    else:
        tiers.forget(checkpoint)
    return True


def quarantine_pages(tiers: Tiers, pages: Collection[Replica]) -> None:
    """The same for every checkpoint that stands on one of these pages in host memory."""
    suspects = set(map(id, pages))
    for checkpoint in [each for each in tiers.store if each.is_in_host]:
        own = [*(node.host for node in checkpoint.node.path()), checkpoint.host_tail]
        if not suspects.isdisjoint(map(id, own)):
            quarantine(tiers, checkpoint, LossReason.RESTORE_FAILED)
