"""The causal depthwise convolution before the gated delta rule, over a ragged batch and without a word to the host.

By Triton kernels of ours on a GPU, else by `convolve` and `update` here, which say in torch what those compute.
flashinfer's `causal_conv1d` is for SM100 and SM103 alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels.flashinfer.delta import capture_ends
from engine.kernels.flashinfer.plan import StepPlan

TRIAL_TOLERANCE = 2.0**-7
"""Of the largest magnitude: both sum in float32 and round to bfloat16 once."""
_TRIAL_CHANNELS, _TRIAL_ROWS = 264, 37


def convolve(source: torch.Tensor, windows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """source [rows, C], windows [W, n] int32, weight [C, W] -> silu(sum over taps) [n, C], summed in float32."""
    taps = weight.t().float()
    total = source.index_select(0, windows[0]) * taps[0]
    for rows, tap in zip(windows[1:], taps[1:], strict=True):
        total.addcmul_(source.index_select(0, rows).float(), tap)
    return F.silu(total, inplace=True).to(source.dtype)


def update(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One token each: x [B, C], weight [C, W], states [slots, C, W - 1] in place, slots [B] int32 -> [B, C]."""
    window = torch.cat((states.index_select(0, slots), x.unsqueeze(-1)), dim=-1)
    states.index_copy_(0, slots.long(), window[:, :, 1:])
    return F.silu((window.float() * weight.float()).sum(dim=-1), inplace=True).to(x.dtype)


class CausalConv:
    """silu(convolution) with tails in slots. `trouble` says why Triton does not compute it; empty where it does."""

    def __init__(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        self._convolve: Callable[..., torch.Tensor] = convolve
        self._update: Callable[..., torch.Tensor] = update
        self.trouble = "Triton needs a GPU"
        if device.type == "cuda":
            self.trouble = self._take_kernels(device, dtype, width)

    def _take_kernels(self, device: torch.device, dtype: torch.dtype, width: int) -> str:
        try:
            kernels = importlib.import_module("engine.kernels.flashinfer.conv_kernel")
            trouble = find_fault(kernels, device, dtype, width)
        except Exception as error:  # noqa: BLE001 - Triton fails in many ways, and torch computes the same
            return f"Triton fails: {type(error).__name__}: {error}"
        if not trouble:
            self._convolve, self._update = kernels.convolve, kernels.update
        return trouble

    def run(self, plan: StepPlan, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """x [n, C], weight [C, W] -> [n, C]; states [slots, C, W - 1] in place."""
        if plan.num_decodes == len(x):
            out = self._update(x, weight, states, plan.slots)
            capture_ends(plan, states)
            return out
        return self._run_ragged(plan, x, weight, states)

    def _run_ragged(self, plan: StepPlan, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Decodes and prefills are one case: a token's window is W rows of the step's inputs and the tails before."""
        assert plan.windows is not None, "a model without convolutions was planned"
        assert plan.tails is not None, "tails are planned with windows"
        past = weight.shape[1] - 1
        old = states.index_select(0, plan.slots).transpose(1, 2)
        if plan.fresh is not None:
            # Filled, not multiplied: whatever stands in a slot, not-a-number included, does not count.
            old = old.masked_fill(plan.fresh.view(-1, 1, 1), 0.0)
        source = torch.cat((x, old.reshape(-1, x.shape[1])))
        out = self._convolve(source, plan.windows, weight)
        states.index_copy_(0, plan.slots_long, _tails(source, plan.tails, past))
        if plan.captured_tails is not None and plan.capture_slots is not None:
            states.index_copy_(0, plan.capture_slots, _tails(source, plan.captured_tails, past))
        return out


def _tails(source: torch.Tensor, rows: torch.Tensor, past: int) -> torch.Tensor:
    """[sequences, C, W - 1]"""
    return source.index_select(0, rows).view(-1, past, source.shape[1]).transpose(1, 2)


def find_fault(kernels: Any, device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Try the kernels on random numbers against the functions in torch; what is wrong, or nothing."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    weight, source = draw(_TRIAL_CHANNELS, width), draw(_TRIAL_ROWS, _TRIAL_CHANNELS)
    windows = torch.randint(_TRIAL_ROWS, (width, _TRIAL_ROWS - 4), generator=random, dtype=torch.int32).to(device)
    states, slots = draw(5, _TRIAL_CHANNELS, width - 1), torch.tensor([3, 0], dtype=torch.int32, device=device)
    rows, updated, expected = source[:4:2], states.clone(), states.clone()
    pairs = {
        "convolve": (kernels.convolve(source, windows, weight), convolve(source, windows, weight)),
        "update": (kernels.update(rows, weight, updated, slots), update(rows, weight, expected, slots)),
        "states": (updated, expected),
    }
    for name, (got, right) in pairs.items():
        error = float((got.float() - right.float()).abs().max() / right.float().abs().max())
        if not error <= TRIAL_TOLERANCE:
            return f"Triton's {name} is off by {error:.2g} of the largest magnitude"
    return ""
