"""A chunked gated delta rule for training: few large operations, differentiable, no Python loop over tokens.

Notation of "Gated Delta Networks" (Yang et al., 2024, section 3.3): inside a chunk the updates are condensed by the WY
form (a unit lower triangular solve), between chunks one state of shape [key_dim, value_dim] per head is carried on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rule over whole sequences, in float32.

    query, key: [batch, tokens, key_heads, key_dim]; value: [batch, tokens, value_heads, value_dim];
    g (log decay, <= 0) and beta: [batch, tokens, value_heads]. Returns the outputs, shaped and typed like value, and
    the final state [batch, value_heads, key_dim, value_dim] when it is asked for.
    """
    batch, tokens, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2], key.shape[3]
    out_dtype = value.dtype
    query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
    if use_qk_l2norm_in_kernel:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    query = query * key_dim**-0.5
    g, beta = g.transpose(1, 2).float(), beta.transpose(1, 2).float()

    pad = -tokens % chunk_size
    if pad:
        query, key, value = (F.pad(x, (0, 0, 0, pad)) for x in (query, key, value))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    chunks = (tokens + pad) // chunk_size
    query = query.reshape(batch, key_heads, 1, chunks, chunk_size, key_dim)
    key = key.reshape(batch, key_heads, 1, chunks, chunk_size, key_dim)
    group = value_heads // key_heads
    value = value.reshape(batch, key_heads, group, chunks, chunk_size, value_dim)
    cum = g.reshape(batch, key_heads, group, chunks, chunk_size).cumsum(-1)
    beta = beta.reshape(batch, key_heads, group, chunks, chunk_size, 1)

    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=value.device).tril()
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    # The products of keys and queries are shared by the value heads of a group; only the decay differs.
    key_t = key.transpose(-1, -2)
    system = (key @ key_t) * decay * beta
    attention = (query @ key_t) * decay
    from_start = cum.unsqueeze(-1).exp()
    right = torch.cat([value * beta, key * (beta * from_start)], dim=-1)
    # Inverting the small system once and multiplying is four times less triangular work than solving for `right`.
    identity = torch.eye(chunk_size, dtype=system.dtype, device=system.device).expand_as(system)
    solved = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True) @ right
    new_values, cum_key = solved.split([value_dim, key_dim], dim=-1)
    query = query * from_start
    key_to_end = (key * (cum[..., -1:] - cum).exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = cum[..., -1].exp()[..., None, None]

    shape = (batch, key_heads, group, key_dim, value_dim)
    state = value.new_zeros(shape) if initial_state is None else initial_state.float().reshape(shape)
    outputs = []
    for q, k_end, u, w, att, dec in zip(
        *(x.unbind(3) for x in (query, key_to_end, new_values, cum_key, attention, chunk_decay)), strict=True
    ):
        v_new = u - w @ state
        outputs.append(q @ state + att @ v_new)
        state = state * dec + k_end @ v_new
    out = torch.stack(outputs, dim=3).reshape(batch, value_heads, chunks * chunk_size, value_dim)[:, :, :tokens]
    final = state.reshape(batch, value_heads, key_dim, value_dim) if output_final_state else None
    return out.transpose(1, 2).to(out_dtype), final
