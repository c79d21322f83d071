"""The parts that all architectures share: embedding, feed-forward, head, and how they come out of a checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from engine.kernels import UNSCALED, Kernels, KvScales, PreparedLinear
from engine.models.config import ModelConfig
from engine.models.rope import cos_sin_cache
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import DenseWeight


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU: down(silu(gate x) * up x)."""

    gate_up: PreparedLinear
    down: PreparedLinear


@dataclass(frozen=True, slots=True)
class Outer:
    """What stands before and after the layers."""

    embedding: torch.Tensor
    """[vocab, hidden], in the checkpoint's dtype."""
    cos_sin: torch.Tensor
    final_norm: torch.Tensor
    lm_head: PreparedLinear


def load_outer(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, kernels: Kernels, *, norm_offset: float = 0.0
) -> Outer:
    """`norm_offset` is added to the norm's weight: 1 where the checkpoint stores (w - 1)."""
    table = checkpoint.tensor(f"{prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size))
    if config.has_tied_embeddings:
        checkpoint.skip(("lm_head.",), "the head is tied to the embedding")
        head = kernels.prepare_linear([DenseWeight(table)])
    else:
        head = kernels.prepare_linear([checkpoint.linear("lm_head", config.vocab_size, config.hidden_size)])
    checkpoint.skip(("*.rotary_emb.inv_freq",), "the rotary frequencies are computed from config.json")
    return Outer(
        embedding=kernels.prepare_tensor(table, table.dtype),
        cos_sin=kernels.prepare_tensor(cos_sin_cache(config.rope, config.max_position_embeddings), torch.float32),
        final_norm=load_norm(checkpoint, f"{prefix}norm", config.hidden_size, kernels, offset=norm_offset),
        lm_head=head,
    )


def load_norm(checkpoint: Checkpoint, prefix: str, size: int, kernels: Kernels, *, offset: float = 0.0) -> torch.Tensor:
    """A norm's weight [size] with `offset` added in float32."""
    weight = checkpoint.tensor(f"{prefix}.weight", (size,))
    return kernels.prepare_tensor(weight.float() + offset if offset else weight)


def load_mlp(checkpoint: Checkpoint, prefix: str, config: ModelConfig, kernels: Kernels) -> Mlp:
    hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
    gate, up = (
        checkpoint.linear(f"{prefix}.{name}", inner, hidden, has_bias=has_bias) for name in ("gate_proj", "up_proj")
    )
    down = checkpoint.linear(f"{prefix}.down_proj", hidden, inner, has_bias=has_bias)
    return Mlp(gate_up=kernels.prepare_linear([gate, up]), down=kernels.prepare_linear([down]))


def load_kv_scales(checkpoint: Checkpoint, prefix: str) -> KvScales:
    """The scales of attention `prefix` for fp8 pages; 1 where the checkpoint has none."""
    scales = checkpoint.kv_scales(prefix)
    return UNSCALED if scales is None else KvScales(*scales)


def page_scales(pages: torch.Tensor, scales: KvScales) -> KvScales:
    """What pages [pages, 2, ...] are written and read with: a checkpoint's scales are for fp8 pages alone."""
    return scales if pages.dtype == torch.float8_e4m3fn else UNSCALED


def mlp(kernels: Kernels, weights: Mlp, x: torch.Tensor) -> torch.Tensor:
    return kernels.linear(kernels.silu_and_mul(kernels.linear(x, weights.gate_up)), weights.down)


def head_logits(kernels: Kernels, weights: Outer, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [rows, hidden], final norm applied -> float32 [rows, vocab]."""
    return kernels.linear(hidden, weights.lm_head).float()


def weight_bytes(record: object) -> int:
    """Bytes of all tensors and prepared layers in a record of records."""
    if dataclasses.is_dataclass(record) and not hasattr(record, "nbytes"):
        return sum(weight_bytes(getattr(record, field.name)) for field in dataclasses.fields(record))
    if isinstance(record, tuple):
        return sum(weight_bytes(part) for part in record)
    return int(getattr(record, "nbytes", 0))
