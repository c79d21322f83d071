"""What the daemon looks like over time: units of each pool, reuse since the last look, resident memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.soak.checks import Account

_STATES = ("cached", "pinned", "in_flight")
_SHORT_NAMES = {
    "device_state_slots": "slots",
    "device_kv_pages": "pages",
    "host_state_slots": "host slots",
    "host_units": "host",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One reading of /metrics, by name and label values."""

    values: Mapping[tuple[str, ...], float]

    @classmethod
    def parse(cls, text: str) -> Page:
        families = text_string_to_metric_families(text)
        return cls({(s.name, *map(str, s.labels.values())): s.value for family in families for s in family.samples})

    def total(self, name: str, *labels: str) -> int:
        """A counter's value; 0 for one that this daemon does not have."""
        return int(self.values.get((f"dalsegno_{name}", *labels), 0))

    def family(self, name: str) -> dict[tuple[str, ...], int]:
        """Label values -> value, where it is not 0."""
        return {key[1:]: int(value) for key, value in self.values.items() if key[0] == f"dalsegno_{name}" and value}

    @property
    def pools(self) -> list[str]:
        """Those that have any units."""
        return [pool for (pool,), units in self.family("cache_capacity").items() if units]

    def account(self) -> Account:
        """What the daemon says that it answered."""
        sources = {tier: self.total("prompt_tokens_by_source_total", tier) for tier in ("device", "host", "disk")}
        return Account(
            answers=sum(self.family("reuse_selections_total").values()),
            prompt_tokens=self.total("prompt_tokens_total"),
            cached_tokens=sum(sources.values()),
            host_tokens=sources["host"],
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. Shares are of a pool's capacity; rates are since the sample before, None where nothing was asked."""

    seconds: float
    requests: int
    occupied: Mapping[str, float]
    """By pool: units that are not free."""
    pinned: Mapping[str, float]
    """By pool: units that requests and copies hold."""
    hit_rate: float | None
    """Cached tokens per prompt token."""
    achieved: float | None
    """Cached tokens per achievable token."""
    rss_bytes: int


@dataclass(slots=True)
class Observer:
    """Takes samples of one daemon and keeps them. Mutable."""

    pid: int
    samples: list[Sample] = field(default_factory=list)
    _last: Page | None = None

    def look(self, page: Page, seconds: float, requests: int) -> Sample:
        """Take in a reading of /metrics."""
        held = {pool: {state: page.total("cache_units", pool, state) for state in _STATES} for pool in page.pools}
        capacity = {pool: page.total("cache_capacity", pool) for pool in page.pools}
        sample = Sample(
            seconds=seconds,
            requests=requests,
            occupied={pool: sum(units.values()) / capacity[pool] for pool, units in held.items()},
            pinned={pool: (units["pinned"] + units["in_flight"]) / capacity[pool] for pool, units in held.items()},
            hit_rate=self._rate(page, "reuse_achieved_tokens_total", "prompt_tokens_total"),
            achieved=self._rate(page, "reuse_achieved_tokens_total", "reuse_achievable_tokens_total"),
            rss_bytes=resident_bytes(self.pid),
        )
        self.samples.append(sample)
        self._last = page
        return sample

    def counters(self) -> dict[str, float]:
        """Everything that the daemon had counted about tokens, steps and its cache when it was last looked at."""
        values = {} if self._last is None else self._last.values
        parts = ("_cache_", "_reuse_", "_tokens_", "_step_seconds_")
        wanted = {name: value for name, value in values.items() if any(part in name[0] for part in parts)}
        return {" ".join(name): value for name, value in wanted.items() if value and not name[0].endswith("_created")}

    def _rate(self, page: Page, part: str, whole: str) -> float | None:
        if self._last is None:
            return None
        of = page.total(whole) - self._last.total(whole)
        return (page.total(part) - self._last.total(part)) / of if of else None


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def processor_seconds(pid: int) -> float:
    """0 for a process that has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def describe(sample: Sample, total: int) -> str:
    """One line."""
    pools = "  ".join(f"{_SHORT_NAMES.get(pool, pool)} {share:4.0%}" for pool, share in sample.occupied.items())
    rates = f"hit {_percent(sample.hit_rate)}  of achievable {_percent(sample.achieved)}"
    clock = f"{int(sample.seconds) // 60:3d}:{int(sample.seconds) % 60:02d}"
    per_second = sample.requests / max(sample.seconds, 1e-9)
    memory = f"{sample.rss_bytes / 2**20:6.0f} MiB"
    return f"{clock}  {sample.requests:6,}/{total:,}  {per_second:4.1f}/s  {pools}  {rates}  {memory}"


def median(values: Iterable[int]) -> int:
    """The middle one; the upper of two. Raises IndexError for none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _percent(share: float | None) -> str:
    return "  - " if share is None else f"{share:4.0%}"
