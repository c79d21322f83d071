"""Counters of what the cache did; always on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cache.types import CheckpointKind, SkipReason


@dataclass(slots=True)
class CacheStats:
    """Counters since the start. Mutable: only the engine loop's task may touch it."""

    selections: Counter[str] = field(default_factory=Counter)
    """Admitted requests by reuse path."""
    reused_tokens: int = 0
    """Prompt tokens that admitted requests did not have to compute."""
    evictions: Counter[CheckpointKind] = field(default_factory=Counter)
    """Checkpoints that gave way, by kind."""
    published: Counter[CheckpointKind] = field(default_factory=Counter)
    """Checkpoints that became visible, by kind."""
    distrusted: int = 0
    """Checkpoints that were dropped because a request failed right after it was resumed from them."""
    publish_skipped: Counter[SkipReason] = field(default_factory=Counter)
    """Frontiers that did not become checkpoints, by reason."""
