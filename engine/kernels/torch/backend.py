"""The class that ties the torch functions to the `Kernels` protocol."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.kernels import UNSCALED, BatchLayout, KernelChoice, KvScales, PreparedLinear, SamplingBatch
from engine.kernels.torch import attention, conv, gated_delta, sampling
from engine.kernels.torch.linear import TorchLinear, linear, prepare_linear
from engine.kernels.torch.linear_trial import TRIALS
from engine.kernels.torch.plan import StepPlan, make_plan
from engine.kernels.torch.team import look
from engine.weights.formats import LinearWeight


class TorchKernels:
    """`Kernels` in plain torch, float32 on the CPU unless told otherwise. Holds the current step's plan: one thread."""

    name = "torch"

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> None:
        self.dtype = dtype
        self.device = torch.device("cpu") if device is None else device
        self._plan: StepPlan | None = None

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        return (KernelChoice("all", "torch"), *TRIALS.choices(self.dtype))

    def describe_layers(self) -> tuple[str, ...]:
        return ()

    def prepare_linear(self, shards: Sequence[LinearWeight]) -> TorchLinear:
        return prepare_linear(shards, self.dtype, self.device)

    def prepare_tensor(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def linear(self, x: torch.Tensor, layer: PreparedLinear) -> torch.Tensor:
        assert isinstance(layer, TorchLinear), f"a layer prepared by another backend: {type(layer).__name__}"
        look()
        return linear(x, layer)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids.to(self.device), table).to(self.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        look()
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(x, weight, eps).mul_(F.silu(gate))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def plan(self, layout: BatchLayout) -> None:
        self._plan = make_plan(layout, self.device)

    def apply_rope(self, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
        attention.apply_rope(self._current_plan(), q, k, cos_sin_cache)

    def append_paged_kv(
        self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, scales: KvScales = UNSCALED
    ) -> None:
        attention.append_paged_kv(self._current_plan(), k, v, kv_cache, scales)

    def paged_attention(
        self, q: torch.Tensor, kv_cache: torch.Tensor, scale: float, scales: KvScales = UNSCALED
    ) -> torch.Tensor:
        return attention.paged_attention(self._current_plan(), q, kv_cache, scale, scales)

    def causal_conv(self, x: torch.Tensor, weight: torch.Tensor, conv_states: torch.Tensor) -> torch.Tensor:
        return conv.causal_conv(self._current_plan(), x, weight, conv_states)

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
        return gated_delta.gated_delta_rule(self._current_plan(), q, k, v, a, b, A_log, dt_bias, states)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sampling.sample(logits, batch)

    def _current_plan(self) -> StepPlan:
        if self._plan is None:
            raise RuntimeError("plan(layout) must come before the step's kernels")
        look()
        return self._plan
