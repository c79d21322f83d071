"""Plain weights, and quantised ones that are dequantised at load because nothing else serves them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.kernels.device import DeviceTraits
from engine.kernels.linear.product import dtype_name, format_name, stack_biases, total_bytes
from engine.options import Activations
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight
from engine.weights.nvfp4 import dequantize_nvfp4

_VALUES_AT_A_TIME = 2**25
"""What dequantising takes besides the result is bounded by it: a few float32 numbers for each."""


@dataclass(frozen=True, slots=True)
class DenseProduct:
    """weight [out, in] and bias [out] or None, in the compute dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    kind: str

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Dense:
    """torch's own product. It serves every format, in `dtype`: the last resort for NVFP4 and fp8, which then take two
    bytes a weight (in bfloat16) instead of a half or one."""

    formats: tuple[str, ...] = ("dense", "nvfp4", "fp8")
    activation_range: float | None = None
    noise: float = 0.02

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def supports(self, traits: DeviceTraits, shard: LinearWeight, activations: Activations) -> str:
        return ""

    def kind_of(self, shard: LinearWeight) -> str:
        form = format_name(shard)
        return form if form == "dense" else f"{form} dequantised to {dtype_name(self._dtype)}"

    def key(self, shard: LinearWeight) -> Hashable:
        return format_name(shard)

    def bytes_of(self, shards: Sequence[LinearWeight]) -> int:
        """What `prepare` will take, without the biases."""
        return sum(shard.out_features * shard.in_features for shard in shards) * self._dtype.itemsize

    def prepare(self, shards: Sequence[LinearWeight]) -> DenseProduct:
        rows = sum(shard.out_features for shard in shards)
        weight = torch.empty(rows, shards[0].in_features, dtype=self._dtype, device=self._device)
        first = 0
        for shard in shards:
            for part in _parts(shard):
                weight[first : first + part.out_features] = dense_rows(part, self._device)
                first += part.out_features
        return DenseProduct(weight, stack_biases(shards, self._dtype, self._device), self.kind_of(shards[0]))


def dense_rows(shard: LinearWeight, device: torch.device) -> torch.Tensor:
    """[out, in] on the device, dequantised there by the shard's own scales: float32 where it was quantised."""
    if isinstance(shard, DenseWeight):
        return shard.weight.to(device)
    if isinstance(shard, Fp8Weight):
        return shard.weight.to(device).float() * shard.scale.to(device).float().view(-1, 1)
    return dequantize_nvfp4(
        replace(
            shard,
            packed=shard.packed.to(device),
            scale=shard.scale.to(device),
            global_scale=shard.global_scale.to(device),
        )
    )


def rows_of(shard: LinearWeight, rows: slice) -> LinearWeight:
    """Some of a shard's rows, without their bias."""
    if isinstance(shard, DenseWeight):
        return replace(shard, weight=shard.weight[rows], bias=None)
    if isinstance(shard, Fp8Weight):
        scale = shard.scale if shard.scale.numel() == 1 else shard.scale.view(-1)[rows]
        return replace(shard, weight=shard.weight[rows], scale=scale, bias=None)
    return replace(shard, packed=shard.packed[rows], scale=shard.scale[rows], bias=None)


def _parts(shard: LinearWeight) -> Iterator[LinearWeight]:
    step = max(_VALUES_AT_A_TIME // shard.in_features, 1)
    return (rows_of(shard, slice(first, first + step)) for first in range(0, shard.out_features, step))
