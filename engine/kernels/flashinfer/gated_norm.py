"""The norm with a gate behind the gated delta rule: flashinfer's multiply by a sigmoid, this one by silu.

By a Triton kernel of ours on a GPU, which saves two launches in each linear layer; else by a norm and torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

Norm: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
GatedNorm: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

TRIAL_TOLERANCE = 2.0**-6
"""Of the largest magnitude: torch's rounds twice more."""


def load_kernel(device: torch.device, dtype: torch.dtype, size: int) -> tuple[GatedNorm | None, str]:
    """The kernel for heads of `size`, or None and why not."""
    if device.type != "cuda":
        return None, "Triton needs a GPU"
    try:
        kernels = importlib.import_module("engine.kernels.flashinfer.gated_norm_kernel")
        fault = find_fault(kernels, device, dtype, size)
    except Exception as error:  # noqa: BLE001 - Triton fails in many ways, and torch computes the same
        return None, f"Triton fails: {type(error).__name__}: {error}"
    return (None, fault) if fault else (kernels.gated_rms_norm, "")


def in_parts(norm: Norm, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, gate [..., d] -> norm(x) * silu(gate)."""
    return norm(x, weight, eps).mul_(F.silu(gate))


def find_fault(kernels: Any, device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Try the kernel on random numbers against torch; what is wrong, or nothing."""
    random = torch.Generator().manual_seed(0)
    wide = torch.randn(7, 6, size, generator=random).to(device, dtype)
    x, gate, weight = wide[:, :3], wide[:, 3:], torch.randn(size, generator=random).to(device, dtype)
    got = kernels.gated_rms_norm(x, gate, weight, 1e-3).float()
    right = F.rms_norm(x.float(), (size,), weight.float(), 1e-3) * F.silu(gate.float())
    error = float((got - right).abs().max() / right.abs().max())
    return "" if error <= TRIAL_TOLERANCE else f"Triton's gated norm is off by {error:.2g} of the largest magnitude"
