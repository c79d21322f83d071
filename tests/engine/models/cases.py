"""Tiny configurations of every architecture, each with something that the others lack."""

from __future__ import annotations

import transformers

_SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_GDN = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def llama(**changes) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**_SMALL, **changes})


def qwen3(**changes) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(**{**_SMALL, "head_dim": 32, **changes})


def qwen3_5(**changes) -> transformers.Qwen3_5TextConfig:
    return transformers.Qwen3_5TextConfig(**{**_SMALL, **_GDN, **changes})


def qwen3_5_full(**changes) -> transformers.Qwen3_5Config:
    text = {**_SMALL, **_GDN, **changes}
    return transformers.Qwen3_5Config(
        text_config=text,
        vision_config=_VISION,
        image_token_id=250,
        video_token_id=251,
        vision_start_token_id=252,
        vision_end_token_id=253,
    )


MAIN = {
    "llama": lambda: llama(tie_word_embeddings=True),
    "qwen3": lambda: qwen3(),
    "qwen3_5": lambda: qwen3_5(),
}
"""One of each architecture: these get the most prompts."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

VARIANTS = {
    "llama with biases, no grouping": lambda: llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama with one key head and its own head size": lambda: llama(num_key_value_heads=1, head_dim=24),
    "llama with llama3 rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama with linear rope": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
    ),
    "llama with yarn rope": lambda: llama(rope_parameters=YARN_ROPE),
    "qwen3 with biases, tied": lambda: qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3 with yarn rope": lambda: qwen3(rope_parameters=YARN_ROPE),
    "qwen3_5 at the head sizes of CUDA kernels": lambda: qwen3_5(
        head_dim=128, linear_key_head_dim=128, linear_value_head_dim=128
    ),
    "qwen3_5 without grouping, tied, half rotary": lambda: qwen3_5(
        linear_num_key_heads=4,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ),
    "qwen3_5 with biases, full rotary and other layers": lambda: qwen3_5(
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        layer_types=["full_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_conv_kernel_dim=3,
    ),
    "qwen3_5 with vision, mrope": lambda: qwen3_5_full(
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        }
    ),
}
