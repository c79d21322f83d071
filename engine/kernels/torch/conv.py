"""The causal depthwise convolution before the gated delta rule, with its tail kept in slots.

It is quick where the channels of a tail lie side by side in memory, as `engine.storage` lays them on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.torch.plan import StepPlan


def causal_conv(plan: StepPlan, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """silu(convolution) of x [n, C] with weight [C, W]; states [slots, C, W - 1] in place."""
    decodes = plan.num_decodes
    taps = weight.t().contiguous()
    if decodes == len(x):
        return F.silu(_decode(plan, x, taps, states), inplace=True)
    out = torch.empty_like(x)
    if decodes:
        out[:decodes] = _decode(plan, x[:decodes], taps, states)
    for i in plan.prefills:
        start, end = plan.starts[i], plan.starts[i + 1]
        _prefill(plan, i, x[start:end], taps, states, out[start:end])
    return F.silu(out, inplace=True)


def _decode(plan: StepPlan, x: torch.Tensor, taps: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """One token for each of B sequences, without the activation; taps [W, C]."""
    slots, order = plan.decode_slots, plan.decode_order
    inputs = x if order is None else x[order]
    tails = states.transpose(1, 2)
    window = torch.cat((tails[slots], inputs.unsqueeze(1)), dim=1)
    tails[slots] = window[:, 1:]
    plan.capture_decodes(states)
    out = window.mul_(taps).sum(dim=1)
    return out if order is None else torch.empty_like(out).index_copy_(0, order, out)


def _prefill(
    plan: StepPlan, i: int, x: torch.Tensor, taps: torch.Tensor, states: torch.Tensor, out: torch.Tensor
) -> None:
    """One sequence, without the activation: W shifted products, which keeps the token-major layout."""
    width = len(taps)
    slot = plan.slots[i]
    past = states[slot].t() if plan.has_initial_state[i] else x.new_zeros(width - 1, x.shape[1])
    padded = torch.cat((past, x))
    torch.mul(padded[width - 1 :], taps[width - 1], out=out)
    for tap in range(width - 1):
        out.addcmul_(padded[tap : tap + len(x)], taps[tap])
    for offset, destination in plan.captures.get(i, ()):
        states[destination] = padded[offset : offset + width - 1].t()
    states[slot] = padded[len(x) :].t()
