"""The Triton kernel of the norm with a gate. Import it only where Triton is to run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 4


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, gate [n, heads, d] -> rms_norm(x) * silu(gate), in float32 but for the result; d lies dense in all of them."""
    n, heads, size = x.shape
    out = torch.empty(n, heads, size, dtype=x.dtype, device=x.device)
    grid = (-(-n * heads // _ROWS),)
    strides = (*x.stride()[:2], *gate.stride()[:2])
    _kernel[grid](x, gate, weight, out, n * heads, heads, size, *strides, eps, ROWS=_ROWS, SIZE=_power_of_two(size))
    return out


def _power_of_two(size: int) -> int:
    """The least that is not smaller."""
    return 1 << (size - 1).bit_length()


def _gated_rms_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    x_head_stride: tl.tensor,
    gate_stride: tl.tensor,
    gate_head_stride: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """So many heads of tokens, each a row."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.arange(0, SIZE)[None, :]
    is_there = (row < rows) & (column < size)
    token, head = row // heads, row % heads
    values = tl.load(x + token * x_stride + head * x_head_stride + column, mask=is_there, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + head * gate_head_stride + column, mask=is_there, other=0.0)
    gates = gates.to(tl.float32)
    factors = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / size + eps)
    result = values * scale[:, None] * factors * gates * tl.sigmoid(gates)
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=is_there)


# Steps differ in their rows: one compilation serves them all.
_kernel = triton.jit(_gated_rms_norm, do_not_specialize=("rows", "eps"))
