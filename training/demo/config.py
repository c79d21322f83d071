"""Every number of the run: the shape of the model, the token budget, the seeds."""

from __future__ import annotations

from dataclasses import dataclass, field

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


@dataclass(frozen=True)
class ModelShape:
    """The `qwen3_5_text` fields that we choose; the rest are transformers' defaults."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 16384
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1_000_000.0


@dataclass(frozen=True)
class TrainPlan:
    """A run is fixed by this record: the same plan gives the same order of the same tokens."""

    seed: int = 20260
    row_tokens: int = 512
    rows_per_step: int = 8
    steps: int = 2000
    warmup_steps: int = 60
    decay_from: float = 0.45
    """Share of the steps after which the learning rate falls linearly to `final_lr_share`."""
    final_lr_share: float = 0.03
    varied_from_step: int = 1379
    """From this step on requests come in other words than the patterns give (`corpus/vary.py`)."""
    long_from: float = 0.80
    """Share of the steps after which every `long_every`-th step has long rows of `long_row_tokens`."""
    long_every: int = 5
    long_row_tokens: int = 1024
    quantised_from: float = 0.82
    """Share of the steps after which the forward pass sees NVFP4 weights (straight-through gradients)."""
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    muon_weight_decay: float = 0.01
    user_weight: float = 0.3
    """Loss weight of user turns; assistant tokens weigh 1, everything else `other_weight`."""
    other_weight: float = 0.1
    threads: int = 2


@dataclass(frozen=True)
class DemoConfig:
    shape: ModelShape = field(default_factory=ModelShape)
    plan: TrainPlan = field(default_factory=TrainPlan)
