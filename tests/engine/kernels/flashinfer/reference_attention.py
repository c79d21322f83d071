"""The paged attention wrappers of flashinfer: the real plan's arguments, kept as the real ones keep them, and a run
that computes with flashinfer's reference.

The reference is that of its batched paged attention (`trtllm_batch_context`): the wrappers' own templates round to
bfloat16, and take every last page for a full one. `test_reference_library.py` holds both against each other.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from flashinfer.trace.templates.attention import _trtllm_paged_attention_reference

from tests.engine.kernels.flashinfer.contract import (
    Call,
    bind,
    check_activations,
    check_indices,
    record,
    require,
    with_defaults,
)

PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
DECODE = "BatchDecodeWithPagedKVCacheWrapper"
HEAD_DIMS = (64, 128, 256)
"""Those of FA2 and FA3 in common."""
DECODE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads for a key head that the decode without tensor cores is built for (DISPATCH_GQA_GROUP_SIZE, utils.cuh)."""
KV_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


class ReferenceWrapper:
    """What both wrappers share. `buffers` stand for device memory: with use_cuda_graph they are the caller's."""

    name = ""
    buffer_of: dict[str, str] = {}  # noqa: RUF012
    """For each planned tensor (by the prefill's names), the parameter of the constructor that gives its buffer."""

    def __init__(self, dtype: torch.dtype, calls: list[Call], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = bind(self.name, args, kwargs)
        calls.append(record(self.name, given))
        self.options = with_defaults(self.name, given)
        workspace = self.options["float_workspace_buffer"]
        require(workspace.data_ptr() % 16 == 0, "the workspace must be aligned to 16 bytes")
        require(self.options["kv_layout"] in ("NHD", "HND"), f"kv_layout={self.options['kv_layout']!r}")
        require(self.options["backend"] in ("auto", "fa2", "fa3"), f"no reference for {self.options['backend']!r}")
        require(self.options["jit_args"] is None, "no reference for a custom kernel")
        self.dtype, self.calls = dtype, calls
        self.is_graph: bool = self.options["use_cuda_graph"]
        self.buffers: dict[str, torch.Tensor] = {}
        self.planned: dict[str, Any] = {}
        if self.is_graph:
            self.buffers = {key: self.options[parameter] for key, parameter in self.buffer_of.items()}
            for key, buffer in self.buffers.items():
                require(isinstance(buffer, torch.Tensor), f"{self.buffer_of[key]} must be a tensor with use_cuda_graph")
                check_indices(**{self.buffer_of[key]: buffer})

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = bind(f"{self.name}.plan", (self, *args), kwargs)
        del given["self"]
        self.calls.append(record(f"{self.name}.plan", given))
        planned = with_defaults(f"{self.name}.plan", given)
        tables = self.tables(planned)
        check_indices(**tables)
        self._check_plan(planned, tables)
        if self.is_graph:
            for key, table in tables.items():
                buffer = self.buffers[key]
                is_fixed = key != "indices"
                require(len(table) == len(buffer) if is_fixed else len(table) <= len(buffer), f"{key}: {len(table)}")
                buffer[: len(table)] = table
        else:
            # A copy, as from the host to the device: what the caller does to its tensors afterwards is not seen.
            self.buffers = {key: table.clone() for key, table in tables.items()}
        self.planned = planned

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = bind(f"{self.name}.run", (self, *args), kwargs)
        del given["self"]
        self.calls.append(record(f"{self.name}.run", given))
        return self.compute(**with_defaults(f"{self.name}.run", given))

    def compute(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        q_scale: float | None,
        k_scale: Any,
        v_scale: Any,
        out: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
        **rest: Any,
    ) -> torch.Tensor:
        plan, cache = self.planned, _one_tensor(paged_kv_cache)
        require(bool(plan), "run before plan")
        self._check_run(q, cache)
        require(not return_lse and window_left is None, "no reference for return_lse, window_left")
        for name in ("lse", "sinks", "kv_cache_sf", "skip_softmax_threshold_scale_factor"):
            require(rest.get(name) is None, f"no reference for {name}")
        require(not rest.get("args"), "custom arguments without a custom kernel")
        qo_indptr = self.buffers.get("qo_indptr", torch.arange(len(self.buffers["last_page_len"]) + 1))
        require(int(qo_indptr[-1]) == len(q), f"{len(q)} queries, planned for {int(qo_indptr[-1])}")
        pages, table, lengths = self._pages(cache)
        scale = plan["sm_scale"] if plan["sm_scale"] is not None else q.shape[2] ** -0.5
        for factor in (q_scale, k_scale):
            scale = scale if factor is None else scale * float(factor)
        result = _trtllm_paged_attention_reference(
            q,
            pages,
            table,
            lengths,
            causal=self.is_causal,
            kv_layout=self.options["kv_layout"],
            bmm1_scale=scale,
            bmm2_scale=1.0 if v_scale is None else float(v_scale),
            cum_seq_lens_q=qo_indptr,
        )
        return result if out is None else out.copy_(result)

    def tables(self, planned: dict[str, Any]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    @property
    def is_causal(self) -> bool:
        raise NotImplementedError

    def _pages(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequences' own pages alone, so that no other can be read; block table [B, most pages]; lengths [B]."""
        indptr, indices = self.buffers["kv_indptr"].tolist(), self.buffers["indices"]
        own = [indices[first:last].long() for first, last in itertools.pairwise(indptr)]
        table = torch.zeros(len(own), max(map(len, own)), dtype=torch.int32)
        for row, pages in enumerate(own):
            table[row, : len(pages)] = sum(map(len, own[:row])) + torch.arange(len(pages))
        page_size = self.planned["page_size"]
        lengths = torch.tensor([(len(pages) - 1) * page_size for pages in own]) + self.buffers["last_page_len"]
        return cache[torch.cat(own)], table, lengths

    def _check_plan(self, planned: dict[str, Any], tables: dict[str, torch.Tensor]) -> None:
        batch = len(tables["last_page_len"])
        require(len(tables["kv_indptr"]) == batch + 1, f"kv_indptr has {len(tables['kv_indptr'])} entries for {batch}")
        require(len(tables["indices"]) == int(tables["kv_indptr"][-1]), "kv_indices and kv_indptr differ in length")
        last, page_size = tables["last_page_len"], planned["page_size"]
        require(bool(((last >= 1) & (last <= page_size)).all()), f"last_page_len {last.tolist()}")
        q_heads, kv_heads = planned["num_qo_heads"], planned["num_kv_heads"]
        require(q_heads % kv_heads == 0, f"{q_heads} query heads for {kv_heads} key heads")
        dim = planned.get("head_dim") or planned["head_dim_qk"]
        require(dim in HEAD_DIMS, f"head_dim {dim} is not one of {HEAD_DIMS}")
        require(planned["pos_encoding_mode"] == "NONE", "positions are encoded before")
        require(planned["window_left"] == -1 and not planned["logits_soft_cap"], "no window, no soft cap")
        require(planned["q_data_type"] == self.dtype, f"q_data_type={planned['q_data_type']}, expected {self.dtype}")
        require(planned["kv_data_type"] in (None, self.dtype, *KV_DTYPES), f"kv_data_type={planned['kv_data_type']}")
        require(planned["o_data_type"] in (None, self.dtype), f"o_data_type={planned['o_data_type']}")
        for name in ("block_tables", "seq_lens"):
            require(planned[name] is None, f"no reference for {name}")
        has_tensor_cores = self.name == PREFILL or self.options["use_tensor_cores"]
        require(has_tensor_cores or q_heads // kv_heads in DECODE_GROUPS, f"no decode for groups {q_heads // kv_heads}")
        require(has_tensor_cores or planned["fixed_split_size"] is None, "fixed_split_size needs tensor cores")

    def _check_run(self, q: torch.Tensor, cache: torch.Tensor) -> None:
        plan = self.planned
        check_activations(self.dtype, q=q)
        dim = plan.get("head_dim") or plan["head_dim_qk"]
        require(tuple(q.shape[1:]) == (plan["num_qo_heads"], dim), f"q has shape {tuple(q.shape)}")
        require(cache.dim() == 5 and cache.shape[1] == 2, f"the cache has shape {tuple(cache.shape)}")
        page, heads = (plan["page_size"], plan["num_kv_heads"])
        inner = (page, heads) if self.options["kv_layout"] == "NHD" else (heads, page)
        require(tuple(cache.shape[2:]) == (*inner, dim), f"the cache has shape {tuple(cache.shape)}, planned {inner}")
        require(cache.stride(-1) == 1, f"the cache has strides {cache.stride()}")
        expected = plan["kv_data_type"] or plan["q_data_type"]
        require(cache.dtype == expected, f"the cache is {cache.dtype}, planned for {expected}")


class ReferencePrefill(ReferenceWrapper):
    name = PREFILL
    buffer_of = {  # noqa: RUF012
        "qo_indptr": "qo_indptr_buf",
        "kv_indptr": "paged_kv_indptr_buf",
        "indices": "paged_kv_indices_buf",
        "last_page_len": "paged_kv_last_page_len_buf",
    }

    def tables(self, planned: dict[str, Any]) -> dict[str, torch.Tensor]:
        require(planned["custom_mask"] is None and planned["packed_custom_mask"] is None, "no reference for a mask")
        require(planned["head_dim_vo"] in (None, planned["head_dim_qk"]), "keys and values differ in size")
        require(len(planned["qo_indptr"]) == len(planned["paged_kv_indptr"]), "qo_indptr and paged_kv_indptr differ")
        return {
            "qo_indptr": planned["qo_indptr"],
            "kv_indptr": planned["paged_kv_indptr"],
            "indices": planned["paged_kv_indices"],
            "last_page_len": planned["paged_kv_last_page_len"],
        }

    @property
    def is_causal(self) -> bool:
        return bool(self.planned["causal"])


class ReferenceDecode(ReferenceWrapper):
    name = DECODE
    buffer_of = {  # noqa: RUF012
        "kv_indptr": "paged_kv_indptr_buffer",
        "indices": "paged_kv_indices_buffer",
        "last_page_len": "paged_kv_last_page_len_buffer",
    }

    def tables(self, planned: dict[str, Any]) -> dict[str, torch.Tensor]:
        require(planned["q_len_per_req"] == 1, f"q_len_per_req={planned['q_len_per_req']}")
        return {
            "kv_indptr": planned["indptr"],
            "indices": planned["indices"],
            "last_page_len": planned["last_page_len"],
        }

    @property
    def is_causal(self) -> bool:
        """The one query is the last token: it sees everything."""
        return False


def _one_tensor(cache: Any) -> torch.Tensor:
    """[pages, 2, ...] of a pair (keys, values) too."""
    if isinstance(cache, torch.Tensor):
        return cache
    keys, values = cache
    require(keys.stride() == values.stride() and keys.dtype == values.dtype, "keys and values differ in layout")
    return torch.stack((keys, values), dim=1)
