"""The scheduler with a cache behind it: what is restored and captured, when, and who waits for whom."""

from __future__ import annotations

import pytest

from cache import CheckpointKind, ContextCache, CopyObject, Frontier, SkipReason
from engine.phases import Phase
from engine.request import GenerationRequest
from engine.sequence import SequenceState
from tests.engine.house import House

CLOSURE, STABLE = CheckpointKind.PRIVATE_TURN_CLOSURE, CheckpointKind.SHARED_STABLE_PREFIX


def shape(plans):
    return [(each.request_id, each.start, each.end) for plan in plans for each in plan.segments]


def test_segments_end_at_the_named_frontiers_where_a_state_is_wanted_and_anchors_at_the_ends_of_segments():
    frontiers = (Frontier(3, STABLE), Frontier(28, CLOSURE))
    plans = House().run("a", range(30), frontiers=frontiers)
    assert shape(plans) == [("a", 0, 3), ("a", 3, 11), ("a", 11, 19), ("a", 19, 27), ("a", 27, 28), ("a", 28, 30)]
    captured = [plan.segments[0].end for plan in plans if plan.segments[0].capture_slot is not None]
    assert captured == [3, 11, 19, 28]


def test_kv_alone_is_published_without_a_split():
    house = House(has_state=False)
    plans = house.run("a", range(20), frontiers=(Frontier(5, STABLE), Frontier(18, CLOSURE)))
    assert shape(plans) == [("a", 0, 8), ("a", 8, 16), ("a", 16, 20)]
    assert house.cache.stats.published == {STABLE: 1, CLOSURE: 1, CheckpointKind.PRIVATE_ENDPOINT: 1}


def test_a_ladder_costs_no_split_and_at_most_the_slots_that_nobody_needs():
    house = House(spare_slots=4)
    plans = house.run("a", range(60))
    ends = [plan.segments[0].end for plan in plans]
    assert ends == [8, 16, 24, 32, 40, 48, 56, 59, 60]
    assert house.cache.stats.published[CheckpointKind.PRIVATE_LONG_ANCHOR] == 3


def test_a_hit_restores_the_state_and_the_page_that_it_goes_on_in_before_its_first_segment():
    house = House()
    house.run("a", range(20))
    plans = house.run("b", range(20))
    assert shape(plans) == [("b", 19, 20)]
    assert [copy.what for copy in plans[0].resumes] == [CopyObject.KV_PAGE, CopyObject.STATE]
    assert plans[0].segments[0].is_sampled


def test_a_hit_at_the_end_of_a_page_copies_no_page():
    house = House()
    house.run("a", range(17))
    (plan,) = house.run("b", range(17))
    assert [copy.what for copy in plan.resumes] == [CopyObject.STATE]


def test_the_time_of_the_copies_is_told():
    house = House()
    house.step_seconds = 0.5
    house.run("a", range(20))
    house.submit("b", range(20), max_tokens=3)
    house.step()
    (sequence,) = house.scheduler.running
    house.step()
    assert (sequence.clock.seconds[Phase.RESTORE], sequence.reuse.cached_tokens) == (0.25, 19)


def test_a_failed_step_publishes_nothing_of_what_it_was_to_capture():
    house = House()
    house.submit("a", range(20), frontiers=(Frontier(5, CLOSURE),))
    plan = house.scheduler.plan(0.0)
    house.device.spoil(plan)
    house.scheduler.fail(plan, 0.0)
    assert house.scheduler.check() == []
    assert (house.cache.pages.free, house.cache.slots.free) == (house.cache.pages.capacity, house.cache.slots.capacity)


def test_a_failed_step_spares_what_was_published_before_it():
    house = House()
    house.submit("a", range(20), max_tokens=9)
    for _ in range(4):
        house.step()
    plan = house.scheduler.plan(house.now)
    house.device.spoil(plan)
    house.scheduler.fail(plan, house.now)
    assert shape(house.run("b", range(20))) == [("b", 19, 20)]


def test_a_request_that_fails_right_after_its_restore_is_not_resumed_from_there_again():
    house = House()
    house.run("a", range(20))
    house.submit("b", range(20))
    house.scheduler.fail(house.scheduler.plan(house.now), house.now)
    assert house.scheduler.check() == []
    assert shape(house.run("c", range(20)))[0][1] < 19


def test_a_cancelled_prefill_goes_on_from_its_last_segment():
    house = House()
    house.submit("a", range(20))
    house.step()
    house.scheduler.cancel("a", house.now)
    assert shape(house.run("b", range(20)))[0] == ("b", 8, 16)


def test_namespaces_share_nothing():
    house = House()
    house.run("a", range(20), namespace="one")
    assert shape(house.run("b", range(20), namespace="two"))[0] == ("b", 0, 8)


def test_who_waits_for_a_prefix_starts_from_it_and_others_pass():
    house = House()
    house.submit("a", range(20))
    house.submit("b", (*range(19), 77))
    house.submit("c", range(50, 53))
    plans = [house.step() for _ in range(3)]
    assert {each.request_id for plan in plans for each in plan.segments} == {"a", "c"}
    assert [each.request_id for each in house.scheduler.waiting] == ["b"]
    house.step()
    house.step()
    assert house.scheduler.waiting == ()
    assert house.step() is None
    assert house.cache.stats.selections == {"root": 2, CLOSURE: 1}


def test_nobody_waits_for_a_prefix_so_long_that_it_could_time_out():
    house = House()
    house.submit("a", range(60))
    house.submit("b", range(60))
    house.step()
    assert [each.request_id for each in house.scheduler.waiting] == ["b"]
    house.now = 5.1
    house.step()
    assert house.scheduler.waiting == ()


def test_nobody_waits_for_a_prefix_that_could_not_be_kept(monkeypatch):
    def refuse(_cache, lease, frontier):
        lease.wanted.remove(frontier)
        return SkipReason.SLOTS_PINNED

    monkeypatch.setattr(ContextCache, "capture", refuse)
    house = House()
    house.submit("a", range(5), max_tokens=9)
    house.submit("b", range(5), max_tokens=9)
    house.step()
    house.step()
    assert [each.request_id for each in house.scheduler.running] == ["a", "b"]


def test_those_that_wait_for_a_prefix_leave_the_free_seats_to_others():
    house = House(max_pending_requests=1)
    house.submit("a", range(60))
    house.submit("b", range(60))
    house.step()
    house.scheduler.validate(GenerationRequest("c", (1, 2)))


def test_the_end_of_the_leader_lets_the_others_go_on_from_what_it_has_computed():
    house = House()
    house.submit("a", range(60))
    house.submit("b", range(60))
    house.step()
    house.scheduler.cancel("a", house.now)
    assert shape([house.step()]) == [("b", 8, 16)]


def test_a_suspended_request_resumes_from_its_own_checkpoint_and_tells_its_first_hit():
    house = House(pages=16, max_context_tokens=64, max_concurrency=2)
    house.run("old", range(100, 110))
    house.submit("a", range(20), max_tokens=30)
    house.submit("b", (*range(100, 109), *range(200, 211)), max_tokens=20)
    while house.scheduler.suspensions_total == 0:
        house.step()
    (suspended,) = house.scheduler.waiting
    assert (suspended.request_id, suspended.state) == ("b", SequenceState.SUSPENDED)
    house.scheduler.cancel("a", house.now)
    house.step()
    assert suspended.state is not SequenceState.SUSPENDED
    assert suspended.reuse.cached_tokens == 9
    while house.step() is not None:
        pass
    assert house.outputs["b"] == list(range(1020, 1040))
    assert house.cache.stats.reused_tokens == 9
    assert 0 < suspended.recomputed_tokens < suspended.preempted_at_tokens


@pytest.mark.parametrize(("pages", "spare_slots"), [(3, 1), (100, 0)])
def test_a_request_that_its_own_past_leaves_no_room_for_starts_from_the_root(pages, spare_slots):
    house = House(pages=pages, spare_slots=spare_slots, max_concurrency=1, max_context_tokens=12)
    house.run("a", range(7))
    plans = house.run("b", (*range(6), 50, 51, 52), max_tokens=3)
    assert house.outputs["b"] == [1009, 1010, 1011]
    assert not plans[0].resumes


def test_a_turn_is_captured_where_the_one_before_it_lay_when_there_is_no_other_slot():
    house = House(max_concurrency=1, spare_slots=1)
    for turn in range(1, 6):
        plans = house.run(f"t{turn}", range(10 * turn), frontiers=(Frontier(10 * turn - 2, CLOSURE),))
        assert plans[0].segments[0].start == (10 * turn - 10 if turn > 1 else 0)
    assert not house.cache.stats.publish_skipped[SkipReason.SLOTS_PINNED]


def test_without_reuse_nothing_is_split_captured_or_kept():
    house = House(prefix_reuse=False)
    plans = house.run("a", range(20))
    assert shape(plans) == [("a", 0, 8), ("a", 8, 16), ("a", 16, 20)]
    assert house.cache.pages.free == 100


# -- a system prompt and the conversations that stand on it


def chat_prompt(session, turn):
    """12 tokens of system text of its own, and for each turn 6 of a question and 2 of the answer before it."""
    first = 10_000 * (session + 1)
    return range(first, first + 12 + 6 + 8 * (turn - 1))


def ask(house, session, turn):
    prompt = chat_prompt(session, turn)
    frontiers = (Frontier(12, STABLE), Frontier(len(prompt) - 2, CLOSURE))
    house.run(f"s{session}t{turn}", prompt, frontiers=frontiers)
    return house.reuse(f"s{session}t{turn}").cached_tokens


@pytest.mark.parametrize("sessions", [2, 6])
@pytest.mark.parametrize("max_concurrency", [1, 2])
def test_as_many_conversations_as_slots_go_on_from_their_newest_turns(sessions, max_concurrency):
    house = House(max_concurrency=max_concurrency, spare_slots=sessions, pages=400)
    for turn in range(1, 7):
        reused = [ask(house, session, turn) for session in range(sessions)]
        assert reused == [len(chat_prompt(0, turn - 1)) - 2 if turn > 1 else 0] * sessions


def test_a_system_prompt_that_a_second_conversation_uses_outlives_the_conversations():
    house = House(max_concurrency=1, spare_slots=2, pages=400)
    system = range(100, 112)
    reused = []
    for user in range(6):
        prompt = (*system, *range(1000 + 10 * user, 1006 + 10 * user))
        house.run(f"u{user}", prompt, frontiers=(Frontier(12, STABLE), Frontier(16, CLOSURE)))
        reused.append(house.reuse(f"u{user}").cached_tokens)
    assert reused == [0, 12, 12, 12, 12, 12]


# -- text that prompts share and that nobody named


def few_shot(number, shared=300):
    """A raw prompt: the same examples, and a question of its own of 21 tokens."""
    return (*range(shared), *range(10_000 + 100 * number, 10_021 + 100 * number))


def reuse_of_each(house, prompts, frontiers=lambda _prompt: ()):
    reused = []
    for number, prompt in enumerate(prompts):
        house.run(f"r{number}", prompt, frontiers=frontiers(prompt))
        reused.append(house.reuse(f"r{number}").cached_tokens)
    return reused


@pytest.fixture(
    params=[(512, 16), (512, 64), (2048, 16), (2048, 64)], ids=lambda sizes: "chunk {}, page {}".format(*sizes)
)
def large(request):
    """A house of the usual sizes."""
    chunk, page = request.param

    def build(**options):
        options = {"pages": 400, "spare_slots": 16, "max_context_tokens": 4096, "max_concurrency": 8, **options}
        return House(page_size=page, prefill_chunk=chunk, max_pending_requests=64, **options)

    return build


def test_examples_that_prompts_share_are_reused_from_the_third_on_to_the_token(large):
    house = large()
    assert reuse_of_each(house, map(few_shot, range(30))) == [0, 0, *[300] * 28]
    assert house.cache.stats.published[CheckpointKind.SHARED_BRANCH] == 1


def test_without_states_they_are_reused_from_the_second_on(large):
    assert reuse_of_each(large(has_state=False), map(few_shot, range(5))) == [0, 300, 300, 300, 300]


def test_behind_a_system_prompt_too(large):
    def named(prompt):
        return Frontier(40, STABLE), Frontier(len(prompt) - 4, CLOSURE)

    assert reuse_of_each(large(), map(few_shot, range(16)), named) == [0, 40, *[300] * 14]


def test_documents_with_questions_are_each_reused_from_the_third_question_on(large):
    """The second document shows where it parts from the first: behind the header that all of them have."""
    header = range(40)
    reused = {}
    house = large()
    for question in range(5):
        for document in range(4):
            first = 1000 * (document + 1)
            prompt = (*header, *range(first, first + 400), *range(20_000 + 100 * question, 20_020 + 100 * question))
            house.run(f"d{document}q{question}", prompt)
            reused[document, question] = house.reuse(f"d{document}q{question}").cached_tokens
    page = house.cache.options.page_size
    least = len(header) if page <= len(header) else 0
    assert [reused[document, 0] for document in range(4)] == [0, 0, least, least]
    assert [reused[document, 1] for document in range(4)] == [least] * 4
    assert {cached for (_, question), cached in reused.items() if question > 1} == {440}


def test_in_a_burst_two_show_where_they_part_and_the_others_wait_for_it(large):
    house = large()
    for number in range(16):
        house.submit(f"r{number}", few_shot(number), max_tokens=2)
    house.run_on()
    assert sorted(house.reuse(f"r{number}").cached_tokens for number in range(16)) == [0, 0, *[300] * 14]


def test_a_branch_finds_its_slot_in_a_crowded_pool_and_keeps_it(large):
    house = large(spare_slots=2, max_concurrency=1)
    for number in range(8):
        house.run(f"x{number}", range(50_000 + 1000 * number, 50_200 + 1000 * number))
    assert reuse_of_each(house, map(few_shot, range(12))) == [0, 0, *[300] * 10]


def test_a_branch_that_was_lost_is_marked_again_by_who_computes_it_again(large):
    house = large()
    reuse_of_each(house, map(few_shot, range(3)))
    (branch,) = (each for each in house.cache.tiers.store if each.kind is CheckpointKind.SHARED_BRANCH)
    house.cache.tiers.drop_slot(branch)
    house.run("again", few_shot(50))
    house.run("after", few_shot(51))
    assert (house.reuse("again").cached_tokens, house.reuse("after").cached_tokens) == (0, 300)


def test_a_long_chat_of_short_messages_has_no_more_segments_for_it(large):
    """Each turn repeats the one before it but for the opening of the answer, whose thinking is not sent back."""
    house, history, segments = large(), tuple(range(100)), []
    for turn in range(20):
        prompt = (*history, *range(1000 * (turn + 1), 1000 * (turn + 1) + 9))
        plans = house.run(f"t{turn}", (*prompt, 7, 8, 9), max_tokens=30, frontiers=(Frontier(len(prompt), CLOSURE),))
        segments.append(sum(len(plan.segments) for plan in plans if plan.segments[0].start < len(prompt) + 3))
        history = (*prompt, 7, 8, *range(1000 * (turn + 1) + 500, 1000 * (turn + 1) + 510))
    assert segments == [2] * 20
    assert house.cache.stats.published[CheckpointKind.SHARED_BRANCH] == 0


def test_vacant_slots_take_an_anchor_at_each_end_of_a_chunk_and_give_it_away_first():
    house = House(spare_slots=12, pages=400)
    house.run("long", range(60), frontiers=(Frontier(58, CLOSURE),))
    assert house.cache.stats.published[CheckpointKind.PRIVATE_LONG_ANCHOR] == 6
    for number in range(6):
        first = 1000 * (number + 1)
        house.run(f"chat{number}", range(first, first + 7), frontiers=(Frontier(5, CLOSURE),))
    closures = [each for each in house.cache.tiers.store if each.kind is CLOSURE]
    assert len(closures) == 7
