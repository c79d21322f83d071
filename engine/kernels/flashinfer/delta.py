"""The gated delta rule by flashinfer: decodes against the pool's slots, prefills by chunks that start and end in them.

q and k are normalised here for the chunks, in float32 and then rounded: the same on every architecture, and what
flashinfer's own reference takes. The decode kernel does it within, in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import STATE_GRID_TOKENS
from engine.kernels.flashinfer.library import Library
from engine.kernels.flashinfer.plan import ChunkPart, StepPlan

_L2_EPS = 1e-6


def decode(
    library: Library,
    plan: StepPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One token for each of the plan's decodes: q, k [D, Hk, K], v [D, Hv, V], a, b [D, Hv] -> out [D, Hv, V]."""
    library.gated_delta_rule_decode_pretranspose(
        q=q.unsqueeze(1),
        k=k.unsqueeze(1),
        v=v.unsqueeze(1),
        state=None,
        A_log=A_log,
        a=a.unsqueeze(1),
        dt_bias=dt_bias,
        b=b.unsqueeze(1),
        scale=q.shape[-1] ** -0.5,
        output=out.unsqueeze(1),
        use_qk_l2norm=True,
        initial_state=states,
        initial_state_indices=plan.slots[: plan.num_decodes],
        backend="flashinfer",
    )


def by_chunks(
    library: Library,
    part: ChunkPart,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """All tokens of some sequences: q, k [m, Hk, K], v [m, Hv, V], a, b [m, Hv] -> out [m, Hv, V]."""
    library.chunk_gated_delta_rule(
        q=normalized(q),
        k=normalized(k),
        v=v.contiguous(),
        g=decay(a, A_log, dt_bias),
        beta=b.float().sigmoid().contiguous(),
        scale=q.shape[-1] ** -0.5,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=part.cu_seqlens,
        use_qk_l2norm_in_kernel=False,
        output=out,
        output_state=states,
        state_checkpoints=None if part.grid_slots is None else states,
        checkpoint_cu_starts=part.grid_starts,
        checkpoint_every_n_tokens=0 if part.grid_slots is None else STATE_GRID_TOKENS,
        use_cp=False,
        state_indices=part.read_slots,
        backend="flashinfer",
        output_state_indices=part.write_slots,
        checkpoint_state_indices=part.grid_slots,
    )


def capture_ends(plan: StepPlan, states: torch.Tensor) -> None:
    """Copy the states that the step's segments end with to where they are captured."""
    if plan.end_sources is not None and plan.end_destinations is not None:
        states.index_copy_(0, plan.end_destinations, states.index_select(0, plan.end_sources))


def normalized(x: torch.Tensor) -> torch.Tensor:
    """x [m, H, K] / its l2 norm over K, computed in float32; contiguous."""
    wide = x.float()
    return (wide * wide.square().sum(dim=-1, keepdim=True).add_(_L2_EPS).rsqrt_()).to(x.dtype).contiguous()


def decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """exp(-exp(A_log) * softplus(a + dt_bias)) in float32: what the state is multiplied by, not its logarithm."""
    return F.softplus(a.float() + dt_bias).mul_(A_log.exp()).neg_().exp_().contiguous()
