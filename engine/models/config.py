"""What a model is, apart from its weights: one record for every architecture, filled from a Hugging Face
config.json."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How a layer mixes tokens."""

    FULL_ATTENTION = "full_attention"
    LINEAR_ATTENTION = "linear_attention"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `rotary_dim` <= head_dim; dimensions beyond it are not rotated.

    `scaling` is one of `default`, `linear`, `llama3`, `yarn`; `parameters` holds that kind's own values.
    """

    theta: float
    rotary_dim: int
    scaling: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Softmax attention with grouped queries; dims in elements."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool = False
    has_output_gate: bool = False
    has_qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet (Yang et al., 2024, "Gated Delta Networks"); each key head serves num_v_heads / num_k_heads value
    heads."""

    num_k_heads: int
    num_v_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One language model. `architecture` is the module's name in `engine.models`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[LayerKind, ...]
    attention: AttentionConfig
    gated_delta_net: GatedDeltaNetConfig | None
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    has_tied_embeddings: bool
    has_mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def num_attention_layers(self) -> int:
        return self.layer_kinds.count(LayerKind.FULL_ATTENTION)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_kinds.count(LayerKind.LINEAR_ATTENTION)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values that one token adds over all attention layers."""
        attention = self.attention
        return self.num_attention_layers * 2 * attention.num_kv_heads * attention.head_dim * element_bytes

    def state_image_bytes(self, conv_element_bytes: int) -> int:
        """Bytes of one state image: the float32 recurrent state and the convolution's tail of every linear layer."""
        gdn = self.gated_delta_net
        if gdn is None:
            return 0
        recurrent = gdn.num_v_heads * gdn.value_head_dim * gdn.key_head_dim * 4
        conv = gdn.conv_dim * (gdn.conv_kernel_size - 1) * conv_element_bytes
        return self.num_linear_layers * (recurrent + conv)
