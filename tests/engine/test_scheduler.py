"""The scheduler on tiny pools: who runs, in what pieces, and what is given back; without reuse between requests."""

from dataclasses import replace

import pytest

from cache import CacheOptions, ContextCache
from engine.errors import ContextLengthExceededError, RequestError, ServerOverloadedError
from engine.limits import SchedulerLimits
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason, GenerationRequest, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import SequenceState

END = 99
PAGE_SIZE = 2
LIMITS = SchedulerLimits(
    max_concurrency=3,
    max_pending_requests=4,
    pending_timeout_seconds=10.0,
    max_context_tokens=32,
    prefill_chunk=8,
    output_step_tokens=4,
)


def scheduler(pages: int = 100, slots: int = 4, **limits) -> Scheduler:
    cache = ContextCache(CacheOptions(PAGE_SIZE, pages, slots, has_state=True, prefix_reuse=False))
    return Scheduler(replace(LIMITS, **limits), cache, end_token_ids=[END])


def request(name: str, prompt_tokens: int, max_tokens: int = 100, **sampling) -> GenerationRequest:
    return GenerationRequest(
        name, tuple(range(prompt_tokens)), SamplingParams(seed=0, max_tokens=max_tokens, **sampling)
    )


def submit(to: Scheduler, *requests: tuple[str, int] | tuple[str, int, int], now: float = 0.0) -> None:
    for each in requests:
        to.submit(request(*each), now)


def step(of: Scheduler, token_id: int = 7, now: float = 0.0) -> StepPlan | None:
    """One step in which every sampled request picks `token_id`."""
    plan = of.plan(now)
    if plan is not None:
        of.apply(plan, picks(plan, token_id), now)
    assert of.check() == []
    return plan


def picks(plan: StepPlan, token_id: int = 7) -> StepResult:
    return StepResult({segment.request_id: token_id for segment in plan.segments if segment.is_sampled})


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    return [] if plan is None else [(each.request_id, each.start, each.end) for each in plan.segments]


def is_all_free(of: Scheduler) -> bool:
    cache = of.cache
    return (cache.pages.free, cache.slots.free) == (cache.pages.capacity, cache.slots.capacity)


def test_nothing_to_do_is_no_plan():
    assert scheduler().plan(0.0) is None


def test_requests_run_in_the_order_in_which_they_came():
    of = scheduler(max_concurrency=2)
    submit(of, ("a", 2), ("b", 2), ("c", 2))
    assert shape(step(of)) == [("a", 0, 2), ("b", 0, 2)]
    assert [each.request_id for each in of.waiting] == ["c"]


def test_a_long_prompt_is_computed_in_chunks_and_sampled_at_its_end():
    of = scheduler()
    submit(of, ("a", 20))
    plans = [step(of) for _ in range(4)]
    assert [shape(plan) for plan in plans] == [[("a", 0, 8)], [("a", 8, 16)], [("a", 16, 20)], [("a", 20, 21)]]
    assert [plan.segments[0].is_sampled for plan in plans] == [False, False, True, True]


def test_a_segment_carries_its_tokens_pages_and_slot():
    of = scheduler()
    submit(of, ("a", 10))
    step(of)
    segment = of.plan(0.0).segments[0]
    (sequence,) = of.running
    assert segment.token_ids == (8, 9)
    assert segment.page_ids.tolist() == list(sequence.lease.page_units[:5])
    assert segment.state_slot == sequence.lease.state_unit


def test_decodes_come_first_and_a_prefill_chunk_rides_along():
    of = scheduler()
    submit(of, ("a", 2))
    step(of)
    submit(of, ("b", 20))
    assert shape(step(of)) == [("a", 2, 3), ("b", 0, 8)]
    assert shape(step(of)) == [("a", 3, 4), ("b", 8, 16)]


def test_a_last_piece_of_one_token_counts_as_a_decode_for_the_kernels():
    of = scheduler()
    submit(of, ("a", 28), ("b", 5))
    assert shape(step(of)) == [("a", 0, 4), ("b", 0, 4)]
    assert shape(step(of)) == [("b", 4, 5), ("a", 4, 11)]


def test_short_prompts_share_one_chunk_to_its_last_token():
    of = scheduler()
    submit(of, ("a", 3), ("b", 3), ("c", 4))
    assert shape(step(of)) == [("a", 0, 3), ("b", 0, 3), ("c", 0, 2)]
    assert shape(step(of)) == [("a", 3, 4), ("b", 3, 4), ("c", 2, 4)]


def test_a_short_prompt_is_computed_beside_the_long_one_that_came_before_it():
    of = scheduler()
    submit(of, ("a", 28))
    step(of)
    submit(of, ("b", 2))
    assert shape(step(of)) == [("a", 8, 14), ("b", 0, 2)]
    assert shape(step(of)) == [("b", 2, 3), ("a", 14, 22)]


def test_admission_reserves_the_prompt_and_a_first_step_of_output():
    of = scheduler()
    submit(of, ("a", 6))
    of.plan(0.0)
    assert of.cache.pages.counts().pinned == 5
    assert of.cache.slots.counts().pinned == 1


def test_admission_reserves_no_more_than_the_request_may_use():
    of = scheduler()
    submit(of, ("a", 6, 1))
    of.plan(0.0)
    assert of.cache.pages.counts().pinned == 4


def test_a_request_waits_while_its_reservation_does_not_fit_and_what_fits_overtakes_it():
    of = scheduler(pages=16)
    submit(of, ("a", 20, 2), ("b", 8), ("c", 2, 1))
    assert shape(step(of)) == [("a", 0, 6), ("c", 0, 2)]
    assert [each.request_id for each in of.waiting] == ["b"]


def test_output_grows_in_steps():
    of = scheduler()
    submit(of, ("a", 2))
    held = []
    for _ in range(8):
        step(of)
        held.append(of.cache.pages.counts().pinned)
    assert held == [3, 3, 3, 3, 3, 6, 6, 6]


def test_growth_takes_what_is_there_when_a_whole_step_is_not():
    of = scheduler(pages=16, max_concurrency=2)
    submit(of, ("a", 4, 28), ("b", 18, 5))
    for _ in range(6):
        step(of)
    assert (of.cache.pages.free, of.suspensions_total) == (0, 0)


def run_to_end(of: Scheduler, rounds: int = 500) -> dict[str, int]:
    """Steps until nothing is left; every picked token tells its own position, so a repeated one would show."""
    outputs: dict[str, list[int]] = {}
    for _ in range(rounds):
        plan = of.plan(0.0)
        if plan is None:
            break
        result = StepResult({each.request_id: 1000 + each.end for each in plan.segments if each.is_sampled})
        for outcome in of.apply(plan, result, 0.0):
            outputs.setdefault(outcome.sequence.request_id, []).append(outcome.token_id)
        assert of.check() == []
    return outputs


def test_the_youngest_is_suspended_when_growth_finds_no_room():
    of = scheduler(pages=16)
    submit(of, ("a", 10, 16), ("b", 10, 16))
    while of.suspensions_total == 0:
        step(of)
    assert [(each.request_id, each.state) for each in of.waiting] == [("b", SequenceState.SUSPENDED)]
    assert [each.request_id for each in of.running] == ["a"]


def test_a_suspended_request_goes_on_before_anything_new_and_emits_each_token_once():
    of = scheduler(pages=16)
    submit(of, ("a", 10, 16), ("b", 10, 16), ("c", 4, 4))
    outputs = run_to_end(of)
    assert of.suspensions_total > 0
    assert outputs == {
        "a": list(range(1010, 1026)),
        "b": list(range(1010, 1026)),
        "c": list(range(1004, 1008)),
    }
    assert is_all_free(of)


def test_a_suspended_request_is_computed_again_from_its_first_token():
    of = scheduler(pages=16)
    submit(of, ("a", 10, 16), ("b", 10, 16))
    while of.suspensions_total == 0:
        step(of)
    done = of.waiting[0].output_tokens
    of.cancel("a", 0.0)
    assert shape(of.plan(0.0)) == [("b", 0, 8)]
    assert of.running[0].output_tokens == done


def test_a_request_that_needs_room_may_have_to_suspend_itself():
    of = scheduler(pages=16, max_concurrency=2)
    submit(of, ("a", 10, 22), ("b", 2, 30))
    while of.suspensions_total == 0:
        step(of)
    assert [each.request_id for each in of.running] == ["a"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "stop", "picked", "reason", "output_tokens"),
    [
        (4, 3, (), 7, FinishReason.LENGTH, 3),
        (4, 1, (), 7, FinishReason.LENGTH, 1),
        (30, 100, (), 7, FinishReason.LENGTH, 2),
        (4, 3, (), END, FinishReason.STOP, 1),
        (4, 1, (), END, FinishReason.STOP, 1),
        (4, 3, (5,), 5, FinishReason.STOP, 1),
        (4, 3, (5,), END, FinishReason.STOP, 1),
    ],
)
def test_a_request_ends_for_the_right_reason(prompt, max_tokens, stop, picked, reason, output_tokens):
    of = scheduler()
    of.submit(request("a", prompt, max_tokens, stop_token_ids=stop), 0.0)
    outcomes = []
    while (plan := of.plan(0.0)) is not None:
        outcomes += of.apply(plan, picks(plan, picked), 0.0)
    assert [outcome.finish_reason for outcome in outcomes] == [None] * (output_tokens - 1) + [reason]
    assert is_all_free(of)


@pytest.mark.parametrize("prompt_tokens", [32, 33, 1000])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_numbers(prompt_tokens):
    with pytest.raises(ContextLengthExceededError, match=rf"is 32 tokens.* {prompt_tokens} tokens,.* 31 tokens"):
        scheduler().validate(request("a", prompt_tokens))


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(0, 5), (3, 0), (3, -1)])
def test_a_request_without_work_is_refused(prompt_tokens, max_tokens):
    with pytest.raises(RequestError):
        scheduler().validate(request("a", prompt_tokens, max_tokens))


def test_the_queue_is_bounded_beyond_the_free_seats():
    of = scheduler()
    for index in range(7):
        of.validate(request("r", 2))
        submit(of, (f"r{index}", 2))
        of.plan(0.0)
    with pytest.raises(ServerOverloadedError, match="4 requests are waiting, the queue holds 4"):
        of.validate(request("r", 2))


def test_requests_on_their_way_count_as_waiting():
    of = scheduler()
    of.validate(request("r", 2), also_waiting=6)
    with pytest.raises(ServerOverloadedError):
        of.validate(request("r", 2), also_waiting=7)


def test_suspended_requests_do_not_fill_the_queue():
    of = scheduler(pages=16, max_pending_requests=1)
    submit(of, ("a", 10, 16), ("b", 10, 16))
    while of.suspensions_total == 0:
        step(of)
    of.validate(request("c", 2))


def test_waiting_too_long_ends_a_request_that_never_began():
    of = scheduler(max_concurrency=1)
    submit(of, ("a", 2))
    submit(of, ("b", 2), now=5.0)
    of.plan(5.0)
    assert of.expire(14.9) == []
    assert [each.request_id for each in of.expire(15.0)] == ["b"]
    assert of.check() == []


def test_a_suspended_request_does_not_time_out():
    of = scheduler(pages=16)
    submit(of, ("a", 10, 16), ("b", 10, 16))
    while of.suspensions_total == 0:
        step(of)
    assert of.expire(1000.0) == []


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "suspended"])
def test_a_cancel_gives_everything_back_in_every_state(state):
    of = scheduler(pages=16)
    victim = {"waiting": "d", "prefilling": "a", "decoding": "a", "suspended": "b"}[state]
    if state == "waiting":
        submit(of, ("a", 2), ("b", 2), ("c", 2), ("d", 2))
        step(of)
    elif state == "suspended":
        submit(of, ("a", 10, 16), ("b", 10, 16))
        while of.suspensions_total == 0:
            step(of)
    else:
        submit(of, ("a", 20))
        for _ in range(1 if state == "prefilling" else 3):
            step(of)
    found = next(each for each in (*of.running, *of.waiting) if each.request_id == victim)
    assert found.state == state
    assert of.cancel(victim, 0.0) is found
    assert (found.state, found.lease) == (SequenceState.FINISHED, None)
    assert of.check() == []
    for each in (*of.running, *of.waiting):
        of.cancel(each.request_id, 0.0)
    assert is_all_free(of)


def test_cancelling_twice_or_something_unknown_does_nothing():
    of = scheduler()
    submit(of, ("a", 2))
    of.cancel("a", 0.0)
    assert of.cancel("a", 0.0) is None


def test_an_id_can_be_used_again_once_its_request_has_ended():
    of = scheduler()
    submit(of, ("a", 2))
    of.cancel("a", 0.0)
    submit(of, ("a", 2))
    assert shape(step(of)) == [("a", 0, 2)]


def test_an_id_that_is_alive_is_refused():
    of = scheduler()
    submit(of, ("a", 2))
    with pytest.raises(ValueError, match="alive"):
        submit(of, ("a", 2))


def test_a_failed_step_ends_its_requests_only():
    of = scheduler()
    submit(of, ("a", 8), ("b", 8))
    plan = of.plan(0.0)
    assert [each.request_id for each in of.fail(plan, 0.0)] == ["a"]
    assert [each.request_id for each in of.running] == ["b"]
    assert of.check() == []


def test_times_are_those_of_the_first_admission_and_of_the_first_token():
    of = scheduler()
    submit(of, ("a", 10, 3), now=1.0)
    for now in (2.0, 3.0, 4.0):
        step(of, now=now)
    (sequence,) = of.running
    assert (sequence.submitted_at, sequence.admitted_at, sequence.first_token_at) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(("pages", "slots"), [(15, 4), (16, 2)])
def test_pools_that_could_never_serve_are_refused(pages, slots):
    with pytest.raises(ValueError, match=r"max_context_tokens|slots"):
        scheduler(pages=pages, slots=slots)
