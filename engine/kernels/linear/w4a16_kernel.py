"""The Triton kernel that multiplies bfloat16 rows by NVFP4 weights. Import it only where Triton is to run.

Both small formats are read as the top bits of a float16, whose exponent is biased by 15 instead of 1 or 7: e2m1 comes
out too small by 2**14, e4m3 (which no GPU before SM89 converts) by 2**8, subnormals included. Their product has six
significant bits, so it is exact in bfloat16; what rounds is the float32 sum and the result.

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

_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Blocking:
    """How the result is cut up among programs; for up to `most_rows` rows of x."""

    most_rows: int
    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int = 3

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns, "BLOCK_K": self.k}


BLOCKINGS = (
    Blocking(most_rows=16, rows=16, columns=64, k=128, num_warps=4),
    Blocking(most_rows=32, rows=32, columns=128, k=64, num_warps=8),
    Blocking(most_rows=2**31 - 1, rows=64, columns=128, k=64, num_warps=8),
)
"""The first is for decodes, which read all weights for a few rows: it alone is spread over K too."""


def multiply(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor, multiprocessors: int
) -> torch.Tensor:
    """x [n, K] bfloat16 -> [n, N] bfloat16: x @ (e2m1(packed) * e4m3(scale)).T * row_scale.

    packed [N, K / 2] and scale [N, K / 16] uint8, contiguous; row_scale [N] float32; the rows of x are dense, but may
    lie apart. K is a multiple of 16, n and N are any.
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
    DOT_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One block of the result, summed over columns_k columns of x from program_id(2) * columns_k on."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    split = tl.program_id(2)
    is_row, is_column = rows < n, columns < N
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    first = split * columns_k
    last = tl.minimum(first + columns_k, K)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for k in range(first, last, BLOCK_K):
        pairs = k // 2 + tl.arange(0, BLOCK_K // 2)
        is_pair = pairs < last // 2
        blocks = k // 16 + tl.arange(0, BLOCK_K // 16)
        is_block = blocks < last // 16
        codes = tl.load(
            packed + wide_columns[:, None] * (K // 2) + pairs[None, :],
            mask=is_column[:, None] & is_pair[None, :],
            other=0,
        ).to(tl.uint16)
        scales = tl.load(
            scale + wide_columns[:, None] * (K // 16) + blocks[None, :],
            mask=is_column[:, None] & is_block[None, :],
            other=0,
        ).to(tl.uint16)
        # 2**22 undoes both biases.
        steps = ((scales & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 4194304.0
        steps = tl.reshape(
            tl.broadcast_to(steps[:, :, None], (BLOCK_COLUMNS, BLOCK_K // 16, 8)), (BLOCK_COLUMNS, BLOCK_K // 2)
        )
        even_codes = ((codes & 0x7) << 9) | ((codes & 0x8) << 12)
        odd_codes = ((codes & 0x70) << 5) | ((codes & 0x80) << 8)
        even_weights = (even_codes.to(tl.float16, bitcast=True).to(tl.float32) * steps).to(DOT_DTYPE)
        odd_weights = (odd_codes.to(tl.float16, bitcast=True).to(tl.float32) * steps).to(DOT_DTYPE)
        inputs = x + wide_rows[:, None] * x_stride + 2 * pairs[None, :]
        is_input = is_row[:, None] & is_pair[None, :]
        even = tl.load(inputs, mask=is_input, other=0.0).to(DOT_DTYPE)
        odd = tl.load(inputs + 1, mask=is_input, other=0.0).to(DOT_DTYPE)
        total = tl.dot(even, tl.trans(even_weights), total)
        total = tl.dot(odd, tl.trans(odd_weights), total)
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
