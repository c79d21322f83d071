"""Fixtures for the engine's tests: a tiny model as a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "he l", "l o", "hel lo", "Ġ w", "1 2"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def vocabulary() -> list[str]:
    merged = ["".join(pair.split(" ")) for pair in MERGES]
    return SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()) + merged


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random llama; row counts of q and k differ, so that swapping them cannot go unseen."""
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@dataclass
class TinyGguf:
    """A GGUF as llama.cpp's converter would write it, open to changes before it is written."""

    model: LlamaForCausalLM
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32
    architecture: str = "llama"
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config
        tokens = vocabulary()
        self.metadata |= {
            "llama.block_count": config.num_hidden_layers,
            "llama.context_length": config.max_position_embeddings,
            "llama.embedding_length": config.hidden_size,
            "llama.feed_forward_length": config.intermediate_size,
            "llama.attention.head_count": config.num_attention_heads,
            "llama.attention.head_count_kv": config.num_key_value_heads,
            "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        }
        for name, parameter in self.model.named_parameters():
            self.tensors[gguf_name(name)] = self._as_llama_cpp(name, parameter.detach().numpy())

    def _as_llama_cpp(self, name: str, value: np.ndarray) -> np.ndarray:
        """q and k with the two halves of each head interleaved."""
        config = self.model.config
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is None:
            return value
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            self._add(writer, key, value)
        for name, value in self.tensors.items():
            if value.ndim == 2 and value.dtype == np.float32 and self.quantization != GGMLQuantizationType.F32:
                writer.add_tensor(name, quantize(value, self.quantization), raw_dtype=self.quantization)
            else:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add(self, writer: GGUFWriter, key: str, value: Any) -> None:
        match value:
            case str():
                writer.add_string(key, value)
            case float():
                writer.add_float32(key, value)
            case int():
                writer.add_uint32(key, value)
            case list():
                writer.add_array(key, value)


def gguf_name(hf_name: str) -> str:
    stem, kind = hf_name.rsplit(".", 1)
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{BLOCK_NAMES[part]}.{kind}"


@pytest.fixture
def tiny_gguf() -> type[TinyGguf]:
    """`tiny_gguf(tiny_llama())` describes a file; `.write(path)` writes it."""
    return TinyGguf


@pytest.fixture
def make_tiny_llama() -> Any:
    return tiny_llama
