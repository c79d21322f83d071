"""Rotary embedding and attention over paged keys and values by flashinfer's wrappers: planned once a step, run once a
layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels import KvScales
from engine.kernels.flashinfer.checks import aligned, expect
from engine.kernels.flashinfer.library import Library
from engine.kernels.flashinfer.plan import Fence, StepPlan
from engine.models.config import AttentionConfig
from engine.step_memory import ATTENTION_WORKSPACE_BYTES, INDEX_WORKSPACE_BYTES

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

_TENSOR_CORE_GROUP = 4
"""Query heads of one key head from which on a decode step is quicker on tensor cores."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the wrappers are planned for."""

    heads: AttentionConfig
    dtype: torch.dtype
    prefill_backend: str
    """flashinfer's name; decodes always take `fa2`, whose plan a captured graph can follow."""

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)


class PagedAttention:
    """flashinfer's wrappers and the memory that they share. Mutable: holds the current step's plan."""

    def __init__(self, library: Library, device: torch.device, shape: AttentionShape) -> None:
        self._library = library
        self._shape = shape
        # flashinfer wants zeros for the first use.
        self._workspace = torch.zeros(ATTENTION_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace, kv_layout="NHD", backend=shape.prefill_backend
        )
        self._eager_decode = self._make_decode()
        self._decode = self._eager_decode
        self._num_wrappers = 2
        self._kv_dtype = shape.dtype
        """What the pages were last seen to hold; planned for until a layer shows another."""
        self._fixed_decode: object | None = None
        self._fence = Fence(device)

    @property
    def workspace_bytes(self) -> int:
        """What the wrappers allocated on the device, those of fixed decodes included."""
        return ATTENTION_WORKSPACE_BYTES + self._num_wrappers * INDEX_WORKSPACE_BYTES

    def make_fixed_decode(
        self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor
    ) -> object:
        """A wrapper for steps of len(kv_last_page_len) decodes that always reads these buffers."""
        self._num_wrappers += 1
        return self._make_decode(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=kv_indptr,
            paged_kv_indices_buffer=kv_indices,
            paged_kv_last_page_len_buffer=kv_last_page_len,
        )

    def _make_decode(self, **buffers: object) -> Library:
        heads = self._shape.heads
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace,
            kv_layout="NHD",
            use_tensor_cores=heads.num_q_heads // heads.num_kv_heads >= _TENSOR_CORE_GROUP,
            backend="fa2",
            **buffers,
        )

    def plan(self, plan: StepPlan, fixed_decode: object | None) -> None:
        """Divide the step's work. `fixed_decode` is the wrapper of a step of decodes alone, if it has one."""
        layout = plan.layout
        heads, decodes = self._shape.heads, layout.num_decodes
        self._fixed_decode = fixed_decode
        self._decode = self._eager_decode if fixed_decode is None else fixed_decode
        # The wrappers plan into page-locked memory, and copy from it when the device comes to that.
        self._fence.wait()
        # The wrappers divide the work on the host, but pass page numbers on to the device: they get those that are
        # there, for they would wait for a copy.
        first_page = int(layout.kv_indptr[decodes])
        shared = {
            "num_qo_heads": heads.num_q_heads,
            "num_kv_heads": heads.num_kv_heads,
            "page_size": layout.page_size,
            "q_data_type": self._shape.dtype,
            "kv_data_type": self._kv_dtype,
            "sm_scale": self._shape.scale,
        }
        if decodes:
            self._decode.plan(
                indptr=layout.kv_indptr[: decodes + 1],
                indices=plan.kv_indices[:first_page],
                last_page_len=layout.kv_last_page_len[:decodes],
                head_dim=heads.head_dim,
                **shared,
            )
        if decodes < layout.num_sequences:
            self._prefill.plan(
                qo_indptr=layout.qo_indptr[decodes:] - decodes,
                paged_kv_indptr=layout.kv_indptr[decodes:] - first_page,
                paged_kv_indices=plan.kv_indices[first_page:],
                paged_kv_last_page_len=layout.kv_last_page_len[decodes:],
                head_dim_qk=heads.head_dim,
                causal=True,
                **shared,
            )
        self._fence.put()

    def append(
        self, plan: StepPlan, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, scales: KvScales
    ) -> None:
        """Write k and v [n, Hkv, D] to the step's places; rounded to fp8 first if the pages are."""
        heads = self._shape.heads
        self._check_pages(plan, kv_cache)
        for name, x in (("k", k), ("v", v)):
            expect(name, x, (len(plan.positions), heads.num_kv_heads, heads.head_dim), self._shape.dtype)
        if self._kv_dtype == FP8:
            k, v = to_fp8(k, scales.k), to_fp8(v, scales.v)
        self._library.append_paged_kv_cache(
            append_key=aligned(k),
            append_value=aligned(v),
            batch_indices=plan.batch_indices,
            positions=plan.positions,
            paged_kv_cache=kv_cache,
            kv_indices=plan.kv_indices,
            kv_indptr=plan.kv_indptr,
            kv_last_page_len=plan.kv_last_page_len,
            kv_layout="NHD",
        )

    def attend(
        self, plan: StepPlan, q: torch.Tensor, kv_cache: torch.Tensor, scale: float, scales: KvScales
    ) -> torch.Tensor:
        """q [n, Hq, D] -> [n, Hq, D]: the decodes' rows by one wrapper, the others by the other."""
        heads, decodes = self._shape.heads, plan.num_decodes
        self._check_pages(plan, kv_cache)
        expect("q", q, (len(plan.positions), heads.num_q_heads, heads.head_dim), self._shape.dtype)
        if not math.isclose(scale, self._shape.scale, rel_tol=1e-6):
            raise ValueError(f"attention was planned with the scale {self._shape.scale}, but {scale} is asked for")
        q = q.contiguous()
        out = torch.empty_like(q)
        is_fp8 = self._kv_dtype == FP8
        factors = {"k_scale": scales.k, "v_scale": scales.v} if is_fp8 else {}
        if decodes:
            self._decode.run(q=q[:decodes], paged_kv_cache=kv_cache, out=out[:decodes], **factors)
        if decodes < len(q):
            self._prefill.run(q=q[decodes:], paged_kv_cache=kv_cache, out=out[decodes:], **factors)
        return out

    def _check_pages(self, plan: StepPlan, kv_cache: torch.Tensor) -> None:
        heads = self._shape.heads
        shape = (None, 2, plan.layout.page_size, heads.num_kv_heads, heads.head_dim)
        expect("kv_cache", kv_cache, shape, self._shape.dtype, FP8)
        if kv_cache.dtype != self._kv_dtype:
            self._kv_dtype = kv_cache.dtype
            self.plan(plan, self._fixed_decode)


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale, rounded to e4m3; what is beyond its range saturates, and what is not a number stays so."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def apply_rope(library: Library, plan: StepPlan, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Rotate the leading dims of q [n, Hq, D] and k [n, Hkv, D] in place, NeoX halves."""
    expect("cos_sin_cache", cos_sin_cache, (None, None), torch.float32)
    expect("q", q, (len(plan.positions), None, k.shape[-1]), k.dtype)
    expect("k", k, (len(plan.positions), None, q.shape[-1]), q.dtype)
    rows = [_as_rows(q), _as_rows(k)]
    library.apply_rope_with_cos_sin_cache_inplace(
        positions=plan.positions,
        query=rows[0],
        key=rows[1],
        head_size=q.shape[-1],
        cos_sin_cache=cos_sin_cache,
        is_neox=True,
    )
    _copy_back((q, k), rows)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[n, H, D] as [n, H * D]: a view where the heads lie side by side, else a copy."""
    return aligned(x.reshape(len(x), -1))


def _copy_back(originals: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    for original, row in zip(originals, rows, strict=True):
        if row.data_ptr() != original.data_ptr():
            original.copy_(row.view(original.shape))
