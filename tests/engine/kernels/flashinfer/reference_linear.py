"""Products with FP4 and FP8 operands behind flashinfer's names.

NVFP4 is decoded by the reference of `mm_bf16_fp4` for weights as they are quantised (packed codes, scales in the
128x4 swizzle); that of `mm_fp4` in the library takes codes for numbers, and is left alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from flashinfer.quantization.fp4_quantization import SfLayout
from flashinfer.trace.templates.gemm import (
    _mm_bf16_fp4_native_reference,
    _unswizzle_sf_128x4,
    mm_bf16_fp4_trace_dispatch,
)

from tests.engine.kernels.flashinfer.contract import check_activations, real, reference, require

BLOCK = 16


def nvfp4_quantize(dtype: torch.dtype, *, a: torch.Tensor, a_global_sf: Any, **rest: Any) -> Any:
    """Packed codes [M, K / 2], and scales as bytes in the layout that is asked for."""
    check_activations(dtype, a=a)
    require(a.dim() == 2 and a.shape[1] % BLOCK == 0 and a.is_contiguous(), f"a has shape {tuple(a.shape)}")
    require(rest["sf_vec_size"] == BLOCK and not rest["per_token_activation"], "no reference for other recipes")
    require(not rest["do_shuffle"], "no reference for do_shuffle")
    scale = torch.as_tensor(a_global_sf, dtype=torch.float32)
    require(scale.numel() == 1, f"a_global_sf has {scale.numel()} values")
    packed, scales = reference("nvfp4_quantize")(a, scale)
    scale_bytes = scales.view(torch.uint8)
    if rest["sfLayout"] == SfLayout.layout_linear:
        return packed, scale_bytes
    require(rest["sfLayout"] == SfLayout.layout_128x4, f"no reference for {rest['sfLayout']}")
    return packed, swizzle(scale_bytes).view(-(-a.shape[0] // 128) * 128, -1)


def nvfp4_block_scale_interleave(
    dtype: torch.dtype, *, unswizzled_sf: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    require(unswizzled_sf.dtype == torch.uint8 and unswizzled_sf.dim() == 2, f"scales are {unswizzled_sf.dtype}")
    require(unswizzled_sf.is_contiguous(), "scales must be contiguous")
    result = swizzle(unswizzled_sf)
    return result if out is None else out.copy_(result)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """[rows, columns] bytes -> flat, 128x4: the inverse of what the library's references undo."""
    rows, columns = scales.shape
    place = _places(rows, columns)
    result = torch.zeros(-(-rows // 128) * 128 * (-(-columns // 4) * 4), dtype=torch.uint8)
    result[place.reshape(-1)] = scales.reshape(-1)
    return result


@functools.cache
def _places(rows: int, columns: int) -> torch.Tensor:
    padded = -(-rows // 128) * 128 * (-(-columns // 4) * 4)
    return _unswizzle_sf_128x4(torch.arange(padded), rows, columns)


def mm_fp4(
    dtype: torch.dtype,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    **rest: Any,
) -> torch.Tensor:
    """a [M, K / 2], b [K / 2, N] column-major: both packed codes, scales swizzled."""
    require(a.dtype == b.dtype == torch.uint8, f"codes are {a.dtype}, {b.dtype}")
    require(a.shape[1] == b.shape[0], f"a {tuple(a.shape)} times b {tuple(b.shape)}")
    require(a.is_contiguous() and b.t().is_contiguous(), "a must be row-major, b column-major")
    require(rest["block_size"] == BLOCK and rest["use_nvfp4"] and not rest["use_8x4_sf_layout"], f"{rest}")
    require(alpha is None or (alpha.dtype == torch.float32 and alpha.numel() == 1), "alpha is one float32")
    _check_scales("a_descale", a_descale, a.shape[0], a.shape[1] * 2)
    b_flat = b_descale.t() if b_descale.dim() == 2 and not b_descale.is_contiguous() else b_descale
    _check_scales("b_descale", b_flat, b.shape[1], b.shape[0] * 2)
    identity = torch.eye(a.shape[1] * 2)
    decoded = _mm_bf16_fp4_native_reference(identity, a, a_descale.contiguous()).t()
    result = _mm_bf16_fp4_native_reference(decoded, b.t(), b_flat.contiguous(), alpha, out_dtype=out_dtype)
    return result if out is None else out.copy_(result)


def _check_scales(name: str, scales: torch.Tensor, rows: int, columns: int) -> None:
    require(scales.element_size() == 1 and scales.is_contiguous(), f"{name}: {scales.dtype}, {scales.stride()}")
    expected = -(-rows // 128) * 128 * (-(-(columns // BLOCK) // 4) * 4)
    require(scales.numel() == expected, f"{name} has {scales.numel()} bytes, 128x4 has {expected}")


def prepare_bf16_fp4_weights(dtype: torch.dtype, **arguments: Any) -> Any:
    """The real one: it is plain torch, but for the choice of a layout by the device in cute-dsl."""
    return real("prepare_bf16_fp4_weights")(**arguments)


def mm_bf16_fp4(
    dtype: torch.dtype,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None,
    backend: str,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    block_size: int,
    enable_pdl: bool,
) -> torch.Tensor:
    check_activations(dtype, a=a)
    require(alpha is None or (alpha.dtype == torch.float32 and alpha.shape == (1,)), "alpha is one float32")
    template = mm_bf16_fp4_trace_dispatch(b=b, b_descale=b_descale, backend=backend)
    result = template.reference(a, b, b_descale, alpha, block_size).to(out_dtype or a.dtype)
    return result if out is None else out.copy_(result)


def bmm_fp8(
    _dtype: torch.dtype,
    /,
    *,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    out: torch.Tensor | None,
    backend: str,
    batch_invariant: bool,
    **rest: Any,
) -> torch.Tensor:
    """A [b, m, k] row-major, B [b, k, n] column-major, a float32 scale each."""
    require(A.dim() == B.dim() == 3 and A.shape[2] == B.shape[1], f"A {tuple(A.shape)} times B {tuple(B.shape)}")
    require(A.dtype == B.dtype == torch.float8_e4m3fn, f"A and B are {A.dtype}, {B.dtype}")
    require(A.is_contiguous() and B.transpose(1, 2).is_contiguous(), "A must be row-major, B column-major")
    for name, scale in {"A_scale": A_scale, "B_scale": B_scale}.items():
        require(scale.dtype == torch.float32 and scale.numel() == 1, f"{name} is one float32")
    result = reference("bmm_fp8")(A, B, A_scale, B_scale, rest["dtype"])
    return result if out is None else out.copy_(result)
