"""The causal depthwise convolution before the gated delta rule, with its tail kept in slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.torch.plan import StepPlan


def causal_conv(plan: StepPlan, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """silu(convolution) of x [n, C] with weight [C, W]; states [slots, C, W - 1] in place."""
    decodes = plan.num_decodes
    if decodes == len(x):
        return _decode(plan, x, weight, states)
    out = torch.empty_like(x)
    if decodes:
        out[:decodes] = _decode(plan, x[:decodes], weight, states)
    for i in plan.prefills:
        start, end = plan.starts[i], plan.starts[i + 1]
        _prefill(plan, i, x[start:end], weight, states, out[start:end])
    return F.silu(out[decodes:], inplace=True) if not decodes else _silu_from(out, decodes)


def _silu_from(out: torch.Tensor, first: int) -> torch.Tensor:
    F.silu(out[first:], inplace=True)
    return out


def _decode(plan: StepPlan, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    slots, order = plan.decode_slots, plan.decode_order
    inputs = x if order is None else x[order]
    window = torch.cat((states[slots], inputs.unsqueeze(-1)), dim=-1)
    states[slots] = window[..., 1:]
    out = F.silu(torch.linalg.vecdot(window, weight), inplace=True)
    _capture_decodes(plan, states)
    if order is None:
        return out
    return torch.empty_like(out).index_copy_(0, order, out)


def _capture_decodes(plan: StepPlan, states: torch.Tensor) -> None:
    for i, captures in plan.captures.items():
        if i < plan.num_decodes:
            for _, slot in captures:
                states[slot] = states[plan.slots[i]]


def _prefill(
    plan: StepPlan, i: int, x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, out: torch.Tensor
) -> None:
    """One sequence, without the activation: W shifted products, which keeps the token-major layout."""
    width = weight.shape[1]
    slot = plan.slots[i]
    past = states[slot].t() if plan.has_initial_state[i] else x.new_zeros(width - 1, x.shape[1])
    padded = torch.cat((past, x))
    taps = weight.t().contiguous()
    torch.mul(padded[width - 1 :], taps[width - 1], out=out)
    for tap in range(width - 1):
        out.addcmul_(padded[tap : tap + len(x)], taps[tap])
    for offset, destination in plan.captures.get(i, ()):
        states[destination] = padded[offset : offset + width - 1].t()
    states[slot] = padded[len(x) :].t()
