"""How prompts share a step: by a table, and by random traffic on the real scheduler against each prompt alone."""

from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from engine.packing import Prefill, share_step
from engine.sequence import SequenceState
from tests.engine.house import House

CHUNK = 16
SHORT = CHUNK // 8
SEATS = 8
MOST_WANTED = 2
"""Named places in a prompt of these at which a state is wanted: a step that is cut there has room for others only."""


@pytest.mark.parametrize(
    ("prefills", "expected"),
    [
        ([], []),
        ([(100, 100)], [16]),
        ([(5, 5)], [5]),
        ([(100, 100), (2, 2)], [14, 2]),
        ([(100, 100), (2, 1)], [15, 1]),
        ([(100, 100), (50, 50)], [8, 8]),
        ([(100, 100), (51, 51)], [16, 0]),
        ([(100, 100), (100, 100)], [16, 0]),
        ([(100, 3), (100, 100)], [3, 13]),
        ([(100, 3), (40, 40), (100, 100)], [3, 13, 0]),
        ([(100, 100), (7, 7), (3, 3)], [8, 5, 3]),
        ([(100, 100), (3, 3), (3, 3), (3, 3)], [8, 3, 3, 2]),
        ([(100, 100), (60, 60), (4, 4)], [12, 0, 4]),
        ([(4, 4), (100, 100), (4, 4)], [4, 8, 4]),
        ([(100, 100), *[(1, 1)] * 20], [8, *[1] * 8, *[0] * 12]),
    ],
)
def test_the_smallest_remainder_comes_first_and_the_oldest_keeps_half(prefills, expected):
    assert share_step([Prefill(*each) for each in prefills], CHUNK) == expected


def test_the_oldest_has_the_larger_half_of_an_odd_budget():
    assert share_step([Prefill(100, 100), *[Prefill(1, 1)] * 9], 3) == [2, 1, *[0] * 8]


def house(has_state=True) -> House:
    return House(
        has_state=has_state,
        pages=400,
        max_concurrency=SEATS,
        max_pending_requests=1000,
        max_context_tokens=660,
        prefill_chunk=CHUNK,
    )


@cache
def steps_alone(prompt_tokens: int) -> int:
    """To the first token."""
    of = house()
    of.submit("alone", range(prompt_tokens), max_tokens=1)
    return len(of.run_on())


class SharingMachine(RuleBasedStateMachine):
    """Prompts of all lengths come and go; steps are counted from the moment when each could first be computed."""

    def __init__(self):
        super().__init__()
        self.house = house()
        self.number = 0
        self.steps: dict[str, int] = {}
        self.is_beside_few: dict[str, bool] = {}
        self.stolen: dict[str, int] = {}
        """Tokens of others in the steps of a prompt that was the oldest from its first token on."""
        self.oldest_for: dict[str, int] = {}

    @rule(prompt_tokens=st.integers(1, SHORT), max_tokens=st.integers(1, 4))
    def submit_short(self, prompt_tokens, max_tokens):
        self.submit(prompt_tokens, max_tokens)

    @rule(prompt_tokens=st.integers(SHORT + 1, 6 * CHUNK), max_tokens=st.integers(1, 4))
    def submit_longer(self, prompt_tokens, max_tokens):
        self.submit(prompt_tokens, max_tokens)

    @rule(count=st.integers(5, 10))
    def flood(self, count):
        for _ in range(count):
            self.submit(SHORT, 1)

    def submit(self, prompt_tokens, max_tokens):
        name = f"r{self.number:04}"
        self.house.submit(name, range(10_000 * self.number, 10_000 * self.number + prompt_tokens), max_tokens)
        self.number += 1

    @rule(times=st.integers(1, 6))
    def go_on(self, times):
        for _ in range(times):
            self.one_step()

    def one_step(self):
        plan = self.house.plan()
        if plan is None:
            return False
        line = [each for each in self.house.scheduler.running if each.state is SequenceState.PREFILLING]
        few = sum(len(each.token_ids) <= SHORT for each in line) <= CHUNK // 2 // SHORT
        computed = {segment.request_id: len(segment.token_ids) for segment in plan.segments}
        prefilled = sum(computed.get(each.request_id, 0) for each in line)
        for place, each in enumerate(line):
            name, share = each.request_id, computed.get(each.request_id, 0)
            self.steps[name] = self.steps.get(name, 0) + 1
            self.is_beside_few[name] = self.is_beside_few.get(name, True) and few
            if place == 0 and (name in self.stolen or each.computed_tokens == 0):
                self.stolen[name] = self.stolen.get(name, 0) + prefilled - share
                self.oldest_for[name] = self.oldest_for.get(name, 0) + 1
        self.house.take_in(plan)
        for each in line:
            if each.output_tokens:
                self.check(each)
        return True

    def check(self, sequence):
        name, prompt_tokens = sequence.request_id, len(sequence.request.prompt_token_ids)
        steps, alone = self.steps.pop(name), steps_alone(prompt_tokens)
        if prompt_tokens <= SHORT and self.is_beside_few[name]:
            assert steps == alone
        if name in self.stolen:
            assert self.oldest_for[name] <= alone + self.stolen.pop(name) // CHUNK + MOST_WANTED

    def teardown(self):
        while self.one_step():
            pass
        assert not self.house.scheduler.running
        assert len(self.house.ended) == self.number


SharingMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSharing = SharingMachine.TestCase


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("chunks", [16, 32])
def test_on_mixed_traffic_a_long_prompt_is_at_most_a_tenth_later_and_short_ones_are_not_late_at_all(chunks, has_state):
    of = house(has_state)
    of.submit("long", range(chunks * CHUNK), max_tokens=1)
    steps, waited = 0, []
    while "long" not in of.ended:
        of.submit(f"short{steps}", [9000 + steps], max_tokens=2)
        of.step()
        steps += 1
        waited.append(of.outputs[f"short{steps - 1}"])
    assert all(waited)
    assert steps <= 1.1 * steps_alone(chunks * CHUNK)
