"""Sampling: the filters, the random numbers, and that a row depends on itself alone."""

from __future__ import annotations

import math

import pytest
import torch

from engine.errors import NonFiniteLogitsError
from engine.kernels import SamplingBatch
from engine.kernels.torch import TorchKernels
from engine.kernels.torch.sampling import philox_uniform

VOCAB = 50


def make_batch(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, offsets=None) -> SamplingBatch:
    def each(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return SamplingBatch(
        temperature=each(temperature, torch.float32),
        top_k=each(top_k, torch.int32),
        top_p=each(top_p, torch.float32),
        min_p=each(min_p, torch.float32),
        seeds=each(seeds if seeds is not None else list(range(rows)), torch.int64),
        offsets=each(offsets if offsets is not None else 0, torch.int64),
    )


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def draw(logits, count, **options) -> torch.Tensor:
    """`count` draws from one row of logits, each with another seed."""
    return TorchKernels().sample(logits.expand(count, -1), make_batch(count, **options))


def test_greedy_is_the_exact_argmax(logits):
    rows = torch.randn(20, VOCAB)
    tokens = TorchKernels().sample(rows, make_batch(20, temperature=0.0))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == rows.argmax(-1).tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"temperature": 3.0}])
def test_frequencies_follow_the_softmax_at_the_temperature(logits, options):
    count = 20_000
    expected = (logits[0] / options.get("temperature", 1.0)).softmax(-1) * count
    observed = draw(logits, count, **options).bincount(minlength=VOCAB).float()
    bins = expected >= 5
    chi_square = ((observed - expected)[bins].square() / expected[bins]).sum().item()
    degrees = int(bins.sum()) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def top_p_set(probabilities, top_p):
    order = probabilities.argsort(descending=True)
    kept, mass = set(), 0.0
    for token in order.tolist():
        kept.add(token)
        mass += probabilities[token].item()
        if mass >= top_p:
            break
    return kept


def test_top_k_keeps_the_k_largest(logits):
    assert set(draw(logits, 3000, top_k=5).tolist()) == set(logits[0].topk(5).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p(logits):
    kept = top_p_set(logits[0].softmax(-1), 0.8)
    assert set(draw(logits, 5000, top_p=0.8).tolist()) == kept


@pytest.mark.parametrize("temperature", [0.3, 30.0])
def test_top_p_over_a_large_vocabulary_keeps_the_same_set(temperature):
    """Flat enough, the set is larger than the head that is looked at first."""
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(5))
    kept = top_p_set((logits[0] / temperature).softmax(-1).double(), 0.4)
    tokens = draw(logits, 6000, temperature=temperature, top_p=0.4)
    assert set(tokens.tolist()) <= kept
    assert len(tokens.unique()) > 0.9 * min(len(kept), 1300)


def test_top_p_counts_what_top_k_left(logits):
    probabilities = logits[0].softmax(-1)
    after_top_k = torch.where(probabilities >= probabilities.topk(8).values[-1], probabilities, 0.0)
    kept = top_p_set(after_top_k / after_top_k.sum(), 0.8)
    assert kept != top_p_set(probabilities, 0.8)
    assert set(draw(logits, 5000, top_k=8, top_p=0.8).tolist()) == kept


def test_min_p_is_measured_against_the_largest_probability(logits):
    probabilities = logits[0].softmax(-1)
    kept = (probabilities >= 0.2 * probabilities.max()).nonzero().flatten().tolist()
    assert set(draw(logits, 5000, min_p=0.2).tolist()) == set(kept)


def test_filters_come_after_the_temperature(logits):
    hot = (logits[0] / 2.0).softmax(-1)
    kept = top_p_set(hot, 0.6)
    assert kept != top_p_set(logits[0].softmax(-1), 0.6)
    assert set(draw(logits, 8000, temperature=2.0, top_p=0.6).tolist()) == kept


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-30}])
def test_the_tightest_filter_still_leaves_the_best_token(logits, options):
    assert draw(logits, 50, **options).unique().tolist() == [int(logits.argmax())]


def test_a_row_depends_on_itself_alone():
    rows = torch.randn(6, VOCAB)
    options = {
        "temperature": [0.0, 1.0, 0.7, 1.0, 2.0, 0.0],
        "top_k": [0, 0, 10, 0, 5, 0],
        "top_p": [1.0, 0.9, 1.0, 1.0, 0.5, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.3, 0.0, 0.0],
        "seeds": [1, 2, 3, -4, 5, 6],
        "offsets": [9, 8, 7, 6, 2**40, 4],
    }
    together = TorchKernels().sample(rows, make_batch(6, **options))
    for i in range(6):
        alone = make_batch(1, **{name: [values[i]] for name, values in options.items()})
        assert TorchKernels().sample(rows[i : i + 1], alone).item() == together[i].item()


def test_seed_and_offset_fix_the_token_and_either_changes_it():
    flat = torch.zeros(1, 100_000)

    def token(seed, offset):
        return TorchKernels().sample(flat, make_batch(1, seeds=[seed], offsets=[offset])).item()

    assert token(1, 1) == token(1, 1)
    assert len({token(1, 1), token(1, 2), token(2, 1), token(-1, 1)}) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_that_names_the_rows(temperature, bad):
    rows = torch.randn(3, VOCAB)
    rows[1, 7] = bad
    with pytest.raises(NonFiniteLogitsError, match=r"rows \[1\]"):
        TorchKernels().sample(rows, make_batch(3, temperature=temperature))


def test_a_row_of_minus_infinities_is_an_error():
    with pytest.raises(NonFiniteLogitsError):
        TorchKernels().sample(torch.full((1, VOCAB), -math.inf), make_batch(1))


def test_masked_tokens_are_never_picked(logits):
    masked = logits.clone()
    masked[0, ::2] = -math.inf
    assert all(token % 2 for token in draw(masked, 500, temperature=5.0).tolist())


@pytest.mark.parametrize(
    ("seed", "offset", "words"),
    [
        # The published known answers of Random123 for philox4x32-10 whose upper counter words are 0.
        (0, 0, (0x6627E8D5, 0xE169C58D)),
    ],
)
def test_random_numbers_are_philox(seed, offset, words):
    assert philox_uniform(seed, offset) == ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53
