"""NVFP4 weights multiplied by flashinfer: with activations rounded to NVFP4, or left in bfloat16.

Conventions, as the installed source has them: `nvfp4_quantize` *multiplies* by its global scale, so it is given the
reciprocal of the checkpoint's `input_scale`; `alpha` multiplies the product, so it is input_scale * global_scale. The
scales of 16 columns lie in tiles of 128 rows x 4 columns, both filled up with zeros; packed weights lie as they came.

Neither kernel has run here: on the CPU flashinfer's references in plain torch stand behind the same names.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer.library import Library
from engine.kernels.linear.product import (
    add_bias,
    beside,
    denied,
    dtype_name,
    nvfp4_shards,
    positive_scale,
    row_steps,
    scalar,
    stack_biases,
    stack_rows,
    total_bytes,
)
from engine.options import Activations
from engine.weights.formats import LinearWeight, Nvfp4Weight
from engine.weights.nvfp4 import E2M1_MAX, E4M3_MAX

NVFP4_RANGE = E2M1_MAX * E4M3_MAX
"""The greatest value that NVFP4 holds, in units of its global scale."""

W4A4_BACKENDS = {(10, 0): "cutlass", (10, 3): "cutlass", (12, 0): "auto", (12, 1): "cutlass"}
"""`mm_fp4`'s backend for each architecture. cuDNN is passed over: it plans anew for every number of rows, and cannot
while a graph is captured. On SM120 flashinfer's own choice begins with b12x, which has no plans, then cutlass."""

W4A16_BACKENDS = {(10, 0): "cute-dsl", (10, 3): "cute-dsl"}
"""`mm_bf16_fp4`'s backend for each architecture. Not on SM120: there `cute-dsl` rounds activations to float16, where
large ones become infinite, and `cute-dsl-native` is compiled anew for every number of rows."""

_W4A4_ALIGNMENT = 32
_TILE_ROWS, _TILE_COLUMNS = 128, 64
"""It reads whole tiles of scales."""


@dataclass(frozen=True, slots=True)
class W4A4Part:
    """Rows that share a global scale."""

    packed: torch.Tensor
    """[out, in / 2] uint8."""
    scale: torch.Tensor
    """[out to 128, in / 16 to 4] uint8: the bytes of the 128x4 tiles, one after the other."""
    alpha: torch.Tensor
    """[1] float32: input_scale * global_scale."""


@dataclass(frozen=True, slots=True)
class W4A4Product:
    """Activations are rounded once, and multiplied by each part."""

    library: Library
    parts: tuple[W4A4Part, ...]
    input_factor: torch.Tensor
    """[1] float32: 1 / input_scale, or 1 where each row brings its own."""
    backend: str
    is_dynamic: bool
    bias: torch.Tensor | None
    kind: str

    @property
    def out_features(self) -> int:
        return sum(part.packed.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        return total_bytes(self.bias) + sum(total_bytes(part.packed, part.scale) for part in self.parts)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_dynamic:
            return add_bias(self._multiply(x.contiguous()), self.bias)
        steps = row_steps(x, NVFP4_RANGE)
        return add_bias(self._multiply((x / steps).to(x.dtype)).mul_(steps), self.bias)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        rounded, scale = self.library.nvfp4_quantize(a=x, a_global_sf=self.input_factor)
        products: list[torch.Tensor] = [
            self.library.mm_fp4(
                a=rounded,
                b=part.packed.t(),
                a_descale=scale,
                b_descale=part.scale.t(),
                alpha=part.alpha,
                out_dtype=torch.bfloat16,
                backend=self.backend,
            )
            for part in self.parts
        ]
        return beside(products)


class Nvfp4W4A4:
    """Activations rounded to NVFP4 by the checkpoint's input_scale. Without one they stay in bfloat16, unless `fp4` was
    asked for: then each row is scaled by a power of two of its own, so that a token does not depend on its batch."""

    formats: tuple[str, ...] = ("nvfp4",)
    activation_range: float | None = NVFP4_RANGE
    noise: float = 0.25

    def __init__(self, device: torch.device, dtype: torch.dtype, traits: DeviceTraits, library: Library) -> None:
        self._device = device
        self._dtype = dtype
        self._backend = "" if traits.capability is None else W4A4_BACKENDS.get(traits.capability, "")
        self._library = library

    def supports(self, traits: DeviceTraits, shard: LinearWeight, activations: Activations) -> str:
        if not isinstance(shard, Nvfp4Weight):
            return "mm_fp4 multiplies by NVFP4 weights only"
        if activations == "bf16":
            return "activations are to stay in bf16"
        if shard.input_scale is None and activations != "fp4":
            return "the checkpoint has no scale for activations"
        if self._dtype != torch.bfloat16:
            return f"mm_fp4 answers in bf16, not {dtype_name(self._dtype)}"
        if not self._backend or denied(self._library.mm_fp4, traits, self._backend):
            return f"mm_fp4 has no kernel for {traits.architecture}"
        if shard.out_features % _W4A4_ALIGNMENT or shard.in_features % _W4A4_ALIGNMENT:
            shape = f"{shard.out_features} x {shard.in_features}"
            return f"mm_fp4 needs multiples of {_W4A4_ALIGNMENT}, not {shape}"
        return ""

    def kind_of(self, shard: LinearWeight) -> str:
        assert isinstance(shard, Nvfp4Weight)
        return "nvfp4 w4a4 (flashinfer mm_fp4" + (
            ")" if shard.input_scale is not None else ", activations scaled by row)"
        )

    def key(self, shard: LinearWeight) -> Hashable:
        assert isinstance(shard, Nvfp4Weight)
        return None if shard.input_scale is None else float(shard.input_scale)

    def prepare(self, shards: Sequence[LinearWeight]) -> W4A4Product:
        weights = nvfp4_shards(shards)
        first = weights[0]
        step = 1.0 if first.input_scale is None else positive_scale(first.input_scale, first, "its input scale")
        groups = (list(group) for _, group in groupby(weights, lambda weight: float(weight.global_scale)))
        return W4A4Product(
            library=self._library,
            parts=tuple(self._prepare_part(group, step) for group in groups),
            input_factor=scalar(1.0 / step, self._device),
            backend=self._backend,
            is_dynamic=first.input_scale is None,
            bias=stack_biases(shards, self._dtype, self._device),
            kind=self.kind_of(first),
        )

    def _prepare_part(self, weights: Sequence[Nvfp4Weight], step: float) -> W4A4Part:
        global_scale = positive_scale(weights[0].global_scale, weights[0], "its global scale")
        return W4A4Part(
            packed=stack_rows([weight.packed for weight in weights], self._device),
            scale=swizzled_scales(weights, self._device, self._library),
            alpha=scalar(step * global_scale, self._device),
        )


@dataclass(frozen=True, slots=True)
class W4A16Product:
    """Weights and scales as `prepare_bf16_fp4_weights` laid them out for one backend."""

    library: Library
    weight: torch.Tensor
    scale: torch.Tensor
    alpha: torch.Tensor | None
    """[1] float32: global_scale."""
    backend: str
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    kind: str

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.scale, self.bias)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.library.mm_bf16_fp4(
            a=x.contiguous(), b=self.weight, b_descale=self.scale, alpha=self.alpha, backend=self.backend
        )
        return add_bias(out, self.bias)


class Nvfp4W4A16:
    """Weights dequantised inside flashinfer's kernel; activations stay in bfloat16."""

    formats: tuple[str, ...] = ("nvfp4",)
    activation_range: float | None = None
    noise: float = 0.02

    def __init__(self, device: torch.device, dtype: torch.dtype, traits: DeviceTraits, library: Library) -> None:
        self._device = device
        self._dtype = dtype
        self._backend = "" if traits.capability is None else W4A16_BACKENDS.get(traits.capability, "")
        self._library = library

    def supports(self, traits: DeviceTraits, shard: LinearWeight, activations: Activations) -> str:
        if not isinstance(shard, Nvfp4Weight):
            return "mm_bf16_fp4 multiplies by NVFP4 weights only"
        if self._dtype != torch.bfloat16:
            return f"mm_bf16_fp4 multiplies in bf16, not {dtype_name(self._dtype)}"
        if not self._backend or denied(self._library.mm_bf16_fp4, traits, self._backend):
            return f"mm_bf16_fp4 has no kernel for {traits.architecture} that takes any rows"
        if shard.out_features % _TILE_ROWS or shard.in_features % _TILE_COLUMNS:
            shape = f"{shard.out_features} x {shard.in_features}"
            return f"mm_bf16_fp4 needs multiples of {_TILE_ROWS} x {_TILE_COLUMNS}, not {shape}"
        return ""

    def kind_of(self, shard: LinearWeight) -> str:
        return "nvfp4 w4a16 (flashinfer mm_bf16_fp4)"

    def key(self, shard: LinearWeight) -> Hashable:
        assert isinstance(shard, Nvfp4Weight)
        return float(shard.global_scale)

    def prepare(self, shards: Sequence[LinearWeight]) -> W4A16Product:
        weights = nvfp4_shards(shards)
        global_scale = positive_scale(weights[0].global_scale, weights[0], "its global scale")
        packed = stack_rows([weight.packed for weight in weights], self._device)
        weight, scale, alpha = self._library.prepare_bf16_fp4_weights(
            b=packed,
            b_descale=swizzled_scales(weights, self._device, self._library),
            alpha=scalar(global_scale, self._device),
            backend=self._backend,
        )
        return W4A16Product(
            library=self._library,
            weight=weight,
            scale=scale,
            alpha=alpha,
            backend=self._backend,
            bias=stack_biases(shards, self._dtype, self._device),
            out_features=packed.shape[0],
            in_features=packed.shape[1] * 2,
            kind=self.kind_of(weights[0]),
        )


def swizzled_scales(weights: Sequence[Nvfp4Weight], device: torch.device, library: Library) -> torch.Tensor:
    """[out to 128, in / 16 to 4] uint8: the scales of all rows in 128x4 tiles, zeros where there is no weight."""
    linear = stack_rows([weight.scale.view(torch.uint8) for weight in weights], device)
    tiles: torch.Tensor = library.nvfp4_block_scale_interleave(linear)
    rows, columns = linear.shape
    return tiles.view(_round_up(rows, 128), _round_up(columns, 4))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
