"""NVFP4: four-bit e2m1 values with one e4m3 scale for 16 columns and one float32 scale for the tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.errors import WeightsError
from engine.weights.formats import Nvfp4Weight

BLOCK_COLUMNS = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each four-bit code; bit 3 is the sign."""

# The smallest e4m3 number. A block far below the tensor's maximum would otherwise get the scale 0 and lose everything.
_E4M3_TINY = 2.0**-9
_ROUNDING = 1.5 * 2.0**23
# Blocks worked on at a time on a CPU. What one pass needs stays in the second-level cache, and torch runs operations of
# fewer than 32,768 elements without waking its threads, which on a busy machine wait longer for each other than they
# work.
_CPU_CHUNK_BLOCKS = 2000


def quantize_nvfp4(weight: torch.Tensor, name: str = "weight", amax: torch.Tensor | None = None) -> Nvfp4Weight:
    """Round a matrix to NVFP4 by its maxima, in ModelOpt's convention: global_scale = max |w| / (6 * 448).

    weight [out, in], float32, bfloat16 or float16, any device. A block's scale is its maximum / 6 / global_scale in
    e4m3; elements go to the nearest e2m1 value, ties to the even code. An all-zero matrix has global_scale 1. `amax`
    [] float32 stands for max |w| where several layers are to share one global scale; what is above it saturates.
    Raises WeightsError that names `name` where `in` is not a multiple of 16, or an element is infinite or not a number.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        shape = list(weight.shape)
        raise WeightsError(f"{name}: NVFP4 needs a floating-point matrix [out, in], not {weight.dtype} {shape}")
    out_features, in_features = weight.shape
    if in_features % BLOCK_COLUMNS or not weight.numel():
        raise WeightsError(
            f"{name}: NVFP4 needs in-features that are a multiple of {BLOCK_COLUMNS}, and at least one row; "
            f"this matrix is {out_features} x {in_features}"
        )
    blocks = weight.detach().contiguous().view(-1, BLOCK_COLUMNS)
    own_amax = matrix_amax(blocks, name)
    amax = own_amax if amax is None else amax
    global_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    # A maximum in float32's subnormal range would divide to 0.
    global_scale = global_scale.clamp_(min=torch.finfo(torch.float32).tiny)
    packed = torch.empty(blocks.shape[0], BLOCK_COLUMNS // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(blocks.shape[0], 1, dtype=torch.float8_e4m3fn, device=weight.device)
    for part in _chunks(blocks):
        values = blocks[part].float()
        magnitude = values.abs()
        wanted = magnitude.amax(dim=-1, keepdim=True).div_(E2M1_MAX).div_(global_scale)
        scale[part] = wanted.clamp_(_E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
        code = _encode(magnitude.div_(scale[part].float().mul_(global_scale)))
        packed[part] = _pack(code.add_(values < 0, alpha=8).to(torch.uint8))
    return Nvfp4Weight(
        packed=packed.view(out_features, in_features // 2),
        scale=scale.view(out_features, in_features // BLOCK_COLUMNS),
        global_scale=global_scale,
    )


def dequantize_nvfp4(weight: Nvfp4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[out, in] in `dtype`: each e2m1 value times (scale * global_scale), the product taken in float32."""
    packed = weight.packed.contiguous().view(-1, BLOCK_COLUMNS // 2)
    scale = weight.scale.contiguous().view(-1, 1)
    table = _byte_table(packed.device)
    result = torch.empty(packed.shape[0], BLOCK_COLUMNS, dtype=dtype, device=packed.device)
    for part in _chunks(packed):
        step = scale[part].float().mul_(weight.global_scale.float())
        result[part] = _lookup(packed[part], table).mul_(step)
    return result.view(weight.out_features, weight.in_features)


def matrix_amax(weight: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """max |w| as a float32 scalar. Raises WeightsError that names `name` where it is infinite or not a number."""
    low, high = weight.aminmax()
    return _finite(torch.maximum(low.neg(), high).float(), name)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """packed [out, in / 2] uint8 -> the e2m1 values without any scale, [out, in] float32."""
    return _lookup(packed.contiguous(), _byte_table(packed.device))


def _chunks(blocks: torch.Tensor) -> Iterator[slice]:
    count = blocks.shape[0]
    step = _CPU_CHUNK_BLOCKS if blocks.device.type == "cpu" else max(count, 1)
    return (slice(first, first + step) for first in range(0, count, step))


def _finite(amax: torch.Tensor, name: str) -> torch.Tensor:
    if not torch.isfinite(amax):
        raise WeightsError(f"{name}: an element is infinite or not a number; NVFP4 can hold neither")
    return amax


def _encode(magnitude: torch.Tensor) -> torch.Tensor:
    """float32 magnitudes in steps (overwritten) -> e2m1 codes without the sign, float32. Beyond 6 saturates.

    The codes are spaced 1/2 below 2, 1 from 2 to 4 and 2 above, so the code is the least of the three roundings.
    """
    magnitude.clamp_(max=E2M1_MAX)
    code = _round(magnitude * 2)
    torch.minimum(code, _round(magnitude.clone()).add_(2), out=code)
    return torch.minimum(code, _round(magnitude.mul_(0.5)).add_(4), out=code)


def _round(values: torch.Tensor) -> torch.Tensor:
    """Round small non-negative float32 values in place, ties to even, by pushing the fraction out of the mantissa.

    torch.round would do, but wakes all threads for 2,048 elements.
    """
    return values.add_(_ROUNDING).sub_(_ROUNDING)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [n, 2 m] uint8 -> [n, m] bytes; the even column goes to the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _byte_table(device: torch.device) -> torch.Tensor:
    """[256, 2] float32: the values of the low and the high nibble of each byte."""
    values = torch.tensor(E2M1_VALUES, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def _lookup(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Bytes [n, m] -> [n, 2 m] float32."""
    return torch.nn.functional.embedding(packed.int(), table).flatten(1)
