"""Run by test_triton.py in a process where TRITON_INTERPRET is 1: multiplies, and prints the errors as JSON.

Every tensor that the kernel writes is poisoned with NaN beforehand, and what lies around its inputs with NaN or 0xFF.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from engine.kernels.linear import w4a16_kernel
from engine.kernels.linear.nvfp4_triton import group_codes, group_scales
from engine.weights.formats import DenseWeight, Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tests.engine.kernels.linear.samples import (
    SM90,
    even_nvfp4,
    even_rows,
    exact,
    make_room,
    random_rows,
    relative_error,
)

SHAPES = [
    (1, 1, 16),
    (1, 64, 512),
    (1, 33, 48),
    (2, 127, 256),
    (3, 65, 144),
    (4, 1, 512),
    (5, 70, 400),
    (7, 128, 16),
    (8, 200, 64),
    (11, 31, 336),
    (15, 63, 272),
    (16, 64, 128),
    (16, 129, 496),
    (17, 1, 32),
    (17, 129, 240),
    (24, 40, 80),
    (32, 127, 64),
    (33, 128, 160),
    (48, 99, 112),
    (64, 5, 512),
    (65, 64, 48),
    (100, 257, 32),
    (127, 17, 208),
    (130, 130, 16),
    (130, 65, 512),
]
MULTIPROCESSORS = (1, 4, 100)


def poison_new_tensors() -> None:
    real = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = real(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    torch.empty = poisoned


def surrounded(tensor: torch.Tensor, columns: int, filler: float) -> torch.Tensor:
    """A copy with `columns` and a row more on either side, of which only the middle is handed out."""
    rows, width = tensor.shape
    outer = torch.full((rows + 2, width + 2 * columns), filler, dtype=tensor.dtype)
    middle = outer[1:-1, columns : columns + width]
    middle.copy_(tensor)
    return middle


def every_code(rows: int, columns: int) -> Nvfp4Weight:
    """All 16 codes beside all 127 finite scales, subnormal ones included."""
    generator = torch.Generator().manual_seed(rows + columns)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.arange(rows * columns // 16).remainder(127).to(torch.uint8).view(torch.float8_e4m3fn)
    return Nvfp4Weight(packed, scale.view(rows, -1), torch.tensor(0.037))


def multiply(weight: Nvfp4Weight, x: torch.Tensor, multiprocessors: int) -> torch.Tensor:
    rows = weight.out_features
    packed, scale = (
        surrounded(grouped.flatten(1), 0, -1).view(grouped.shape)
        for grouped in (group_codes(weight.packed), group_scales(weight.scale))
    )
    row_scale = torch.full((rows + 2,), torch.nan)
    row_scale[1:-1] = weight.global_scale
    return w4a16_kernel.multiply(surrounded(x, 8, torch.nan), packed, scale, row_scale[1:-1], multiprocessors)


def shape_errors() -> dict[str, float]:
    errors = {}
    for index, (n, rows, columns) in enumerate(SHAPES):
        weight = every_code(rows, columns) if index % 2 else quantize_nvfp4(random_rows(rows, columns))
        x = random_rows(n, columns, seed=index).to(torch.bfloat16)
        out = multiply(weight, x, MULTIPROCESSORS[index % 3])
        assert out.dtype == torch.bfloat16
        assert out.shape == (n, rows)
        errors[f"{n} x {columns} by {rows}"] = relative_error(out, x.double() @ dequantize_nvfp4(weight).double().t())
    return errors


def room_findings() -> dict[str, Any]:
    """Shards of unequal global scales, with and without a bias, beside plain ones."""
    shards = [
        even_nvfp4(40, size=2**-6),
        even_nvfp4(33, size=8.0, bias=True),
        DenseWeight(even_rows(3)),
        even_nvfp4(48),
    ]
    x = even_rows(5).to(torch.bfloat16)
    nothing = object()  # On SM90 no function of flashinfer is called for these.
    fused = make_room(SM90, library=nothing).prepare(shards)
    alone = torch.cat([make_room(SM90, library=nothing).prepare([shard]).apply(x) for shard in shards], dim=1)
    wide = even_rows(5, 384).to(torch.bfloat16)[:, 128:256]
    return {
        "kind": fused.kind,
        "products": len(fused.products),
        "error": relative_error(fused.apply(x), exact(x, shards)),
        "fused equals unfused": bool(torch.equal(fused.apply(x), alone)),
        "strided equals dense": bool(torch.equal(fused.apply(wide), fused.apply(wide.contiguous()))),
        "nbytes": fused.products[0].nbytes,
        "no rows": list(fused.apply(x[:0]).shape),
    }


def batch_findings() -> dict[str, bool]:
    """A row of a decode has the same bits whatever its batch."""
    weight = even_nvfp4(70)
    x = even_rows(16).to(torch.bfloat16)
    together = multiply(weight, x, 100)
    return {str(i): bool(torch.equal(together[i : i + 1], multiply(weight, x[i : i + 1], 100))) for i in (0, 7, 15)}


if __name__ == "__main__":
    assert w4a16_kernel.IS_INTERPRETED
    poison_new_tensors()
    print(json.dumps({"shapes": shape_errors(), "room": room_findings(), "batch": batch_findings()}))
