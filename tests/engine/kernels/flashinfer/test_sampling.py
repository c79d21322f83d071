"""Sampling on the device, by flashinfer's references: filters, frequencies, and that a row depends on itself alone."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from engine.errors import NonFiniteLogitsError
from engine.kernels import SamplingBatch
from engine.kernels.flashinfer.sampling import invert, sample, uniforms
from engine.kernels.torch.sampling import philox_uniform
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.kernels.test_sampling import VOCAB, make_batch

LIBRARY = ReferenceLibrary()


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def draw(logits, count, **options):
    """`count` draws from one row of logits, each with another seed."""
    return sample(LIBRARY, logits.expand(count, -1).contiguous(), make_batch(count, **options))


def test_greedy_is_the_exact_argmax_beside_a_row_that_is_drawn():
    rows = torch.randn(20, VOCAB)
    tokens = sample(LIBRARY, rows, make_batch(20, temperature=[0.0] * 19 + [1.0]))
    assert tokens.dtype == torch.int64
    assert tokens.tolist()[:19] == rows.argmax(-1).tolist()[:19]


def left(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What the filters leave, by their definition: temperature, then top-k, top-p on what it left, then min-p."""
    values, ids = (logits[0] / temperature).softmax(-1).sort(descending=True)
    values = values[: top_k or VOCAB] / values[: top_k or VOCAB].sum()
    values = values * (values.cumsum(0) - values < top_p)
    values = values * (values >= min_p * values.max())
    return torch.zeros(VOCAB).scatter_(0, ids[: len(values)], values / values.sum())


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": VOCAB},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 10, "top_p": 0.7, "min_p": 0.1, "temperature": 1.5},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_frequencies_follow_what_the_filters_leave(logits, options):
    count = 4000
    expected = left(logits, **{key: min(value, VOCAB) for key, value in options.items()}) * count
    observed = draw(logits, count, **options).bincount(minlength=VOCAB).float()
    assert not observed[expected == 0].any()
    bins = expected >= 5
    chi_square = ((observed - expected)[bins].square() / expected[bins]).sum().item()
    degrees = max(int(bins.sum()) - 1, 1)
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_rows_of_one_batch_have_their_own_filters(logits):
    batch = make_batch(
        6, temperature=[1.0, 0.0, 1.0, 1.0, 1.0, 1e-30], top_k=[1, 0, 0, 0, 0, 0], top_p=[1.0, 1.0, 1e-6, 1.0, 1.0, 1.0]
    )
    batch.min_p[3] = 1.0
    tokens = sample(LIBRARY, logits.expand(6, -1).contiguous(), batch).tolist()
    best = int(logits.argmax())
    assert [tokens[i] for i in (0, 1, 2, 3, 5)] == [best] * 5


def test_a_row_gets_the_same_token_in_any_batch():
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(8, VOCAB, generator=generator)
    options = {
        "temperature": [0.7, 0.0, 1.0, 2.0, 1.0, 1.0, 0.3, 1.0],
        "top_k": [0, 0, 7, 0, 3, 0, 0, 20],
        "top_p": [1.0, 1.0, 0.9, 0.5, 1.0, 1.0, 0.8, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.05],
        "offsets": [3, 1, 4, 1, 5, 9, 2, 6],
    }
    batch = make_batch(8, **options)
    together = sample(LIBRARY, rows, batch).tolist()
    order = torch.randperm(8, generator=generator)
    shuffled = sample(LIBRARY, rows[order].contiguous(), take(batch, order)).tolist()
    assert shuffled == [together[i] for i in order]
    alone = [int(sample(LIBRARY, rows[i : i + 1], take(batch, torch.tensor([i])))) for i in range(8)]
    assert alone == together


def take(batch: SamplingBatch, rows: torch.Tensor) -> SamplingBatch:
    return SamplingBatch(**{field.name: getattr(batch, field.name)[rows] for field in fields(batch)})


def test_the_number_of_a_row_is_that_of_its_seed_and_offset():
    batch = make_batch(3, seeds=[1, 1, 2], offsets=[7, 8, 7])
    assert uniforms(batch).tolist() == [philox_uniform(1, 7), philox_uniform(1, 8), philox_uniform(2, 7)]


@pytest.mark.parametrize(
    ("probs", "uniform", "expected"),
    [
        ([0.5, 0.5], 0.0, 0),
        ([0.5, 0.5], 0.5, 1),
        ([0.0, 1.0], 0.0, 1),
        ([0.5, 0.0, 0.5, 0.0], 1.0 - 2**-53, 2),
        ([0.25, 0.5, 0.0], 1.0, 1),
        ([0.25, 0.5, 0.125], 1.0, 2),
        ([0.2, 0.0, 0.2], 0.5, 2),
    ],
)
def test_a_number_falls_on_a_token_that_is_left(probs, uniform, expected):
    place = invert(torch.tensor([probs]), torch.tensor([uniform], dtype=torch.float64))
    assert place.tolist() == [expected]


def test_a_token_that_is_masked_is_never_picked(logits):
    masked = logits.clone()
    masked[0, logits.topk(10).indices] = -math.inf
    tokens = draw(masked, 500, top_k=20)
    assert not set(tokens.tolist()) & set(logits.topk(10).indices[0].tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named(temperature, value):
    rows = torch.randn(3, VOCAB)
    rows[1, 4] = value
    with pytest.raises(NonFiniteLogitsError, match=r"\[1\]"):
        sample(LIBRARY, rows, make_batch(3, temperature=temperature, top_k=4, top_p=0.9))


def test_a_row_that_is_masked_whole_is_named():
    rows = torch.full((1, VOCAB), -math.inf)
    with pytest.raises(NonFiniteLogitsError, match=r"\[0\]"):
        sample(LIBRARY, rows, make_batch(1))
