"""Clients take turns in the queue, no client fills it alone, and what fits may pass what lacks room, for a while."""

from dataclasses import replace

import pytest

from cache import CacheOptions, ContextCache
from engine.errors import ServerOverloadedError
from engine.limits import SchedulerLimits
from engine.plan import StepResult
from engine.request import GenerationRequest, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import SequenceState

LIMITS = SchedulerLimits(
    max_concurrency=1,
    max_pending_requests=64,
    pending_timeout_seconds=60.0,
    max_context_tokens=140,
    prefill_chunk=64,
    output_step_tokens=2,
)


def scheduler(pages: int = 100, **limits) -> Scheduler:
    of = replace(LIMITS, **limits)
    options = CacheOptions(2, pages, of.max_concurrency, has_state=True, prefix_reuse=False)
    return Scheduler(of, ContextCache(options))


def submit(to: Scheduler, name: str, client: str = "", prompt_tokens: int = 2, max_tokens: int = 1) -> None:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    request = GenerationRequest(name, tuple(range(prompt_tokens)), sampling, client=client)
    to.validate(request)
    to.submit(request, 0.0)


def step(of: Scheduler, now: float = 0.0) -> list[str]:
    """Who has ended in it."""
    plan = of.plan(now)
    assert plan is not None
    picked = {segment.request_id: 7 for segment in plan.segments if segment.is_sampled}
    ended = [each.sequence.request_id for each in of.apply(plan, StepResult(picked), now) if each.finish_reason]
    assert of.check() == []
    return ended


def run(of: Scheduler, steps: int) -> list[str]:
    return [name for _ in range(steps) for name in step(of)]


def test_a_light_client_is_served_beside_a_heavy_one_after_one_turn_of_its():
    of = scheduler()
    for number in range(40):
        submit(of, f"heavy{number}", "heavy")
    run(of, 5)
    submit(of, "light0", "light")
    submit(of, "light1", "light")
    assert run(of, 5) == ["heavy5", "light0", "heavy6", "light1", "heavy7"]


def test_a_client_that_was_just_served_does_not_pass_one_that_waits():
    of = scheduler()
    for number in range(4):
        submit(of, f"heavy{number}", "heavy")
    served = []
    for number in range(4):
        submit(of, f"light{number}", "light")
        served += run(of, 1)
    assert served.count("heavy0") == served.count("heavy1") == 1


def test_new_clients_without_end_do_not_keep_an_old_one_waiting():
    of = scheduler()
    for number in range(3):
        submit(of, f"old{number}", "old")
    served = []
    for number in range(12):
        submit(of, f"a{number}", f"a{number}")
        submit(of, f"b{number}", f"b{number}")
        served += run(of, 1)
    assert [name for name in served if name.startswith("old")] == ["old0", "old1", "old2"]


def test_requests_that_were_cancelled_cost_no_turn():
    of = scheduler()
    for number in range(5):
        submit(of, f"gone{number}", "a")
    for number in range(5):
        of.cancel(f"gone{number}", 0.0)
    submit(of, "b0", "b")
    submit(of, "a0", "a")
    submit(of, "b1", "b")
    assert run(of, 3) == ["b0", "a0", "b1"]


def test_no_client_fills_the_queue_alone():
    of = scheduler()
    submit(of, "running", "heavy", max_tokens=50)
    of.plan(0.0)
    for number in range(56):
        submit(of, f"heavy{number}", "heavy")
    with pytest.raises(ServerOverloadedError, match=r"56 requests of this client .* last 8 places"):
        submit(of, "heavy56", "heavy")
    for client in ("light", "other", "third", "fourth"):
        submit(of, f"{client}0", client)
        submit(of, f"{client}1", client)
    with pytest.raises(ServerOverloadedError, match="64 requests are waiting, the queue holds 64"):
        submit(of, "fifth", "fifth")


def test_requests_on_their_way_count_for_their_client():
    request = GenerationRequest("r", (1, 2), SamplingParams(seed=0, max_tokens=1), client="a")
    scheduler().validate(request, also_waiting=57, also_of_client=1)
    with pytest.raises(ServerOverloadedError, match="kept for others"):
        scheduler().validate(request, also_waiting=57, also_of_client=57)


def hog_and_head(**limits) -> Scheduler:
    """70 pages: a hog holds 42, the head of the queue needs 44."""
    of = scheduler(pages=70, max_concurrency=4, **limits)
    submit(of, "hog", prompt_tokens=80, max_tokens=4)
    step(of)
    submit(of, "head", prompt_tokens=84, max_tokens=4)
    return of


def test_a_request_that_fits_passes_one_that_lacks_pages():
    of = hog_and_head()
    submit(of, "hi")
    step(of)
    assert [each.request_id for each in of.waiting] == ["head"]
    assert "hi" not in {each.request_id for each in of.waiting}


def test_pages_are_kept_for_the_head_after_so_many_passes():
    of = hog_and_head()
    of.waiting[0].times_passed = 16
    submit(of, "hi")
    step(of)
    assert [each.request_id for each in of.waiting] == ["head", "hi"]


def test_pages_are_kept_for_the_head_after_so_many_seconds():
    of = hog_and_head()
    step(of, now=1.0)
    submit(of, "hi")
    of.plan(16.0)
    assert [each.request_id for each in of.waiting] == ["head", "hi"]


def test_each_pass_is_counted():
    of = hog_and_head()
    submit(of, "hi0")
    submit(of, "hi1")
    of.plan(0.0)
    assert of.waiting[0].times_passed == 2


def test_nothing_passes_a_request_that_was_suspended():
    of = scheduler(pages=70, max_concurrency=3)
    submit(of, "a", prompt_tokens=60, max_tokens=40)
    submit(of, "b", prompt_tokens=60, max_tokens=40)
    while of.suspensions_total == 0:
        step(of)
    submit(of, "hi")
    step(of)
    waiting = [(each.request_id, each.state) for each in of.waiting]
    assert waiting == [("b", SequenceState.SUSPENDED), ("hi", SequenceState.WAITING)]
