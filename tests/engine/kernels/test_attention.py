"""Paged attention, its writes and its rotary embedding against plain formulas in float64."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.torch import TorchKernels
from tests.engine.kernels.layouts import make_layout

PAGES, PAGE_SIZE, KV_HEADS, DIM = 40, 16, 2, 24
NAN = float("nan")


@pytest.fixture
def kernels():
    return TorchKernels()


def apart():
    """Pages as `engine.storage` lays them out on the host."""
    return torch.full((2, PAGES, PAGE_SIZE, KV_HEADS, DIM), NAN).transpose(0, 1)


def together():
    return torch.full((PAGES, 2, PAGE_SIZE, KV_HEADS, DIM), NAN)


def ascending(rng, counts):
    return [list(range(sum(counts[:i]) + 3, sum(counts[: i + 1]) + 3)) for i in range(len(counts))]


def scattered(rng, counts):
    numbers = torch.randperm(PAGES, generator=rng).tolist()
    return [[numbers.pop() for _ in range(count)] for count in counts]


def longest_run_first(rng, counts):
    return [own[len(own) // 3 :] + own[: len(own) // 3] for own in ascending(rng, counts)]


def longest_run_last(rng, counts):
    return [own[-(len(own) // 3) :] + own[: -(len(own) // 3)] for own in ascending(rng, counts)]


CASES = [
    ([1], [0]),
    ([16], [0]),
    ([100], [0]),
    ([40], [33]),
    ([1, 1, 1], [15, 16, 100]),
    ([1, 1], [255, 300]),
    ([1, 1, 30, 17, 1], [40, 3, 0, 50, 0]),
]


@pytest.mark.parametrize("storage", [apart, together])
@pytest.mark.parametrize("choose_pages", [ascending, scattered, longest_run_first, longest_run_last])
@pytest.mark.parametrize("q_heads", [2, 6])
@pytest.mark.parametrize(("new_tokens", "contexts"), CASES)
def test_attention_is_the_softmax_over_own_tokens_only(kernels, storage, choose_pages, q_heads, new_tokens, contexts):
    rng = torch.Generator().manual_seed(1)
    totals = [new + old for new, old in zip(new_tokens, contexts, strict=True)]
    pages = choose_pages(rng, [-(-total // PAGE_SIZE) for total in totals])
    kv_cache, all_keys, all_values = storage(), [], []
    for total, own in zip(totals, pages, strict=True):
        keys, values = (torch.randn(total, KV_HEADS, DIM, generator=rng) for _ in range(2))
        for position in range(total):
            page, offset = own[position // PAGE_SIZE], position % PAGE_SIZE
            kv_cache[page, 0, offset], kv_cache[page, 1, offset] = keys[position], values[position]
        all_keys.append(keys)
        all_values.append(values)
    q = torch.randn(sum(new_tokens), q_heads, DIM, generator=rng)
    kernels.plan(make_layout(new_tokens, contexts, pages=pages))
    out = kernels.paged_attention(q, kv_cache, scale=0.3)
    start = 0
    for new, old, keys, values in zip(new_tokens, contexts, all_keys, all_values, strict=True):
        for t in range(new):
            visible = old + t + 1
            for head in range(q_heads):
                kv_head = head // (q_heads // KV_HEADS)
                scores = keys[:visible, kv_head].double() @ q[start + t, head].double() * 0.3
                expected = scores.softmax(-1) @ values[:visible, kv_head].double()
                torch.testing.assert_close(out[start + t, head].double(), expected, atol=1e-5, rtol=1e-5)
        start += new


@pytest.mark.parametrize("storage", [apart, together])
@pytest.mark.parametrize("choose_pages", [ascending, scattered, longest_run_first, longest_run_last])
@pytest.mark.parametrize(("new_tokens", "contexts"), CASES)
def test_append_writes_the_new_tokens_and_nothing_else(kernels, storage, choose_pages, new_tokens, contexts):
    rng = torch.Generator().manual_seed(1)
    totals = [new + old for new, old in zip(new_tokens, contexts, strict=True)]
    pages = choose_pages(rng, [-(-total // PAGE_SIZE) for total in totals])
    k, v = (torch.randn(sum(new_tokens), KV_HEADS, DIM, generator=rng) for _ in range(2))
    kv_cache, expected, row = storage(), storage(), 0
    for new, old, own in zip(new_tokens, contexts, pages, strict=True):
        for position in range(old, old + new):
            page, offset = own[position // PAGE_SIZE], position % PAGE_SIZE
            expected[page, 0, offset], expected[page, 1, offset] = k[row], v[row]
            row += 1
    kernels.plan(make_layout(new_tokens, contexts, pages=pages))
    kernels.append_paged_kv(k, v, kv_cache)
    assert torch.equal(kv_cache.nan_to_num(-9.0), expected.nan_to_num(-9.0))


@pytest.mark.parametrize("rotary_dim", [8, DIM])
@pytest.mark.parametrize("is_one_projection", [True, False])
def test_rope_turns_pairs_of_halves_by_the_position(kernels, rotary_dim, is_one_projection):
    layout = make_layout([1, 5], [20, 3])
    q_heads = 4
    if is_one_projection:
        projected = torch.randn(6, q_heads + 2 * KV_HEADS, DIM)
        q, k, v = projected.split_with_sizes((q_heads, KV_HEADS, KV_HEADS), dim=1)
    else:
        q, k, v = torch.randn(6, q_heads, DIM), torch.randn(6, KV_HEADS, DIM), torch.zeros(1)
    frequencies = torch.rand(rotary_dim // 2, dtype=torch.float64)
    angles = torch.arange(64, dtype=torch.float64)[:, None] * frequencies
    before = q.clone(), k.clone(), v.clone()
    kernels.plan(layout)
    kernels.apply_rope(q, k, torch.cat((angles.cos(), angles.sin()), dim=-1).float())
    for x, old in zip((q, k), before, strict=False):
        as_complex = torch.complex(old[..., : rotary_dim // 2], old[..., rotary_dim // 2 : rotary_dim]).to(
            torch.cdouble
        )
        turned = as_complex * torch.polar(torch.ones(1, dtype=torch.float64), angles)[layout.positions.long()][:, None]
        expected = torch.cat((turned.real, turned.imag, old[..., rotary_dim:].double()), dim=-1)
        torch.testing.assert_close(x.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(v, before[2])


def test_a_step_without_a_plan_is_refused(kernels):
    with pytest.raises(RuntimeError, match="plan"):
        kernels.paged_attention(torch.zeros(1, 2, DIM), together(), 1.0)
