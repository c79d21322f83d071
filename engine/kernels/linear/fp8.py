"""fp8 weights multiplied by flashinfer's `bmm_fp8`, with activations rounded to fp8.

Its scales multiply, one number for each side. So a static activation scale and a weight scale for the whole matrix go
through the kernel; scales of single rows go after it, in float32: those of weights (per channel) round the bfloat16
result once more, 2**-9 beside fp8's own 2**-4, and those of activations are powers of two, which round nothing.

The kernel has not run here: on the CPU flashinfer's reference in plain torch stands behind the same name.
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
    positive_scale,
    row_steps,
    scalar,
    stack_biases,
    stack_rows,
    total_bytes,
)
from engine.options import Activations
from engine.weights.formats import Fp8Weight, LinearWeight
from engine.weights.nvfp4 import E4M3_MAX

_ALIGNMENT = 16
"""cuBLASLt's, in bytes, for both sides of an fp8 matrix."""
_BACKEND = "cublas"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that share a weight scale, or have one each."""

    weight: torch.Tensor
    """[out, in] float8_e4m3fn."""
    scale: torch.Tensor
    """[1] float32; 1 where each row has its own."""
    channel_scale: torch.Tensor | None
    """[out] float32, or None where one scale serves all rows."""


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """Activations are rounded once, and multiplied by each part."""

    library: Library
    parts: tuple[Part, ...]
    input_scale: torch.Tensor
    """[1] float32; 1 where each row of activations brings its own."""
    is_dynamic: bool
    bias: torch.Tensor | None
    kind: str

    @property
    def out_features(self) -> int:
        return sum(part.weight.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].weight.shape[1]

    @property
    def nbytes(self) -> int:
        return total_bytes(self.bias) + sum(total_bytes(part.weight, part.channel_scale) for part in self.parts)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        steps = row_steps(x, E4M3_MAX) if self.is_dynamic else self.input_scale
        rounded = x.float().div_(steps).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        out = beside([self._multiply(rounded, part) for part in self.parts])
        if self.is_dynamic:
            out = out.mul_(steps)
        return add_bias(out, self.bias)

    def _multiply(self, rounded: torch.Tensor, part: Part) -> torch.Tensor:
        out: torch.Tensor = self.library.bmm_fp8(
            A=rounded.unsqueeze(0),
            B=part.weight.t().unsqueeze(0),
            A_scale=self.input_scale,
            B_scale=part.scale,
            dtype=torch.bfloat16,
            backend=_BACKEND,
        ).squeeze(0)
        return out if part.channel_scale is None else out.mul_(part.channel_scale)


class Fp8:
    """Activations rounded to fp8 by the checkpoint's input_scale; without one, each row by a power of two of its own,
    so that a token does not depend on its batch."""

    formats: tuple[str, ...] = ("fp8",)
    activation_range: float | None = E4M3_MAX
    noise: float = 0.1

    def __init__(self, device: torch.device, dtype: torch.dtype, library: Library) -> None:
        self._device = device
        self._dtype = dtype
        self._library = library

    def supports(self, traits: DeviceTraits, shard: LinearWeight, activations: Activations) -> str:
        if not isinstance(shard, Fp8Weight):
            return "bmm_fp8 multiplies by fp8 weights only"
        if activations == "bf16":
            return "activations are to stay in bf16"
        if self._dtype != torch.bfloat16:
            return f"bmm_fp8 answers in bf16, not {dtype_name(self._dtype)}"
        if traits.capability is None or traits.capability < (8, 9) or denied(self._library.bmm_fp8, traits, _BACKEND):
            return f"bmm_fp8 has no kernel for {traits.architecture}"
        if shard.out_features % _ALIGNMENT or shard.in_features % _ALIGNMENT:
            shape = f"{shard.out_features} x {shard.in_features}"
            return f"bmm_fp8 needs multiples of {_ALIGNMENT}, not {shape}"
        return ""

    def kind_of(self, shard: LinearWeight) -> str:
        assert isinstance(shard, Fp8Weight)
        return "fp8 w8a8 (flashinfer bmm_fp8" + (
            ")" if shard.input_scale is not None else ", activations scaled by row)"
        )

    def key(self, shard: LinearWeight) -> Hashable:
        assert isinstance(shard, Fp8Weight)
        return None if shard.input_scale is None else float(shard.input_scale)

    def prepare(self, shards: Sequence[LinearWeight]) -> Fp8Product:
        weights = [shard for shard in shards if isinstance(shard, Fp8Weight)]
        assert len(weights) == len(shards), "the class was asked to prepare what it does not support"
        first = weights[0]
        step = 1.0 if first.input_scale is None else positive_scale(first.input_scale, first, "its input scale")
        return Fp8Product(
            library=self._library,
            parts=tuple(self._prepare_part(list(group)) for _, group in groupby(weights, _weight_scale)),
            input_scale=scalar(step, self._device),
            is_dynamic=first.input_scale is None,
            bias=stack_biases(shards, self._dtype, self._device),
            kind=self.kind_of(first),
        )

    def _prepare_part(self, weights: Sequence[Fp8Weight]) -> Part:
        first = weights[0]
        weight = stack_rows([weight.weight for weight in weights], self._device)
        if _weight_scale(first) is None:
            scales = stack_rows([weight.scale.float().view(-1) for weight in weights], self._device)
            return Part(weight, scalar(1.0, self._device), scales)
        return Part(weight, scalar(positive_scale(first.scale, first, "its scale"), self._device), None)


def _weight_scale(weight: Fp8Weight) -> float | None:
    """None where each row has its own."""
    return float(weight.scale) if weight.scale.numel() == 1 else None
