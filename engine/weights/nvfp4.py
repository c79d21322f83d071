"""NVFP4: four-bit e2m1 values with one e4m3 scale for 16 columns and one float32 scale for the tensor."""

from __future__ import annotations

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
# Elements worked on at a time: what the temporaries of one pass need stays in the second-level cache.
_CHUNK_ELEMENTS = 1 << 18


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
    low, high = blocks.aminmax(dim=-1)
    block_amax = torch.maximum(low.neg(), high).float()
    own_amax = _finite(block_amax.amax(), name)
    amax = own_amax if amax is None else amax
    global_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    # A maximum in float32's subnormal range would divide to 0.
    global_scale = global_scale.clamp_(min=torch.finfo(torch.float32).tiny)
    scale = (block_amax / E2M1_MAX / global_scale).clamp_(_E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    packed = torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)
    steps = scale.float().mul_(global_scale).view(-1, 1)
    chunk = _CHUNK_ELEMENTS // BLOCK_COLUMNS
    for first in range(0, blocks.shape[0], chunk):
        part = blocks[first : first + chunk].float() / steps[first : first + chunk]
        packed[first * BLOCK_COLUMNS // 2 :][: part.numel() // 2] = _pack(_encode(part))
    return Nvfp4Weight(
        packed=packed.view(out_features, in_features // 2),
        scale=scale.view(out_features, in_features // BLOCK_COLUMNS),
        global_scale=global_scale,
    )


def dequantize_nvfp4(weight: Nvfp4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[out, in] in `dtype`: each e2m1 value times (scale * global_scale), the product taken in float32."""
    values = _unpack_flat(weight.packed).view(-1, BLOCK_COLUMNS)
    steps = weight.scale.float().mul_(weight.global_scale.float()).view(-1, 1)
    return values.mul_(steps).view(weight.out_features, weight.in_features).to(dtype)


def matrix_amax(weight: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """max |w| as a float32 scalar. Raises WeightsError that names `name` where it is infinite or not a number."""
    low, high = weight.aminmax()
    return _finite(torch.maximum(low.neg(), high).float(), name)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """packed [out, in / 2] uint8 -> the e2m1 values without any scale, [out, in] float32."""
    return _unpack_flat(packed).view(packed.shape[0], packed.shape[1] * 2)


def _finite(amax: torch.Tensor, name: str) -> torch.Tensor:
    if not torch.isfinite(amax):
        raise WeightsError(f"{name}: an element is infinite or not a number; NVFP4 can hold neither")
    return amax


def _encode(values: torch.Tensor) -> torch.Tensor:
    """float32 in steps -> e2m1 codes, uint8, same shape. Beyond ±6 saturates.

    The codes are spaced 1/2 below 2, 1 from 2 to 4 and 2 above, so the code is the least of the three roundings.
    """
    magnitude = values.abs().clamp_(max=E2M1_MAX)
    code = (magnitude * 2).round_()
    torch.minimum(code, magnitude.round().add_(2), out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4), out=code)
    return code.add_(values < 0, alpha=8).to(torch.uint8)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [.., 2 n] uint8 -> [n] bytes; the even column goes to the low nibble."""
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _unpack_flat(packed: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(E2M1_VALUES, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    both = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    return torch.nn.functional.embedding(packed.reshape(-1).int(), both).view(-1)
