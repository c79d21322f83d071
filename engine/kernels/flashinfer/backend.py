"""The class that ties flashinfer's functions, and the alternatives to them, to the `Kernels` protocol."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels import UNSCALED, BatchLayout, KernelChoice, KvScales, PreparedLinear, SamplingBatch
from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer import delta
from engine.kernels.flashinfer.attention import AttentionShape, PagedAttention, apply_rope
from engine.kernels.flashinfer.checks import NORM_BYTES, aligned, expect
from engine.kernels.flashinfer.conv import CausalConv
from engine.kernels.flashinfer.gated_norm import in_parts, load_kernel
from engine.kernels.flashinfer.library import Library, dsl_trouble
from engine.kernels.flashinfer.plan import Arena, StepPlan, bind, ints_of, plan_on_host
from engine.kernels.flashinfer.sampling import sample
from engine.kernels.flashinfer.support import choose
from engine.kernels.linear import LinearRoom
from engine.kernels.linear.product import Stack
from engine.kernels.torch import TorchKernels
from engine.models.config import ModelConfig
from engine.options import Activations
from engine.weights.formats import LinearWeight

logger = logging.getLogger("dalsegno.kernels")

_CUDA_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _FixedDecode:
    """The buffers of steps of so many decodes, which stay where they are."""

    arena: Arena
    slots_long: torch.Tensor
    wrapper: object | None


class FlashinferKernels:
    """`Kernels` by flashinfer, for one model. Holds the current step's plan: one thread.

    On the CPU it runs with a library that has flashinfer's references behind the same names.
    """

    name = "flashinfer"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        config: ModelConfig,
        library: Library,
        traits: DeviceTraits,
        activations: Activations = "auto",
    ) -> None:
        on_gpu = device.type == "cuda"
        if on_gpu and dtype not in _CUDA_DTYPES:
            raise ValueError(f"flashinfer computes in {' or '.join(map(str, _CUDA_DTYPES))} on a GPU, not in {dtype}")
        self.device = device
        self.dtype = dtype
        self._config = config
        self._library = library
        width = self._conv_width
        self._conv = None if width is None else CausalConv(device, dtype, width)
        size = 0 if config.gated_delta_net is None else config.gated_delta_net.value_head_dim
        self._gated_norm, gated_norm_trouble = load_kernel(device, dtype, size) if size else (None, "")
        self._support = choose(
            traits,
            config,
            conv_trouble="" if self._conv is None else self._conv.trouble,
            gated_norm_trouble=gated_norm_trouble,
            cuda_version=torch.version.cuda if on_gpu else None,
            dsl_trouble=dsl_trouble(traits) if on_gpu else "",
        )
        for choice in self._support.choices:
            if on_gpu and choice.reason:
                logger.warning("%s falls back to %s: %s", choice.kernel, choice.implementation, choice.reason)
        self._alternative = TorchKernels(dtype, device)
        self._linear = LinearRoom(device, dtype, traits, activations, library)
        self._attention = self._make_attention() if self._support.attention else None
        self._fixed: dict[int, _FixedDecode] = {}
        self._max_fixed_pages = 0
        self._plan: StepPlan | None = None

    def _make_attention(self) -> PagedAttention:
        shape = AttentionShape(self._config.attention, self.dtype, self._support.prefill_backend)
        return PagedAttention(self._library, self.device, shape)

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """What serves each kernel; the linear layers among them once they are loaded."""
        return (*self._support.choices, *self._linear.choices())

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can hold a step of decodes."""
        return self._support.can_capture

    @property
    def workspace_bytes(self) -> int:
        """Device memory of the attention's plans and partial results."""
        return 0 if self._attention is None else self._attention.workspace_bytes

    def prepare_decodes(self, max_batch: int, max_pages: int) -> None:
        """Set aside buffers for steps of 1 to `max_batch` decodes with at most `max_pages` pages together. From then on
        `plan` writes such a step into them, at the same addresses each time; the states that it captures are planned
        beside them."""
        if max_pages < max_batch:
            raise ValueError(f"{max_batch} decodes have at least as many pages; max_pages is {max_pages}")
        for batch in range(1, max_batch + 1):
            host = plan_on_host(_largest_decodes(batch, max_pages), self._conv_width, self._decodes_by_chunks)
            arena = Arena(self.device, sum(ints_of(array.size) for array in host.arrays.values()))
            laid = arena.lay(host.arrays)
            wrapper = None
            if self._attention is not None:
                wrapper = self._attention.make_fixed_decode(
                    laid["kv_indptr"], laid["kv_indices"], laid["kv_last_page_len"]
                )
            self._fixed[batch] = _FixedDecode(arena, laid["slots"].long(), wrapper)
        self._max_fixed_pages = max_pages

    def plan(self, layout: BatchLayout) -> None:
        host = plan_on_host(layout, self._conv_width, self._decodes_by_chunks)
        fits = layout.num_decodes == layout.num_sequences and len(layout.kv_indices) <= self._max_fixed_pages
        fixed = self._fixed.get(layout.num_decodes) if fits else None
        arena = Arena(self.device) if fixed is None else fixed.arena
        laid = arena.lay(host.arrays)
        if host.capture_arrays:
            laid |= Arena(self.device).lay(host.capture_arrays)
        self._plan = bind(layout, host, laid, None if fixed is None else fixed.slots_long)
        if self._attention is not None:
            self._attention.plan(self._plan, None if fixed is None else fixed.wrapper)
        if not self._support.is_complete:
            self._alternative.plan(layout)

    @property
    def _conv_width(self) -> int | None:
        gdn = self._config.gated_delta_net
        return None if gdn is None else gdn.conv_kernel_size

    @property
    def _decodes_by_chunks(self) -> bool:
        return self._support.gdn_prefill and not self._support.gdn_decode

    def describe_layers(self) -> tuple[str, ...]:
        return tuple(map(str, self._linear.census()))

    def prepare_linear(self, shards: Sequence[LinearWeight]) -> PreparedLinear:
        return self._linear.prepare(shards)

    def prepare_tensor(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._alternative.prepare_tensor(tensor, dtype)

    def linear(self, x: torch.Tensor, layer: PreparedLinear) -> torch.Tensor:
        assert isinstance(layer, Stack), f"a layer prepared by another backend: {type(layer).__name__}"
        return layer.apply(x)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self._alternative.embedding(token_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not self._support.fused:
            return self._alternative.rms_norm(x, weight, eps)
        expect("norm weight", weight, (x.shape[-1],), x.dtype)
        rows = aligned(x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1]), NORM_BYTES)
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        self._library.rmsnorm(input=rows, weight=weight, eps=eps, out=out)
        return out.view(x.shape)

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if not self._support.fused:
            return self._alternative.fused_add_rms_norm(x, residual, weight, eps)
        expect("norm weight", weight, (x.shape[-1],), x.dtype)
        expect("residual", residual, tuple(x.shape), x.dtype)
        out = aligned(x.contiguous(), NORM_BYTES)
        self._library.fused_add_rmsnorm(input=out, residual=residual, weight=weight, eps=eps)
        return out

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self._gated_norm is None or x.dim() != 3 or x.stride(-1) != 1 or gate.stride(-1) != 1:
            return in_parts(self.rms_norm, x, gate, weight, eps)
        expect("norm weight", weight, (x.shape[-1],), x.dtype)
        expect("gate", gate, tuple(x.shape), x.dtype)
        return self._gated_norm(x, gate, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._support.fused:
            return self._alternative.silu_and_mul(gate_up)
        out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
        self._library.silu_and_mul(input=gate_up.contiguous(), out=out)
        return out

    def apply_rope(self, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
        if self._support.rope:
            apply_rope(self._library, self._current_plan(), q, k, cos_sin_cache)
        else:
            self._alternative.apply_rope(q, k, cos_sin_cache)

    def append_paged_kv(
        self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, scales: KvScales = UNSCALED
    ) -> None:
        if self._attention is None:
            self._alternative.append_paged_kv(k, v, kv_cache, scales)
        else:
            self._attention.append(self._current_plan(), k, v, kv_cache, scales)

    def paged_attention(
        self, q: torch.Tensor, kv_cache: torch.Tensor, scale: float, scales: KvScales = UNSCALED
    ) -> torch.Tensor:
        if self._attention is None:
            return self._alternative.paged_attention(q, kv_cache, scale, scales)
        return self._attention.attend(self._current_plan(), q, kv_cache, scale, scales)

    def causal_conv(self, x: torch.Tensor, weight: torch.Tensor, conv_states: torch.Tensor) -> torch.Tensor:
        assert self._conv is not None, "a model without linear layers"
        expect("conv weight", weight, (x.shape[1], conv_states.shape[2] + 1), x.dtype)
        expect("conv_states", conv_states, (None, x.shape[1], None), x.dtype)
        return self._conv.run(self._current_plan(), x, weight, conv_states)

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        plan = self._current_plan()
        if not self._support.gdn_prefill and (plan.chunks is not None or not self._support.gdn_decode):
            return self._alternative.gated_delta_rule(q, k, v, a, b, A_log, dt_bias, states)
        n, heads, head_dim = v.shape
        expect("states", states, (None, heads, head_dim, k.shape[-1]), torch.float32)
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            expect(name, x, (heads,), torch.float32)
        for name, x, shape in (("q", q, k.shape), ("k", k, k.shape), ("a", a, (n, heads)), ("b", b, (n, heads))):
            expect(name, x, tuple(shape), v.dtype)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        rows = n if plan.chunks is None else plan.chunks.first_row
        if rows:
            delta.decode(
                self._library,
                plan,
                aligned(q[:rows]),
                aligned(k[:rows]),
                aligned(v[:rows]),
                a[:rows],
                b[:rows],
                A_log,
                dt_bias,
                states,
                out[:rows],
            )
        if plan.chunks is not None:
            delta.by_chunks(
                self._library,
                plan.chunks,
                q[rows:],
                k[rows:],
                v[rows:],
                a[rows:],
                b[rows:],
                A_log,
                dt_bias,
                states,
                out[rows:],
            )
        delta.capture_ends(plan, states)
        return out

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if not self._support.fused:
            return self._alternative.sample(logits, batch)
        return sample(self._library, logits, batch)

    def _current_plan(self) -> StepPlan:
        if self._plan is None:
            raise RuntimeError("plan(layout) must come before the step's kernels")
        return self._plan


def _largest_decodes(batch: int, max_pages: int) -> BatchLayout:
    """A step of decodes whose arrays are as large as they get."""
    indptr = np.arange(batch + 1, dtype=np.int32)
    pages = indptr.copy()
    pages[-1] = max_pages
    ones = torch.ones(batch, dtype=torch.int32)
    return BatchLayout(
        num_decodes=batch,
        qo_indptr=torch.from_numpy(indptr),
        kv_indptr=torch.from_numpy(pages),
        kv_indices=torch.zeros(max_pages, dtype=torch.int32),
        kv_last_page_len=ones,
        positions=torch.from_numpy(np.diff(pages) - 1),
        state_slots=torch.from_numpy(indptr[:-1]),
        has_initial_state=ones.bool(),
        page_size=1,
    )
