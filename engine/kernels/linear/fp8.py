"""fp8 weights multiplied by flashinfer's `bmm_fp8`, with activations rounded to fp8.

Its scales multiply, one number for each side. So a static activation scale and a weight scale for the whole matrix go
through the kernel; scales of single rows go after it, in float32: those of weights (per channel) round the bfloat16
result once more, 2**-9 beside fp8's own 2**-4, and those of activations are powers of two, which round nothing.

The kernel has not run here: on the CPU flashinfer's reference in plain torch stands behind the same name.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer.library import Library
from engine.kernels.linear.product import (
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
class Fp8Product:
    """weight [out, in] float8_e4m3fn; one scale for each side, and what single rows have beyond that."""

    library: Library
    weight: torch.Tensor
    weight_scale: torch.Tensor
    """[1] float32; 1 where each row has its own."""
    channel_scale: torch.Tensor | None
    """[out] float32, or None where one scale serves all rows."""
    input_scale: torch.Tensor
    """[1] float32; 1 where each row of activations brings its own."""
    is_dynamic: bool
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
        return total_bytes(self.weight, self.channel_scale, self.bias)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        steps = row_steps(x, E4M3_MAX) if self.is_dynamic else self.input_scale
        rounded = x.float().div_(steps).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        out: torch.Tensor = self.library.bmm_fp8(
            A=rounded.unsqueeze(0),
            B=self.weight.t().unsqueeze(0),
            A_scale=self.input_scale,
            B_scale=self.weight_scale,
            dtype=torch.bfloat16,
            backend=_BACKEND,
        ).squeeze(0)
        if self.is_dynamic:
            out = out.mul_(steps)
        if self.channel_scale is not None:
            out = out.mul_(self.channel_scale)
        return out if self.bias is None else out.add_(self.bias)


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
        weight_scale = "by row" if shard.scale.numel() > 1 else float(shard.scale)
        return weight_scale, None if shard.input_scale is None else float(shard.input_scale)

    def prepare(self, shards: Sequence[LinearWeight]) -> Fp8Product:
        weights = [shard for shard in shards if isinstance(shard, Fp8Weight)]
        assert len(weights) == len(shards), "the class was asked to prepare what it does not support"
        first = weights[0]
        is_by_row = first.scale.numel() > 1
        input_scale = first.input_scale
        return Fp8Product(
            library=self._library,
            weight=stack_rows([weight.weight for weight in weights], self._device),
            weight_scale=scalar(1.0 if is_by_row else positive_scale(first.scale, first, "its scale"), self._device),
            channel_scale=_channel_scales(weights, self._device) if is_by_row else None,
            input_scale=scalar(
                1.0 if input_scale is None else positive_scale(input_scale, first, "its input scale"), self._device
            ),
            is_dynamic=input_scale is None,
            bias=stack_biases(shards, self._dtype, self._device),
            kind=self.kind_of(first),
        )


def _channel_scales(weights: Sequence[Fp8Weight], device: torch.device) -> torch.Tensor:
    return stack_rows([weight.scale.float().view(-1) for weight in weights], device)
