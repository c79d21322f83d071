"""From a simulation's records to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.replay.measure import Measurements, Served
from bench.report import Quantiles, quantiles
from cache import ContextCache

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens of some requests."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int
    achievable_tokens: int

    @property
    def hit_rate(self) -> float:
        """Of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def achieved(self) -> float:
        """Of what unlimited memory would have reused."""
        return self.cached_tokens / self.achievable_tokens if self.achievable_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that a simulation showed. Seconds are virtual."""

    seconds: float
    reuse: Reuse
    hours: list[Reuse]
    """By the hour in which a request was sent."""
    paths: dict[str, int]
    lost_tokens: dict[str, int]
    ttft_seconds: Quantiles | None
    evictions: dict[str, dict[str, int]]
    """Checkpoints that left a pool, by pool and kind."""
    publish_skipped: dict[str, int]
    moved_bytes: dict[str, int]
    refused: int
    suspensions: int
    longest_queue: int
    checks: int
    violations: list[str]
    orphans: int
    """Units that audits gave back because nobody held them."""


def reuse_of(served: Sequence[Served]) -> Reuse:
    """The sum over these requests."""
    return Reuse(
        requests=len(served),
        prompt_tokens=sum(each.prompt_tokens for each in served),
        cached_tokens=sum(each.cached_tokens for each in served),
        host_tokens=sum(each.host_tokens for each in served),
        achievable_tokens=sum(each.achievable_tokens for each in served),
    )


def windows(served: Sequence[Served], seconds: float) -> list[Reuse]:
    """The sum in each window of so many seconds, from the start on."""
    found: dict[int, list[Served]] = {}
    for each in served:
        found.setdefault(int(each.sent_at // seconds), []).append(each)
    return [reuse_of(found.get(number, [])) for number in range(max(found, default=-1) + 1)]


def summarise(measurements: Measurements, cache: ContextCache) -> Summary:
    """The figures, with the counters of the cache that served."""
    served = measurements.served
    lost: Counter[str] = Counter()
    for each in served:
        lost.update(each.lost)
    evictions: dict[str, dict[str, int]] = {}
    for (pool, kind), number in cache.stats.evictions.most_common():
        evictions.setdefault(pool, {})[str(kind)] = number
    return Summary(
        seconds=max((each.ended_at for each in served), default=0.0),
        reuse=reuse_of(served),
        hours=windows(served, HOUR_SECONDS),
        paths=dict(Counter(each.path for each in served)),
        lost_tokens=dict(lost.most_common()),
        ttft_seconds=quantiles(each.ttft_seconds for each in served),
        evictions=evictions,
        publish_skipped={str(reason): number for reason, number in cache.stats.publish_skipped.most_common()},
        moved_bytes=dict(measurements.moved_bytes),
        refused=measurements.refused,
        suspensions=measurements.suspensions,
        longest_queue=max((sample.waiting for sample in measurements.samples), default=0),
        checks=measurements.checks,
        violations=measurements.violations,
        orphans=cache.stats.orphans_reclaimed.total(),
    )
