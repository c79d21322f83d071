"""A throughput event is the difference of two snapshots, and the history keeps the last of them."""

import dataclasses

import pytest

from cache import ROOT_PATH, CheckpointKind, LossReason, SkipReason
from ops.event_json import plain
from ops.events import MedianSeconds, PoolUnits, RequestCounts, RequestDone, Result, TimingsSeconds
from ops.throughput import History, ThroughputMeter
from tests.ops.event_samples import (
    SAMPLES,
    UNIT_BYTES,
    busy_cache,
    busy_snapshot,
    busy_transfers,
    snapshot,
    throughput,
)


def meter(now=100.0):
    return ThroughputMeter(host_unit_bytes=UNIT_BYTES, interval_seconds=5.0, now=now)


def numbers(value):
    """Every number in an event, by the names that lead to it."""
    if isinstance(value, dict):
        return {(name, *rest): number for name, part in value.items() for rest, number in numbers(part).items()}
    return {(): value}


def test_the_first_sample_tells_what_was_done_since_the_start():
    sample = meter().sample(busy_snapshot(), 105.5)
    assert sample.interval_seconds == 5.5
    assert (sample.tokens.prefill, sample.tokens.decode) == (1000, 250)
    scheduler = sample.scheduler
    assert (scheduler.running, scheduler.waiting, scheduler.prefilling, scheduler.decoding) == (3, 2, 1, 2)
    cache = sample.context_cache
    assert (cache.reused_tokens, cache.achievable_tokens, cache.expected_tokens) == (100, 300, 200)
    assert cache.selections == dict.fromkeys((ROOT_PATH, *CheckpointKind), 0) | {"private_endpoint": 1}
    assert cache.lost_tokens == dict.fromkeys(LossReason, 0) | {"evicted_kv": 50}
    pressure = cache.pressure
    assert pressure.evictions == dict.fromkeys(CheckpointKind, 0) | {"private_endpoint": 3, "shared_branch": 5}
    assert (pressure.private_owners_evicted, pressure.shared_owners_evicted) == (3, 5)
    assert pressure.publish_skipped == dict.fromkeys(SkipReason, 0) | {"slots_pinned": 6}
    found = pressure.checkpoints_dropped, pressure.checkpoints_demoted, pressure.restores, pressure.restore_failures
    assert found == (4, 3, 2, 1)
    assert plain(cache.transfers) == {
        "device_to_host": {"bytes": 0, "seconds": 0, "count": 0},
        "host_to_device": {"bytes": 107, "seconds": 1.0, "count": 4},
    }


def test_pools_are_told_as_they_are_with_host_memory_in_bytes():
    cache = throughput().context_cache
    assert cache.capacity == PoolUnits(5, 3, 10, 9 * UNIT_BYTES)
    assert cache.occupancy == PoolUnits(0, 2, 6, 7 * UNIT_BYTES)
    assert cache.pinned == PoolUnits(0, 0, 2, 1 * UNIT_BYTES)
    assert cache.in_flight == PoolUnits(0, 1, 1, 0)


def test_the_next_sample_tells_only_what_was_done_since_the_last():
    each = meter()
    each.sample(busy_snapshot(), 105.0)
    stats = busy_cache()
    stats.selections[ROOT_PATH] += 2
    stats.evictions["host_units", CheckpointKind.SHARED_BRANCH] += 4
    later = dataclasses.replace(busy_snapshot(), prefill_tokens_total=1010, cache=stats)
    sample = each.sample(later, 112.0)
    assert sample.interval_seconds == 7.0
    changed = numbers(plain(dataclasses.replace(sample, scheduler=None)))
    pools = ("occupancy", "capacity", "pinned", "in_flight")
    done = {path: number for path, number in changed.items() if number and not set(path) & set(pools)}
    assert done == {
        ("interval_seconds",): 7.0,
        ("tokens", "prefill"): 10,
        ("context_cache", "selections", "root"): 2,
        ("context_cache", "pressure", "evictions", "shared_branch"): 4,
        ("context_cache", "pressure", "shared_owners_evicted"): 4,
    }


def test_totals_that_live_on_in_the_engine_do_not_change_a_snapshot_that_was_taken():
    each, stats, transfers = meter(), busy_cache(), busy_transfers()
    each.sample(snapshot(cache=stats, transfers=transfers), 105.0)
    stats.restores += 5
    next(iter(transfers.values())).count += 3
    sample = each.sample(snapshot(cache=stats, transfers=transfers), 110.0)
    assert sample.context_cache.pressure.restores == 5
    assert sample.context_cache.transfers.device_to_host.count == 3


def test_totals_that_began_anew_are_never_told_as_less_than_nothing():
    each = meter()
    each.sample(busy_snapshot(), 105.0)
    sample = each.sample(snapshot(prefill_tokens_total=30), 110.0)
    assert sample.tokens.prefill == 30
    assert min(numbers(plain(sample)).values()) == 0
    assert each.sample(snapshot(prefill_tokens_total=35), 115.0).tokens.prefill == 5


def test_requests_are_counted_from_their_events_in_the_interval_in_which_they_are_told():
    each = meter()
    for event in SAMPLES:
        each.saw(event)
    assert each.sample(snapshot(), 105.0).requests == RequestCounts(started=1, done=4, errors=2, rejected=2)
    assert each.sample(snapshot(), 110.0).requests == RequestCounts()


def test_the_median_times_are_those_of_the_answers_of_the_interval():
    each = meter()
    answers = [("root", 0.5, 3.0), ("root", 0.0, 1.0), ("root", 0.1, 2.0), ("private_endpoint", 9.0, 0.2)]
    for reuse, queue, ttft in answers:
        result, timings = Result("stop", 100, 5, reuse=reuse), TimingsSeconds(queue=queue, ttft=ttft, stalled=ttft / 2)
        each.saw(RequestDone("request", "answer", "/v1/completions", result, timings))
    left = Result("cancelled", 100, 0, reuse="root")
    each.saw(RequestDone("request", "left", "/v1/completions", left, TimingsSeconds()))
    assert each.sample(snapshot(), 105.0).median_seconds == MedianSeconds(
        0.3, ttft_hit=0.2, ttft_root=2.0, stalled=0.75
    )
    assert each.sample(snapshot(), 110.0).median_seconds == MedianSeconds(None, None, None, None)


def test_what_was_set_aside_and_computed_again_is_told_of_the_interval():
    each = meter()
    each.sample(snapshot(suspensions_total=2, recomputed_tokens_total=70), 105.0)
    sample = each.sample(snapshot(suspensions_total=5, recomputed_tokens_total=170), 110.0)
    assert (sample.context_cache.pressure.preemptions, sample.tokens.recomputed) == (3, 100)


@pytest.mark.parametrize(("now", "is_due"), [(100.0, False), (104.9, False), (105.0, True), (300.0, True)])
def test_a_sample_is_due_when_the_interval_is_over(now, is_due):
    each = meter()
    assert each.is_due(now) is is_due
    each.sample(snapshot(), now)
    assert not each.is_due(now + 4.9)
    assert each.is_due(now + 5.0)


def test_the_history_keeps_the_last_and_gives_those_after_a_moment():
    history, sample = History(capacity=3), throughput()
    assert history.since() == []
    for unix_ms in (10, 20, 30, 40):
        history.add(unix_ms, sample)
    assert [point.timestamp_unix_ms for point in history.since()] == [20, 30, 40]
    assert [point.timestamp_unix_ms for point in history.since(30)] == [40]
    assert history.since(40) == []
    assert history.since(20)[0].sample is sample


def test_the_history_covers_an_hour_by_default():
    history, sample = History(), throughput()
    for unix_ms in range(1, 1001):
        history.add(unix_ms, sample)
    assert len(history.since()) * 5 == 3600
