"""The trial of a class on its first layer: what no test here could run on a GPU proves itself before it serves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.errors import EngineError
from engine.kernels.linear.dense import dense_rows, rows_of
from engine.kernels.linear.product import LinearClass, Product
from engine.weights.formats import DenseWeight, LinearWeight

_BATCHES = (1, 5, 20, 130)
"""Decodes and prefills: kernels differ by the number of rows."""
_ROWS = 64
_BIAS_ROUNDING = 2.0**-8


def find_fault(
    linear_class: LinearClass, shards: Sequence[LinearWeight], device: torch.device, dtype: torch.dtype
) -> tuple[Product | None, str]:
    """Prepare shards and multiply by them: the product and "", or what is wrong with the class on this machine.

    Random rows are multiplied by the product, and by the first and last rows of each shard, dequantised, in float32. A
    wrong layout, scale or convention is off by about the whole value; a compiler or part that is missing raises.
    """
    try:
        product = linear_class.prepare(shards)
        errors = [_relative_error(linear_class, product, shards, batch, device, dtype) for batch in _BATCHES]
    except (torch.OutOfMemoryError, EngineError):
        raise
    except Exception as fault:  # noqa: BLE001 - whatever a library raises here, another class can serve
        return None, f"it failed on this machine: {type(fault).__name__}: {fault}"
    for batch, error in zip(_BATCHES, errors, strict=True):
        if not error < linear_class.noise:
            found = f"a relative error of {error:.3g} for {batch} rows, where {linear_class.noise} is the most"
            return None, f"its results are wrong on this machine: {found}"
    return product, ""


def _relative_error(
    linear_class: LinearClass,
    product: Product,
    shards: Sequence[LinearWeight],
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    x = torch.randn(batch, product.in_features, generator=torch.Generator().manual_seed(batch))
    x = (x * _magnitude(linear_class, shards[0])).to(device=device, dtype=dtype)
    out = product.apply(x)
    actual, expected, biases, first = [], [], [], 0
    for shard in shards:
        for rows in (slice(0, _ROWS), slice(max(shard.out_features - _ROWS, 0), shard.out_features)):
            expected.append(x.float() @ dense_rows(rows_of(shard, rows), device).float().t())
            biases.append((torch.zeros(shard.out_features) if shard.bias is None else shard.bias.float())[rows])
            actual.append(out[:, first : first + shard.out_features][:, rows].float())
        first += shard.out_features
    bias = torch.cat(biases).to(device)
    wanted = torch.cat(expected, dim=1)
    norm: float = wanted.norm().item()
    error: float = (torch.cat(actual, dim=1) - bias - wanted).norm().item()
    # What a large bias takes from the sum's last bits is no fault of the product.
    error -= _BIAS_ROUNDING * bias.norm().item() * math.sqrt(batch)
    return max(error, 0.0) / (norm or 1.0)


def _magnitude(linear_class: LinearClass, shard: LinearWeight) -> float:
    """How large activations are to be, so that a static scale neither clips them nor rounds them away."""
    if linear_class.activation_range is None or isinstance(shard, DenseWeight) or shard.input_scale is None:
        return 1.0
    return float(shard.input_scale) * linear_class.activation_range / 5
