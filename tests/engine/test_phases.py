"""What a request's time is charged to: a table of cases on the real scheduler, each step of which takes 8 seconds.

That nothing is lost and nothing charged twice is held by tests/engine/test_scheduler_histories.py.
"""

from engine.phases import Phase, PhaseClock
from tests.engine.house import House

CHUNK = 8
STEP_SECONDS = 8.0


def house(**options) -> House:
    """Between two steps a second goes by, which is charged with the next."""
    of = House(has_state=False, prefill_chunk=CHUNK, **options)
    of.step_seconds = STEP_SECONDS - 1.0
    return of


def told(of: House, name: str) -> dict[str, float]:
    """The phases that took any time."""
    return {phase.value: seconds for phase, seconds in of.ended[name].sequence.clock.seconds.items() if seconds}


def fresh(number: int, tokens: int) -> range:
    return range(100 * number, 100 * number + tokens)


def test_alone_a_prompt_is_computed_and_then_decoded():
    of = house()
    of.run("a", fresh(1, 16), max_tokens=3)
    assert told(of, "a") == {"prefill": 15.0, "decode": 16.0}


def test_of_a_step_that_prompts_share_each_is_charged_by_its_tokens():
    of = house()
    of.submit("long", fresh(1, 15))
    of.submit("short", fresh(2, 1))
    of.run_on()
    assert told(of, "short") == {"prefill": 7 / 8, "stalled": 7 * 7 / 8}
    assert told(of, "long") == {"prefill": 7 * 7 / 8 + 8.0, "stalled": 7 / 8}


def test_a_prompt_without_a_share_stalls():
    of = house()
    of.submit("first", fresh(1, 16))
    of.submit("second", fresh(2, 16))
    of.run_on()
    assert told(of, "first") == {"prefill": 15.0}
    assert told(of, "second") == {"stalled": 15.0, "prefill": 16.0}


def test_what_decodes_beside_a_prompt_is_no_part_of_its_wait():
    of = house()
    of.submit("old", fresh(1, 4), max_tokens=9)
    of.step()
    of.submit("new", fresh(2, 8))
    of.run_on()
    assert told(of, "new") == {"prefill": 7.0}


def test_who_is_not_let_in_waits_in_the_queue_to_the_end():
    of = house(max_concurrency=1)
    of.submit("seated", fresh(1, 8), max_tokens=2)
    of.submit("next", fresh(2, 8))
    of.step()
    waiting = of.scheduler.cancel("next", of.now)
    assert {phase: seconds for phase, seconds in waiting.clock.seconds.items() if seconds} == {Phase.QUEUE: 8.0}
    of.run_on()
    assert told(of, "seated") == {"prefill": 7.0, "decode": 8.0}


def test_from_being_set_aside_until_it_is_where_it_was_a_request_is_preempted():
    of = house(pages=8, max_context_tokens=32, output_step_tokens=4)
    of.submit("old", fresh(1, 10), max_tokens=20)
    of.step()
    of.submit("young", fresh(2, 8), max_tokens=8)
    while not of.scheduler.suspensions_total:
        suspended_at = of.now
        of.step()
    (young,) = of.scheduler.waiting
    had, before = len(young.token_ids) - 1, dict(young.clock.seconds)
    while young.is_preempted:
        of.step()
    caught_up_at = of.now - 1.0
    of.run_on()
    after = young.clock.seconds
    assert (young.preemptions, young.recomputed_tokens, of.scheduler.recomputed_tokens_total) == (1, had, had)
    assert after[Phase.PREEMPTED] == caught_up_at - suspended_at
    assert (after[Phase.PREFILL], after[Phase.STALLED]) == (before[Phase.PREFILL], before[Phase.STALLED])
    assert after[Phase.DECODE] > before[Phase.DECODE] > 0


def test_a_clock_charges_no_time_twice_and_none_that_has_not_been():
    clock = PhaseClock(10.0)
    clock.charge_most(Phase.RESTORE, 14.0, 100.0)
    clock.charge(Phase.PREFILL, 14.0)
    clock.charge(Phase.STALLED, 13.0)
    clock.charge(Phase.PREFILL, 18.0, 0.25)
    clock.charge(Phase.STALLED, 18.0)
    assert {phase: seconds for phase, seconds in clock.seconds.items() if seconds} == {
        Phase.RESTORE: 4.0,
        Phase.PREFILL: 1.0,
        Phase.STALLED: 3.0,
    }
