"""Each class against the matrices that its shards stand for, alone and stacked, with flashinfer's references below."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from flashinfer.quantization.fp4_quantization import SfLayout, _e2m1_and_ufp8sf_scale_to_float_cpu

from engine.kernels.linear.product import row_steps
from engine.weights.formats import DenseWeight
from tests.engine.kernels.linear.library import LinearLibrary
from tests.engine.kernels.linear.samples import (
    COLUMNS,
    SM90,
    SM100,
    SM120,
    dense,
    even_fp8,
    even_nvfp4,
    even_rows,
    exact,
    fp8,
    make_room,
    matrix_of,
    nvfp4,
    random_rows,
    relative_error,
)

BF16_ROUNDING = 2.0**-8
"""Twice the most that rounding to bfloat16 moves a number, relative to it: the sum in float32 adds next to nothing."""


def inputs(rows, columns=COLUMNS, size=1.0):
    return (random_rows(rows, columns, seed=5) * size).to(torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize(
    ("traits", "activations", "shard"),
    [
        (SM100, "bf16", nvfp4(256, size=0.1)),
        (SM100, "bf16", nvfp4(128, 64, size=30.0, bias=True)),
        (SM90, "auto", nvfp4(40)),
        (SM90, "bf16", fp8(40, by_row=True)),
        (SM90, "auto", dense(40, bias=True)),
    ],
    ids=["nvfp4", "nvfp4 with bias", "nvfp4 unpacked", "fp8 unpacked", "dense"],
)
def test_bf16_activations_are_multiplied_by_the_dequantised_weights(traits, activations, shard, rows):
    x = inputs(rows, shard.in_features)
    out = make_room(traits, activations).prepare([shard]).apply(x)
    expected = exact(x, [shard])
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < BF16_ROUNDING


@pytest.mark.parametrize("input_scale", [0.5, 2.0**-10, 0.0123])
def test_nvfp4_activations_are_those_that_the_checkpoints_scale_rounds_to(input_scale):
    shard = nvfp4(64, 192, size=0.01, input_scale=input_scale)
    x = inputs(9, 192, size=input_scale * 500)
    packed, scale = LinearLibrary().nvfp4_quantize(
        a=x, a_global_sf=torch.tensor([1 / input_scale]), sfLayout=SfLayout.layout_linear
    )
    rounded = _e2m1_and_ufp8sf_scale_to_float_cpu(packed, scale, torch.tensor([input_scale]), 16, 1, False)
    out = make_room(SM100).prepare([shard]).apply(x)
    assert relative_error(out, exact(rounded, [shard])) < BF16_ROUNDING
    assert relative_error(out, exact(x, [shard])) < 0.15


@pytest.mark.parametrize(("by_row", "rounding"), [(False, BF16_ROUNDING), (True, 2 * BF16_ROUNDING)])
@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_fp8_activations_are_those_that_the_scale_rounds_to(by_row, rounding, input_scale):
    shard = fp8(48, by_row=by_row, size=0.02, input_scale=input_scale)
    x = inputs(9)
    step = row_steps(x, 448.0) if input_scale is None else input_scale
    rounded = (x.float() / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    out = make_room(SM90).prepare([shard]).apply(x)
    assert relative_error(out, exact(rounded, [shard])) < rounding
    assert relative_error(out, exact(x, [shard])) < 0.05


def test_fp8_activations_beyond_the_static_range_saturate():
    shard = fp8(48, input_scale=0.001)
    x = torch.full((2, COLUMNS), 3.0e4, dtype=torch.bfloat16)
    out = make_room(SM90).prepare([shard]).apply(x)
    assert relative_error(out, exact(torch.full_like(x, 0.448), [shard])) < BF16_ROUNDING


def even_inputs(rows, columns=COLUMNS):
    return even_rows(rows, columns, seed=5).to(torch.bfloat16)


FUSED = {
    "nvfp4 w4a4": (SM100, "auto", lambda size: even_nvfp4(64, size=size, input_scale=size / 64)),
    "nvfp4 w4a4 by row": (SM100, "fp4", lambda size: even_nvfp4(64, size=size)),
    "nvfp4 w4a4 sm120": (SM120, "auto", lambda size: even_nvfp4(32, size=size, input_scale=2**-6, bias=size > 1)),
    "nvfp4 w4a16": (SM100, "bf16", lambda size: even_nvfp4(128, size=size, bias=size > 1)),
    "nvfp4 unpacked": (SM90, "auto", lambda size: even_nvfp4(40, size=size, bias=size > 1)),
    "fp8": (SM90, "auto", lambda size: even_fp8(48, size=size, input_scale=size / 32, bias=size > 1)),
    "fp8 by row": (SM90, "auto", lambda size: even_fp8(48, size=size, by_row=size < 1)),
    "fp8 unpacked": (SM90, "bf16", lambda size: even_fp8(40, size=size)),
}


@pytest.mark.parametrize(("traits", "activations", "make"), FUSED.values(), ids=FUSED.keys())
def test_fused_shards_of_unequal_scales_give_the_bits_of_the_unfused(traits, activations, make):
    """q, k, v with global scales 256 times apart, the first two alike."""
    shards = [make(size) for size in (2**-5, 2**-5, 8.0, 1.0)]
    x = even_inputs(5)
    fused = make_room(traits, activations).prepare(shards)
    alone = [make_room(traits, activations).prepare([shard]) for shard in shards]
    torch.testing.assert_close(fused.apply(x), torch.cat([layer.apply(x) for layer in alone], dim=1), rtol=0, atol=0)
    assert fused.out_features == sum(shard.out_features for shard in shards)


@pytest.mark.parametrize("shard", [nvfp4(70), fp8(70), fp8(70, by_row=True), dense(70)])
def test_unpacking_a_few_rows_at_a_time_changes_nothing(monkeypatch, shard):
    x = inputs(3)
    whole = make_room().prepare([shard, dense(3)]).apply(x)
    monkeypatch.setattr("engine.kernels.linear.dense._VALUES_AT_A_TIME", 16 * COLUMNS)
    assert torch.equal(make_room().prepare([shard, dense(3)]).apply(x), whole)


@pytest.mark.parametrize(
    ("activations", "make", "calls"),
    [
        ("auto", nvfp4, {"nvfp4_quantize": 1, "mm_fp4": 2}),
        ("bf16", nvfp4, {"mm_bf16_fp4": 2}),
        ("auto", fp8, {"bmm_fp8": 2}),
    ],
)
def test_shards_of_equal_scales_share_a_product_and_all_share_the_rounding(activations, make, calls):
    library = LinearLibrary()
    shards = [make(128, size=size, input_scale=0.01) for size in (1.0, 1.0, 3.0)]
    layer = make_room(SM100, activations, library).prepare(shards)
    library.calls.clear()
    layer.apply(inputs(2))
    assert Counter(call.name for call in library.calls) == calls


@pytest.mark.parametrize("traits", [SM90, SM100, SM120])
def test_shards_of_different_formats_keep_the_order_of_their_rows(traits):
    shards = [nvfp4(128, bias=True), fp8(48, by_row=True), dense(3, bias=True), dense(3), nvfp4(128, size=7.0)]
    layer = make_room(traits, "bf16").prepare(shards)
    x = inputs(6)
    out = layer.apply(x)
    assert (layer.out_features, layer.in_features) == (310, COLUMNS)
    assert relative_error(out, exact(x, shards)) < BF16_ROUNDING
    assert layer.kind.split(" + ")[-1].startswith("dense") or "nvfp4" in layer.kind


@pytest.mark.parametrize("shard", [even_nvfp4(64), even_fp8(48)], ids=["nvfp4", "fp8"])
def test_a_rows_own_scale_does_not_depend_on_its_batch(shard):
    layer = make_room(SM100, "fp4").prepare([shard])
    x = even_inputs(7) * torch.logspace(-9, 9, 7, base=2)[:, None].to(torch.bfloat16)
    x[3] = 0
    together = layer.apply(x)
    apart = torch.cat([layer.apply(row[None]) for row in x])
    assert torch.equal(together, apart)
    assert relative_error(together, exact(x, [shard])) < 0.2


def test_the_step_of_a_row_is_the_power_of_two_that_brings_it_into_range():
    x = torch.tensor([[448.0, -1.0], [449.0, 0.0], [-3.0, 2.0], [0.0, 0.0], [1e-30, 0.0], [1e-44, 0.0]])
    steps = row_steps(x, 448.0)
    assert torch.equal(steps, torch.exp2(torch.log2(steps).round()))
    assert bool((x.abs().amax(1, keepdim=True) / steps <= 448.0).all())
    assert bool((x[:3].abs().amax(1, keepdim=True) / steps[:3] >= 224.0).all())
    assert steps[3] == 1.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("shard", [nvfp4(64), fp8(48)], ids=["nvfp4", "fp8"])
def test_a_row_that_is_not_finite_stays_seen_and_alone(shard, value):
    x = inputs(3)
    x[1, 5] = value
    out = make_room(SM100, "fp4").prepare([shard]).apply(x)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()


@pytest.mark.parametrize(
    ("traits", "activations", "shard"),
    [
        (SM100, "auto", even_nvfp4(64, input_scale=2**-6)),
        (SM100, "fp4", even_nvfp4(64)),
        (SM100, "bf16", even_nvfp4(128)),
        (SM90, "auto", even_fp8(48, input_scale=2**-6)),
        (SM90, "auto", even_fp8(48)),
        (SM90, "auto", DenseWeight(even_rows(4))),
    ],
)
def test_rows_that_do_not_lie_together_are_read_right(traits, activations, shard):
    layer = make_room(traits, activations).prepare([shard])
    wide = even_inputs(5, 3 * COLUMNS)
    x = wide[:, COLUMNS : 2 * COLUMNS]
    before = x.clone()
    assert torch.equal(layer.apply(x), layer.apply(x.contiguous()))
    assert torch.equal(x, before)


def test_values_times_scales_are_exact_in_bfloat16():
    """What the W4A16 kernels rely on when they dequantise to bfloat16: 16 codes times 127 scales."""
    codes = matrix_of(nvfp4(1, 16)).new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    product = codes[:, None] * scales
    assert torch.equal(product.to(torch.bfloat16).double(), product)
