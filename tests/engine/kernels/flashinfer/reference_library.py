"""flashinfer on a CPU: every name that the backend calls, bound to the installed signature, checked as a GPU would
check it, recorded, and computed by the library's own reference in plain torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.flashinfer.library import FUNCTIONS
from tests.engine.kernels.flashinfer import reference_gdn, reference_linear
from tests.engine.kernels.flashinfer.contract import (
    Call,
    bind,
    check_activations,
    check_indices,
    check_template,
    record,
    reference,
    require,
    templates,
    with_defaults,
)
from tests.engine.kernels.flashinfer.reference_attention import ReferenceDecode, ReferencePrefill

REFERENCE_EPS = 1e-6
"""The one epsilon that the references of the norms know."""
ROPE_HEAD_DIMS = (64, 128, 256, 512)
"""DISPATCH_HEAD_DIM of utils.cuh."""


class ReferenceLibrary:
    """An object with the names of FUNCTIONS. `dtype` is that of the activations: on a GPU bfloat16 alone; float32 is
    for tests at its tolerances.

    Mutable: `calls` grows with every call, in their order.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.calls: list[Call] = []
        for name in FUNCTIONS:
            if name in _REFERENCES:
                setattr(self, name, functools.partial(self._call, name))

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> ReferencePrefill:
        return ReferencePrefill(self.dtype, self.calls, args, kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> ReferenceDecode:
        return ReferenceDecode(self.dtype, self.calls, args, kwargs)

    def called(self, name: str) -> list[Call]:
        """The calls of one name: also `BatchDecodeWithPagedKVCacheWrapper.run`."""
        return [call for call in self.calls if call.name == name]

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        given = bind(name, args, kwargs)
        self.calls.append(record(name, given))
        return _REFERENCES[name](self.dtype, **with_defaults(name, given))


def append_paged_kv_cache(
    dtype: torch.dtype, *, append_key: torch.Tensor, append_value: torch.Tensor, paged_kv_cache: Any, **rest: Any
) -> None:
    keys, values = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
    named = {"append_key": append_key, "append_value": append_value, **rest}
    axes = check_template(templates("append_paged_kv_cache")[0], {**named, "paged_kv_cache": keys})
    heads_dim = 2 if rest["kv_layout"] == "NHD" else 1
    require(keys.shape[heads_dim] == append_key.shape[1], f"the cache has shape {tuple(keys.shape)}")
    require(values.shape == keys.shape and values.stride() == keys.stride(), "keys and values differ in layout")
    # page.cu takes the type of the cache for that of the new keys and values, and int32 for all indices.
    check_activations(keys.dtype, append_key=append_key, append_value=append_value, keys=keys, values=values)
    require(keys.dtype in (dtype, torch.float8_e4m3fn), f"the cache is {keys.dtype}")
    check_indices(
        **{name: rest[name] for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")}
    )
    batch, positions = rest["batch_indices"].long(), rest["positions"].long()
    require(bool(((batch >= 0) & (batch < axes["batch_size"])).all()), f"batch_indices {batch.tolist()}")
    pages = rest["kv_indptr"].diff().long()
    lengths = (pages - 1) * keys.shape[1] + rest["kv_last_page_len"]
    require(bool(((positions >= 0) & (positions < lengths[batch])).all()), f"positions {positions.tolist()}")
    # It takes a pointer to the page numbers too, and their end from kv_indptr: a graph that was captured with a view of
    # fewer reads on in the same buffer.
    numbers = rest["kv_indices"]
    reachable = numbers.as_strided((numbers.untyped_storage().nbytes() // 4 - numbers.storage_offset(),), (1,))
    require(int(rest["kv_indptr"][-1]) <= len(reachable), "kv_indices ends before kv_indptr does")
    paged = {**rest, "kv_indices": reachable, "paged_kv_cache": (keys, values)}
    reference("append_paged_kv_cache")(append_key, append_value, **paged)


def apply_rope_with_cos_sin_cache_inplace(
    dtype: torch.dtype,
    *,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    arguments = {"query": query, "key": key, "head_size": head_size, "cos_sin_cache": cos_sin_cache}
    check_template(templates("apply_rope_with_cos_sin_cache_inplace")[0], {**arguments, "positions": positions.int()})
    check_activations(dtype, query=query, key=key)
    check_indices(dtypes=(torch.int32, torch.int64), positions=positions)
    require(cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous(), "cos_sin_cache must be float32")
    require(head_size in ROPE_HEAD_DIMS, f"head_size {head_size} is not one of {ROPE_HEAD_DIMS}")
    require(cos_sin_cache.shape[1] <= head_size, f"rotary_dim {cos_sin_cache.shape[1]} of {head_size}")
    require(bool(((positions >= 0) & (positions < len(cos_sin_cache))).all()), f"positions {positions.tolist()}")
    # The real one makes the same views, and raises where these need a copy.
    views = [x.view(len(x), -1, head_size) for x in (query, key)]
    rotate = reference("apply_rope_with_cos_sin_cache_inplace")
    rotated = rotate(positions, query.contiguous(), key.contiguous(), head_size, cos_sin_cache, is_neox)
    for view, result in zip(views, rotated, strict=True):
        view.copy_(result.view_as(view))


def rmsnorm(
    dtype: torch.dtype,
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    enable_pdl: bool | None,
) -> torch.Tensor:
    require(input.dim() in (2, 3), f"input has shape {tuple(input.shape)}")
    check_template(templates("rmsnorm")[0], {"input": input.reshape(-1, input.shape[-1]), "weight": weight})
    check_activations(dtype, input=input, out=out)
    check_weight(dtype, weight)
    check_norm_start(input if out is None else out, input=input)
    result = reference("rmsnorm")(input.float() * _for_eps(eps), weight).to(dtype)
    return result if out is None else out.copy_(result)


def fused_add_rmsnorm(
    dtype: torch.dtype,
    *,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    enable_pdl: bool | None,
) -> None:
    """input <- the norm of their sum, residual <- their sum."""
    named = {"input": input, "residual": residual, "weight": weight}
    check_template(templates("fused_add_rmsnorm")[0], named)
    check_activations(dtype, input=input, residual=residual)
    check_weight(dtype, weight)
    check_norm_start(residual, input=input)
    factor = _for_eps(eps)
    normalized = reference("fused_add_rmsnorm")(input.float() * factor, residual.float() * factor, weight)
    residual.add_(input)
    input.copy_(normalized)


def check_weight(dtype: torch.dtype, weight: torch.Tensor) -> None:
    """Not its address: on a CPU it may lie in the checkpoint's file, on a GPU it is an allocation of its own."""
    require(weight.dtype == dtype and weight.is_contiguous(), f"the weight is {weight.dtype}, must be {dtype}")


def check_norm_start(other: torch.Tensor, *, input: torch.Tensor) -> None:
    """norm/kernels/*.py: the kernel for dense rows is compiled for tensors that begin at a multiple of 128 bytes, or of
    the greatest divisor that a row shares with that. A GPU's allocations do, so the offset within one counts."""
    if input.dim() == 2 and input.is_contiguous() and other.is_contiguous():
        for tensor in (input, other):
            step = math.gcd(128, tensor.shape[1] * tensor.element_size())
            offset = tensor.storage_offset() * tensor.element_size()
            require(
                offset % step == 0, f"dense rows begin {offset} bytes into their memory, not at a multiple of {step}"
            )


def _for_eps(eps: float) -> float:
    """What x is multiplied by so that x / sqrt(mean(x^2) + REFERENCE_EPS) is x / sqrt(mean(x^2) + eps)."""
    return float((REFERENCE_EPS / eps) ** 0.5)


def silu_and_mul(
    dtype: torch.dtype, *, input: torch.Tensor, out: torch.Tensor | None, enable_pdl: bool | None
) -> torch.Tensor:
    check_activations(dtype, input=input, out=out)
    require(input.shape[-1] % 2 == 0 and input.is_contiguous(), f"input has shape {tuple(input.shape)}")
    result: torch.Tensor = reference("silu_and_mul")(input.float()).to(dtype)
    return result if out is None else out.copy_(result)


def softmax(dtype: torch.dtype, *, logits: torch.Tensor, temperature: Any, enable_pdl: bool | None) -> torch.Tensor:
    check_template(templates("softmax")[0], {"logits": logits})
    require(logits.dtype == torch.float32 and logits.is_contiguous(), "logits must be float32 and dense")
    if isinstance(temperature, torch.Tensor):
        require(temperature.shape == (len(logits),) and temperature.dtype == torch.float32, "one temperature a row")
    return reference("softmax")(logits, temperature)


def top_k_renorm_probs(dtype: torch.dtype, *, probs: torch.Tensor, top_k: Any, is_deterministic: bool) -> torch.Tensor:
    check_template(templates("top_k_renorm_probs")[0], {"probs": probs})
    require(probs.dtype == torch.float32 and probs.is_contiguous(), "probs must be float32 and dense")
    if not isinstance(top_k, torch.Tensor):
        return reference("top_k_renorm_probs")(probs, top_k)
    require(top_k.shape == (len(probs),) and top_k.dtype == torch.int32, "one int32 top_k a row")
    require(bool(((top_k > 0) & (top_k <= probs.shape[1])).all()), f"top_k {top_k.tolist()}")
    # The reference takes the largest for all rows.
    rows = [reference("top_k_renorm_probs")(probs[i : i + 1], int(k)) for i, k in enumerate(top_k)]
    return torch.cat(rows)


def top_p_renorm_probs(dtype: torch.dtype, *, probs: torch.Tensor, top_p: Any, is_deterministic: bool) -> torch.Tensor:
    check_template(templates("top_p_renorm_probs")[0], {"probs": probs})
    require(probs.dtype == torch.float32 and probs.is_contiguous(), "probs must be float32 and dense")
    if isinstance(top_p, torch.Tensor):
        require(top_p.shape == (len(probs),) and top_p.dtype == torch.float32, "one float32 top_p a row")
    return reference("top_p_renorm_probs")(probs, top_p)


_REFERENCES: dict[str, Callable[..., Any]] = {
    "append_paged_kv_cache": append_paged_kv_cache,
    "apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace,
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "silu_and_mul": silu_and_mul,
    "softmax": softmax,
    "top_k_renorm_probs": top_k_renorm_probs,
    "top_p_renorm_probs": top_p_renorm_probs,
    "chunk_gated_delta_rule": reference_gdn.chunk_gated_delta_rule,
    "gated_delta_rule_decode_pretranspose": reference_gdn.gated_delta_rule_decode_pretranspose,
    "mm_fp4": reference_linear.mm_fp4,
    "mm_bf16_fp4": reference_linear.mm_bf16_fp4,
    "prepare_bf16_fp4_weights": reference_linear.prepare_bf16_fp4_weights,
    "nvfp4_quantize": reference_linear.nvfp4_quantize,
    "nvfp4_block_scale_interleave": reference_linear.nvfp4_block_scale_interleave,
    "bmm_fp8": reference_linear.bmm_fp8,
}
