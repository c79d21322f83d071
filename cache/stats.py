"""Counters of what the cache did; always on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cache.types import CheckpointKind, ReuseReport, SkipReason, Tier


@dataclass(slots=True)
class CacheStats:
    """Counters since the start. Mutable: only the engine loop's task may touch it."""

    selections: Counter[str] = field(default_factory=Counter)
    """Admitted requests by reuse path."""
    reused_from: Counter[Tier] = field(default_factory=Counter)
    """Prompt tokens that admitted requests did not have to compute, by where they came from."""
    computed_tokens: int = 0
    """Prompt tokens that admitted requests had to compute."""
    achievable_tokens: int = 0
    """Prompt tokens that could have been reused if nothing had been lost."""
    expected_tokens: int = 0
    """Prompt tokens that a plain cache of the same size would have saved."""
    lost_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that had to be computed, by LossReason."""
    evictions: Counter[tuple[str, CheckpointKind]] = field(default_factory=Counter)
    """Checkpoints that gave way, by pool and kind; those that only left one tier for another are among them."""
    granted: Counter[str] = field(default_factory=Counter)
    """Units that requests, captures and copies took, by pool."""
    surplus: Counter[str] = field(default_factory=Counter)
    """Units that victims gave back beyond what was asked of them, for they leave as a whole; by pool."""
    published: Counter[CheckpointKind] = field(default_factory=Counter)
    """Checkpoints that became visible, by kind."""
    publish_skipped: Counter[SkipReason] = field(default_factory=Counter)
    """Frontiers that did not become checkpoints, and checkpoints that host memory refused, by reason."""
    checkpoints_dropped: int = 0
    """Checkpoints of which no bytes are left."""
    checkpoints_demoted: int = 0
    """Checkpoints that were copied to host memory."""
    restores: int = 0
    """Requests that took something from host memory."""
    restore_failures: int = 0
    """Requests whose copy from host memory failed."""
    quarantined: int = 0
    """Checkpoints that were dropped because their bytes could not be trusted."""
    audits: int = 0
    violations: int = 0
    """What audits found, all told."""
    orphans_reclaimed: Counter[str] = field(default_factory=Counter)
    """Units that nobody held any more, by pool, given back by audits."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that admitted requests did not have to compute."""
        return self.reused_from.total()

    def count_reuse(self, found: ReuseReport) -> None:
        """Add one request's prompt."""
        self.selections[found.path] += 1
        for tier in Tier:
            self.reused_from[tier] += found.source[tier]
        self.computed_tokens += found.prompt_tokens - found.cached_tokens
        self.achievable_tokens += found.achievable_tokens
        self.expected_tokens += found.expected_tokens
        self.lost_tokens.update(found.lost)
