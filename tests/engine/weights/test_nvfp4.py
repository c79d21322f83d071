import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import WeightsError
from engine.weights.formats import Nvfp4Weight
from engine.weights.nvfp4 import E2M1_VALUES, dequantize_nvfp4, quantize_nvfp4, unpack_e2m1
from tests.engine.weights import tiny_checkpoints as tiny

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def every_byte() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(16, 16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def test_unpacking_every_byte_agrees_to_the_bit_with_compressed_tensors() -> None:
    theirs = unpack_fp4_from_uint8(every_byte(), 16, 32, dtype=torch.float32)
    assert torch.equal(bits(unpack_e2m1(every_byte())), bits(theirs))


def test_whole_weights_agree_to_the_bit_with_compressed_tensors_in_its_own_layout_and_dtype() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    stored = {name[2:]: tensor for name, tensor in tiny.compressed_nvfp4_tensors("a", weight).items()}
    theirs = NVFP4PackedCompressor.decompress(dict(stored), preset_name_to_scheme("NVFP4", ["Linear"]))["weight"]
    global_scale = stored["weight_global_scale"].reciprocal().view(())
    ours = Nvfp4Weight(stored["weight_packed"], stored["weight_scale"], global_scale)
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(dequantize_nvfp4(ours, torch.bfloat16), theirs)


def test_the_low_nibble_is_the_even_column() -> None:
    assert unpack_e2m1(torch.tensor([[0xA3]], dtype=torch.uint8)).tolist() == [[1.5, -1.0]]


def test_packing_agrees_to_the_bit_with_compressed_tensors_given_the_same_scales() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    amax = 6 * 448 * 2.0**-11  # the global scale is then a power of two, and no reciprocal is rounded
    weight.clamp_(-amax, amax)[0, 0] = amax
    ours = quantize_nvfp4(weight)
    theirs = quantize_and_pack_fp4(weight, ours.scale.float(), global_scale=1 / ours.global_scale)
    assert torch.equal(ours.packed, theirs)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (5.01, 6.0),
        (0.26, 0.5),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_to_nearest_with_ties_to_the_even_code(value: float, expected: float, sign: int) -> None:
    weight = torch.zeros(1, 16)
    weight[0, 0] = 6 * 448  # global scale 1
    row = torch.cat([weight, torch.tensor([[6.0, sign * value] + [0.0] * 14])], dim=1)  # second block: scale 1
    assert dequantize_nvfp4(quantize_nvfp4(row))[0, 17].item() == sign * expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantised_values_are_a_fixed_point(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    once = quantize_nvfp4(weight)
    again = quantize_nvfp4(dequantize_nvfp4(once))
    assert torch.allclose(dequantize_nvfp4(again), dequantize_nvfp4(once), rtol=0, atol=0.02)


@settings(deadline=None, max_examples=200)
@given(st.lists(finite, min_size=32, max_size=32))
def test_each_element_goes_to_the_nearest_value_that_its_block_can_hold(values: list[float]) -> None:
    weight = torch.tensor(values).view(2, 16)
    quantised = quantize_nvfp4(weight)
    steps = quantised.scale.double() * quantised.global_scale.double()
    representable = steps.unsqueeze(-1) * torch.tensor(E2M1_VALUES, dtype=torch.float64)
    least = (weight.double().unsqueeze(-1) - representable).abs().amin(dim=-1)
    error = (dequantize_nvfp4(quantised).double() - weight.double()).abs()
    # What rounding the products to float32 adds, also among its smallest numbers.
    assert (error <= least + 2.0**-22 * weight.double().abs() + 2.0**-147).all()


@given(st.lists(st.floats(-4, 4, width=32), min_size=32, max_size=32))
def test_a_block_scale_fits_the_blocks_maximum_to_six(values: list[float]) -> None:
    weight = torch.tensor(values).view(2, 16)
    quantised = quantize_nvfp4(weight)
    wanted = weight.abs().amax(dim=1, keepdim=True) / 6 / quantised.global_scale
    assert torch.equal(quantised.scale.float(), wanted.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float())


@settings(deadline=None, max_examples=100)
@given(st.lists(finite, min_size=16, max_size=16))
def test_signs_and_zeros_survive(values: list[float]) -> None:
    weight = torch.tensor(values).view(1, 16)
    restored = dequantize_nvfp4(quantize_nvfp4(weight))
    assert ((restored == 0) | (restored.sign() == weight.sign())).all()
    assert (restored[weight == 0] == 0).all()


@given(st.binary(min_size=64, max_size=64))
def test_packed_bytes_give_the_values_of_their_nibbles(data: bytes) -> None:
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(4, 16)
    expected = [E2M1_VALUES[nibble] for byte in data for nibble in (byte & 15, byte >> 4)]
    assert unpack_e2m1(packed).flatten().tolist() == expected


def test_an_all_zero_matrix_stays_zero_and_an_all_zero_block_does_too() -> None:
    weight = torch.zeros(2, 32)
    assert torch.equal(dequantize_nvfp4(quantize_nvfp4(weight)), weight)
    weight[1, 20] = 3.0
    restored = dequantize_nvfp4(quantize_nvfp4(weight))
    assert restored.count_nonzero() == 1
    assert restored[1, 20].item() == pytest.approx(3.0)


def test_rows_beyond_one_chunk_are_quantised_like_rows_alone() -> None:
    weight = torch.randn(700, 1024, generator=torch.Generator().manual_seed(3))
    weight[:, 0] = 7.0
    whole, last = quantize_nvfp4(weight), quantize_nvfp4(weight[-1:])
    assert torch.equal(whole.packed[-1:], last.packed)


def test_a_given_maximum_sets_the_global_scale_and_what_is_above_it_saturates() -> None:
    weight = torch.tensor([[8.0] + [0.0] * 15])
    assert quantize_nvfp4(weight, amax=torch.tensor(16.0)).global_scale.item() == pytest.approx(16 / (6 * 448))
    saturated = quantize_nvfp4(weight, amax=torch.tensor(4.0))
    assert dequantize_nvfp4(saturated)[0, 0].item() == pytest.approx(4.0)


def test_a_result_in_bfloat16_is_the_float32_one_rounded() -> None:
    quantised = quantize_nvfp4(torch.randn(16, 32, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(dequantize_nvfp4(quantised, torch.bfloat16), dequantize_nvfp4(quantised).bfloat16())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4, 24), r"blk\.weight.*multiple of 16.*4 x 24"),
        (torch.zeros(0, 16), r"blk\.weight.*0 x 16"),
        (torch.full((1, 16), torch.nan), r"blk\.weight.*not a number"),
        (torch.tensor([[torch.inf] + [0.0] * 15]), r"blk\.weight.*infinite"),
        (torch.zeros(16), r"blk\.weight.*matrix"),
        (torch.zeros(1, 16, dtype=torch.int8), r"blk\.weight.*int8"),
    ],
)
def test_a_matrix_that_nvfp4_cannot_hold_is_refused_by_name(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        quantize_nvfp4(weight, "blk.weight")


def test_the_global_scale_multiplies() -> None:
    quantised = Nvfp4Weight(
        packed=torch.full((1, 8), 0x22, dtype=torch.uint8),
        scale=torch.tensor([[2.0]]).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(0.25),
    )
    assert dequantize_nvfp4(quantised).unique().tolist() == [0.5]
