"""Every other insight: when it opens and clears, what it tells, when it must keep silent (S16, S18, S54 to S57)."""

from dataclasses import replace
from pathlib import Path

import pytest

from cache import AuditReport, CacheStats, CheckpointKind, Fault
from engine.errors import QueueTimeoutError
from engine.events import StepFailed
from ops.insights.rules.base import Facts
from ops.insights.types import InsightId, Severity
from tests.ops.insights.house import COLD, GOOD, REFUSED, Desk, pool, report

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "insights.md"


def stats(**counts):
    return CacheStats(**counts)


def evicting(pool_name, number):
    found = CacheStats()
    found.evictions[pool_name, CheckpointKind.PRIVATE_TURN_CLOSURE] = number
    return found


# -- nothing at all


def test_s54_a_thousand_cold_prompts_on_full_pools_say_nothing():
    desk = Desk()
    for number in range(1000):
        desk.ask(COLD)
        desk.end(queue_seconds=0.01, prefill_seconds=0.4, ttft_seconds=0.41, decode_seconds=0.1, total_seconds=0.5)
        desk.wait(cache=stats(checkpoints_demoted=2 * number, checkpoints_dropped=number))
    assert desk.opened == set()


def test_a_young_daemon_and_one_that_nobody_asks_say_nothing():
    desk = Desk(kv_pages=pool(free=100), state_slots=pool(free=18), host_units=pool(free=300))
    for _ in range(100):
        desk.wait(60.0)
    assert desk.opened == set()


# -- pools


def test_units_that_stay_pinned_while_nobody_asks_are_told_and_degrade_reuse():
    desk = Desk(state_slots=pool(free=3, cached=10, pinned=3), running=1)
    desk.wait(60.0)
    assert desk.open == set()
    desk.wait(1.0, running=0)
    desk.wait(9.0)
    assert desk.open == {"cache.pool_pinned", "prefix.reuse_degraded"}
    found = desk.insight("cache.pool_pinned")
    assert found.evidence["pinned_device_state_slots"] == 3
    assert "3 state slots on the device" in found.statement
    desk.wait(1.0, state_slots=pool(free=6, cached=10))
    assert desk.open == set()


def test_more_slots_than_requests_can_hold_are_told_while_they_run():
    desk = Desk(state_slots=pool(free=3, cached=4, pinned=9), running=4)
    desk.wait(1.0)
    desk.wait(31.0)
    assert "cache.pool_pinned" in desk.open


@pytest.mark.parametrize("pinned", [1, 4, 8])
def test_what_running_requests_hold_is_not_told(pinned):
    desk = Desk(state_slots=pool(cached=10, pinned=pinned), kv_pages=pool(pinned=100), running=4)
    for _ in range(100):
        desk.wait()
    assert desk.opened == set()


def test_s18_half_a_pool_gone_in_a_second_is_told_for_ten_minutes():
    desk = Desk(state_slots=pool(cached=20))
    desk.wait()
    desk.wait(state_slots=pool(free=12, cached=8), cache=evicting("device_state_slots", 12))
    found = desk.insight("cache.eviction_cliff")
    assert (found.evidence["device_state_slots_before"], found.evidence["device_state_slots_after"]) == (20, 8)
    desk.wait(590.0)
    assert desk.open == {"cache.eviction_cliff"}
    desk.wait(20.0)
    assert desk.open == set()


@pytest.mark.parametrize(
    ("name", "after", "evicted"),
    [
        ("state_slots", pool(free=9, cached=11), 9),
        ("state_slots", pool(cached=8, pinned=12), 12),
        ("kv_pages", pool(free=12, cached=8), 1),
        ("host_state_slots", pool(free=12, cached=8), 12),
    ],
    ids=["not half", "requests took it", "one long conversation", "states gave way to KV"],
)
def test_what_gives_way_in_proportion_is_no_cliff(name, after, evicted):
    desk = Desk(**{name: pool(cached=20)})
    desk.wait()
    pool_name = {"state_slots": "device_state_slots", "kv_pages": "device_kv_pages"}.get(name, "host_units")
    desk.wait(**{name: after}, cache=evicting(pool_name, evicted))
    assert desk.opened == set()


@pytest.mark.parametrize(("granted", "surplus"), [(75, 0), (10, 65)], ids=["come and gone", "whole victims"])
def test_what_requests_took_and_gave_back_between_two_looks_is_no_cliff(granted, surplus):
    desk = Desk(kv_pages=pool(free=30, cached=120))
    desk.wait()
    found = evicting("device_kv_pages", 9)
    found.granted["device_kv_pages"], found.surplus["device_kv_pages"] = granted, surplus
    desk.wait(kv_pages=pool(free=105, cached=45), cache=found)
    assert desk.opened == set()


def test_a_cliff_is_told_though_requests_took_a_little():
    desk = Desk(kv_pages=pool(free=30, cached=120))
    desk.wait()
    found = evicting("device_kv_pages", 9)
    found.granted["device_kv_pages"] = 10
    desk.wait(kv_pages=pool(free=105, cached=45), cache=found)
    assert desk.open == {"cache.eviction_cliff"}


def test_a_reset_is_no_cliff():
    desk = Desk(state_slots=pool(cached=20))
    desk.wait()
    desk.reset()
    desk.wait(state_slots=pool(free=20), cache=evicting("device_state_slots", 20))
    assert desk.opened == set()


# -- host memory


def far(number):
    """A request whose state had left the device, and was not found in host memory either."""
    return report(0, 0, achievable=1800 + number)


def test_s16_host_memory_that_is_written_and_never_read_is_told_until_the_first_read():
    desk = Desk()
    for number in range(40):
        desk.ask(far(number), seconds=10.0)
        desk.wait(0.0, cache=stats(checkpoints_demoted=number))
    found = desk.insight("cache.tier_inert")
    assert found.evidence["restores"] == 0
    assert found.evidence["checkpoints_written"] >= 16
    desk.ask(report(1800, 1800, host=1800))
    assert "cache.tier_inert" not in desk.open


@pytest.mark.parametrize(
    ("request_report", "seconds", "demoted"),
    [
        (GOOD, 10.0, 1),
        (COLD, 10.0, 1),
        (far(0), 1.0, 1),
        (far(0), 10.0, 0),
        (report(1700, 1700, achievable=1800), 10, 1),
    ],
    ids=["the device has it all", "nothing to read", "young", "not written", "only an end that nobody needs is gone"],
)
def test_host_memory_without_a_chance_to_be_read_is_not_told(request_report, seconds, demoted):
    desk = Desk()
    for number in range(40):
        desk.ask(request_report, seconds=seconds)
        desk.wait(0.0, cache=stats(checkpoints_demoted=number * demoted))
    assert "cache.tier_inert" not in desk.opened


def test_s55_a_lack_of_memory_is_told_with_what_fits_and_is_no_collapse():
    desk = Desk(state_slots=pool(cached=6), host_state_slots=pool(cached=12), host_units=pool(cached=3000))
    desk.ask(*[report(0, 0, achievable=1800), report(1800, 0)] * 15)
    assert desk.open == {"cache.capacity_small"}
    found = desk.insight("cache.capacity_small")
    assert found.severity is Severity.NOTICE
    assert found.evidence["conversations_that_fit"] == 12
    assert found.evidence["tokens_that_fit"] == 16 * 3000
    assert "50 % of what could have been reused had to give way" in found.statement
    assert "50 % was reused" in found.statement
    assert "About 12 conversations" in found.statement
    assert "--host-state-slots" in found.recommendation
    desk.ask(*[GOOD] * 400)
    assert desk.open == set()


def test_a_lack_of_memory_in_which_nothing_is_reused_says_so():
    desk = Desk()
    desk.ask(*[report(0, 0, achievable=1800)] * 30)
    found = desk.insight("cache.capacity_small")
    assert "; 0 % was reused" in found.statement
    assert "works" not in found.statement
    assert found.evidence["reused_tokens"] == 0


def test_what_is_lost_by_a_fault_is_no_lack_of_memory():
    desk = Desk()
    desk.ask(*[report(0, 1800)] * 40)
    assert "cache.capacity_small" not in desk.opened


def test_a_few_losses_are_no_lack_of_memory():
    desk = Desk()
    desk.ask(*[report(0, 0, achievable=1800), *[GOOD] * 9] * 10)
    assert "cache.capacity_small" not in desk.opened


def test_without_the_facts_no_figure_is_made_up():
    desk = Desk(facts=None)
    desk.ask(*[report(0, 0, achievable=1800)] * 30)
    assert "tokens_that_fit" not in desk.insight("cache.capacity_small").evidence


def test_s56_prompts_that_are_quicker_computed_than_copied_are_told_as_information():
    desk = Desk(restore_bytes_per_second=5e8)
    desk.ask(*[report(achievable=24, prompt=30, lost={"structural": 24})] * 30)
    assert desk.open == {"cache.structural_floor"}
    found = desk.insight("cache.structural_floor")
    assert found.severity is Severity.INFO
    assert found.evidence["restore_bytes_per_second"] == 500_000_000
    assert "prefill_tokens_per_second" not in found.evidence
    desk.wait(700.0)
    assert desk.open == set()


# -- clients


def rewritten(position):
    return report(position, position, diverged_at=position, lost={"diverged": 900})


def test_s57_a_rewritten_history_is_told_with_its_position():
    desk = Desk()
    desk.ask(*[rewritten(500 + 300 * turn) for turn in range(8)])
    assert desk.open == {"client.history_rewritten"}
    found = desk.insight("client.history_rewritten")
    assert found.evidence["diverged_at_latest"] == 500 + 300 * 7
    assert "2,600" in found.statement
    desk.ask(*[GOOD] * 50)
    assert desk.open == set()


@pytest.mark.parametrize(
    "reports",
    [
        [rewritten(700)] * 40,
        [*[GOOD] * 9, rewritten(700), *[GOOD] * 9, rewritten(900)] * 5,
        [rewritten(n) for n in range(4)],
    ],
    ids=["forks of one conversation", "a person edits now and then", "too few"],
)
def test_forks_and_edits_are_not_told(reports):
    desk = Desk()
    desk.ask(*reports)
    assert "client.history_rewritten" not in desk.opened


# -- the books


def test_units_that_an_audit_gave_back_are_told_for_ten_minutes():
    desk = Desk()
    desk.audit(
        AuditReport(("pool 'host_units': 5 units are leased to 'secret' but nothing refers",), {"host_units": 5})
    )
    found = desk.insight("cache.ledger_violation")
    assert found.severity is Severity.NOTICE
    assert found.evidence["host_units"] == 5
    assert "secret" not in str(found)
    desk.wait(610.0)
    assert desk.open == set()


def test_a_violation_that_remains_is_told_until_an_audit_finds_none():
    line = "a node of namespace 'secret' at depth 3 leads to no checkpoint"
    desk = Desk()
    desk.audit(AuditReport((line,), {}, (line,)))
    found = desk.insight("cache.ledger_violation")
    assert found.severity is Severity.WARNING
    assert "/admin/cache/reset" in found.recommendation
    assert "secret" not in str(desk.insights.active)
    desk.wait(10_000.0)
    assert "cache.ledger_violation" in desk.open
    desk.audit()
    assert desk.open == set()


# -- load


@pytest.mark.parametrize("code", ["server_overloaded", "queue_timeout"])
def test_a_full_queue_is_told_until_two_minutes_without(code):
    desk = Desk()
    desk.reject(code, times=2)
    assert desk.open == set()
    desk.reject(code)
    assert desk.open == {"queue.saturated"}
    desk.wait(100.0)
    assert desk.open == {"queue.saturated"}
    desk.wait(30.0)
    assert desk.open == set()


def test_requests_that_waited_in_vain_count_and_other_refusals_do_not():
    desk = Desk()
    desk.reject("invalid_api_key", times=50)
    assert desk.opened == set()
    desk.end(times=3, error=QueueTimeoutError("waited"), queue_seconds=60.0)
    assert desk.insight("queue.saturated").evidence["timed_out"] == 3


QUEUED = {
    "queue_seconds": 3.0,
    "prefill_seconds": 0.5,
    "ttft_seconds": 3.5,
    "decode_seconds": 5.0,
    "total_seconds": 8.5,
}
PREFILL = {
    "queue_seconds": 0.0,
    "prefill_seconds": 8.0,
    "ttft_seconds": 8.0,
    "decode_seconds": 1.0,
    "total_seconds": 9.0,
}
STALLED = {
    "queue_seconds": 0.0,
    "stalled_seconds": 2.5,
    "prefill_seconds": 0.5,
    "ttft_seconds": 3.0,
    "decode_seconds": 1.0,
    "total_seconds": 4.0,
}
QUICK = {"queue_seconds": 0.1, "prefill_seconds": 0.2, "ttft_seconds": 0.3, "decode_seconds": 0.1, "total_seconds": 0.4}


@pytest.mark.parametrize(
    ("timings", "told"),
    [
        (QUEUED, "latency.queued_behind_concurrency"),
        (STALLED, "latency.stalled_behind_prompts"),
        (PREFILL, "latency.prefill_dominated"),
    ],
)
def test_where_the_time_goes_is_told_and_clears(timings, told):
    desk = Desk()
    desk.end(times=9, **timings)
    assert desk.open == set()
    desk.end(**timings)
    assert desk.open == {told}
    desk.end(times=40, **QUICK)
    assert desk.open == set()


def test_quick_requests_and_those_that_never_had_a_token_are_not_told():
    desk = Desk()
    desk.end(times=100, **QUICK)
    desk.end(times=100, queue_seconds=30.0, total_seconds=30.0)
    assert desk.opened == set()


PREEMPTED = {**QUICK, "preempted_seconds": 1.5, "preemptions": 2, "recomputed_tokens": 100}


def test_requests_that_are_set_aside_are_told_until_there_are_few():
    desk = Desk()
    desk.end(times=18, **QUICK)
    desk.end(times=2, **PREEMPTED)
    assert desk.open == set()
    desk.end(**PREEMPTED)
    found = desk.insight("latency.preempted")
    assert found.evidence == {
        "preempted_requests": 3,
        "preemptions": 6,
        "preempted_seconds": 4.5,
        "recomputed_tokens": 300,
    }
    assert "3 of 21 requests had to make room and lost 4.5 s by it; 300 tokens were computed again" in found.statement
    assert "--kv-cache-mib" in found.recommendation
    desk.end(times=40, **QUICK)
    assert desk.open == set()


def test_a_few_of_many_that_are_set_aside_are_not_told():
    desk = Desk()
    desk.end(times=100, **QUICK)
    desk.end(times=9, **PREEMPTED)
    assert desk.opened == set()


def test_what_to_raise_depends_on_what_is_short():
    desk = Desk(kv_pages=pool(free=50, pinned=50), running=8)
    desk.end(times=10, **QUEUED)
    assert "--max-concurrency" in desk.insight("latency.queued_behind_concurrency").recommendation
    desk.wait(kv_pages=pool(free=5, pinned=95))
    assert "--kv-cache-mib" in desk.insight("latency.queued_behind_concurrency").recommendation


def test_a_cpu_is_not_told_to_run_more_at_once():
    desk = Desk(Facts(page_tokens=16, max_concurrency=8, is_cpu=True), kv_pages=pool(free=50, pinned=50), running=8)
    desk.end(times=10, **QUEUED)
    desk.reject("server_overloaded", times=3)
    desk.wait()
    for name in ("latency.queued_behind_concurrency", "queue.saturated"):
        advice = desk.insight(name).recommendation
        assert "--max-concurrency" not in advice
        assert "another machine" in advice


# -- the engine


def test_a_step_that_failed_is_told_for_five_minutes():
    desk = Desk()
    desk.fail_step()
    found = desk.insight("engine.faults")
    assert (found.severity, found.evidence["step_failures"], found.evidence["requests_failed"]) == ("warning", 1, 2)
    assert "RuntimeError" in found.statement
    desk.wait(310.0)
    assert desk.open == set()


def test_three_in_a_row_and_a_loop_that_began_anew_are_critical():
    desk = Desk()
    for number in (1, 2, 3):
        desk.insights.saw_step_failure(StepFailed("RuntimeError", 1, number), desk.now)
    desk.restart()
    found = desk.insight("engine.faults")
    assert found.severity is Severity.CRITICAL
    assert "forgot what it remembered" in found.statement


def test_copies_that_fail_are_told_and_those_of_long_ago_are_not():
    desk = Desk(cache=stats(restore_failures=7))
    desk.wait()
    assert desk.open == set()
    desk.wait(cache=stats(restore_failures=9))
    assert desk.insight("engine.faults").evidence["restore_failures"] == 2


# -- a fire drill


def test_a_fire_drill_is_told_with_how_to_end_it_for_as_long_as_it_lasts():
    desk = Desk(faults=frozenset({Fault.STEP_FAIL, Fault.REFUSE_PUBLISH}))
    desk.wait()
    found = desk.insight("engine.fire_drill")
    assert (found.severity, found.evidence) == ("warning", {"faults": "refuse_publish, step_fail"})
    assert "/admin/faults" in found.recommendation
    assert '{"faults":[]}' in found.recommendation
    desk.wait(faults=frozenset())
    assert desk.open == set()


def test_nothing_is_to_be_mended_while_a_drill_lasts():
    desk = Desk(faults=frozenset({Fault.REFUSE_PUBLISH}))
    desk.fail_step()
    desk.ask(*[REFUSED] * 8)
    assert desk.open == {"prefix.reuse_collapsed", "engine.faults", "engine.fire_drill"}
    for each in desk.insights.active:
        assert "/admin/faults" in each.recommendation, each.id
        assert "/admin/cache/reset" not in each.recommendation, each.id
    desk.wait(faults=frozenset())
    assert "/admin/cache/reset" in desk.insight("prefix.reuse_collapsed").recommendation


# -- all of them


def test_every_insight_has_a_section_in_the_documentation():
    text = DOCUMENTATION.read_text(encoding="utf-8")
    for each in InsightId:
        assert f"### `{each.value}`" in text, each


def test_an_insight_keeps_the_moment_since_when_it_holds_while_its_figures_change():
    desk = Desk()
    desk.ask(*[rewritten(500 + 300 * turn) for turn in range(8)])
    before = desk.insight("client.history_rewritten")
    desk.ask(rewritten(9000))
    after = desk.insight("client.history_rewritten")
    assert after.since_unix_ms == before.since_unix_ms
    assert after.evidence["diverged_at_latest"] == 9000
    assert replace(before, evidence={}, measured_over={}, statement="") == replace(
        after, evidence={}, measured_over={}, statement=""
    )
