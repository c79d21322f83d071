"""The gated delta rule: one token against states in slots, and whole prompts by chunks.

The chunked form is the WY representation of Yang et al., 2024 ("Gated Delta Networks", section 3.3): inside a chunk of
64 tokens everything is a matrix product but one triangular inverse; only the state walks from chunk to chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import STATE_GRID_TOKENS
from engine.kernels.torch.plan import Chunks, StepPlan

_L2_EPS = 1e-6


def gated_delta_rule(
    plan: StepPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """q, k [n, Hk, K], v [n, Hv, V], a, b [n, Hv] -> [n, Hv, V]; states [slots, Hv, V, K] float32 in place."""
    dtype = v.dtype
    q, k, v = q.float(), k.float(), v.float()
    q, k = l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)
    beta = b.float().sigmoid()
    log_decay = F.softplus(a.float() + dt_bias) * -A_log.exp()
    decodes = plan.num_decodes
    if decodes == len(v):
        return _decode(plan, q, k, v, beta, log_decay, states).to(dtype)
    out = torch.empty(v.shape, dtype=dtype, device=v.device)
    if decodes:
        part = slice(0, decodes)
        out[part] = _decode(plan, q[part], k[part], v[part], beta[part], log_decay[part], states)
    out[decodes:] = _prefill(plan, q, k, v, beta, log_decay, states)
    return out


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dim."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _L2_EPS)


def _decode(
    plan: StepPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """One token for each of B sequences -> [B, Hv, V]. Neighbouring slots are updated in place, others are gathered."""
    slots, order = plan.decode_slots, plan.decode_order
    if order is not None:
        q, k, v, beta, log_decay = (x[order] for x in (q, k, v, beta, log_decay))
    state = states[slots]
    B, Hv, V, K = state.shape
    group = Hv // k.shape[1]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    flat = state.view(B * Hv, V, K)
    q, k, v = q.reshape(B * Hv, K), k.reshape(B * Hv, K), v.reshape(B * Hv, V)
    decay = log_decay.exp().reshape(B * Hv, 1)
    flat.mul_(decay.unsqueeze(-1))
    predicted = torch.bmm(flat, k.unsqueeze(-1)).squeeze(-1)
    delta = (v - predicted).mul_(beta.reshape(B * Hv, 1))
    flat.baddbmm_(delta.unsqueeze(-1), k.unsqueeze(1))
    out = torch.bmm(flat, q.unsqueeze(-1)).view(B, Hv, V)
    if isinstance(slots, torch.Tensor):
        states.index_copy_(0, slots, state)
    for i, captures in plan.captures.items():
        if i < plan.num_decodes:
            for _, slot in captures:
                states[slot] = states[plan.slots[i]]
    return out if order is None else torch.empty_like(out).index_copy_(0, order, out)


def _prefill(
    plan: StepPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """All prefill tokens of the step -> [prefill tokens, Hv, V]."""
    chunks = plan.chunks
    Hv, V = v.shape[1:]
    q, k, v = (_pack(x, chunks) for x in (q, k, v))
    if chunks.is_token is None:
        beta, log_decay = beta[chunks.token_rows], log_decay[chunks.token_rows]
    else:
        # beta 0 and decay 1: a place without a token leaves the state as it is, whatever stands in q, k and v.
        beta, log_decay = beta[chunks.token_rows] * chunks.is_token, log_decay[chunks.token_rows] * chunks.is_token
    beta, log_decay = _pack_scalars(beta), _pack_scalars(log_decay)
    cumulative = log_decay.cumsum(dim=-1)
    reads, attention, new_values, writes = _within_chunks(q, k, v, beta, cumulative)
    chunk_decay = cumulative[..., -1:].exp().unsqueeze(-1)
    state = _initial_states(plan, states)
    out = torch.empty(len(v), Hv, STATE_GRID_TOKENS, V, device=v.device)
    first = 0
    for step, active in enumerate(chunks.active):
        part = slice(first, first + active)
        out[part] = _scan_step(
            state[:active], reads[part], attention[part], new_values[part], writes[part], chunk_decay[part]
        )
        for rank, slot in chunks.captures[step]:
            states[slot] = state[rank]
        first += active
    for rank, i in enumerate(chunks.ranks):
        states[plan.slots[i]] = state[rank]
    return out.transpose(1, 2).reshape(-1, Hv, V)[chunks.places]


def _pack(x: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """[n, H, D] -> [chunks, H, 64, D]."""
    return x[chunks.token_rows].view(-1, STATE_GRID_TOKENS, *x.shape[1:]).transpose(1, 2).contiguous()


def _pack_scalars(x: torch.Tensor) -> torch.Tensor:
    """[chunks * 64, H] -> [chunks, H, 64]."""
    return x.view(-1, STATE_GRID_TOKENS, x.shape[1]).transpose(1, 2).contiguous()


def _initial_states(plan: StepPlan, states: torch.Tensor) -> torch.Tensor:
    """A copy of each rank's state, zero where it has none: [ranks, Hv, V, K]."""
    ranks = plan.chunks.ranks
    state = states[[plan.slots[i] for i in ranks]]
    for rank, i in enumerate(ranks):
        if not plan.has_initial_state[i]:
            state[rank] = 0.0
    return state


def _within_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, cumulative: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What does not depend on the state, for P chunks of C tokens at once.

    q, k [P, Hk, C, K], v [P, Hv, C, V], beta and cumulative (log decay) [P, Hv, C]. Returns reads [P, Hv, 2C, K] (rows
    that multiply the state: for the correction, then for the output), attention [P, Hv, C, C], new values [P, Hv, C, V]
    and writes [P, Hv, C, K].
    """
    P, Hk, C, K = k.shape
    Hv = v.shape[1]
    group = Hv // Hk

    def to_value_heads(x: torch.Tensor) -> torch.Tensor:
        return x if group == 1 else x.repeat_interleave(group, dim=1)

    pairwise = (cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)).tril_().exp_().tril_()
    kk = to_value_heads(k @ k.transpose(-1, -2))
    system = (kk * pairwise).mul_(beta.unsqueeze(-1)).tril_(-1)
    identity = torch.eye(C, dtype=k.dtype, device=k.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    attention = to_value_heads(q @ k.transpose(-1, -2)).mul_(pairwise)
    decay = cumulative.exp().unsqueeze(-1)
    remaining = (cumulative[..., -1:] - cumulative).exp().unsqueeze(-1)
    q, k = to_value_heads(q), to_value_heads(k)
    new_values = inverse @ (v * beta.unsqueeze(-1))
    reads = torch.empty(P, Hv, 2 * C, K, dtype=k.dtype, device=k.device)
    torch.matmul(inverse, k * (beta.unsqueeze(-1) * decay), out=reads[:, :, :C])
    torch.mul(q, decay, out=reads[:, :, C:])
    return reads, attention, new_values, k * remaining


def _scan_step(
    state: torch.Tensor,
    reads: torch.Tensor,
    attention: torch.Tensor,
    new_values: torch.Tensor,
    writes: torch.Tensor,
    chunk_decay: torch.Tensor,
) -> torch.Tensor:
    """Advance state [active, Hv, V, K] in place by a chunk; returns the chunk's outputs [active, Hv, C, V]."""
    C = attention.shape[-1]
    read = reads @ state.transpose(-1, -2)
    corrected = new_values - read[:, :, :C]
    out = attention @ corrected
    out += read[:, :, C:]
    state.mul_(chunk_decay).add_(corrected.transpose(-1, -2) @ writes)
    return out
