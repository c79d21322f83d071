"""Rotary embedding and softmax attention over paged keys and values.

Where a layer's pages are stored with keys and values apart (as `engine.storage` does on the host), pages that are
neighbours are read in place; other contexts are gathered, one sequence at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.torch.plan import Context, StepPlan


def apply_rope(plan: StepPlan, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Rotate the leading dims of q [n, Hq, D] and k [n, Hkv, D] in place; NeoX halves (Su et al., 2021)."""
    cos, sin = _rope_rows(plan, cos_sin_cache, q.dtype)
    rotary_dim = cos.shape[-1]
    joint = _side_by_side(q, k)
    for x in (q, k) if joint is None else (joint,):
        rotated = x[..., :rotary_dim]
        halves_swapped = rotated.roll(rotary_dim // 2, dims=-1)
        rotated.mul_(cos).addcmul_(halves_swapped, sin)


def _rope_rows(plan: StepPlan, table: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1, rotary_dim] each: cosines twice; sines negative in the left half."""
    key = id(table)
    if key not in plan.rope:
        cos, sin = table[plan.positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)
        plan.rope[key] = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    return plan.rope[key]


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """One view of both, if they are neighbouring columns of one projection's output."""
    is_adjacent = k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    if not is_adjacent or q.stride() != k.stride() or q.stride(1) != q.shape[2]:
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def append_paged_kv(plan: StepPlan, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Write k and v [n, Hkv, D] to the step's places in kv_cache [pages, 2, page_size, Hkv, D]."""
    for new, pages in zip((k, v), kv_cache.unbind(1), strict=True):
        rows = _as_rows(pages) if plan.write_first_row is not None else None
        if rows is not None and plan.write_first_row is not None:
            rows.narrow(0, plan.write_first_row, len(new)).copy_(new)
        else:
            pages[plan.write_pages, plan.write_offsets] = new


def paged_attention(plan: StepPlan, q: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of q [n, Hq, D] over each sequence's own pages -> [n, Hq, D]."""
    key_pages, value_pages = kv_cache.unbind(1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i, context in enumerate(plan.contexts):
        keys, values = _context_rows(key_pages, context), _context_rows(value_pages, context)
        start, end = plan.starts[i], plan.starts[i + 1]
        if i < plan.num_decodes:
            out[i] = _attend_one(q[i], keys, values, scale)
        else:
            out[start:end] = _attend_causal(q[start:end], keys, values, scale)
    return out


def _as_rows(pages: torch.Tensor) -> torch.Tensor | None:
    """[pages, page_size, H, D] seen as [pages * page_size, H, D], or None if that needs a copy."""
    if pages.stride(0) != pages.shape[1] * pages.stride(1):
        return None
    return pages.view(-1, pages.shape[2], pages.shape[3])


def _context_rows(pages: torch.Tensor, context: Context) -> torch.Tensor:
    """The context's tokens as [H, tokens, D]: a view if they lie in one run, else a copy."""
    rows = _as_rows(pages) if context.first_row is not None else None
    if rows is not None and context.first_row is not None:
        return rows.narrow(0, context.first_row, context.tokens).transpose(0, 1)
    gathered = pages.index_select(0, context.pages.to(pages.device))
    return gathered.view(-1, pages.shape[2], pages.shape[3])[: context.tokens].transpose(0, 1)


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [Hq, D] of the last token. The queries of one key head are the rows of one product."""
    heads, _, dim = keys.shape
    grouped = q.reshape(1, heads, -1, dim)
    return F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale).reshape(q.shape)


def _attend_causal(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, Hq, D] of the last n tokens."""
    heads_first = q.transpose(0, 1)[None]
    past = keys.shape[1] - len(q)
    if past == 0:
        out = F.scaled_dot_product_attention(
            heads_first, keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
        )
    elif q.device.type == "cpu":
        out = _attend_past_and_own(heads_first, keys[None], values[None], past, scale)
    else:
        mask = torch.ones(len(q), keys.shape[1], dtype=torch.bool, device=q.device).tril(past)
        out = F.scaled_dot_product_attention(
            heads_first, keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def _attend_past_and_own(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float
) -> torch.Tensor:
    """Attend to the past without a mask and to the own tokens causally, then weigh the two by their softmax sums.

    Torch's causal flag counts from the first key, so a segment behind a context would need a mask of n * tokens, and
    would compute what the mask hides. The merge is FlashAttention's (Dao et al., 2022, section 3.1).
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out_past, lse_past = attend(q, keys[:, :, :past], values[:, :, :past], 0.0, False, scale=scale)
    out_own, lse_own = attend(q, keys[:, :, past:], values[:, :, past:], 0.0, True, scale=scale)
    share_of_past = torch.sigmoid(lse_past - lse_own).unsqueeze(-1).to(q.dtype)
    return torch.lerp(out_own, out_past, share_of_past)
