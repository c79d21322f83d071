"""What a simulation writes down while it runs: one record for each request, one for each virtual minute."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cache import PoolCounts


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered. Times are virtual seconds from the start of the trace."""

    sent_at: float
    first_token_at: float
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int
    """Of the cached ones, those that came back from host memory."""
    achievable_tokens: int
    """With unlimited memory."""
    path: str
    lost: dict[str, int]
    """By reason, as the cache reports it, in tokens."""

    @property
    def ttft_seconds(self) -> float:
        return self.first_token_at - self.sent_at


@dataclass(frozen=True, slots=True)
class Sample:
    """The pools at one moment."""

    at: float
    pools: dict[str, PoolCounts]
    waiting: int
    running: int


@dataclass(slots=True)
class Measurements:
    """Mutable: only the simulation adds to it."""

    served: list[Served] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """By direction and object."""
    violations: list[str] = field(default_factory=list)
    checks: int = 0
    refused: int = 0
    """Requests that can never fit."""
    suspensions: int = 0
