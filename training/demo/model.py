"""The network as transformers defines it, and a faster forward pass over the same parameters for training on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from training.demo.config import VOCAB_SIZE, ModelShape
from training.demo.delta_rule import chunk_gated_delta_rule

Tensor = torch.Tensor
HALF = torch.bfloat16


def build_config(shape: ModelShape, eos: list[int], pad: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.linear_num_key_heads,
        linear_num_value_heads=shape.linear_num_value_heads,
        linear_key_head_dim=shape.linear_key_head_dim,
        linear_value_head_dim=shape.linear_value_head_dim,
        linear_conv_kernel_dim=shape.linear_conv_kernel_dim,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.partial_rotary_factor,
        },
        eos_token_id=eos,
        pad_token_id=pad,
    )


def build_model(config: Qwen3_5TextConfig, seed: int) -> Qwen3_5ForCausalLM:
    """Random weights from the seed. Decays are drawn slow (half-lives of a few tokens to some hundreds)."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.5, 8.0).log())
            elif name.endswith("dt_bias"):
                step = torch.exp(torch.empty_like(parameter).uniform_(-6.9, -2.3))
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(HALF), weight.to(HALF))


def _mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    h = _norm(x, norm, eps).to(HALF)
    return x + _linear(F.silu(_linear(h, gate)) * _linear(h, up), down)


def _delta_block(x: Tensor, w: dict[str, Tensor], key_heads: int, value_heads: int, eps: float) -> Tensor:
    """One Gated DeltaNet layer and its MLP. x: float32 [batch, tokens, hidden]."""
    batch, tokens, _ = x.shape
    h = _norm(x, w["input_layernorm.weight"], eps).to(HALF)
    qkv = _linear(h, w["linear_attn.in_proj_qkv.weight"])
    conv = w["linear_attn.conv1d.weight"].squeeze(1)
    taps = conv.shape[-1]
    padded = F.pad(qkv.float(), (0, 0, taps - 1, 0))
    mixed = padded[:, taps - 1 :] * conv[:, taps - 1]
    for tap in range(taps - 1):
        mixed = mixed + padded[:, tap : tap + tokens] * conv[:, tap]
    mixed = F.silu(mixed)
    z = _linear(h, w["linear_attn.in_proj_z.weight"])
    value_dim = z.shape[-1]
    key_dim = (mixed.shape[-1] - value_dim) // 2
    q, k, v = torch.split(mixed, [key_dim, key_dim, value_dim], dim=-1)
    beta = _linear(h, w["linear_attn.in_proj_b.weight"]).float().sigmoid()
    a = _linear(h, w["linear_attn.in_proj_a.weight"]).float()
    g = -w["linear_attn.A_log"].exp() * F.softplus(a + w["linear_attn.dt_bias"])
    out, _ = chunk_gated_delta_rule(
        q.reshape(batch, tokens, key_heads, -1),
        k.reshape(batch, tokens, key_heads, -1),
        v.reshape(batch, tokens, value_heads, -1),
        g,
        beta,
        use_qk_l2norm_in_kernel=True,
    )
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * w["linear_attn.norm.weight"]
    out = out.reshape(batch, tokens, -1) * F.silu(z.float())
    x = x + _linear(out, w["linear_attn.out_proj.weight"])
    return _mlp(
        x,
        w["post_attention_layernorm.weight"],
        w["mlp.gate_proj.weight"],
        w["mlp.up_proj.weight"],
        w["mlp.down_proj.weight"],
        eps,
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial rotary on [batch, tokens, heads, dim] with cos, sin [tokens, 1, rotary_dim / 2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _attention_block(x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, head_dim: int, eps: float) -> Tensor:
    """One gated full-attention layer and its MLP. x: float32 [batch, tokens, hidden]."""
    batch, tokens, _ = x.shape
    h = _norm(x, w["input_layernorm.weight"], eps).to(HALF)
    q, gate = _linear(h, w["self_attn.q_proj.weight"]).reshape(batch, tokens, -1, 2 * head_dim).chunk(2, dim=-1)
    k = _linear(h, w["self_attn.k_proj.weight"]).reshape(batch, tokens, -1, head_dim)
    v = _linear(h, w["self_attn.v_proj.weight"]).reshape(batch, tokens, -1, head_dim)
    q = _rotate(_norm(q.float(), w["self_attn.q_norm.weight"], eps), cos, sin).to(HALF).transpose(1, 2)
    k = _rotate(_norm(k.float(), w["self_attn.k_norm.weight"], eps), cos, sin).to(HALF).transpose(1, 2)
    group = q.shape[1] // k.shape[1]
    q = q.reshape(batch, -1, group * tokens, head_dim)
    scores = (q @ k.transpose(-1, -2)).float().reshape(batch, -1, group, tokens, tokens) * head_dim**-0.5
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1).to(HALF)
    out = weights.reshape(batch, -1, group * tokens, tokens) @ v.transpose(1, 2)
    out = out.reshape(batch, -1, tokens, head_dim).transpose(1, 2)
    out = out * torch.sigmoid(gate)
    x = x + _linear(out.reshape(batch, tokens, -1), w["self_attn.o_proj.weight"])
    return _mlp(
        x,
        w["post_attention_layernorm.weight"],
        w["mlp.gate_proj.weight"],
        w["mlp.up_proj.weight"],
        w["mlp.down_proj.weight"],
        eps,
    )


def _head_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Sum over tokens of weight times cross-entropy. targets, weights: [batch, tokens]."""
    logits = _linear(_norm(x, norm, eps), head).float()
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return ((logits.logsumexp(-1) - picked) * weights).sum()


class FastForward:
    """The training forward pass over a transformers model's own parameters. Compiled once per kind of layer."""

    def __init__(self, model: Qwen3_5ForCausalLM, compiled: bool = True) -> None:
        self.model = model
        config = model.config
        self.eps: float = config.rms_norm_eps
        self.config = config
        self.kinds: list[str] = list(config.layer_types or ())
        self.layers: list[dict[str, Tensor]] = [dict(layer.named_parameters()) for layer in model.model.layers]
        rope: dict[str, Any] = dict(config.rope_parameters or {})
        rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        self.inv_freq = torch.pow(torch.tensor(float(rope["rope_theta"])), -exponent)

        def maybe(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._delta, self._attention, self._head = maybe(_delta_block), maybe(_attention_block), maybe(_head_loss)

    def loss(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the cross-entropies. All three: [batch, tokens]."""
        config = self.config
        x = F.embedding(tokens, self.model.model.embed_tokens.weight)
        angle = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None, None] * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        for kind, w in zip(self.kinds, self.layers, strict=True):
            if kind == "full_attention":
                x = self._attention(x, w, cos, sin, config.head_dim, self.eps)
            else:
                x = self._delta(x, w, config.linear_num_key_heads, config.linear_num_value_heads, self.eps)
        head = self.model.model.embed_tokens.weight
        return self._head(x, self.model.model.norm.weight, head, targets, weights, self.eps)
