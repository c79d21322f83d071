"""flashinfer's own Python, down to where it calls compiled code; from there on the references.

Its functions check, convert, choose and hand on; none of that needs a GPU but to be told that there is one. So the
backend's calls go through it as they would on a device, and a kernel's arguments are what the reference is given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from flashinfer import decode, gdn_decode, gdn_prefill, norm, page, prefill, rope
from flashinfer.trace.templates.attention import _trtllm_paged_attention_reference

from engine.kernels.device import DeviceTraits
from tests.engine.kernels.flashinfer.contract import real, require
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary

FRONTS = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode_pretranspose",
    "append_paged_kv_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "rmsnorm",
    "fused_add_rmsnorm",
)
_CAUSAL, _NHD = 1, 0
"""flashinfer.utils.MaskMode.CAUSAL, TensorLayout.NHD."""


class FrontLibrary:
    """The real functions of FRONTS, and the references of a library for all others."""

    def __init__(self, library: ReferenceLibrary) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return real(name) if name in FRONTS else getattr(self._library, name)


@contextmanager
def fronts_on(traits: DeviceTraits, library: ReferenceLibrary) -> Iterator[None]:
    """flashinfer believes to be on this GPU; where it would start a kernel, `library` computes."""
    assert traits.capability is not None
    patches: list[tuple[Any, str, Any]] = [
        (torch, "empty", functools.partial(_unpinned, torch.empty)),
        (decode, "get_batch_decode_module", lambda *args: _DecodeModule()),
        (decode, "get_batch_prefill_module", lambda *args: _PrefillModule()),
        (prefill, "get_batch_prefill_module", lambda *args: _PrefillModule()),
        (page, "get_page_module", lambda: _PageModule(library)),
        (rope, "get_rope_module", lambda: _RopeModule(library)),
        (norm, "get_norm_module", lambda: _NormModule(library)),
        (norm, "_use_cuda_norm", lambda device: True),
        (norm, "device_support_pdl", lambda device: True),
        (gdn_decode, "run_pretranspose_decode", functools.partial(_decode_step, library)),
    ]
    for module in (decode, prefill, gdn_decode, gdn_prefill):
        patches.append((module, "get_compute_capability", lambda device: traits.capability))
    for module in (decode, prefill):
        patches.append((module, "device_support_pdl", lambda device: True))
        patches.append((module, "determine_attention_backend", lambda *args, **kwargs: "fa2"))
    patches += [
        (gdn_prefill, "get_device_sm_count", lambda device: traits.multiprocessors),
        (gdn_prefill, "get_device_name", lambda device: traits.name),
    ]
    for generation in ("sm80", "sm90", "sm120"):
        patches.append((gdn_prefill, f"chunk_gated_delta_rule_{generation}", functools.partial(_chunks, library)))
    patches += [
        (gdn_prefill, "chunk_gated_delta_rule_sm100", functools.partial(_chunks_sm100, library)),
        (torch.version, "cuda", "13.0"),
    ]
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _unpinned(empty: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """Only a driver locks pages."""
    return empty(*args, **kwargs)


class _PrefillModule:
    """What `get_batch_prefill_module` compiles: arguments by position, as batch_prefill.cu takes them."""

    def plan(self, *args: Any) -> list[int]:
        _, _, _, qo_indptr, kv_indptr, kv_lengths, rows, batch, *_ = args
        for name, table in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("kv_lengths", kv_lengths)):
            require(table.dtype == torch.int32 and table.device.type == "cpu", f"{name}: {table.dtype}")
        require(int(qo_indptr[-1]) <= rows and len(kv_indptr) == batch + 1, f"{rows} rows, {batch} sequences")
        return [0]

    def paged_run(self, *args: Any) -> None:
        q, keys, values, qo_indptr, kv_indptr, kv_indices, last_page_len, out = args[3:11]
        mask, layout, scale = args[12], args[13], args[23]
        _attend(q, keys, values, qo_indptr, kv_indptr, kv_indices, last_page_len, out, mask == _CAUSAL, layout, scale)


class _DecodeModule:
    """What `get_batch_decode_module` compiles, as batch_decode.cu takes it."""

    def plan(self, *args: Any) -> list[int]:
        kv_indptr, batch = args[3:5]
        require(kv_indptr.dtype == torch.int32 and kv_indptr.device.type == "cpu", f"kv_indptr: {kv_indptr.dtype}")
        require(len(kv_indptr) == batch + 1, f"kv_indptr has {len(kv_indptr)} entries for {batch} sequences")
        return [0]

    def run(self, *args: Any) -> None:
        q, keys, values, kv_indptr, kv_indices, last_page_len, out, _, layout = args[3:12]
        rows = torch.arange(len(q) + 1)
        _attend(q, keys, values, rows, kv_indptr, kv_indices, last_page_len, out, False, layout, args[16])


class _Leaf:
    """A compiled module that writes where the library's references do."""

    def __init__(self, library: ReferenceLibrary) -> None:
        self._library = library


class _PageModule(_Leaf):
    def append_paged_kv_cache(self, *args: Any) -> None:
        keys, values, layout = args[4], args[5], args[9]
        require(layout == _NHD, "keys and values are NHD")
        self._library.append_paged_kv_cache(*args[:4], (keys, values), *args[6:9])


class _RopeModule(_Leaf):
    def apply_rope_pos_ids_cos_sin_cache(self, *args: Any) -> None:
        q, k, q_out, k_out, table, positions, interleave = args
        require(q.data_ptr() == q_out.data_ptr() and k.data_ptr() == k_out.data_ptr(), "in place")
        flat = [x.view(len(x), -1) for x in (q, k)]
        self._library.apply_rope_with_cos_sin_cache_inplace(positions, *flat, q.shape[-1], table, not interleave)


class _NormModule(_Leaf):
    def rmsnorm(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool) -> None:
        self._library.rmsnorm(x, weight, eps, out)

    def fused_add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool
    ) -> None:
        self._library.fused_add_rmsnorm(x, residual, weight, eps)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    layout: int,
    scale: float,
) -> None:
    require(layout == _NHD, "keys and values are NHD")
    for name, table in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices), ("last_page_len", last_page_len)):
        require(table.dtype == torch.int32 and table.is_contiguous(), f"{name}: {table.dtype}")
    for i in range(len(last_page_len)):
        pages = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        rows = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
        out[rows] = _trtllm_paged_attention_reference(
            q[rows],
            torch.stack((keys[pages], values[pages]), dim=1),
            torch.arange(len(pages))[None],
            (len(pages) - 1) * keys.shape[1] + last_page_len[i : i + 1],
            causal=is_causal,
            kv_layout="NHD",
            bmm1_scale=scale,
        )


def _decode_step(library: ReferenceLibrary, pool: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """run_pretranspose_decode: the pool, the gates' parameters, the inputs, the output, sizes, scale, l2norm."""
    A_log, a, dt_bias, q, k, v, b, output = args[:8]
    scale, use_qk_l2norm = args[14:16]
    require(kwargs["use_pool_indexing"], "decodes work on the pool's slots")
    library.gated_delta_rule_decode_pretranspose(
        q, k, v, None, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        initial_state=pool,
        initial_state_indices=kwargs["initial_state_indices"],
        output_state_indices=kwargs["output_state_indices"],
    )  # fmt: skip


def _chunks(
    library: ReferenceLibrary,
    output: torch.Tensor,
    output_state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
    state_checkpoints: torch.Tensor | None,
    checkpoint_cu_starts: torch.Tensor | None,
    checkpoint_every_n_tokens: int,
    **slots: Any,
) -> None:
    slots.pop("_v32", None)
    library.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, True, cu_seqlens, False, output, output_state, state_checkpoints,
        checkpoint_cu_starts, checkpoint_every_n_tokens, **slots,
    )  # fmt: skip


def _chunks_sm100(
    library: ReferenceLibrary,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    output: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_state: torch.Tensor | None,
    scale: float,
    *,
    checkpoint_every_n_tokens: int,
    cu_checkpoints: torch.Tensor | None,
    output_checkpoints: torch.Tensor | None,
    **slots: Any,
) -> None:
    library.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, True, cu_seqlens, False, output, output_state, output_checkpoints,
        cu_checkpoints, checkpoint_every_n_tokens, **slots,
    )  # fmt: skip
