"""The scheduler with host memory: who restores, in what pieces, beside whom, and what a copy that fails costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache import CheckpointKind, CopyObject, Tier
from engine.copies import Direction
from engine.limits import SchedulerLimits
from engine.phases import Phase
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason
from engine.sequence import SequenceState
from tests.cache.house import prefix_of
from tests.engine.house import House

CLOSURE = CheckpointKind.PRIVATE_TURN_CLOSURE
PROMPT = range(20)
"""Five pages; resumed at 19 it takes all of them, and a state, from host memory."""
CACHED = 19
COPIES = 6


def house_of_old(*prompts: range, **options) -> House:
    """One whose device has forgotten everything and whose host memory knows PROMPT, or `prompts`."""
    house = House(**{"spare_slots": 1, "host_units": 100, **options})
    wanted = {tuple(prompt)[:-1] for prompt in prompts or (PROMPT,)}
    for prompt in prompts or (PROMPT,):
        house.run(f"old{prompt.start}", prompt)
    for number in range(30):
        if wanted <= {prefix_of(each) for each in house.cache.tiers.store if each.is_in_host}:
            break
        house.run(f"other{number}", range(10_000 + 100 * number, 10_000 + 100 * number + 20))
    else:
        raise AssertionError("nothing was demoted")
    house.cache.reset([Tier.DEVICE])
    return house


def limits_of(house: House, **changes) -> SchedulerLimits:
    return replace(house.scheduler.limits, **changes)


def state_of(house: House, name: str) -> SequenceState:
    return next(each.state for each in house.scheduler.running if each.request_id == name)


def restores(plan: StepPlan) -> list[int]:
    """How many copies from host memory each batch has."""
    batches = [batch for batch in plan.background if batch.copies[0].source.tier is Tier.HOST]
    return [len(batch.copies) for batch in batches]


def test_a_request_begins_when_everything_has_come_from_host_memory():
    house = house_of_old()
    house.submit("new", PROMPT)
    plan = house.step()
    assert (plan.segments, restores(plan)) == ((), [COPIES])
    plan = house.step()
    assert [(each.start, each.end) for each in plan.segments] == [(CACHED, 20)]
    house.run_on()
    reuse = house.reuse("new")
    assert (reuse.path, reuse.cached_tokens) == (CLOSURE, CACHED)
    assert reuse.source == {Tier.DEVICE: 0, Tier.HOST: CACHED, Tier.DISK: 0}
    assert house.outputs["new"] == [1020]


def test_without_states_the_pages_alone_come_back():
    house = house_of_old(has_state=False, pages=22)
    house.submit("new", PROMPT)
    assert restores(house.plan()) == [5]


@pytest.mark.parametrize(("copy_bytes", "pieces"), [(1, 6), (2, 3), (4, 2), (6, 1)])
def test_a_restore_runs_in_pieces(copy_bytes, pieces):
    house = house_of_old()
    house.scheduler.limits = limits_of(house, copy_bytes_alone=copy_bytes)
    house.submit("new", PROMPT)
    counts = []
    while True:
        plan = house.step()
        if plan.segments:
            break
        counts.append(sum(restores(plan)))
    assert len(counts) == pieces
    assert sum(counts) == COPIES


def test_pieces_are_small_while_others_compute_and_large_while_nobody_does():
    house = house_of_old()
    house.scheduler.limits = limits_of(house, copy_bytes=1, copy_bytes_alone=4)
    house.submit("busy", range(900, 905), max_tokens=3)
    house.submit("new", PROMPT)
    counts = []
    while not house.ended.get("new"):
        plan = house.step()
        counts.append((len(plan.segments), sum(restores(plan))))
    assert counts == [(1, 1), (1, 1), (1, 1), (1, 1), (0, 2), (1, 0)]


def test_others_compute_while_one_restores():
    house = house_of_old()
    house.scheduler.limits = limits_of(house, copy_bytes=1, copy_bytes_alone=1)
    house.submit("new", PROMPT)
    house.submit("busy", range(900, 905), max_tokens=4)
    for _ in range(5):
        plan = house.step()
        assert [each.request_id for each in plan.segments] == ["busy"]
        assert restores(plan) == [1]
    assert house.ended["busy"].finish_reason is FinishReason.LENGTH
    assert "new" not in house.ended


def test_the_oldest_restores_first():
    house = house_of_old(PROMPT, range(100, 120))
    house.scheduler.limits = limits_of(house, copy_bytes=1, copy_bytes_alone=1)
    house.submit("first", PROMPT)
    house.submit("second", range(100, 120))
    while house.plan() and state_of(house, "first") is SequenceState.RESTORING:
        house.step()
    assert state_of(house, "second") is SequenceState.RESTORING
    house.run_on()
    assert [house.reuse(name).source[Tier.HOST] for name in ("first", "second")] == [CACHED, CACHED]


@pytest.mark.parametrize("at_piece", [0, 3, 5], ids=["first", "in the middle", "last"])
def test_a_restore_that_fails_is_served_from_the_root_and_says_so(at_piece):
    house = house_of_old()
    house.scheduler.limits = limits_of(house, copy_bytes_alone=1)
    held = house.cache.host.counts()
    house.submit("new", PROMPT)
    for _ in range(at_piece):
        house.step()
    house.step(copies_fail=True)
    (sequence,) = house.scheduler.waiting
    assert sequence.state is SequenceState.SUSPENDED
    assert house.held() == [0] * 6
    assert house.cache.host.counts().free >= held.free
    house.run_on()
    reuse = house.reuse("new")
    assert (reuse.path, reuse.cached_tokens, reuse.lost) == ("root", 0, {"restore_failed": CACHED})
    assert house.outputs["new"] == [1020]
    assert house.cache.stats.restore_failures == 1


def test_a_restore_that_fails_counts_no_hit_and_its_request_once():
    house = house_of_old()
    before = house.cache.stats.selections.total(), house.cache.stats.reused_tokens
    house.submit("new", PROMPT)
    house.step(copies_fail=True)
    house.run_on()
    assert (house.cache.stats.selections.total(), house.cache.stats.reused_tokens) == (before[0] + 1, before[1])


def test_a_restore_that_fails_leaves_others_and_their_entries_alone():
    house = house_of_old(PROMPT, range(100, 120))
    house.scheduler.limits = limits_of(house, copy_bytes=100, copy_bytes_alone=100)
    house.submit("new", PROMPT)
    house.submit("other", range(100, 120))
    plan = house.plan()
    assert restores(plan) == [COPIES, COPIES]
    copied = house.device.run(plan, house.tokens_of, failing=[plan.background[0].number])
    house.scheduler.apply(plan, StepResult({}, copied=copied), house.now)
    assert house.scheduler.check() == []
    house.run_on()
    assert [house.reuse(name).cached_tokens for name in ("new", "other")] == [0, CACHED]
    house.run("again", PROMPT)
    assert house.reuse("again").cached_tokens == CACHED, "what was computed anew is kept"


def leave_by_cancel(house: House) -> None:
    house.scheduler.cancel("new", house.now)


def leave_by_fault(house: House) -> None:
    plan = house.plan()
    house.device.spoil(plan)
    house.scheduler.fail(plan, house.now)
    leave_by_cancel(house)


@pytest.mark.parametrize("leave", [leave_by_cancel, leave_by_fault])
@pytest.mark.parametrize("pieces", range(6))
def test_whoever_leaves_while_restoring_gives_everything_back(leave, pieces):
    house = house_of_old()
    house.scheduler.limits = limits_of(house, copy_bytes=1, copy_bytes_alone=1)
    house.submit("new", PROMPT)
    for _ in range(pieces):
        house.step()
    if pieces:
        assert state_of(house, "new") is SequenceState.RESTORING
    leave(house)
    assert house.scheduler.check() == []
    assert house.held() == [0] * 6
    house.run("again", PROMPT)
    assert house.outputs["again"] == [1020]


def test_a_step_that_fails_beside_a_restore_costs_its_own_requests_only():
    house = house_of_old()
    house.scheduler.limits = limits_of(house, copy_bytes=2)
    house.submit("busy", range(900, 905), max_tokens=3)
    house.submit("new", PROMPT)
    house.step()
    plan = house.plan()
    house.device.spoil(plan)
    assert [each.request_id for each in house.scheduler.fail(plan, house.now)] == ["busy"]
    house.run_on()
    assert house.reuse("new").cached_tokens == CACHED
    assert house.outputs["new"] == [1020]


def test_a_step_of_copies_alone_that_fails_as_a_whole_costs_them():
    house = house_of_old()
    house.submit("new", PROMPT)
    plan = house.plan()
    house.device.spoil(plan)
    assert house.scheduler.fail(plan, house.now) == []
    house.run_on()
    assert house.reuse("new").lost == {"restore_failed": CACHED}


def test_a_running_request_that_needs_room_suspends_the_one_that_restores():
    house = house_of_old(pages=24)
    house.scheduler.limits = limits_of(house, copy_bytes=1, copy_bytes_alone=1)
    for start in (800, 900):
        house.submit(f"busy{start}", range(start, start + 8), max_tokens=56)
    while house.cache.pages.counts().pinned < 17:
        house.step()
    house.step()
    house.step()
    house.submit("new", PROMPT)
    while not house.scheduler.suspensions_total:
        assert all(each.state is not SequenceState.PREFILLING for each in house.scheduler.running)
        house.step()
    assert [each.request_id for each in house.scheduler.waiting] == ["new"]
    house.run_on()
    assert house.outputs == {**house.outputs, "new": [1020], "busy800": list(range(1008, 1064))}


def test_demotions_go_on_when_nothing_else_is_to_be_done():
    house = House(spare_slots=1, host_units=100)
    plans = [plan for start in range(0, 600, 100) for plan in house.run(f"r{start}", range(start, start + 20))]
    alone = [plan for plan in plans if not plan.segments]
    assert alone
    assert all(batch.copies[0].destination.tier is Tier.HOST for plan in alone for batch in plan.background)
    assert house.cache.stats.checkpoints_demoted > 0
    assert house.plan() is None


def test_a_demotion_that_fails_costs_nothing_and_is_tried_again_later():
    house = House(spare_slots=1, host_units=60)
    house.submit("a", PROMPT)
    house.submit("b", range(100, 120))
    while house.scheduler.running or house.scheduler.waiting or house.plan() is not None:
        house.step(copies_fail=True)
        house.now -= 1.0
    assert (house.outputs["a"], house.outputs["b"]) == ([1020], [1120]) or house.outputs["b"] == [1020]
    assert house.cache.stats.checkpoints_demoted == 0
    assert house.cache.host.free == house.cache.host.capacity
    house.now += 1.0
    assert house.plan() is not None
    house.run_on()
    assert house.cache.stats.checkpoints_demoted > 0


def test_a_request_takes_the_pages_of_a_demotion_under_way():
    house = House(pages=16, spare_slots=1, host_units=60, copy_bytes=1, copy_bytes_alone=1)
    house.run("a", range(40))
    house.submit("b", range(100, 150))
    while house.scheduler.running or house.scheduler.waiting:
        house.step()
        waits = [each.request_id for each in house.scheduler.waiting]
        assert not (waits and house.cache.demotions.under_way)
    assert house.outputs["b"] == [1050]


def test_what_was_moved_is_counted_by_direction_and_object():
    house = house_of_old()
    house.copy_seconds = 3.0
    house.submit("new", PROMPT)
    house.step()
    page = house.scheduler.copies.transfers[Direction.HOST_TO_DEVICE, CopyObject.KV_PAGE]
    state = house.scheduler.copies.transfers[Direction.HOST_TO_DEVICE, CopyObject.STATE]
    assert (page.count, page.bytes, page.seconds) == (5, 5, pytest.approx(2.5))
    assert (state.count, state.bytes, state.seconds) == (1, 1, pytest.approx(0.5))
    assert house.scheduler.copies.transfers[Direction.DEVICE_TO_HOST, CopyObject.STATE].count > 0


def test_restores_are_measured_for_the_choice_between_copying_and_computing():
    house = house_of_old()
    house.copy_seconds = 2.0
    house.submit("new", PROMPT)
    house.step()
    assert house.cache.costs.restore_bytes_per_second == COPIES / 2.0


def test_the_time_until_what_is_reused_is_there_is_told():
    house = house_of_old()
    house.step_seconds = 2.0
    house.submit("new", PROMPT)
    house.run_on()
    assert house.ended["new"].sequence.clock.seconds[Phase.RESTORE] == 2.0


def test_pieces_take_about_as_long_as_they_may():
    house = house_of_old()
    house.scheduler.limits = limits_of(house, copy_seconds_alone=6.0)
    house.copy_seconds = 2.0
    counts = []
    for _ in range(2):
        house.submit(f"new{len(counts)}", PROMPT)
        while (plan := house.step()) is not None:
            counts.append(sum(restores(plan)))
        house.cache.reset([Tier.DEVICE])
        house.scheduler.limits = limits_of(house, copy_seconds_alone=0.7)
    # Six copies took 2 seconds, so two of them are as many as fit into 0.7, and one alone then takes 2.
    assert counts[:2] == [COPIES, 0]
    assert [count for count in counts[2:] if count] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("has_state", [True, False])
def test_one_long_prompt_that_pushes_out_several_others_loses_none_while_host_memory_has_room(has_state):
    house = House(pages=36, spare_slots=20, host_units=400, has_state=has_state)
    for start in (0, 100, 200):
        house.run(f"old{start}", range(start, start + 40))
    house.run("long", range(900, 963))
    for start in (0, 100, 200):
        house.run(f"new{start}", range(start, start + 40))
        assert house.reuse(f"new{start}").cached_tokens == 39
