"""Rotary embedding and softmax attention over paged keys and values.

Where a layer's pages are stored with keys and values apart (as `engine.storage` does on the host), pages that are
neighbours are read in place; other pages are gathered, one sequence at a time. fp8 pages are always gathered, and read
in float32: right, and slower.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import UNSCALED, KvScales
from engine.kernels.torch.plan import Context, StepPlan
from engine.kernels.torch.team import look

FP8 = torch.float8_e4m3fn

# From this length on, two calls and a merge cost less than gathering a run that could be read in place.
_IN_PLACE_TOKENS = 128


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


def append_paged_kv(
    plan: StepPlan, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, scales: KvScales = UNSCALED
) -> None:
    """Write k and v [n, Hkv, D] to the step's places in kv_cache [pages, 2, page_size, Hkv, D]."""
    if kv_cache.dtype == FP8:
        # Bytes from here on: not every operation of torch knows fp8.
        k, v, kv_cache = _to_fp8(k, scales.k), _to_fp8(v, scales.v), kv_cache.view(torch.uint8)
    for new, pages in zip((k, v), kv_cache.unbind(1), strict=True):
        rows = _as_rows(pages) if plan.write_first_row is not None else None
        if rows is not None and plan.write_first_row is not None:
            rows.narrow(0, plan.write_first_row, len(new)).copy_(new)
        else:
            pages[plan.write_pages, plan.write_offsets] = new


def _to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in e4m3, as bytes; what is beyond its range saturates, which torch's own cast does not promise."""
    limit = torch.finfo(FP8).max
    return (x.float() / scale).clamp_(-limit, limit).to(FP8).view(torch.uint8)


def paged_attention(
    plan: StepPlan, q: torch.Tensor, kv_cache: torch.Tensor, scale: float, scales: KvScales = UNSCALED
) -> torch.Tensor:
    """Causal attention of q [n, Hq, D] over each sequence's own pages -> [n, Hq, D]."""
    if kv_cache.dtype == FP8:
        return _attend_fp8(plan, q, kv_cache, scale, scales)
    kv_heads, dim = kv_cache.shape[3:]
    decodes = plan.num_decodes
    # The queries of one key head are the rows of one product.
    grouped = q[:decodes].reshape(decodes, kv_heads, q.shape[1] // kv_heads, dim)
    parts = [_attend_one(grouped[i : i + 1], kv_cache, plan.contexts[i], scale) for i in range(decodes)]
    out = torch.cat(parts).view(decodes, *q.shape[1:]) if parts else q[:0]
    if decodes == len(q):
        return out
    later = []
    for i in plan.prefills:
        look()
        keys, values = _context_rows(kv_cache, plan.contexts[i])
        later.append(_attend_causal(q[plan.starts[i] : plan.starts[i + 1]], keys, values, scale))
    return torch.cat((out, *later)) if decodes or len(later) > 1 else later[0].contiguous()


def _attend_fp8(
    plan: StepPlan, q: torch.Tensor, kv_cache: torch.Tensor, scale: float, scales: KvScales
) -> torch.Tensor:
    """In float32, whatever q is: each sequence's pages are gathered as bytes and multiplied out."""
    parts = []
    for i, context in enumerate(plan.contexts):
        keys, values = _gather(kv_cache.view(torch.uint8), context.pages, context.tokens)
        keys, values = keys.view(FP8).float().mul_(scales.k), values.view(FP8).float().mul_(scales.v)
        parts.append(_attend_causal(q[plan.starts[i] : plan.starts[i + 1]].float(), keys, values, scale))
    return torch.cat(parts).to(q.dtype)


def _as_rows(pages: torch.Tensor) -> torch.Tensor | None:
    """[pages, page_size, H, D] seen as [pages * page_size, H, D], or None if that needs a copy."""
    if pages.stride(0) != pages.shape[1] * pages.stride(1):
        return None
    return pages.view(-1, pages.shape[2], pages.shape[3])


def _context_rows(kv_cache: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """The context's keys and values in the order of its tokens, [1, H, tokens, D] each: views if that is possible."""
    if context.rest is None and _has_rows(kv_cache):
        return _view(kv_cache, context.main_first_row, context.tokens)
    return _gather(kv_cache, context.pages, context.tokens)


def _has_rows(kv_cache: torch.Tensor) -> bool:
    """Whether the keys of neighbouring pages follow one another without the values between."""
    return kv_cache.stride(0) == kv_cache.shape[2] * kv_cache.stride(2)


def _view(kv_cache: torch.Tensor, first_row: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    _, kind, row, head, _ = kv_cache.stride()
    _, _, _, heads, dim = kv_cache.shape
    shape, strides = (1, heads, tokens, dim), (0, head, row, 1)
    start = kv_cache.storage_offset() + first_row * row
    return kv_cache.as_strided(shape, strides, start), kv_cache.as_strided(shape, strides, start + kind)


def _gather(kv_cache: torch.Tensor, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dim = kv_cache.shape[3:]
    pages = pages.to(kv_cache.device)
    keys, values = (
        x.index_select(0, pages).view(1, -1, heads, dim)[:, :tokens].transpose(1, 2) for x in kv_cache.unbind(1)
    )
    return keys, values


def _attend_one(q: torch.Tensor, kv_cache: torch.Tensor, context: Context, scale: float) -> torch.Tensor:
    """q [1, Hkv, Hq / Hkv, D] of the last token, which sees everything: the order of the keys does not matter."""
    is_split = context.rest is not None and context.main_tokens >= _IN_PLACE_TOKENS
    if context.rest is None or not is_split or q.device.type != "cpu" or not _has_rows(kv_cache):
        return F.scaled_dot_product_attention(q, *_context_rows(kv_cache, context), scale=scale)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    main = attend(q, *_view(kv_cache, context.main_first_row, context.main_tokens), scale=scale)
    rest = attend(q, *_gather(kv_cache, context.rest, context.tokens - context.main_tokens), scale=scale)
    return _merge(*main, *rest)


def _attend_causal(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, Hq, D] of the last n tokens; keys and values [1, Hkv, tokens, D]."""
    heads_first = q.transpose(0, 1)[None]
    tokens = keys.shape[2]
    past = tokens - len(q)
    if past == 0:
        out = F.scaled_dot_product_attention(heads_first, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    elif q.device.type == "cpu":
        out = _attend_past_and_own(heads_first, keys, values, past, scale)
    else:
        mask = torch.ones(len(q), tokens, dtype=torch.bool, device=q.device).tril(past)
        out = F.scaled_dot_product_attention(heads_first, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attend_past_and_own(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float
) -> torch.Tensor:
    """Attend to the past without a mask and to the own tokens causally, then merge.

    Torch's causal flag counts from the first key, so a segment behind a context would need a mask of n * tokens, and
    would compute what the mask hides.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    of_past = attend(q, keys[:, :, :past], values[:, :, :past], 0.0, False, scale=scale)
    of_own = attend(q, keys[:, :, past:], values[:, :, past:], 0.0, True, scale=scale)
    return _merge(*of_past, *of_own)


def _merge(a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Attention over two sets of keys from that over each, weighed by their log sums (Dao et al., 2022, section 3.1).

    a, b [1, H, n, D]; lse [1, H, n].
    """
    share_of_a = torch.sigmoid(lse_a - lse_b).unsqueeze(-1).to(a.dtype)
    return torch.lerp(b, a, share_of_a)
