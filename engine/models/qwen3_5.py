"""Qwen3.5 and its successors, text only: three Gated DeltaNet layers for each gated full-attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import UnsupportedConfigError
from engine.kernels import Kernels, KvScales, PreparedLinear
from engine.models.config import AttentionConfig, GatedDeltaNetConfig, LayerKind, ModelConfig
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

# Fields of the text's config that no logit depends on: the state is always float32, and MTP is not used. The interval
# counts where there is no list of layers.
_WITHOUT_EFFECT = (
    "full_attention_interval",
    "layer_types",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "language_model_only",
    "unsloth_fixed",
    "unsloth_version",
)
VISION_PATTERNS = ("model.visual.", "visual.")
MTP_PATTERNS = ("mtp.", "model.mtp.")


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention whose output is multiplied by the sigmoid of a gate. Rows of `qkv`: for each query head its
    query and its gate, then all keys, then all values."""

    qkv: PreparedLinear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out: PreparedLinear
    kv_scales: KvScales


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Rows of `inputs`: q, k and v (through the convolution), z (the output's gate), b and a (per value head)."""

    inputs: PreparedLinear
    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: PreparedLinear


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    mixer: Attention | GatedDeltaNet
    post_attention_norm: torch.Tensor
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Weights:
    outer: Outer
    layers: tuple[Layer, ...]


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """config.json of `qwen3_5` (its text in `text_config`) or `qwen3_5_text`. Raises UnsupportedConfigError."""
    fields = ConfigFields(raw).section("text_config") if "text_config" in raw else ConfigFields(raw)
    fields.require("hidden_act", ("silu", "swish"), default="silu")
    fields.require("attn_output_gate", (True,), default=True)
    # The gate of Gated DeltaNet; that of attention is a sigmoid in every one of these models.
    fields.require("output_gate_type", ("swish", "silu"), default="swish")
    fields.refuse_experts()
    q_heads = fields.integer("num_attention_heads", 16)
    kv_heads = fields.integer("num_key_value_heads", 4)
    if q_heads % kv_heads:
        raise UnsupportedConfigError(
            fields.name("num_key_value_heads"), kv_heads, f"a divisor of {q_heads} query heads"
        )
    head_dim = fields.integer("head_dim", 256)
    max_position_embeddings = fields.positions("max_position_embeddings", 32768)
    has_bias = fields.boolean("attention_bias", False)
    tied = fields.boolean("tie_word_embeddings", False)
    config = ModelConfig(
        architecture="qwen3_5",
        vocab_size=fields.integer("vocab_size", 248320),
        hidden_size=fields.integer("hidden_size", 4096),
        intermediate_size=fields.integer("intermediate_size", 12288),
        layer_kinds=_layer_kinds(fields),
        attention=AttentionConfig(q_heads, kv_heads, head_dim, has_bias, has_output_gate=True, has_qk_norm=True),
        gated_delta_net=_gated_delta_net_config(fields),
        rope=read_rope(fields, head_dim, max_position_embeddings, partial_default=0.25),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        has_tied_embeddings=ConfigFields(raw).boolean("tie_word_embeddings", tied),
        eos_token_ids=read_eos_token_ids(raw, fields.raw),
    )
    fields.refuse_unread(_WITHOUT_EFFECT)
    if fields.raw is not raw:
        outer = {name: value for name, value in raw.items() if name != "tie_word_embeddings"}
        fields.refuse_contradiction(ConfigFields(outer))
    return config


def _layer_kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    num_layers = fields.integer("num_hidden_layers", 32)
    names = fields.raw.get("layer_types")
    if names is None:
        interval = fields.integer("full_attention_interval", 4)
        is_full = ((i + 1) % interval == 0 for i in range(num_layers))
        return tuple(LayerKind.FULL_ATTENTION if full else LayerKind.LINEAR_ATTENTION for full in is_full)
    if not isinstance(names, list) or len(names) != num_layers or not set(names) <= set(LayerKind):
        expected = f"{num_layers} times {' or '.join(LayerKind)}"
        raise UnsupportedConfigError(fields.name("layer_types"), names, expected)
    return tuple(LayerKind(name) for name in names)


def _gated_delta_net_config(fields: ConfigFields) -> GatedDeltaNetConfig:
    k_heads, v_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if v_heads % k_heads:
        raise UnsupportedConfigError(
            fields.name("linear_num_value_heads"), v_heads, f"a multiple of {k_heads} key heads"
        )
    conv_kernel_size = fields.integer("linear_conv_kernel_dim", 4)
    if conv_kernel_size < 2:
        raise UnsupportedConfigError(fields.name("linear_conv_kernel_dim"), conv_kernel_size, "at least 2")
    return GatedDeltaNetConfig(
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        key_head_dim=fields.integer("linear_key_head_dim", 128),
        value_head_dim=fields.integer("linear_value_head_dim", 128),
        conv_kernel_size=conv_kernel_size,
    )


def load_weights(checkpoint: Checkpoint, config: ModelConfig, kernels: Kernels) -> Weights:
    """Norms that the checkpoint stores as (w - 1) get their one here. Raises WeightsError that names the tensor."""
    checkpoint.skip(VISION_PATTERNS, "the vision tower: only text is served")
    checkpoint.skip(MTP_PATTERNS, "multi-token prediction is not used")
    has_tower = checkpoint.has("model.language_model.embed_tokens.weight")
    prefix = "model.language_model." if has_tower else "model."
    outer = load_outer(checkpoint, prefix, config, kernels, norm_offset=1.0)
    layers = tuple(
        _load_layer(checkpoint, f"{prefix}layers.{i}", kind, config, kernels)
        for i, kind in enumerate(config.layer_kinds)
    )
    return Weights(outer=outer, layers=layers)


def _load_layer(checkpoint: Checkpoint, prefix: str, kind: LayerKind, config: ModelConfig, kernels: Kernels) -> Layer:
    hidden = config.hidden_size
    load_mixer = _load_attention if kind is LayerKind.FULL_ATTENTION else _load_gated_delta_net
    return Layer(
        input_norm=load_norm(checkpoint, f"{prefix}.input_layernorm", hidden, kernels, offset=1.0),
        mixer=load_mixer(checkpoint, prefix, config, kernels),
        post_attention_norm=load_norm(checkpoint, f"{prefix}.post_attention_layernorm", hidden, kernels, offset=1.0),
        mlp=load_mlp(checkpoint, f"{prefix}.mlp", config, kernels),
    )


def _load_attention(checkpoint: Checkpoint, prefix: str, config: ModelConfig, kernels: Kernels) -> Attention:
    prefix = f"{prefix}.self_attn"
    hidden, heads = config.hidden_size, config.attention
    q_rows, kv_rows = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    shards = [
        checkpoint.linear(f"{prefix}.{name}", rows, hidden, has_bias=heads.has_bias)
        for name, rows in (("q_proj", 2 * q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    ]
    out = checkpoint.linear(f"{prefix}.o_proj", hidden, q_rows, has_bias=heads.has_bias)
    return Attention(
        qkv=kernels.prepare_linear(shards),
        q_norm=load_norm(checkpoint, f"{prefix}.q_norm", heads.head_dim, kernels, offset=1.0),
        k_norm=load_norm(checkpoint, f"{prefix}.k_norm", heads.head_dim, kernels, offset=1.0),
        out=kernels.prepare_linear([out]),
        kv_scales=load_kv_scales(checkpoint, prefix),
    )


def _load_gated_delta_net(checkpoint: Checkpoint, prefix: str, config: ModelConfig, kernels: Kernels) -> GatedDeltaNet:
    prefix = f"{prefix}.linear_attn"
    hidden, gdn = config.hidden_size, _gdn(config)
    rows_of = {"qkv": gdn.conv_dim, "z": gdn.value_dim, "b": gdn.num_v_heads, "a": gdn.num_v_heads}
    shards = [checkpoint.linear(f"{prefix}.in_proj_{name}", rows, hidden) for name, rows in rows_of.items()]
    conv = checkpoint.tensor(f"{prefix}.conv1d.weight", (gdn.conv_dim, 1, gdn.conv_kernel_size))
    A_log, dt_bias = (checkpoint.tensor(f"{prefix}.{name}", (gdn.num_v_heads,)) for name in ("A_log", "dt_bias"))
    return GatedDeltaNet(
        inputs=kernels.prepare_linear(shards),
        conv=kernels.prepare_tensor(conv.squeeze(1)),
        A_log=kernels.prepare_tensor(A_log, torch.float32),
        dt_bias=kernels.prepare_tensor(dt_bias, torch.float32),
        norm=load_norm(checkpoint, f"{prefix}.norm", gdn.value_head_dim, kernels),
        out=kernels.prepare_linear([checkpoint.linear(f"{prefix}.out_proj", hidden, gdn.value_dim)]),
    )


def forward(
    weights: Weights, config: ModelConfig, kernels: Kernels, state: ModelState, token_ids: torch.Tensor
) -> torch.Tensor:
    """The planned step's token_ids [n] -> hidden [n, hidden], final norm applied; the state is advanced in place."""
    layers, eps = weights.layers, config.rms_norm_eps
    residual = kernels.embedding(token_ids, weights.outer.embedding)
    x = kernels.rms_norm(residual, layers[0].input_norm, eps)
    next_norms = (*(layer.input_norm for layer in layers[1:]), weights.outer.final_norm)
    kv_of_layer, conv_of_layer, recurrent_of_layer = iter(state.kv), iter(state.conv), iter(state.recurrent)
    for layer, next_norm in zip(layers, next_norms, strict=True):
        if isinstance(layer.mixer, Attention):
            x = _attention(layer.mixer, config, kernels, weights.outer.cos_sin, next(kv_of_layer), x)
        else:
            x = _gated_delta_net(layer.mixer, config, kernels, next(conv_of_layer), next(recurrent_of_layer), x)
        x = kernels.fused_add_rms_norm(x, residual, layer.post_attention_norm, eps)
        x = mlp(kernels, layer.mlp, x)
        x = kernels.fused_add_rms_norm(x, residual, next_norm, eps)
    return x


def _attention(
    weights: Attention, config: ModelConfig, kernels: Kernels, cos_sin: torch.Tensor, kv: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    heads = config.attention
    qkv = kernels.linear(x, weights.qkv).view(len(x), -1, heads.head_dim)
    q_and_gate, k, v = qkv.split_with_sizes((2 * heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    q, gate = q_and_gate[:, 0::2], q_and_gate[:, 1::2]
    q = kernels.rms_norm(q, weights.q_norm, config.rms_norm_eps)
    k = kernels.rms_norm(k, weights.k_norm, config.rms_norm_eps)
    kernels.apply_rope(q, k, cos_sin)
    scales = page_scales(kv, weights.kv_scales)
    kernels.append_paged_kv(k, v, kv, scales)
    mixed = kernels.paged_attention(q, kv, heads.head_dim**-0.5, scales)
    return kernels.linear(mixed.mul_(gate.sigmoid()).view(len(x), -1), weights.out)


def _gated_delta_net(
    weights: GatedDeltaNet,
    config: ModelConfig,
    kernels: Kernels,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    gdn, n = _gdn(config), len(x)
    projected = kernels.linear(x, weights.inputs)
    qkv, z, b, a = projected.split_with_sizes((gdn.conv_dim, gdn.value_dim, gdn.num_v_heads, gdn.num_v_heads), dim=1)
    qkv = kernels.causal_conv(qkv, weights.conv, conv_states)
    q, k, v = qkv.split_with_sizes((gdn.key_dim, gdn.key_dim, gdn.value_dim), dim=1)
    q, k = q.view(n, gdn.num_k_heads, -1), k.view(n, gdn.num_k_heads, -1)
    v, z = v.view(n, gdn.num_v_heads, -1), z.view(n, gdn.num_v_heads, -1)
    mixed = kernels.gated_delta_rule(q, k, v, a, b, weights.A_log, weights.dt_bias, states)
    return kernels.linear(kernels.gated_rms_norm(mixed, z, weights.norm, config.rms_norm_eps).view(n, -1), weights.out)


def logits(weights: Weights, kernels: Kernels, hidden_rows: torch.Tensor) -> torch.Tensor:
    """hidden_rows [rows, hidden] of `forward` -> float32 [rows, vocab]."""
    return head_logits(kernels, weights.outer, hidden_rows)


def _gdn(config: ModelConfig) -> GatedDeltaNetConfig:
    assert config.gated_delta_net is not None, "parse_config always sets it"
    return config.gated_delta_net
