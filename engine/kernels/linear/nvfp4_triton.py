"""NVFP4 weights multiplied by a Triton kernel of ours, for GPUs on which flashinfer has none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from engine.kernels.device import DeviceTraits
from engine.kernels.linear.product import (
    add_bias,
    dtype_name,
    nvfp4_shards,
    positive_scale,
    stack_biases,
    stack_rows,
    total_bytes,
)
from engine.options import Activations
from engine.weights.formats import LinearWeight, Nvfp4Weight

_ROWS_AT_A_TIME = 8192
"""What regrouping takes besides the result is bounded by it: about 4 bytes for each of their packed ones."""
_MULTIPROCESSORS = 128
"""Where the device's number is not known: what a decode's product is spread over."""


@dataclass(frozen=True, slots=True)
class TritonProduct:
    """Codes and scales as the kernel reads them; row_scale [out] float32 is each row's global scale."""

    packed: torch.Tensor
    scale: torch.Tensor
    row_scale: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    multiprocessors: int
    kind: str

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def nbytes(self) -> int:
        return total_bytes(self.packed, self.scale, self.row_scale, self.bias)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        # Here and not above: importing Triton takes a second, and declares the kernel for the interpreter or a GPU.
        kernel = importlib.import_module("engine.kernels.linear.w4a16_kernel")
        rows = x if x.stride(-1) == 1 else x.contiguous()
        out: torch.Tensor = kernel.multiply(rows, self.packed, self.scale, self.row_scale, self.multiprocessors)
        return add_bias(out, self.bias)


class Nvfp4Triton:
    """Weights dequantised in registers; activations stay in bfloat16. Every row has its own global scale, so shards
    share a product whatever theirs are."""

    formats: tuple[str, ...] = ("nvfp4",)
    activation_range: float | None = None
    noise: float = 0.02

    def __init__(self, device: torch.device, dtype: torch.dtype, traits: DeviceTraits) -> None:
        self._device = device
        self._dtype = dtype
        self._multiprocessors = traits.multiprocessors or _MULTIPROCESSORS

    def supports(self, traits: DeviceTraits, shard: LinearWeight, activations: Activations) -> str:
        if not isinstance(shard, Nvfp4Weight):
            return "the Triton kernel multiplies by NVFP4 weights only"
        if self._dtype != torch.bfloat16:
            return f"the Triton kernel multiplies in bf16, not {dtype_name(self._dtype)}"
        if find_spec("triton") is None:
            return "triton is not installed"
        if os.environ.get("TRITON_INTERPRET") == "1":
            return ""
        if self._device.type != "cuda":
            return "Triton needs a GPU"
        if traits.capability is None or traits.capability < (8, 0):
            return f"the Triton kernel needs sm80 or newer, not {traits.architecture}"
        return ""

    def kind_of(self, shard: LinearWeight) -> str:
        return "nvfp4 w4a16 (triton)"

    def key(self, shard: LinearWeight) -> Hashable:
        return None

    def prepare(self, shards: Sequence[LinearWeight]) -> TritonProduct:
        weights = nvfp4_shards(shards)
        scales = [positive_scale(weight.global_scale, weight, "its global scale") for weight in weights]
        rows = torch.tensor([weight.out_features for weight in weights])
        return TritonProduct(
            packed=stack_rows([group_codes(weight.packed.to(self._device)) for weight in weights], self._device),
            scale=stack_rows([group_scales(weight.scale.to(self._device)) for weight in weights], self._device),
            row_scale=torch.tensor(scales, dtype=torch.float32).repeat_interleave(rows).to(self._device),
            bias=stack_biases(shards, self._dtype, self._device),
            in_features=weights[0].in_features,
            multiprocessors=self._multiprocessors,
            kind=self.kind_of(weights[0]),
        )


def group_codes(packed: torch.Tensor) -> torch.Tensor:
    """packed [out, in / 2] uint8 -> [out, groups, 16] int32: word j of a group of 128 columns holds the codes of
    columns j, 16 + j, .. 112 + j, from its lowest bits on; 0 beyond `in`."""
    rows, pairs = packed.shape
    groups = -(-pairs // 64)
    words = torch.empty(rows, groups, 16, dtype=torch.int32, device=packed.device)
    for first in range(0, rows, _ROWS_AT_A_TIME):
        part = F.pad(packed[first : first + _ROWS_AT_A_TIME], (0, groups * 64 - pairs))
        codes = torch.stack((part & 15, part >> 4), dim=-1).view(-1, groups, 4, 2, 16)
        of_bytes = codes[:, :, :, 0] | codes[:, :, :, 1] << 4
        words[first : first + _ROWS_AT_A_TIME] = of_bytes.transpose(2, 3).contiguous().view(torch.int32).squeeze(-1)
    return words


def group_scales(scale: torch.Tensor) -> torch.Tensor:
    """scale [out, in / 16] float8_e4m3fn -> [out, groups, 2] int32: the bytes of each group's eight, 0 beyond `in`."""
    rows, blocks = scale.shape
    groups = -(-blocks // 8)
    padded = F.pad(scale.view(torch.uint8), (0, groups * 8 - blocks))
    return padded.contiguous().view(rows, groups, 8).view(torch.int32)
