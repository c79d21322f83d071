"""The Triton kernel that multiplies bfloat16 rows by NVFP4 weights. Import it only where Triton is to run.

Weights come in groups of 128 columns, 16 words of eight codes each: word j holds columns j, 16 + j, .. 112 + j, the
first in its lowest bits. So a product over 16 neighbouring columns takes one code of every word and one scale of a row.

A code becomes the sign and the top bits of a float32, which is too small by 2**126, and subnormal for 1/2; a scale
those of a float16, too small by 2**8, subnormals included (no GPU before SM89 converts e4m3). The product of both has
six significant bits, so it is exact in bfloat16; what rounds is the float32 sum and the result.

Block sizes are not tuned: the kernel has run in Triton's interpreter only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""As Triton itself reads it when a kernel is declared."""

_DOT_DTYPE = tl.float32 if IS_INTERPRETED else tl.bfloat16
"""numpy knows no bfloat16. Its values are exact in float32, so the interpreter's products are the same."""

GROUP_COLUMNS = 128
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Blocking:
    """How the result is cut up among programs; for up to `most_rows` rows of x."""

    most_rows: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int = 3
    k: int = GROUP_COLUMNS

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns}


BLOCKINGS = (
    Blocking(most_rows=16, rows=16, columns=64, num_warps=4),
    Blocking(most_rows=32, rows=32, columns=128, num_warps=8),
    Blocking(most_rows=2**31 - 1, rows=64, columns=128, num_warps=8),
)
"""The first is for decodes, which read all weights for a few rows: it alone is spread over K too."""


def multiply(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor, multiprocessors: int
) -> torch.Tensor:
    """x [n, K] bfloat16 -> [n, N] bfloat16: x @ (e2m1(packed) * e4m3(scale)).T * row_scale.

    packed [N, groups, 16] int32, the words of each group, and scale [N, groups, 2] int32, its eight scales, contiguous,
    both 0 beyond K; row_scale [N] float32; the rows of x are dense, but may lie apart. K is a multiple of 16, n and N
    are any.
    """
    n, K = x.shape
    N = packed.shape[0]
    out = torch.empty(n, N, dtype=torch.bfloat16, device=x.device)
    if n == 0:
        return out
    blocking = next(blocking for blocking in BLOCKINGS if n <= blocking.most_rows)
    is_decode = blocking is BLOCKINGS[0]
    columns_k = _columns_of_a_split(N, K, blocking, multiprocessors) if is_decode else K
    if columns_k >= K:
        _launch(x, packed, scale, row_scale, out, K, blocking)
        return out
    partial = torch.empty(-(-K // columns_k), n, N, dtype=torch.float32, device=x.device)
    _launch(x, packed, scale, row_scale, partial, columns_k, blocking)
    # Added in one order, where atomic additions would come in any: the same input gives the same bits.
    return torch.sum(partial, dim=0).mul_(row_scale).to(torch.bfloat16)


def _columns_of_a_split(N: int, K: int, blocking: Blocking, multiprocessors: int) -> int:
    """How many columns of x one program sums up: few rows of weights alone would leave most of the GPU idle."""
    programs = -(-N // blocking.columns)
    splits = min(max(2 * multiprocessors // programs, 1), _MAX_SPLITS)
    return -(-K // (splits * blocking.k)) * blocking.k


def _launch(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    out: torch.Tensor,
    columns_k: int,
    blocking: Blocking,
) -> None:
    """out [n, N] bfloat16, or [splits, n, N] float32 that is still without row_scale."""
    n, K = x.shape
    N = packed.shape[0]
    # Neighbouring programs share their weights, which are what is large.
    grid = (-(-n // blocking.rows), -(-N // blocking.columns), -(-K // columns_k))
    _kernel[grid](
        x,
        packed,
        scale,
        row_scale,
        out,
        n,
        N,
        K,
        x.stride(0),
        columns_k,
        IS_PARTIAL=out.dim() == 3,
        IS_ALIGNED=K % GROUP_COLUMNS == 0,
        DOT_DTYPE=_DOT_DTYPE,
        **blocking.constants,
        num_warps=blocking.num_warps,
        num_stages=blocking.num_stages,
    )


def _w4a16(
    x: tl.tensor,
    packed: tl.tensor,
    scale: tl.tensor,
    row_scale: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    columns_k: tl.tensor,
    IS_PARTIAL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """One block of the result, summed over columns_k columns of x from program_id(2) * columns_k on."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    split = tl.program_id(2)
    is_row, is_column = rows < n, columns < N
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    first = split * columns_k
    group, groups = first // 128, (K + 127) // 128
    places = tl.arange(0, 16)
    inputs = x + wide_rows[:, None] * x_stride + (first + places)[None, :]
    words_of_group = packed + (wide_columns[None, :] * groups + group) * 16 + places[:, None]
    scales_of_group = scale + (wide_columns * groups + group) * 2
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for k in range(first, tl.minimum(first + columns_k, K), 128):
        words = tl.load(words_of_group, mask=is_column[None, :], other=0)
        low_scales = tl.load(scales_of_group, mask=is_column, other=0)
        high_scales = tl.load(scales_of_group + 1, mask=is_column, other=0)
        for i in tl.static_range(8):
            is_input = is_row[:, None] if IS_ALIGNED else is_row[:, None] & (k + 16 * i + places < K)[None, :]
            values = tl.load(inputs + 16 * i, mask=is_input, other=0.0).to(DOT_DTYPE)
            scales = ((low_scales if i < 4 else high_scales) >> (8 * (i % 4))) & 0x7F
            # 2**116 times the scale: 2**8 for its own bias, 2**126 for the code's, less 2**10 that would overflow.
            steps = (scales << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 2.1267647932558654e37
            # 0x81C00000: the sign, and the three bits of the magnitude below it, moved on by six.
            bits = ((words << (28 - 4 * i)) >> 6) & -2118123520
            weights = (bits.to(tl.float32, bitcast=True) * steps[None, :]).to(DOT_DTYPE)
            total = tl.dot(values, weights, total)
        inputs += 128
        words_of_group += 16
        scales_of_group += 2
    total *= 1024.0
    is_result = is_row[:, None] & is_column[None, :]
    if IS_PARTIAL:
        places = out + (split.to(tl.int64) * n + wide_rows[:, None]) * N + wide_columns[None, :]
        tl.store(places, total, mask=is_result)
    else:
        factors = tl.load(row_scale + columns, mask=is_column, other=0.0)
        places = out + wide_rows[:, None] * N + wide_columns[None, :]
        tl.store(places, (total * factors[None, :]).to(tl.bfloat16), mask=is_result)


# A decode step and a prefill differ in n alone: one compilation for each choice of blocks serves them all.
_kernel = triton.jit(_w4a16, do_not_specialize=("n",))
