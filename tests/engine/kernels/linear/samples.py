"""Shards of every format, the matrices that they stand for, and rooms to prepare them in.

A BLAS owes no equal bits to products of different shapes: where a test asks for them, it takes the `even_` samples,
whose sums are exact in float32 in any order.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.device import CPU, DeviceTraits
from engine.kernels.linear import LinearRoom
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4, quantize_nvfp4

SM80, SM89, SM90, SM100, SM103, SM120, SM121 = (
    DeviceTraits(f"sm{major}{minor}", (major, minor), multiprocessors=100)
    for major, minor in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
)
COLUMNS = 128


def make_room(
    traits: DeviceTraits = CPU, activations: Any = "auto", library: Any = None, dtype: torch.dtype = torch.bfloat16
) -> LinearRoom:
    """With flashinfer's references; importing flashinfer takes seconds, so not before they are needed."""
    if library is None:
        from tests.engine.kernels.linear.library import LinearLibrary

        library = LinearLibrary()
    return LinearRoom(torch.device("cpu"), dtype, traits, activations, library)


def random_rows(rows: int, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + 1000 * rows + columns))


def nvfp4(
    rows: int,
    columns: int = COLUMNS,
    *,
    size: float = 1.0,
    input_scale: float | None = None,
    bias: bool = False,
    name: str = "",
) -> Nvfp4Weight:
    """`size` sets the global scale: random values of that deviation."""
    weight = quantize_nvfp4(random_rows(rows, columns) * size)
    static = None if input_scale is None else torch.tensor(input_scale)
    return Nvfp4Weight(
        weight.packed, weight.scale, weight.global_scale, static, random_rows(1, rows)[0] if bias else None, name
    )


def fp8(
    rows: int,
    *,
    by_row: bool = False,
    size: float = 1.0,
    input_scale: float | None = None,
    bias: bool = False,
    name: str = "",
) -> Fp8Weight:
    weight = random_rows(rows) * size
    scale = weight.abs().amax(dim=1) / 448 if by_row else weight.abs().amax() / 448
    static = None if input_scale is None else torch.tensor(input_scale)
    return Fp8Weight(
        (weight / (scale[:, None] if by_row else scale)).to(torch.float8_e4m3fn),
        scale,
        static,
        random_rows(1, rows)[0] if bias else None,
        name,
    )


def even_rows(rows: int, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    """Whole numbers from -8 to 8 in float32: any format holds them."""
    generator = torch.Generator().manual_seed(seed + 1000 * rows + columns)
    return torch.randint(-8, 9, (rows, columns), generator=generator).float()


def even_nvfp4(rows: int, *, size: float = 1.0, input_scale: float | None = None, bias: bool = False) -> Nvfp4Weight:
    """Every code, times the global scale `size`, a power of two."""
    packed = torch.randint(0, 256, (rows, COLUMNS // 2), generator=torch.Generator().manual_seed(rows))
    return Nvfp4Weight(
        packed.to(torch.uint8),
        torch.ones(rows, COLUMNS // 16).to(torch.float8_e4m3fn),
        torch.tensor(size),
        None if input_scale is None else torch.tensor(input_scale),
        random_rows(1, rows)[0] if bias else None,
    )


def even_fp8(
    rows: int, *, by_row: bool = False, size: float = 1.0, input_scale: float | None = None, bias: bool = False
) -> Fp8Weight:
    """Whole numbers, times the scale `size`, a power of two; by row one that is twice or half of its neighbours'."""
    scale = size * torch.tensor([1.0, 2.0]).repeat(rows)[:rows] if by_row else torch.tensor(size)
    return Fp8Weight(
        even_rows(rows).to(torch.float8_e4m3fn),
        scale,
        None if input_scale is None else torch.tensor(input_scale),
        random_rows(1, rows)[0] if bias else None,
    )


def dense(rows: int, *, bias: bool = False, name: str = "") -> DenseWeight:
    return DenseWeight(random_rows(rows).to(torch.bfloat16), random_rows(1, rows)[0] if bias else None, name)


def exact(x: torch.Tensor, shards: list[LinearWeight]) -> torch.Tensor:
    """x times the dequantised rows, plus the biases, in float64."""
    return torch.cat([x.double() @ matrix_of(shard).t() + _bias_of(shard) for shard in shards], dim=1)


def matrix_of(shard: LinearWeight) -> torch.Tensor:
    if isinstance(shard, DenseWeight):
        return shard.weight.double()
    if isinstance(shard, Fp8Weight):
        return shard.weight.double() * shard.scale.double().view(-1, 1)
    return dequantize_nvfp4(shard).double()


def _bias_of(shard: LinearWeight) -> torch.Tensor:
    return torch.zeros(shard.out_features).double() if shard.bias is None else shard.bias.double()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())
