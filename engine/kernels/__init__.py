"""The kernels that a model is written against, and the layout of the batch that they work on.

Shapes, dtypes and layouts are those of flashinfer's public APIs, so that its backend is a second class and no second
design: ragged batches `[total tokens, heads, dim]` with `qo_indptr`; paged KV as NHD `[pages, 2, page_size, kv_heads,
head_dim]` with `kv_indptr`, `kv_indices`, `kv_last_page_len`; recurrent state pools `[slots, v_heads, V, K]` in
float32, indexed by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.weights.formats import LinearWeight

STATE_GRID_TOKENS = 64
"""The chunk of the gated delta rule: inside a segment, states can be captured at multiples of it."""


@dataclass(frozen=True, slots=True)
class StateCapture:
    """Copy the state of `sequence` after `offset_tokens` of its tokens in this step into pool slot `destination_slot`.

    `offset_tokens` is a multiple of STATE_GRID_TOKENS within the segment, or the segment's whole length.
    """

    sequence: int
    offset_tokens: int
    destination_slot: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Which tokens a step computes and where their context lies. All tensors are on the host; B sequences, n tokens.

    Sequences with exactly one new token and a context (decodes) come first, `num_decodes` of them. A page in
    `kv_indices` already has room for the step's own tokens, and `kv_last_page_len` counts them.
    """

    num_decodes: int
    qo_indptr: torch.Tensor
    """[B + 1] int32: sequence i's new tokens are rows qo_indptr[i]:qo_indptr[i + 1]."""
    kv_indptr: torch.Tensor
    """[B + 1] int32: sequence i's pages are kv_indices[kv_indptr[i]:kv_indptr[i + 1]], in the order of its tokens."""
    kv_indices: torch.Tensor
    """[total pages] int32: page numbers."""
    kv_last_page_len: torch.Tensor
    """[B] int32: tokens in each sequence's last page, the new ones included; 1..page_size."""
    positions: torch.Tensor
    """[n] int32: each new token's position in its sequence, from 0."""
    state_slots: torch.Tensor
    """[B] int32: the slot of each sequence's recurrent state, read and written in place; distinct."""
    has_initial_state: torch.Tensor
    """[B] bool: False starts from the zero state, whatever the slot holds."""
    page_size: int
    captures: tuple[StateCapture, ...] = ()

    @property
    def num_sequences(self) -> int:
        return len(self.qo_indptr) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.qo_indptr[-1])


@dataclass(frozen=True, slots=True)
class KvScales:
    """What the stored keys and values of one layer are multiplied by: fp8 pages hold key / k and value / v."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Which implementation serves a kernel, as the daemon prints at start and shows to operators."""

    kernel: str
    """A method of `Kernels`, or a part of one: `paged_attention (decode)`."""
    implementation: str
    """Whose, and which: `flashinfer gated_delta_rule_decode_pretranspose`, `torch`."""
    reason: str = ""
    """Why it is not the first choice; empty where it is."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to pick one token for each of B rows of logits; all tensors [B], on the host.

    The result of a row depends on that row alone: its random number is a function of (seed, offset), never of the
    batch.
    """

    temperature: torch.Tensor
    """float32; 0 is greedy."""
    top_k: torch.Tensor
    """int32; 0 is off."""
    top_p: torch.Tensor
    """float32 in (0, 1]; 1 is off."""
    min_p: torch.Tensor
    """float32 in [0, 1]; 0 is off."""
    seeds: torch.Tensor
    """int64: one per request."""
    offsets: torch.Tensor
    """int64: the position of the token that is being picked."""


class PreparedLinear(Protocol):
    """A linear layer's weights in the form that a backend computes with. Opaque to models."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> str:
        """The class that serves it, as the daemon prints at start: `dense`, `nvfp4 w4a16 (triton)`."""
        ...


class Kernels(Protocol):
    """One backend. Holds the plan of the current step (as flashinfer's wrappers do), so only the engine thread may use
    it.

    Activations are `dtype` on `device`. Every method but `plan` and the in-place ones named so returns a new tensor.
    """

    name: str
    device: torch.device
    dtype: torch.dtype

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """What serves each kernel here; those that are not the first choice say why."""
        ...

    def describe_layers(self) -> tuple[str, ...]:
        """Which class serves which linear layers, a line for each group of them; empty where one serves all."""
        ...

    def prepare_linear(self, shards: Sequence[LinearWeight]) -> PreparedLinear:
        """Stack the weights of layers that share an input, by rows, into one layer. Formats may differ."""
        ...

    def prepare_tensor(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Bring a plain tensor (norm weight, embedding table, A_log) to the device, in `dtype` or this backend's."""
        ...

    def linear(self, x: torch.Tensor, layer: PreparedLinear) -> torch.Tensor:
        """x [n, in] -> [n, out]: x @ weight.T + bias."""
        ...

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """token_ids [n] int64, table [vocab, hidden] -> [n, hidden]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., d] -> x / sqrt(mean(x^2) + eps) * weight. A model that stores (w - 1) adds the one at load."""
        ...

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place; returns rms_norm(residual), which may lie where x did."""
        ...

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x, gate [..., d] -> rms_norm(x, weight) * silu(gate)."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [n, 2 d] -> silu(left half) * right half, [n, d]."""
        ...

    def plan(self, layout: BatchLayout) -> None:
        """Bind the step that the following calls work on; host work that all layers share happens here, once."""
        ...

    def apply_rope(self, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
        """Rotate the leading dims of q [n, Hq, D] and k [n, Hkv, D] in place (NeoX halves), at the plan's positions.

        cos_sin_cache [max_position, rotary_dim] float32: cosines in the left half, sines in the right.
        """
        ...

    def append_paged_kv(
        self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, scales: KvScales = UNSCALED
    ) -> None:
        """Write k and v [n, Hkv, D] to the plan's pages of kv_cache [pages, 2, page_size, Hkv, D], in place.

        kv_cache is in this backend's dtype, or float8_e4m3fn: then k / scales.k and v / scales.v are rounded to it, and
        what is beyond its range saturates.
        """
        ...

    def paged_attention(
        self, q: torch.Tensor, kv_cache: torch.Tensor, scale: float, scales: KvScales = UNSCALED
    ) -> torch.Tensor:
        """Causal attention of q [n, Hq, D] over the plan's pages (the step's own tokens included) -> [n, Hq, D].

        `scale` multiplies the products of queries and keys; `scales` are those that the pages were written with.
        """
        ...

    def causal_conv(self, x: torch.Tensor, weight: torch.Tensor, conv_states: torch.Tensor) -> torch.Tensor:
        """silu(depthwise causal convolution) of x [n, C] with weight [C, W] -> [n, C].

        conv_states [slots, C, W - 1]: the last W - 1 inputs of each sequence, oldest first; read, then written in
        place, and captured as the plan says.
        """
        ...

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
        """q, k [n, Hk, K], v [n, Hv, V], a, b [n, Hv] -> [n, Hv, V]; states [slots, Hv, V, K] float32 in place.

        q and k are l2-normalised here (eps 1e-6) and q scaled by K ** -0.5; beta = sigmoid(b), decay =
        exp(-exp(A_log) * softplus(a + dt_bias)); S = decay * S; S += beta * (v - S k) k^T; o = S q (Yang et al., 2024,
        eq. 10). The final state goes back to the sequence's slot, and captures to theirs.
        """
        ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """logits [B, vocab] float32 -> token ids [B] int64 on the host: temperature, then top-k, top-p and min-p."""
        ...
