"""Llama (Llama 2 and 3, SmolLM2 and their kin): grouped-query attention and SwiGLU, with pre-normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import UnsupportedConfigError
from engine.kernels import Kernels, KvScales, PreparedLinear
from engine.models.config import AttentionConfig, LayerKind, ModelConfig
from engine.models.config_fields import ConfigFields, read_eos_token_ids, read_rope
from engine.models.parts import (
    Mlp,
    Outer,
    head_logits,
    load_kv_scales,
    load_mlp,
    load_norm,
    load_outer,
    mlp,
    page_scales,
)
from engine.storage import ModelState
from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: PreparedLinear
    out: PreparedLinear
    kv_scales: KvScales
    post_attention_norm: torch.Tensor
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Weights:
    outer: Outer
    layers: tuple[Layer, ...]


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """config.json of a `llama` model. Raises UnsupportedConfigError."""
    fields = ConfigFields(raw)
    fields.require("hidden_act", ("silu", "swish"), default="silu")
    fields.require("sliding_window", (None,), default=None)
    fields.refuse_experts()
    hidden, q_heads = fields.integer("hidden_size", 4096), fields.integer("num_attention_heads", 32)
    kv_heads = fields.integer("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise UnsupportedConfigError("num_key_value_heads", kv_heads, f"a divisor of {q_heads} query heads")
    head_dim = fields.integer("head_dim", hidden // q_heads)
    max_position_embeddings = fields.positions("max_position_embeddings", 2048)
    rope = read_rope(fields, head_dim, max_position_embeddings, partial_default=1.0)
    if rope.rotary_dim != head_dim:
        raise UnsupportedConfigError("partial_rotary_factor", rope.rotary_dim / head_dim, "1")
    return ModelConfig(
        architecture="llama",
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 11008),
        layer_kinds=(LayerKind.FULL_ATTENTION,) * fields.integer("num_hidden_layers", 32),
        attention=AttentionConfig(q_heads, kv_heads, head_dim, has_bias=fields.boolean("attention_bias", False)),
        gated_delta_net=None,
        rope=rope,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        has_tied_embeddings=fields.boolean("tie_word_embeddings", False),
        has_mlp_bias=fields.boolean("mlp_bias", False),
        eos_token_ids=read_eos_token_ids(raw),
    )


def load_weights(checkpoint: Checkpoint, config: ModelConfig, kernels: Kernels) -> Weights:
    """Raises WeightsError that names the tensor."""
    outer = load_outer(checkpoint, "model.", config, kernels)
    layers = tuple(_load_layer(checkpoint, f"model.layers.{i}", config, kernels) for i in range(config.num_layers))
    return Weights(outer=outer, layers=layers)


def _load_layer(checkpoint: Checkpoint, prefix: str, config: ModelConfig, kernels: Kernels) -> Layer:
    hidden, heads = config.hidden_size, config.attention
    q_rows, kv_rows = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    q, k, v = (
        checkpoint.linear(f"{prefix}.self_attn.{name}", rows, hidden, has_bias=heads.has_bias)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    )
    out = checkpoint.linear(f"{prefix}.self_attn.o_proj", hidden, q_rows, has_bias=heads.has_bias)
    return Layer(
        input_norm=load_norm(checkpoint, f"{prefix}.input_layernorm", hidden, kernels),
        qkv=kernels.prepare_linear([q, k, v]),
        out=kernels.prepare_linear([out]),
        kv_scales=load_kv_scales(checkpoint, f"{prefix}.self_attn"),
        post_attention_norm=load_norm(checkpoint, f"{prefix}.post_attention_layernorm", hidden, kernels),
        mlp=load_mlp(checkpoint, f"{prefix}.mlp", config, kernels),
    )


def forward(
    weights: Weights, config: ModelConfig, kernels: Kernels, state: ModelState, token_ids: torch.Tensor
) -> torch.Tensor:
    """The planned step's token_ids [n] -> hidden [n, hidden], final norm applied; the state is advanced in place."""
    layers, eps = weights.layers, config.rms_norm_eps
    residual = kernels.embedding(token_ids, weights.outer.embedding)
    x = kernels.rms_norm(residual, layers[0].input_norm, eps)
    next_norms = (*(layer.input_norm for layer in layers[1:]), weights.outer.final_norm)
    for layer, kv, next_norm in zip(layers, state.kv, next_norms, strict=True):
        x = _attention(layer, config, kernels, weights.outer.cos_sin, kv, x)
        x = kernels.fused_add_rms_norm(x, residual, layer.post_attention_norm, eps)
        x = mlp(kernels, layer.mlp, x)
        x = kernels.fused_add_rms_norm(x, residual, next_norm, eps)
    return x


def _attention(
    layer: Layer, config: ModelConfig, kernels: Kernels, cos_sin: torch.Tensor, kv: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    heads = config.attention
    qkv = kernels.linear(x, layer.qkv).view(len(x), -1, heads.head_dim)
    q, k, v = qkv.split_with_sizes((heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    kernels.apply_rope(q, k, cos_sin)
    scales = page_scales(kv, layer.kv_scales)
    kernels.append_paged_kv(k, v, kv, scales)
    mixed = kernels.paged_attention(q, kv, heads.head_dim**-0.5, scales)
    return kernels.linear(mixed.view(len(x), -1), layer.out)


def logits(weights: Weights, kernels: Kernels, hidden_rows: torch.Tensor) -> torch.Tensor:
    """hidden_rows [rows, hidden] of `forward` -> float32 [rows, vocab]."""
    return head_logits(kernels, weights.outer, hidden_rows)
