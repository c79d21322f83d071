"""fp8 pages of the torch backend: what is written, and that attention reads what it was multiplied by."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import KvScales
from engine.kernels.torch import TorchKernels
from tests.engine.kernels.layouts import make_layout
from tests.engine.kernels.test_attention import CASES, DIM, KV_HEADS, PAGE_SIZE, PAGES, ascending, scattered

FP8 = torch.float8_e4m3fn
SCALES = KvScales(k=0.03, v=0.4)
E4M3 = torch.arange(256, dtype=torch.uint8).view(FP8).double()
"""Every value of e4m3, by its byte."""


def apart():
    """Pages as `engine.storage` lays them out on the host."""
    return torch.full((2, PAGES, PAGE_SIZE, KV_HEADS, DIM), 0x7F, dtype=torch.uint8).view(FP8).transpose(0, 1)


def together():
    return torch.full((PAGES, 2, PAGE_SIZE, KV_HEADS, DIM), 0x7F, dtype=torch.uint8).view(FP8)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest value of e4m3 in float64, ties to the even code; what is beyond them all goes to the largest."""
    finite = E4M3[E4M3.isfinite()].unique()
    distances = (x.double().flatten()[:, None] - finite).abs()
    best = distances.argsort(dim=1, stable=True)[:, :2]
    is_tie = distances.gather(1, best[:, :1]) == distances.gather(1, best[:, 1:])
    codes = finite[best].to(FP8).view(torch.uint8)
    pick_second = is_tie.squeeze(1) & (codes[:, 0] % 2 == 1)
    return finite[torch.where(pick_second, best[:, 1], best[:, 0])].view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", [apart, together])
@pytest.mark.parametrize("choose_pages", [ascending, scattered])
def test_append_rounds_what_the_scale_divides_and_leaves_the_rest(storage, choose_pages, dtype):
    new_tokens, contexts = [1, 1, 30, 17], [40, 3, 0, 50]
    rng = torch.Generator().manual_seed(1)
    totals = [new + old for new, old in zip(new_tokens, contexts, strict=True)]
    pages = choose_pages(rng, [-(-total // PAGE_SIZE) for total in totals])
    k, v = (torch.randn(sum(new_tokens), KV_HEADS, DIM, generator=rng).to(dtype) * scale for scale in (3, 60))
    kv_cache, expected, row = storage(), storage().double(), 0
    kernels = TorchKernels(dtype)
    kernels.plan(make_layout(new_tokens, contexts, pages=pages))
    kernels.append_paged_kv(k, v, kv_cache, SCALES)
    rounded = nearest(k.float() / SCALES.k), nearest(v.float() / SCALES.v)
    for new, old, own in zip(new_tokens, contexts, pages, strict=True):
        for position in range(old, old + new):
            place = (own[position // PAGE_SIZE], slice(None), position % PAGE_SIZE)
            expected[place] = torch.stack((rounded[0][row], rounded[1][row]))
            row += 1
    assert torch.equal(kv_cache.double().nan_to_num(-9.0), expected.nan_to_num(-9.0))


def test_what_is_beyond_fp8_saturates_and_a_nan_stays_one():
    k = torch.tensor([1e6, -1e6, 448 * 0.5, 465 * 0.5, float("nan")]).view(5, 1, 1)
    kv_cache = torch.zeros(1, 2, PAGE_SIZE, 1, 1, dtype=FP8)
    kernels = TorchKernels()
    kernels.plan(make_layout([5]))
    kernels.append_paged_kv(k, -k, kv_cache, KvScales(k=0.5, v=0.5))
    keys, values = kv_cache[0, :, :5].float().flatten(1)
    assert torch.equal(keys[:4], torch.tensor([448.0, -448.0, 448.0, 448.0]))
    assert torch.equal(values[:4], -keys[:4])
    assert keys[4].isnan()


@pytest.mark.parametrize("storage", [apart, together])
@pytest.mark.parametrize("choose_pages", [ascending, scattered])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize(("new_tokens", "contexts"), CASES)
def test_attention_is_that_over_the_pages_multiplied_out(storage, choose_pages, dtype, tolerance, new_tokens, contexts):
    rng = torch.Generator().manual_seed(2)
    totals = [new + old for new, old in zip(new_tokens, contexts, strict=True)]
    pages = choose_pages(rng, [-(-total // PAGE_SIZE) for total in totals])
    kv_cache = storage()
    for own in pages:
        kv_cache.view(torch.uint8)[own] = (
            torch.randn(len(own), 2, PAGE_SIZE, KV_HEADS, DIM, generator=rng).mul(20).to(FP8).view(torch.uint8)
        )
    multiplied = kv_cache.float() * torch.tensor([SCALES.k, SCALES.v]).view(2, 1, 1, 1)
    q = torch.randn(sum(new_tokens), 6, DIM, generator=rng).to(dtype)
    layout = make_layout(new_tokens, contexts, pages=pages)
    plain, kernels = TorchKernels(), TorchKernels(dtype)
    plain.plan(layout)
    kernels.plan(layout)
    out = kernels.paged_attention(q, kv_cache, 0.3, SCALES)
    assert out.dtype == dtype
    expected = plain.paged_attention(q.float(), multiplied, 0.3)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
