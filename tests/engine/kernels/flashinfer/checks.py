"""The contract, kernel by kernel: each check raises AssertionError where the backend is not torch's in float32.

Functions and not tests, because the table of mutations runs them too, over libraries that alter one argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.kernels import BatchLayout, KvScales, SamplingBatch
from engine.kernels.torch.linear import dense_weight
from engine.kernels.torch.sampling import philox_uniform
from engine.models.config import RopeConfig
from engine.models.rope import cos_sin_cache
from tests.engine.kernels.flashinfer.rig import CASES, PAGES, STATE_CASES, Case, Rig, draw_case, kv_pages, slot_pool
from tests.engine.kernels.linear.samples import fp8, nvfp4

FP8 = torch.float8_e4m3fn
SCALES = KvScales(k=0.25, v=2.0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A copy in float32, for what a kernel writes in place."""
    return x.to(torch.float32, copy=True)


def check_rms_norm(rig: Rig) -> None:
    """Over rows, over heads of a wider projection, and so small that the epsilon counts."""
    projected = rig.draw(7, 6, 128)
    cases = {
        "rows": (rig.draw(5, 256), 1e-6),
        "another epsilon": (rig.draw(5, 256, scale=1e-3), 1e-5),
        "small values": (rig.draw(5, 256, scale=1e-3), 1e-6),
        "every other head": (projected[:, 0:4:2], 1e-6),
        "the last heads": (projected[:, 4:], 1e-6),
        "one row": (rig.draw(1, 256), 1e-6),
        "dense rows in the midst of others": (midst_of_others(rig, 5, 256), 1e-6),
    }
    for name, (x, eps) in cases.items():
        weight, before = rig.draw(x.shape[-1]), x.clone()
        got = rig.kernels.rms_norm(x, weight, eps)
        rig.assert_close(got, rig.exact.rms_norm(x.float(), weight.float(), eps), name)
        assert got.dtype == rig.dtype, f"{name}: {got.dtype}"
        assert torch.equal(x, before), f"{name}: the input was written"


def midst_of_others(rig: Rig, rows: int, columns: int) -> torch.Tensor:
    """Dense, but 8 elements from where its memory begins."""
    return rig.draw(rows * columns + 8)[8:].view(rows, columns)


def check_fused_add_rms_norm(rig: Rig) -> None:
    for eps, scale in ((1e-6, 1.0), (1e-5, 1e-3), (1e-6, None)):
        x = midst_of_others(rig, 5, 256) if scale is None else rig.draw(5, 256, scale=scale)
        residual, weight = rig.draw(5, 256, scale=scale or 1.0), rig.draw(256)
        exact = wide(residual)
        expected = rig.exact.fused_add_rms_norm(x.float(), exact, weight.float(), eps)
        got = rig.kernels.fused_add_rms_norm(x, residual, weight, eps)
        rig.assert_close(got, expected, "the norm")
        rig.assert_close(residual, exact, "the residual, in place")


def check_gated_rms_norm(rig: Rig) -> None:
    x, gate, weight = rig.draw(5, 2, 128), rig.draw(5, 4, 128)[:, 1:3], rig.draw(128)
    expected = rig.exact.gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-6)
    rig.assert_close(rig.kernels.gated_rms_norm(x, gate, weight, 1e-6), expected, "the gated norm")


def check_silu_and_mul(rig: Rig) -> None:
    for gate_up in (rig.draw(5, 256), rig.draw(1, 256)):
        expected = rig.exact.silu_and_mul(gate_up.float())
        rig.assert_close(rig.kernels.silu_and_mul(gate_up), expected, "silu(gate) * up")


def check_rope(rig: Rig) -> None:
    """Some and all dims; q and k apart, as norms leave them, and as columns of one projection, as llama has them."""
    for case in (CASES["decodes and prefills"], CASES["decodes at and over page boundaries"]):
        layout = case.layout()
        n = layout.num_tokens
        for rotary_dim in (32, 128):
            table = cos_sin_cache(RopeConfig(theta=100.0, rotary_dim=rotary_dim), 256)
            projected = rig.draw(n, 8, 128)
            for q, k in ((rig.draw(n, 4, 128), rig.draw(n, 2, 128)), projected.split_with_sizes((4, 2, 2), 1)[:2]):
                exact_q, exact_k = wide(q), wide(k)
                rig.plan(layout)
                rig.exact.apply_rope(exact_q, exact_k, table)
                rig.kernels.apply_rope(q, k, table)
                rig.assert_close(q, exact_q, f"q, {rotary_dim} dims")
                rig.assert_close(k, exact_k, f"k, {rotary_dim} dims")


def check_append(rig: Rig) -> None:
    """To the bit, and nothing else is written: the pages start as NaN."""
    for name, case in CASES.items():
        layout = case.layout()
        keys_of_projection = rig.draw(layout.num_tokens, 6, 128)
        k, v = keys_of_projection[:, 4:], rig.draw(layout.num_tokens, 2, 128)
        got = kv_pages(rig, layout)
        expected = wide(got)
        rig.plan(layout)
        rig.exact.append_paged_kv(k.float(), v.float(), expected)
        rig.kernels.append_paged_kv(k, v, got)
        assert torch.equal(got.float().nan_to_num(-9.0), expected.nan_to_num(-9.0)), name


def check_attention(rig: Rig) -> None:
    for name in CASES:
        _check_attention(rig, CASES[name], name)


def check_attention_of_prefills(rig: Rig) -> None:
    _check_attention(rig, CASES["a prefill behind a context"], "a prefill behind a context")


def check_attention_of_decodes(rig: Rig) -> None:
    name = "decodes at and over page boundaries"
    _check_attention(rig, CASES[name], name)


def _check_attention(rig: Rig, case: Case, name: str) -> None:
    """Written by the backend itself, then read back; other pages and the last one's rest are NaN."""
    layout = case.layout()
    cache = kv_pages(rig, layout)
    k, v = rig.draw(layout.num_tokens, 2, 128), rig.draw(layout.num_tokens, 2, 128)
    q = rig.draw(layout.num_tokens, 4, 128)
    exact = wide(cache)
    rig.plan(layout)
    rig.exact.append_paged_kv(k.float(), v.float(), exact)
    rig.kernels.append_paged_kv(k, v, cache)
    untouched = cache.clone()
    expected = rig.exact.paged_attention(q.float(), exact, 128**-0.5)
    got = rig.kernels.paged_attention(q, cache, 128**-0.5)
    rig.assert_close(got, expected, name)
    assert got.dtype == rig.dtype, f"{name}: {got.dtype}"
    assert torch.equal(cache.nan_to_num(-9.0), untouched.nan_to_num(-9.0)), f"{name}: attention wrote to the pages"


def check_fp8_pages(rig: Rig) -> None:
    """Keys and values of unequal magnitude and scale; what is beyond fp8's range saturates; attention gets it back."""
    for name in ("decodes and prefills", "decodes at and over page boundaries", "a prefill behind a context"):
        layout = CASES[name].layout()
        n = layout.num_tokens
        k, v, q = rig.draw(n, 2, 128, scale=0.5), rig.draw(n, 2, 128, scale=4.0), rig.draw(n, 4, 128)
        k[0, 0, 0], v[0, 1, 2] = 1e4, -1e4
        context = kv_pages(rig, layout).float()
        factors = torch.tensor([SCALES.k, SCALES.v]).view(1, 2, 1, 1, 1)
        cache = (context / factors).to(FP8)
        written = cache.clone()
        rig.plan(layout)
        rig.kernels.append_paged_kv(k, v, cache, SCALES)
        for new, factor, kind in ((k, SCALES.k, 0), (v, SCALES.v, 1)):
            rows = written[:, kind]
            stored = (new.float() / factor).clamp(-448.0, 448.0).to(FP8)
            for row, (page, offset) in enumerate(_places(layout)):
                rows[page, offset] = stored[row]
        assert torch.equal(cache.view(torch.uint8), written.view(torch.uint8)), f"{name}: other bytes than k / scale"
        exact = written.float() * factors
        expected = rig.exact.paged_attention(q.float(), exact, 128**-0.5)
        got = rig.kernels.paged_attention(q, cache, 128**-0.5, SCALES)
        rig.assert_close(got, expected, f"{name}: attention over fp8 pages")


def _places(layout: BatchLayout) -> list[tuple[int, int]]:
    """Page and offset of each new token."""
    places, indptr, rows = [], layout.kv_indptr.tolist(), layout.qo_indptr.tolist()
    for i, first in enumerate(indptr[:-1]):
        for position in layout.positions[rows[i] : rows[i + 1]].tolist():
            places.append((int(layout.kv_indices[first + position // layout.page_size]), position % layout.page_size))
    return places


def check_causal_conv(rig: Rig) -> None:
    for name, case in STATE_CASES.items():
        layout = case.layout()
        x, weight = rig.draw(layout.num_tokens, 96), rig.draw(64, 4)
        pool = slot_pool(rig, layout, 64, 3, dtype=rig.dtype)
        exact = wide(pool)
        rig.plan(layout)
        expected = rig.exact.causal_conv(x[:, :64].float(), weight.float(), exact)
        rig.assert_close(rig.kernels.causal_conv(x[:, :64], weight, pool), expected, f"{name}: the convolution")
        assert torch.equal(pool.float().nan_to_num(-9.0), exact.nan_to_num(-9.0)), f"{name}: the tails in their slots"


def check_gated_delta_rule(rig: Rig) -> None:
    for name, case in STATE_CASES.items():
        _check_gated_delta_rule(rig, case, name)


def check_gated_delta_rule_of_decodes(rig: Rig) -> None:
    _check_gated_delta_rule(rig, STATE_CASES["decodes"], "decodes")


def check_gated_delta_rule_of_prefills(rig: Rig) -> None:
    name = "resumed, captured on the grid and at the end"
    _check_gated_delta_rule(rig, STATE_CASES[name], name)


def check_captures(rig: Rig) -> None:
    for name in ("one grid point of two", "decodes, resumed and fresh"):
        _check_gated_delta_rule(rig, STATE_CASES[name], name)


def _check_gated_delta_rule(rig: Rig, case: Case, name: str) -> None:
    """Columns of one convolution's and one projection's output, as the model has them; slots not ours are NaN."""
    layout = case.layout()
    n = layout.num_tokens
    qkv, z_b_a = rig.draw(n, 4 * 128), rig.draw(n, 8)
    q, k, v = qkv.split_with_sizes((128, 128, 256), dim=1)
    b, a = z_b_a[:, 4:6], z_b_a[:, 6:]
    q, k, v = q.view(n, 1, 128), k.view(n, 1, 128), v.view(n, 2, 128)
    A_log, dt_bias = torch.rand(2, generator=rig.random) - 0.5, torch.rand(2, generator=rig.random)
    states = slot_pool(rig, layout, 2, 128, 128, dtype=torch.float32)
    exact = states.clone()
    rig.plan(layout)
    expected = rig.exact.gated_delta_rule(*(x.float() for x in (q, k, v, a, b)), A_log, dt_bias, exact)
    got = rig.kernels.gated_delta_rule(q, k, v, a, b, A_log, dt_bias, states)
    rig.assert_close(got, expected, f"{name}: the outputs")
    assert got.dtype == rig.dtype, f"{name}: {got.dtype}"
    rig.assert_close(states, exact, f"{name}: the states in their slots")


def check_kinds_of_attention(rig: Rig) -> None:
    """Every other number of heads and head size, with this rig's dtype and traits."""
    for heads in ((2, 2, 64), (8, 1, 128), (6, 1, 256), (10, 2, 128)):
        other = rig.with_attention(*heads)
        for name in ("decodes and prefills", "decodes at and over page boundaries"):
            layout = CASES[name].layout()
            q_heads, kv_heads, dim = heads
            cache = kv_pages(other, layout, kv_heads=kv_heads, head_dim=dim)
            k, v = (other.draw(layout.num_tokens, kv_heads, dim) for _ in range(2))
            q, exact = other.draw(layout.num_tokens, q_heads, dim), wide(cache)
            other.plan(layout)
            other.exact.append_paged_kv(k.float(), v.float(), exact)
            other.kernels.append_paged_kv(k, v, cache)
            expected = other.exact.paged_attention(q.float(), exact, dim**-0.5)
            other.assert_close(other.kernels.paged_attention(q, cache, dim**-0.5), expected, f"{heads}, {name}")


def check_decodes_in_buffers(rig: Rig) -> None:
    """After `prepare_decodes` each step of decodes alone goes through buffers; others still go without."""
    rig.kernels.prepare_decodes(3, PAGES)
    order = ("decodes at and over page boundaries", "one decode", "decodes and prefills", "a prefill behind a context")
    for name in (*order, *order[:2]):
        _check_attention(rig, CASES[name], name)
        case = CASES[name]
        _check_gated_delta_rule(rig, replace(case, slots=(7, 3, 9, 0, 4)), name)


def check_any_step(rig: Rig) -> None:
    """Steps drawn at random: lengths at and beside chunks and pages, captures wherever they may be."""
    rig.kernels.prepare_decodes(4, PAGES)
    for seed in range(8):
        case = draw_case(random.Random(seed))
        name = f"{case}"
        _check_gated_delta_rule(rig, case, name)
        _check_attention(rig, replace(case, captures=()), name)


def check_linear(rig: Rig) -> None:
    """The classes that flashinfer serves stay in service after their trial, and multiply by what the weights say.

    How far from it is theirs: activations are rounded to 4 or 8 bits. tests/engine/kernels/linear holds them closer.
    """
    if rig.dtype != torch.bfloat16:
        return
    cases = (
        ("sm100", [nvfp4(128, input_scale=0.01), nvfp4(64, size=3.0, input_scale=0.02)], "mm_fp4", 0.2),
        ("sm90", [fp8(64, input_scale=0.02), fp8(32, by_row=True)], "bmm_fp8", 0.1),
    )
    for architecture, shards, kind, noise in cases:
        other = rig.on(architecture)
        layer, x = other.kernels.prepare_linear(shards), other.draw(5, shards[0].in_features)
        is_served = kind in layer.kind and "dequantised" not in layer.kind
        assert is_served, f"{architecture}: served by {layer.kind}"
        expected = torch.cat([x.float() @ dense_weight(shard).float().t() for shard in shards], dim=1)
        got = other.kernels.linear(x, layer).float()
        error = float((got - expected).norm() / expected.norm())
        assert error < noise, f"{architecture}, {layer.kind}: {error:.2g}"


def check_sample(rig: Rig) -> None:
    """Each row's own temperature, top-k, top-p and min-p, and a random number of its seed and offset alone."""
    options = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.5, 5, 1.0, 0.0), (2.0, 20, 0.6, 0.0), (1.5, 0, 0.9, 0.2)]
    logits = torch.randn(len(options), 64, generator=rig.random) * 2
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*options, strict=True))
    for seed in range(40):
        seeds = torch.arange(len(options)) + 10 * seed
        batch = SamplingBatch(temperature, top_k.int(), top_p, min_p, seeds, torch.full_like(seeds, 3))
        expected = [_pick(row, *own, int(seeds[i])) for i, (row, own) in enumerate(zip(logits, options, strict=True))]
        got = rig.kernels.sample(logits, batch)
        assert got.tolist() == expected, f"seed {seed}: {got.tolist()}, expected {expected}"


def _pick(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> int:
    """The token at which the random number's share of what is left is passed, in the order of ids."""
    if temperature == 0:
        return int(logits.argmax())
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    if top_k:
        probs[order[top_k:]] = 0.0
        probs /= probs.sum()
    before = torch.zeros_like(probs)
    before[order] = probs[order].cumsum(0) - probs[order]
    probs[before >= top_p] = 0.0
    probs[probs < min_p * probs.max()] = 0.0
    cumulative = probs.cumsum(0)
    return int((cumulative <= philox_uniform(seed, 3) * cumulative[-1]).sum())


CHECKS: dict[str, Callable[[Rig], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_rms_norm,
        check_fused_add_rms_norm,
        check_gated_rms_norm,
        check_silu_and_mul,
        check_rope,
        check_append,
        check_attention,
        check_attention_of_prefills,
        check_attention_of_decodes,
        check_kinds_of_attention,
        check_fp8_pages,
        check_causal_conv,
        check_gated_delta_rule,
        check_gated_delta_rule_of_decodes,
        check_gated_delta_rule_of_prefills,
        check_captures,
        check_decodes_in_buffers,
        check_any_step,
        check_linear,
        check_sample,
    )
}
PARTS = {
    "attention_of_prefills",
    "attention_of_decodes",
    "gated_delta_rule_of_decodes",
    "gated_delta_rule_of_prefills",
    "captures",
}
"""Of other checks: what the table of mutations needs of them."""
BY_ARCHITECTURE = {"attention", "gated_delta_rule", "decodes_in_buffers", "any_step"}
"""Where the backend chooses by the architecture."""
