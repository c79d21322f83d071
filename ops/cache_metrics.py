"""What a snapshot tells about the cache, as families of metrics; every labelled series is there from the start."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cache import CheckpointKind, SkipReason
from engine.snapshot import EngineSnapshot

_STATES = ("free", "cached", "pinned", "in_flight")
_EVICTING_POOLS = ("device_kv_pages", "device_state_slots", "host_units")
"""`host_state_slots` counts images whose units are those of `host_units`, so it loses none of its own."""


def cache_metrics(prefix: str, now: EngineSnapshot) -> Iterator[Metric]:
    """Names and meanings are those of the interface."""
    yield from _pools(prefix, now)
    yield from _losses(prefix, now)
    yield from _faults(prefix, now)
    yield from _transfers(prefix, now)
    yield from _costs(prefix, now)


def _pools(prefix: str, now: EngineSnapshot) -> Iterator[Metric]:
    units = GaugeMetricFamily(f"{prefix}_cache_units", "Units of a pool by state.", labels=["pool", "state"])
    capacity = GaugeMetricFamily(f"{prefix}_cache_capacity", "Units of a pool.", labels=["pool"])
    for pool, counts in now.pools.items():
        capacity.add_metric([pool], counts.capacity)
        for state in _STATES:
            units.add_metric([pool, state], getattr(counts, state))
    yield units
    yield capacity
    oldest = GaugeMetricFamily(
        f"{prefix}_cache_oldest_entry_seconds", "Since the last use of what was used longest ago.", labels=["pool"]
    )
    for pool, seconds in now.oldest_entry_seconds.items():
        oldest.add_metric([pool], seconds)
    yield oldest


def _losses(prefix: str, now: EngineSnapshot) -> Iterator[Metric]:
    evictions = CounterMetricFamily(
        f"{prefix}_cache_evictions", "Checkpoints that gave way in a pool, by kind.", labels=["pool", "kind"]
    )
    for pool in _EVICTING_POOLS:
        for kind in CheckpointKind:
            evictions.add_metric([pool, kind.value], now.cache.evictions[pool, kind])
    yield evictions
    skipped = CounterMetricFamily(
        f"{prefix}_cache_publish_skipped", "Checkpoints that were wanted and not kept, by reason.", labels=["reason"]
    )
    for reason in SkipReason:
        skipped.add_metric([reason.value], now.cache.publish_skipped[reason])
    yield skipped


def _faults(prefix: str, now: EngineSnapshot) -> Iterator[Metric]:
    yield CounterMetricFamily(
        f"{prefix}_cache_restore_failures",
        "Requests whose copy from host memory failed.",
        value=now.cache.restore_failures,
    )
    yield CounterMetricFamily(
        f"{prefix}_cache_ledger_violations", "Violations that audits have found.", value=now.cache.violations
    )
    orphans = CounterMetricFamily(
        f"{prefix}_cache_orphans_reclaimed", "Units that nobody held and that were given back.", labels=["pool"]
    )
    for pool in _EVICTING_POOLS:
        orphans.add_metric([pool], now.cache.orphans_reclaimed[pool])
    yield orphans


def _transfers(prefix: str, now: EngineSnapshot) -> Iterator[Metric]:
    labels = ["direction", "object"]
    moved = CounterMetricFamily(f"{prefix}_cache_transfer_bytes", "Bytes copied between tiers.", labels=labels)
    spent = CounterMetricFamily(
        f"{prefix}_cache_transfer_seconds", "Time that copies between tiers took.", labels=labels
    )
    for (direction, what), transfer in now.transfers.items():
        moved.add_metric([direction.value, what.value], transfer.bytes)
        spent.add_metric([direction.value, what.value], transfer.seconds)
    yield moved
    yield spent


def _costs(prefix: str, now: EngineSnapshot) -> Iterator[Metric]:
    """What decides between copying back and computing again; absent until it was measured."""
    for name, meaning, rate in (
        ("cache_restore_bytes_per_second", "Copies from host memory", now.restore_bytes_per_second),
        ("cache_prefill_tokens_per_second", "Prompt tokens computed", now.prefill_tokens_per_second),
    ):
        if rate is not None:
            yield GaugeMetricFamily(f"{prefix}_{name}", f"{meaning}, over the last minutes.", rate)
