"""Penalties, biases, masks and log probabilities, each with a computed expectation."""

import math

import pytest
import torch

from engine.logits import LEAST_LOGPROB, LogitEdits, read_logprobs
from engine.request import GenerationRequest, SamplingParams, TokenLogprob

LOGITS = [2.0, -2.0, 1.0, 0.5, 0.0]
END = (4,)


def edited(output, prompt=(0, 1), logits=LOGITS, **options):
    edits = LogitEdits.of(GenerationRequest("r", prompt, SamplingParams(**options)), END)
    for token_id in output:
        edits.add(token_id)
    row = torch.tensor(logits)
    edits.apply(row)
    return row.tolist()


@pytest.mark.parametrize(
    ("options", "output", "expected"),
    [
        ({"presence_penalty": 0.5}, [2, 2, 3], [2.0, -2.0, 0.5, 0.0, 0.0]),
        ({"presence_penalty": -0.5}, [2, 2, 3], [2.0, -2.0, 1.5, 1.0, 0.0]),
        ({"frequency_penalty": 0.5}, [2, 2, 3], [2.0, -2.0, 0.0, 0.0, 0.0]),
        # The prompt counts for the repetition penalty alone: 2 / 2, -2 * 2, 1 / 2.
        ({"repetition_penalty": 2.0}, [2, 2], [1.0, -4.0, 0.5, 0.5, 0.0]),
        ({"repetition_penalty": 0.5}, [], [4.0, -1.0, 1.0, 0.5, 0.0]),
        # 1 / 2 - 2 * 0.25 - 0.125; the prompt's tokens are repeated but not penalised for presence.
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.125},
            [2, 2],
            [1.0, -4.0, -0.125, 0.5, 0.0],
        ),
        ({"logit_bias": ((1, 5.0), (3, -100.0))}, [], [2.0, 3.0, 1.0, -99.5, 0.0]),
        # A bias comes after the penalties: 2 / 2 + 1.
        ({"repetition_penalty": 2.0, "logit_bias": ((0, 1.0),)}, [], [2.0, -4.0, 1.0, 0.5, 0.0]),
        ({"min_tokens": 2}, [2], [2.0, -2.0, 1.0, 0.5, -math.inf]),
        ({"min_tokens": 2}, [2, 2], LOGITS),
    ],
)
def test_logits_become_what_the_formulas_say(options, output, expected):
    assert edited(output, **options) == expected


def test_counts_go_on_past_the_first_room():
    vocab = 500
    output = [token_id for token_id in range(vocab) for _ in range(1 + token_id % 3)]
    expected = [-0.25 * (1 + token_id % 3) for token_id in range(vocab)]
    assert edited(output, logits=[0.0] * vocab, frequency_penalty=0.25) == expected


def test_a_request_that_asks_for_nothing_has_no_edits():
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, logprobs=2, stop=("x",))
    assert LogitEdits.of(GenerationRequest("r", (1,), params), END) is None


def test_log_probabilities_are_read_with_the_likeliest_tokens():
    rows = torch.tensor([[0.5, 0.25, 0.25 / 2, 0.25 / 2], [0.1, 0.2, 0.3, 0.4]]).log()
    first, second = read_logprobs(rows, [2, 3], [2, 0])
    assert first.logprob == pytest.approx(math.log(0.125))
    assert [token_id for token_id, _ in first.top] == [0, 1]
    assert [value for _, value in first.top] == pytest.approx([math.log(0.5), math.log(0.25)])
    assert second == TokenLogprob(3, pytest.approx(math.log(0.4)), ())


def test_what_cannot_happen_has_a_finite_log_probability():
    [record] = read_logprobs(torch.tensor([[0.0, -math.inf]]), [1], [5])
    assert record.logprob == LEAST_LOGPROB
    assert record.top == ((0, 0.0), (1, LEAST_LOGPROB))
