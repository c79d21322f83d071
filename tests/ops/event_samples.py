"""Events of every kind, made the way the daemon makes them."""

from cache import AuditReport, CacheStats, CheckpointKind, CopyObject, PoolCounts, ReuseReport, SkipReason, Tier
from engine.copies import Direction, no_transfers
from engine.errors import QueueTimeoutError
from engine.events import AuditDone, RequestEnded
from engine.request import FinishReason, Timings, Usage
from engine.snapshot import EngineSnapshot, EngineStatus
from ops.events import (
    InsightCleared,
    InsightOpened,
    PoolUnits,
    Record,
    RequestRejected,
    RequestStart,
    ServerStart,
    ServerStop,
    Stamp,
)
from ops.insights.types import Insight, InsightId, Severity
from ops.throughput import ThroughputMeter
from ops.translation import audit_event, terminal_event

CHAT = "/v1/chat/completions"
MARKER = "planted-marker"
"""Stands where a client's words, keys and salts may be: it must never come out."""

UNIT_BYTES = 1024


def snapshot(**counts):
    """Of an engine that has done nothing, but for `counts`."""
    zeros = dict.fromkeys(EngineSnapshot.__dataclass_fields__, 0)
    pools = {
        "kv_pages": PoolCounts(capacity=10, free=4, cached=3, pinned=2, in_flight=1),
        "state_slots": PoolCounts(capacity=5, free=5, cached=0, pinned=0, in_flight=0),
        "host_units": PoolCounts(capacity=9, free=2, cached=6, pinned=1, in_flight=0),
        "host_state_slots": PoolCounts(capacity=3, free=1, cached=1, pinned=0, in_flight=1),
    }
    rest = {"status": EngineStatus.RUNNING, "cache": CacheStats(), "transfers": no_transfers(), "faults": frozenset()}
    return EngineSnapshot(**zeros | pools | rest | counts)


def busy_cache():
    """What a cache has counted after some work."""
    stats = CacheStats(checkpoints_dropped=4, checkpoints_demoted=3, restores=2, restore_failures=1)
    reuse = {"device": 60, "host": 40, "disk": 0}
    stats.count_reuse(ReuseReport("private_endpoint", 500, 100, 300, reuse, {"evicted_kv": 50}, expected_tokens=200))
    stats.evictions["device_kv_pages", CheckpointKind.PRIVATE_ENDPOINT] = 2
    stats.evictions["host_units", CheckpointKind.PRIVATE_ENDPOINT] = 1
    stats.evictions["device_state_slots", CheckpointKind.SHARED_BRANCH] = 5
    stats.publish_skipped[SkipReason.SLOTS_PINNED] = 6
    return stats


def busy_transfers():
    transfers = no_transfers()
    for what, size in ((CopyObject.KV_PAGE, 100), (CopyObject.STATE, 7)):
        transfer = transfers[Direction.HOST_TO_DEVICE, what]
        transfer.bytes, transfer.seconds, transfer.count = size, 0.5, 2
    return transfers


def busy_snapshot():
    return snapshot(
        running=3,
        waiting=2,
        prefilling=1,
        decoding=2,
        prefill_tokens_total=1000,
        decode_tokens_total=250,
        cache=busy_cache(),
        transfers=busy_transfers(),
    )


def throughput(now=busy_snapshot, seconds=5.0):
    return ThroughputMeter(host_unit_bytes=UNIT_BYTES, interval_seconds=5.0, now=0.0).sample(now(), seconds)


def reuse_report(**fields):
    given = {
        "path": "private_turn_closure",
        "prompt_tokens": 3903,
        "cached_tokens": 3898,
        "achievable_tokens": 3900,
        "source": {tier.value: 0 for tier in Tier} | {"device": 3898},
        "lost": {"cold": 0, "no_checkpoint": 2},
        "expected_tokens": 3898,
    }
    return ReuseReport(**given | fields)


WHOLE_TIMINGS = Timings(0.01, 0.02, 0.1, 0.212, 1.0, 1.3, 0.07, 0.1)


def ended(finish=FinishReason.STOP, *, reuse=None, timings=WHOLE_TIMINGS, error=None, tokens=40):
    return RequestEnded(
        "chatcmpl-1", finish, Usage(3903, tokens, 0, preemptions=2, recomputed_tokens=250), timings, reuse, error
    )


def done(finish=FinishReason.STOP, **fields):
    return terminal_event(ended(finish, reuse=reuse_report(), **fields), "req-1", CHAT)


def left_in_the_queue():
    return terminal_event(ended(FinishReason.CANCELLED, timings=Timings(total_seconds=3.0), tokens=0), "req-1", CHAT)


def timed_out():
    error = QueueTimeoutError(f"{MARKER} waited")
    waited = Timings(queue_seconds=60.0, total_seconds=60.0)
    return terminal_event(ended(FinishReason.ERROR, timings=waited, error=error, tokens=0), "req-1", CHAT)


def insight(severity=Severity.CRITICAL):
    return Insight(
        id=InsightId.REUSE_COLLAPSED,
        severity=severity,
        title="Reuse has collapsed",
        statement="The last 5 requests reused 0 of 9,000 achievable tokens.",
        evidence={"achievable_tokens": 9000, "share": 0.0, "pool": "host_units"},
        measured_over={"requests": 5},
        since_unix_ms=1,
        recommendation="Reset the tier: POST /admin/cache/reset.",
    )


def audit(violations=1, reclaimed=2):
    lines = tuple(f"a node of namespace {MARKER!r} is odd" for _ in range(violations))
    return audit_event(AuditDone(AuditReport(lines, {"host_units": reclaimed, "device_kv_pages": 0}, ()), 0.25))


POOLS = PoolUnits(24, 24, 1000, 2**30)

SAMPLES = (
    ServerStart("0.1.0", "demo", "qwen3_5", "torch", 4096, 16, POOLS, 2.5),
    RequestStart("req-1", "chatcmpl-1", CHAT),
    done(),
    done(FinishReason.LENGTH),
    left_in_the_queue(),
    terminal_event(ended(reuse=reuse_report(diverged_at=17)), "req-1", CHAT),
    timed_out(),
    terminal_event(ended(FinishReason.ERROR, reuse=reuse_report(path="root")), "req-1", CHAT),
    RequestRejected("req-2", CHAT, 429, "server_overloaded"),
    RequestRejected("req-3", "no route", 404),
    throughput(),
    throughput(snapshot),
    *(InsightOpened(insight(severity)) for severity in Severity),
    InsightCleared(insight(), 93.5),
    audit(),
    audit(violations=0, reclaimed=0),
    ServerStop("signal", True, 7200.0),
)


def record(event, unix_ms=1_700_000_000_000):
    return Record(event, Stamp(unix_ms, "instance-1"))
