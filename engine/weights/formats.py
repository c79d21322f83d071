"""The forms in which a linear layer's weights come out of a checkpoint, before a backend prepares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """weight [out, in], float32, bfloat16 or float16; bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    name: str = ""
    """The layer that it came from, for messages."""

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight [out, in] float8_e4m3fn; scale float32, scalar (per tensor) or [out] (per channel): value = weight *
    scale.

    `input_scale` is the checkpoint's static activation scale, a float32 scalar, or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    name: str = ""
    """The layer that it came from, for messages."""

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """value = e2m1(packed) * scale * global_scale, whichever library wrote the checkpoint.

    packed [out, in / 2] uint8, the low nibble is the even column; scale [out, in / 16] float8_e4m3fn, one for 16
    columns; global_scale float32 scalar, the factor that *multiplies* (ModelOpt's `weight_scale_2`; the reciprocal of
    compressed-tensors' `weight_global_scale`). `input_scale` is the static activation scale (multiplies too), or None.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    name: str = ""
    """The layer that it came from, for messages."""

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def in_features(self) -> int:
        return self.packed.shape[1] * 2


LinearWeight: TypeAlias = DenseWeight | Fp8Weight | Nvfp4Weight
