"""The gated delta rule: one token against states in slots, and whole prompts by chunks.

The chunked form is the WY representation of Yang et al., 2024 ("Gated Delta Networks", section 3.3): inside a chunk of
64 tokens everything is a matrix product but one triangular inverse; only the state walks from chunk to chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels import STATE_GRID_TOKENS
from engine.kernels.torch.plan import Chunks, StepPlan
from engine.kernels.torch.team import look

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
    k_and_q, v = _normalized(k.float(), q.float()), v.float()
    beta = b.float().sigmoid()
    log_decay = F.softplus(a.float() + dt_bias).mul_(A_log.exp()).neg_()
    decodes = plan.num_decodes
    if decodes == len(v):
        return _decode(plan, k_and_q, v, beta, log_decay, states).to(dtype)
    out = torch.empty(v.shape, dtype=dtype, device=v.device)
    if decodes:
        part = slice(0, decodes)
        out[part] = _decode(plan, k_and_q[part], v[part], beta[part], log_decay[part], states)
    out[decodes:] = _prefill(plan, k_and_q, v, beta, log_decay, states)
    return out


def _normalized(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """k, q [n, Hk, K] -> [n, Hk, 2, K]: each l2-normalised, and q times K ** -0.5."""
    both = torch.stack((k, q), dim=2)
    factors = both.square().sum(dim=-1, keepdim=True).add_(_L2_EPS).rsqrt_()
    factors[:, :, 1].mul_(k.shape[-1] ** -0.5)
    return both.mul_(factors)


def _decode(
    plan: StepPlan,
    k_and_q: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """One token for each of B sequences -> [B, Hv, V]. Neighbouring slots are updated in place, others are gathered.

    The old state is read once, for key and query together: with u = beta * (v - decay * S k), the new state is
    decay * S + u k^T and the output decay * S q + (k . q) u.
    """
    slots, order = plan.decode_slots, plan.decode_order
    if order is not None:
        k_and_q, v, beta, log_decay = (x[order] for x in (k_and_q, v, beta, log_decay))
    state = states[slots]
    B, Hv, V, K = state.shape
    if Hv != k_and_q.shape[1]:
        k_and_q = k_and_q.repeat_interleave(Hv // k_and_q.shape[1], dim=1)
    k_and_q = k_and_q.view(B * Hv, 2, K)
    decay = log_decay.exp().view(B * Hv, 1, 1)
    flat = state.view(B * Hv, V, K)
    # The short side on the left: torch's batched product is several times slower the other way round.
    by_key, by_query = torch.bmm(k_and_q, flat.transpose(1, 2)).mul_(decay).unbind(1)
    key, query = k_and_q.unbind(1)
    update = (v.reshape(B * Hv, V) - by_key).mul_(beta.view(B * Hv, 1))
    out = torch.addcmul(by_query, update, torch.linalg.vecdot(key, query).unsqueeze(-1))
    flat.mul_(decay).addcmul_(update.unsqueeze(-1), key.unsqueeze(1))
    if isinstance(slots, torch.Tensor):
        states.index_copy_(0, slots, state)
    plan.capture_decodes(states)
    out = out.view(B, Hv, V)
    return out if order is None else torch.empty_like(out).index_copy_(0, order, out)


def _prefill(
    plan: StepPlan,
    k_and_q: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """All prefill tokens of the step -> [prefill tokens, Hv, V]."""
    chunks = plan.chunks
    Hv, V = v.shape[1:]
    beta, log_decay = beta[chunks.token_rows], log_decay[chunks.token_rows]
    if chunks.is_token is not None:
        # beta 0 and decay 1: a place without a token leaves the state as it is, whatever stands in q, k and v.
        beta, log_decay = beta * chunks.is_token, log_decay * chunks.is_token
    beta, log_decay = _pack_scalars(beta), _pack_scalars(log_decay)
    cumulative = log_decay.cumsum(dim=-1)
    k, q = (_pack(x, chunks) for x in k_and_q.unbind(2))
    within = _within_chunks(q, k, _pack(v, chunks), beta, cumulative)
    state = _initial_states(plan, states)
    flat_state = state.flatten(0, 1)
    out = torch.empty_like(within.new_values)
    first = 0
    for step, active in enumerate(chunks.active):
        look()
        last = first + active * Hv
        _scan_step(flat_state[: active * Hv], within.rows(first, last), out[first:last])
        for rank, slot in chunks.captures[step]:
            states[slot] = state[rank]
        first = last
    for rank, i in enumerate(chunks.ranks):
        states[plan.slots[i]] = state[rank]
    return out.view(-1, Hv, STATE_GRID_TOKENS, V).transpose(1, 2).reshape(-1, Hv, V)[chunks.places]


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


class _WithinChunks(NamedTuple):
    """What a chunk contributes apart from the state that it starts from; the first dim is chunk * Hv + head."""

    corrections: torch.Tensor
    """[.., C, K]: times the state, what it already predicts of the new values."""
    new_values: torch.Tensor
    """[.., C, V]"""
    queries: torch.Tensor
    """[.., C, K]: decayed from the chunk's start."""
    attention: torch.Tensor
    """[.., C, C]: causal."""
    writes: torch.Tensor
    """[.., C, K]: keys, decayed to the chunk's end."""
    decay: torch.Tensor
    """[.., 1, 1]: of the state over the chunk."""

    def rows(self, first: int, last: int) -> _WithinChunks:
        return _WithinChunks(*(x[first:last] for x in self))


def _within_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, cumulative: torch.Tensor
) -> _WithinChunks:
    """All that does not depend on the state, for P chunks of C tokens at once.

    q, k [P, Hk, C, K], v [P, Hv, C, V], beta and cumulative (log decay) [P, Hv, C].
    """
    P, Hk, C, K = k.shape
    Hv, V = v.shape[1], v.shape[3]

    def grouped(x: torch.Tensor) -> torch.Tensor:
        """[P, Hv, ...] -> [P, Hk, Hv / Hk, ...]: the value heads of each key head."""
        return x.view(P, Hk, Hv // Hk, *x.shape[2:])

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.view(P * Hv, *x.shape[3:])

    beta, cumulative = grouped(beta).unsqueeze(-1), grouped(cumulative).unsqueeze(-1)
    decay = cumulative.exp()
    remaining = (cumulative[..., -1:, :] - cumulative).exp_()
    # The upper half would overflow: it is set to 0 before the exponential, and again after it.
    pairwise = (cumulative - cumulative.transpose(-1, -2)).tril_().exp_().tril_()
    attention = (q @ k.transpose(-1, -2)).unsqueeze(2) * pairwise
    system = ((k @ k.transpose(-1, -2)).unsqueeze(2) * pairwise.mul_(beta)).tril_(-1)
    identity = torch.eye(C, dtype=k.dtype, device=k.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    q, k = q.unsqueeze(2), k.unsqueeze(2)
    solved = torch.empty(P, Hk, Hv // Hk, C, V + K, dtype=k.dtype, device=k.device)
    torch.mul(grouped(v), beta, out=solved[..., :V])
    torch.mul(k, decay * beta, out=solved[..., V:])
    solved = torch.bmm(flat(inverse), flat(solved))
    return _WithinChunks(
        corrections=solved[..., V:],
        new_values=solved[..., :V],
        queries=flat(q * decay),
        attention=flat(attention),
        writes=flat(k * remaining),
        decay=flat(decay[..., -1:, :]),
    )


def _scan_step(state: torch.Tensor, chunk: _WithinChunks, out: torch.Tensor) -> None:
    """Advance state [.., V, K] in place by a chunk, and write the chunk's outputs [.., C, V]."""
    transposed = state.transpose(1, 2)
    new_values = torch.baddbmm(chunk.new_values, chunk.corrections, transposed, alpha=-1)
    torch.bmm(chunk.queries, transposed, out=out)
    out.baddbmm_(chunk.attention, new_values)
    state.mul_(chunk.decay).baddbmm_(new_values.transpose(1, 2), chunk.writes)
