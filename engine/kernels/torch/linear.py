"""Linear layers: any weight format in, one matrix out, in oneDNN's packed layout where that multiplies faster here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from engine.kernels.torch.linear_trial import TRIALS, multiply_packed
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight
from engine.weights.nvfp4 import dequantize_nvfp4

logger = logging.getLogger("dalsegno.kernels")

_PACKED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """weight [out, in] in the compute dtype, or the same matrix in oneDNN's blocked layout; bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    nbytes: int

    @property
    def kind(self) -> str:
        return "dense"


def prepare_linear(shards: Sequence[LinearWeight], dtype: torch.dtype, device: torch.device) -> TorchLinear:
    """Dequantise each shard by its own scales and stack them by rows. A bias on some shards only is 0 on the others."""
    widths = {shard.in_features for shard in shards}
    if len(widths) != 1:
        raise ValueError(f"layers that are stacked must share their input; in-features are {sorted(widths)}")
    weight = torch.cat([dense_weight(shard).to(device=device, dtype=dtype) for shard in shards])
    bias = None
    if any(shard.bias is not None for shard in shards):
        parts = [torch.zeros(s.out_features) if s.bias is None else s.bias for s in shards]
        bias = torch.cat([part.to(device=device, dtype=dtype) for part in parts])
    out_features, in_features = weight.shape
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    if can_pack(dtype, device):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        weight = packed if TRIALS.prefers_packed(packed, weight) else weight
    elif device.type == "cpu":
        _tell_of_plain_products(dtype)
    return TorchLinear(weight, bias, out_features, in_features, nbytes)


def linear(x: torch.Tensor, layer: TorchLinear) -> torch.Tensor:
    """x [n, in] -> [n, out]."""
    if layer.weight.is_mkldnn:
        return multiply_packed(x, layer.weight, layer.bias)
    return F.linear(x, layer.weight, layer.bias)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed product exists here for `dtype`: that of bfloat16 asks for AVX-512."""
    if device.type != "cpu" or dtype not in _PACKED_DTYPES or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@cache
def _tell_of_plain_products(dtype: torch.dtype) -> None:
    """Once for each dtype: what is right but slower should not stay unseen."""
    logger.warning(
        "oneDNN's packed products are not there for %s; linear layers take torch's own, which are slower", dtype
    )


def dense_weight(shard: LinearWeight) -> torch.Tensor:
    """[out, in], dequantised by its own scales: float32 where it was quantised."""
    if isinstance(shard, DenseWeight):
        return shard.weight
    if isinstance(shard, Nvfp4Weight):
        return dequantize_nvfp4(shard)
    return _dequantize_fp8(shard)


def _dequantize_fp8(shard: Fp8Weight) -> torch.Tensor:
    scale = shard.scale.float()
    return shard.weight.float() * (scale if scale.dim() == 0 else scale.view(-1, 1))
