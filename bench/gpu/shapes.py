"""The models that the check is shaped after: a 27B hybrid, and a tiny one that a CPU can rehearse with."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import AttentionConfig, GatedDeltaNetConfig, LayerKind, ModelConfig, RopeConfig

_LINEAR, _FULL = LayerKind.LINEAR_ATTENTION, LayerKind.FULL_ATTENTION
PERIOD = (_LINEAR, _LINEAR, _LINEAR, _FULL)
"""What the layers of a hybrid repeat."""

HYBRID_27B = ModelConfig(
    architecture="qwen3_5",
    vocab_size=248_320,
    hidden_size=5120,
    intermediate_size=17_408,
    layer_kinds=PERIOD * 16,
    attention=AttentionConfig(24, 4, 256, has_output_gate=True, has_qk_norm=True),
    gated_delta_net=GatedDeltaNetConfig(
        num_k_heads=16, num_v_heads=48, key_head_dim=128, value_head_dim=128, conv_kernel_size=4
    ),
    rope=RopeConfig(theta=1e7, rotary_dim=64),
    rms_norm_eps=1e-6,
    max_position_embeddings=262_144,
    has_tied_embeddings=False,
)
"""The published shape of the 27B dense hybrids."""

DENSE_HEADS = AttentionConfig(32, 8, 128, has_qk_norm=True)
"""The heads of a plain attention model, beside the hybrid's."""

TINY = replace(
    HYBRID_27B,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    layer_kinds=PERIOD,
    attention=AttentionConfig(4, 2, 32, has_output_gate=True, has_qk_norm=True),
    gated_delta_net=GatedDeltaNetConfig(
        num_k_heads=2, num_v_heads=4, key_head_dim=32, value_head_dim=32, conv_kernel_size=4
    ),
    rope=RopeConfig(theta=1e4, rotary_dim=16),
    max_position_embeddings=4096,
)
"""Every ratio but one of the large one's; quick on a CPU."""


def with_heads(config: ModelConfig, heads: AttentionConfig) -> ModelConfig:
    """The same model with other attention heads, rotated over their whole width."""
    return replace(config, attention=heads, rope=replace(config.rope, rotary_dim=heads.head_dim))
