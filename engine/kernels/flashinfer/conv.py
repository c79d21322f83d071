"""The causal depthwise convolution before the gated delta rule, over a ragged batch and without a word to the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.flashinfer.plan import StepPlan


def causal_conv(plan: StepPlan, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """silu(convolution) of x [n, C] with weight [C, W] in float32; states [slots, C, W - 1] in place.

    Decodes and prefills are one case: a token's window is W rows of the step's inputs and the tails before them.
    """
    assert plan.windows is not None, "a model without convolutions was planned"
    assert plan.tails is not None, "tails are planned with windows"
    past = weight.shape[1] - 1
    old = states.index_select(0, plan.slots).transpose(1, 2)
    if plan.fresh is not None:
        # Filled, not multiplied: whatever stands in a slot, not-a-number included, does not count.
        old = old.masked_fill(plan.fresh.view(-1, 1, 1), 0.0)
    source = torch.cat((x, old.reshape(-1, x.shape[1])))
    out = convolve(source, plan.windows, weight)
    states.index_copy_(0, plan.slots_long, _tails(source, plan.tails, past))
    if plan.captured_tails is not None and plan.capture_slots is not None:
        states.index_copy_(0, plan.capture_slots, _tails(source, plan.captured_tails, past))
    return out


def _tails(source: torch.Tensor, rows: torch.Tensor, past: int) -> torch.Tensor:
    """[sequences, C, W - 1]"""
    return source.index_select(0, rows).view(-1, past, source.shape[1]).transpose(1, 2)


def convolve(source: torch.Tensor, windows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """source [rows, C], windows [W, n], weight [C, W] -> silu(sum over taps) [n, C], summed in float32."""
    taps = weight.t().float()
    total = source.index_select(0, windows[0]) * taps[0]
    for rows, tap in zip(windows[1:], taps[1:], strict=True):
        total.addcmul_(source.index_select(0, rows).float(), tap)
    return F.silu(total, inplace=True).to(source.dtype)
