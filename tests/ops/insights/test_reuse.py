"""The collapse detector at the level of pure logic: S54, S55, S58, S59, and what must not alarm it."""

import random
from dataclasses import replace

import pytest

from cache import AuditReport, Tier
from ops.events import InsightCleared, InsightOpened
from ops.insights.reuse_scopes import MOST_NAMESPACES
from ops.insights.reuse_watch import QUIET_SECONDS, ReuseWatch
from ops.insights.types import LEGAL_TRANSITIONS, ReuseState, Severity, worst
from tests.ops.insights.house import COLD, GAVE_WAY, GOOD, REFUSED, Desk, pool, report

COLLAPSED, DEGRADED = "prefix.reuse_collapsed", "prefix.reuse_degraded"
LEAK = AuditReport(("pool 'host_units': 7 units are leased to 'x' but nothing refers to them",) * 2, {}, ("left",) * 2)
HEALED = AuditReport(("pool 'host_units': 7 units are leased to 'x' but nothing refers to them",), {"host_units": 7})
SHARED_ONLY = report(500, 1800, path="shared_stable_prefix", lost={"publish_skipped": 1300})

# -- states


@pytest.mark.parametrize("before", ReuseState)
@pytest.mark.parametrize("after", ReuseState)
def test_only_legal_transitions_are_made(before, after):
    watch = ReuseWatch()
    watch.state = before
    if after in LEGAL_TRANSITIONS[before]:
        watch._move(after, 1.0, watch.cause)
        assert watch.state is after
    else:
        with pytest.raises(ValueError, match=f"from {before} to {after}"):
            watch._move(after, 1.0, watch.cause)


def test_the_states_form_a_ring_with_one_way_back():
    legal = {(before.value, after.value) for before, all_after in LEGAL_TRANSITIONS.items() for after in all_after}
    assert legal == {
        ("healthy", "degraded"),
        ("degraded", "healthy"),
        ("degraded", "collapsed"),
        ("collapsed", "recovering"),
        ("recovering", "healthy"),
        ("recovering", "collapsed"),
    }


def test_the_worst_state_is_the_one_that_is_shown():
    assert worst(ReuseState.HEALTHY, ReuseState.RECOVERING) is ReuseState.RECOVERING
    assert worst(ReuseState.RECOVERING, ReuseState.DEGRADED) is ReuseState.DEGRADED
    assert worst(*ReuseState) is ReuseState.COLLAPSED
    assert worst() is ReuseState.HEALTHY


# -- what must be found


def first_collapse(desk, reports):
    """The number of the request with which it collapsed."""
    for number, each in enumerate(reports, 1):
        if desk.ask(each) is ReuseState.COLLAPSED:
            return number
    return None


@pytest.mark.parametrize("before", [[], [GOOD] * 200, [COLD] * 200, [report(1900, 1800)] * 200])
def test_s58_what_is_refused_is_a_collapse_within_5_whatever_was_before(before):
    desk = Desk()
    desk.ask(*before)
    assert first_collapse(desk, [REFUSED] * 10) == 4
    assert desk.changes == [(InsightOpened, DEGRADED), (InsightCleared, DEGRADED), (InsightOpened, COLLAPSED)]
    found = desk.insight(COLLAPSED)
    assert found.severity is Severity.CRITICAL
    assert found.evidence["lost_publish_skipped_tokens"] == 4 * 1800
    assert "/admin/cache/reset -H" in found.recommendation
    assert '{"tiers":["device"]}' in found.recommendation


def test_s58_a_hit_of_the_system_prompt_does_not_hide_it():
    assert first_collapse(Desk(), [SHARED_ONLY] * 10) == 4


def test_s58_hits_of_a_shared_prefix_between_do_not_hide_it():
    shared_hit = report(500, 500, path="shared_stable_prefix", lost={"cold": 1500})
    assert first_collapse(Desk(), [SHARED_ONLY, shared_hit, shared_hit] * 5) <= 13


def test_small_prompts_that_hit_do_not_hide_large_ones_that_lose():
    desk = Desk()
    desk.ask(*[GOOD] * 20)
    assert first_collapse(desk, [REFUSED, report(30, 30, prompt=40), report(30, 30, prompt=40)] * 6) <= 13


@pytest.mark.parametrize("left", [0, 1])
def test_s58_a_pool_that_is_stuck_full_or_one_below_is_a_collapse_within_5(left):
    desk = Desk(host_state_slots=pool(free=left, cached=16 - left))
    desk.ask(*[GOOD] * 20)
    assert desk.ask(GAVE_WAY, GAVE_WAY) is ReuseState.HEALTHY
    assert desk.insights.wants_audit
    desk.audit(LEAK)
    assert desk.insights.reuse is ReuseState.DEGRADED
    assert first_collapse(desk, [GAVE_WAY] * 3) <= 3
    assert '{"tiers":["host"]}' in desk.insight(COLLAPSED).recommendation
    desk.audit(LEAK)
    assert "could not mend" in desk.insight(COLLAPSED).statement


def test_an_audit_that_never_comes_counts_as_one_that_found_something():
    desk = Desk()
    desk.ask(GAVE_WAY, GAVE_WAY, GAVE_WAY)
    assert desk.insights.reuse is ReuseState.HEALTHY
    desk.wait(5.0)
    assert desk.ask(GAVE_WAY, GAVE_WAY) is ReuseState.COLLAPSED


def test_states_that_vanish_without_need_are_a_collapse_within_5():
    desk = Desk()
    assert first_collapse(desk, [report(0, 1800, fault=1800)] * 10) == 4
    desk.audit()
    assert "Nothing had needed the room" in desk.insight(COLLAPSED).statement
    assert "what others have left" not in desk.insight(COLLAPSED).statement
    assert desk.insight(COLLAPSED).evidence["fault_tokens"] == 4 * 1800


def test_a_conversation_that_goes_on_from_an_old_frontier_is_found_though_it_loses_little():
    """Nothing new is kept; what was there before goes on to hit."""
    stuck = [report(10_000, 10_000 + 900 * turn, lost={"publish_skipped": 900 * turn}) for turn in range(1, 12)]
    desk = Desk()
    desk.ask(report(10_000, 10_000))
    assert desk.ask(*stuck[:3]) is ReuseState.DEGRADED
    assert desk.ask(*stuck[3:5]) is ReuseState.COLLAPSED


def test_what_one_namespace_loses_is_not_hidden_by_the_others():
    desk = Desk()
    for _ in range(6):
        desk.ask(REFUSED, namespace="one")
        for other in "abcdefgh":
            desk.ask(GOOD, namespace=other)
    assert desk.insights.reuse is ReuseState.COLLAPSED
    assert "1 group of clients" in desk.insight(COLLAPSED).statement
    assert "one" not in str(desk.insight(COLLAPSED).evidence)


def test_what_is_spread_over_many_namespaces_is_found():
    desk = Desk()
    for number in range(5):
        desk.ask(REFUSED, namespace=f"salt {number}")
    assert desk.insights.reuse is ReuseState.COLLAPSED


def test_a_leak_degrades_before_any_request_has_lost_something():
    desk = Desk()
    desk.ask(*[GOOD] * 5)
    desk.audit(LEAK)
    assert desk.insights.reuse is ReuseState.DEGRADED
    assert desk.open == {DEGRADED, "cache.ledger_violation"}
    desk.ask(*[GOOD] * 50)
    assert desk.insights.reuse is ReuseState.DEGRADED
    desk.audit()
    assert desk.insights.reuse is ReuseState.HEALTHY
    assert desk.open == set()


# -- what must not alarm


@pytest.mark.parametrize(
    "harmless",
    [
        [COLD],
        [report(achievable=1800)],  # a working set larger than the pools: nobody could have kept it
        [report(500, 500, achievable=1800, path="shared_stable_prefix")],
        [GOOD],
        [GOOD, GOOD, GAVE_WAY],
        [report(1800, 0), GAVE_WAY],  # others are kept than a plain cache would
        [replace(GAVE_WAY, bet_tokens=1800)],  # all conversations end at once, and as many new ones begin
        [report(1800, 0), report(1800, 0), GAVE_WAY, GAVE_WAY],
        [report(lost={"structural": 20}, achievable=20, prompt=30)],
        [report(1790, 1800, lost={"no_checkpoint": 10})],
        [report(300, 300, diverged_at=400, lost={"diverged": 1500})],
    ],
)
def test_a_thousand_requests_of_it_are_healthy(harmless):
    desk = Desk()
    for number in range(1000):
        desk.ask(harmless[number % len(harmless)])
        if desk.insights.wants_audit:
            desk.audit()
    assert not desk.opened & {COLLAPSED, DEGRADED}


def test_what_gives_way_to_others_at_random_is_healthy_while_books_are_sound():
    choice = random.Random(5)
    desk = Desk()
    for _ in range(3000):
        desk.ask(choice.choice([report(1800, 0), GOOD, GAVE_WAY]))
        if desk.insights.wants_audit:
            desk.audit()
    assert desk.opened == set()


def test_what_was_not_kept_for_want_of_slots_is_no_fault():
    crowded_out = report(0, 1800, lost={"publish_skipped": 1800, "cold": 200}, fault=0)
    desk = Desk()
    for _ in range(50):
        desk.ask(GOOD, GOOD, crowded_out, crowded_out)
        if desk.insights.wants_audit:
            desk.audit()
    assert desk.opened == set()


def test_one_fault_alone_is_no_alarm():
    desk = Desk()
    for _ in range(10):
        desk.ask(REFUSED, *[GOOD] * 25)
    assert desk.opened == set()


def test_a_long_row_of_losses_with_sound_books_and_full_pools_degrades_and_says_why():
    desk = Desk()
    for _ in range(25):
        desk.ask(GAVE_WAY)
        if desk.insights.wants_audit:
            desk.audit()
    assert desk.insights.reuse is ReuseState.DEGRADED
    assert "kept in place of what is asked for" in desk.insight(DEGRADED).statement


def test_audits_are_asked_for_at_most_once_a_minute_while_they_find_nothing():
    desk, audits = Desk(), 0
    for _ in range(600):
        desk.ask(report(1800, 0), report(1800, 0), GAVE_WAY, GAVE_WAY)
        if desk.insights.wants_audit:
            desk.audit()
            audits += 1
    assert 1 <= audits <= 600 * 4 / 60 + 1


def test_cold_requests_after_the_engine_began_anew_are_no_collapse():
    desk = Desk()
    desk.ask(*[REFUSED] * 3)
    desk.restart()
    assert desk.insights.reuse is ReuseState.HEALTHY
    assert desk.ask(*[COLD] * 50) is ReuseState.HEALTHY
    assert desk.open == {"engine.faults"}


def test_s59_a_new_daemon_inherits_nothing():
    old, new = Desk(), Desk()
    old.ask(*[REFUSED] * 5)
    assert new.ask(*[COLD] * 10) is ReuseState.HEALTHY
    assert new.insights.active == ()


# -- the way back


def collapsed():
    desk = Desk()
    desk.ask(*[REFUSED] * 5)
    assert desk.insights.reuse is ReuseState.COLLAPSED
    return desk


def test_s59_it_recovers_by_several_hits_and_then_clears_without_a_restart():
    desk = collapsed()
    desk.audit()
    assert "found nothing amiss" in desk.insight(COLLAPSED).statement
    states = [desk.ask(GOOD) for _ in range(8)]
    assert states == [ReuseState.COLLAPSED] * 2 + [ReuseState.RECOVERING] * 5 + [ReuseState.HEALTHY]
    assert desk.open == set()
    assert desk.changes[-1] == (InsightCleared, COLLAPSED)


def test_one_hit_does_not_clear_it():
    desk = collapsed()
    for _ in range(20):
        assert desk.ask(GOOD, REFUSED, REFUSED) is ReuseState.COLLAPSED


def test_an_audit_that_gives_units_back_lets_it_recover_at_once():
    desk = collapsed()
    desk.audit(HEALED)
    assert desk.insights.reuse is ReuseState.RECOVERING
    assert "gave back" in desk.insight(COLLAPSED).statement
    assert desk.insight(COLLAPSED).severity is Severity.NOTICE
    assert not desk.insights.wants_audit
    assert desk.ask(*[GOOD] * 8) is ReuseState.HEALTHY


def test_a_reset_lets_it_recover_at_once_and_a_cause_that_stayed_is_found_again():
    desk = collapsed()
    desk.reset(Tier.HOST)
    assert desk.insights.reuse is ReuseState.RECOVERING
    assert first_collapse(desk, [COLD, COLD, *[REFUSED] * 5]) == 6


def test_a_leak_that_was_reset_away_wants_an_audit_to_say_so():
    desk = Desk()
    desk.audit(LEAK)
    desk.reset()
    assert desk.insights.wants_audit
    desk.audit()
    assert desk.insights.reuse is ReuseState.HEALTHY
    assert not desk.insights.wants_audit


def test_without_requests_that_could_hit_it_does_not_stay_for_ever():
    desk = collapsed()
    desk.ask(*[COLD] * 10, seconds=QUIET_SECONDS / 11)
    assert desk.insights.reuse is ReuseState.COLLAPSED
    desk.wait(QUIET_SECONDS / 5)
    assert desk.insights.reuse is ReuseState.RECOVERING
    desk.wait(QUIET_SECONDS)
    assert desk.insights.reuse is ReuseState.HEALTHY
    assert desk.open == set()


# -- its upkeep


def test_a_second_look_without_a_change_says_nothing():
    desk = collapsed()
    before = desk.insight(COLLAPSED)
    assert [desk.wait() for _ in range(5)] == [[]] * 5
    assert desk.insight(COLLAPSED).since_unix_ms == before.since_unix_ms


def test_invented_namespaces_do_not_make_it_grow_nor_push_out_one_that_suffers():
    desk = Desk()
    for _ in range(6):
        desk.ask(REFUSED, namespace="sick")
    scopes = desk.insights._reuse._scopes
    for number in range(2 * MOST_NAMESPACES):
        scopes.saw(f"salt {number}", GOOD, desk.now, is_host_full=False)
    assert len(scopes._scopes) == MOST_NAMESPACES
    assert "sick" in scopes._scopes
    assert scopes._scopes["sick"].watch.state is ReuseState.COLLAPSED
