"""NVFP4 to the bit: our swizzle, quantisation and dequantisation beside flashinfer's."""

from __future__ import annotations

import pytest
import torch
from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
from flashinfer.gemm.gemm_bf16_fp4 import _unswizzle_sf_128x4
from flashinfer.gemm.gemm_bf16_fp4_cudnn import _prepare_cudnn
from flashinfer.quantization.fp4_quantization import SfLayout, _e2m1_and_ufp8sf_scale_to_float_cpu

from engine.kernels.linear.nvfp4_flashinfer import swizzled_scales
from engine.kernels.linear.nvfp4_triton import group_codes, group_scales
from engine.weights.nvfp4 import dequantize_nvfp4, quantize_nvfp4, unpack_e2m1
from tests.engine.kernels.linear.library import LinearLibrary
from tests.engine.kernels.linear.samples import nvfp4, random_rows

DEVICE = torch.device("cpu")
SHAPES = [(128, 64), (1, 16), (130, 80), (300, 192), (256, 1024)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_swizzled_scales_come_back_by_flashinfers_own_unswizzling(rows, columns):
    shard = nvfp4(rows, columns)
    tiles = swizzled_scales([shard], DEVICE, LinearLibrary())
    assert tiles.shape == (-(-rows // 128) * 128, -(-(columns // 16) // 4) * 4)
    linear = _unswizzle_sf_128x4(tiles, *tiles.shape)
    assert torch.equal(linear[:rows, : columns // 16], shard.scale.view(torch.uint8))
    assert int(linear[rows:].sum()) == int(linear[:, columns // 16 :].sum()) == 0
    prepared = _prepare_cudnn(shard.packed, tiles, None, 16)[1]
    assert torch.equal(prepared.view(torch.uint8), shard.scale.view(torch.uint8))


def test_a_scale_lies_where_the_layout_of_the_tensor_cores_says():
    """Row 32 i + o of a tile and column c: byte 16 o + 4 i + c of its 512 (convert_sf_to_mma_layout's mapping)."""
    shard = nvfp4(256, 128)
    tiles = swizzled_scales([shard], DEVICE, LinearLibrary())
    mapped = convert_sf_to_mma_layout(tiles, m=256, k=128)
    for row, column in ((0, 0), (1, 0), (37, 3), (127, 7), (128, 0), (255, 6)):
        place = (row % 32, row % 128 // 32, row // 128, column % 4, column // 4, 0)
        assert mapped[place] == shard.scale.view(torch.uint8)[row, column]


def test_stacked_shards_are_swizzled_as_one_matrix():
    first, second = nvfp4(40, 96), nvfp4(200, 96, size=3.0)
    tiles = swizzled_scales([first, second], DEVICE, LinearLibrary())
    stacked = torch.cat((first.scale, second.scale)).view(torch.uint8)
    assert torch.equal(_unswizzle_sf_128x4(tiles, 240, 6), stacked)


def quantised_by_flashinfer(weight, global_scale):
    """Its global scale multiplies before rounding, ours after: the reciprocal."""
    codes, scales = LinearLibrary().nvfp4_quantize(
        a=weight, a_global_sf=(1 / global_scale).reshape(1), sfLayout=SfLayout.layout_linear
    )
    return codes, scales


@pytest.mark.parametrize("exponent", [-12, 0, 5])
@pytest.mark.parametrize(("rows", "columns"), SHAPES[1:])
def test_quantising_gives_flashinfers_bits_but_where_a_value_is_halfway(rows, columns, exponent):
    """The global scale is a power of two, so that its reciprocal is exact and both divide alike.

    Halfway between two values, the GPU (cvt.rn) and we take the even code; flashinfer's reference in torch takes the
    smaller magnitude. Nothing else may differ.
    """
    weight = random_rows(rows, columns).to(torch.bfloat16)
    weight[0, 0] = 10.5
    weight *= 2.0**exponent
    ours = quantize_nvfp4(weight)
    assert float(ours.global_scale) == 2.0**exponent * 10.5 / 2688
    codes, scales = quantised_by_flashinfer(weight, ours.global_scale)
    assert torch.equal(scales, ours.scale.view(torch.uint8))
    steps = ours.scale.double().repeat_interleave(16, dim=1) * float(ours.global_scale)
    magnitudes = (weight.double() / steps).abs()
    halfway = (magnitudes[..., None] == torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).any(-1)
    theirs, mine = unpack_e2m1(codes), unpack_e2m1(ours.packed)
    assert torch.equal(theirs[~halfway], mine[~halfway])
    # Codes of even mantissa: 0, 1, 2 and 4.
    assert set(mine[halfway].abs().tolist()) <= {0.0, 1.0, 2.0, 4.0}
    assert float((theirs.abs() - mine.abs()).max()) <= 0


def test_halfway_values_are_met():
    weight = torch.zeros(1, 16, dtype=torch.bfloat16)
    weight[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ours = quantize_nvfp4(weight, amax=torch.tensor(2688.0))
    codes, scales = quantised_by_flashinfer(weight, ours.global_scale)
    assert torch.equal(scales, ours.scale.view(torch.uint8))
    assert unpack_e2m1(ours.packed)[0, :8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert unpack_e2m1(codes)[0, :8].tolist() == [6.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]


def test_a_block_too_small_for_a_scale_keeps_what_it_can_of_its_values():
    """flashinfer's scale becomes 0 and the block is lost on a GPU; ours stays at e4m3's least, 2**-9."""
    weight = torch.zeros(2, 16)
    weight[0, 0], weight[1] = 2688.0, 2.0**-9
    ours = quantize_nvfp4(weight)
    _, scales = quantised_by_flashinfer(weight.to(torch.bfloat16), ours.global_scale)
    assert int(scales[1]) == 0
    assert ours.scale[1].float().item() == 2.0**-9
    assert torch.equal(dequantize_nvfp4(ours)[1], weight[1])


@pytest.mark.parametrize("amax", [None, 2688.0 * 2.0**-7])
def test_dequantising_agrees_with_flashinfer(amax):
    """To the bit for a global scale that is a power of two; otherwise the order of two products may cost one rounding
    of float32."""
    weight = quantize_nvfp4(random_rows(70, 208), amax=None if amax is None else torch.tensor(amax))
    theirs = _e2m1_and_ufp8sf_scale_to_float_cpu(
        weight.packed, weight.scale.view(torch.uint8), weight.global_scale.view(1), 16, 1, False
    )
    rounding = 0.0 if amax else 2.0**-22
    torch.testing.assert_close(dequantize_nvfp4(weight), theirs, rtol=rounding, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [(5, 128), (9, 400), (3, 16)])
def test_regrouped_codes_and_scales_are_those_of_their_columns(monkeypatch, rows, columns):
    """Code i of word j is that of column 16 i + j of the group; regrouped four rows at a time."""
    monkeypatch.setattr("engine.kernels.linear.nvfp4_triton._ROWS_AT_A_TIME", 4)
    shard = nvfp4(rows, columns)
    words, scales = group_codes(shard.packed), group_scales(shard.scale)
    codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=2).flatten(1)
    expected = torch.stack((shard.packed & 15, shard.packed >> 4), dim=-1).flatten(1)
    assert torch.equal(codes[:, :columns], expected.int())
    assert int(codes[:, columns:].sum()) == 0
    assert torch.equal(scales.view(torch.uint8).flatten(1)[:, : columns // 16], shard.scale.view(torch.uint8))
