"""A 27B hybrid's checkpoint with true headers and no bytes: the files are as long as they should be, and empty.

The config is that of Qwen/Qwen3.6-27B, without its vision tower's: docs/memory.md says where it is from. The layout is
nvidia/Qwen3.6-27B-NVFP4's: NVFP4 for the feed-forward layers and the head, fp8 for attention and Gated DeltaNet.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Header = dict[str, tuple[str, tuple[int, ...]]]
"""dtype and shape of each tensor."""

LAYERS, HIDDEN, INNER, VOCABULARY = 64, 5120, 17408, 248320
Q_ROWS, KV_ROWS = 24 * 256, 4 * 256
KEY_ROWS, VALUE_ROWS, VALUE_HEADS = 16 * 128, 48 * 128, 48
CONV_ROWS = 2 * KEY_ROWS + VALUE_ROWS
BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "eos_token_id": 248046,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 24,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}


def write_sparse_27b(folder: Path) -> Path:
    """config.json and model.safetensors; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": TEXT_CONFIG}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: Header = {"model.visual.pos_embed.weight": ("BF16", (2304, 1152))}
    header |= _dense("mtp.fc", HIDDEN, 2 * HIDDEN) | _layer("mtp.layers.0", is_full=True)
    header |= _dense("model.language_model.embed_tokens", VOCABULARY, HIDDEN) | _norm(
        "model.language_model.norm", HIDDEN
    )
    for layer in range(LAYERS):
        header |= _layer(f"model.language_model.layers.{layer}", is_full=layer % 4 == 3)
    header |= _nvfp4("lm_head", VOCABULARY, HIDDEN)
    _write(folder / "model.safetensors", header)
    return folder


def _layer(prefix: str, *, is_full: bool) -> Header:
    found = _norm(f"{prefix}.input_layernorm", HIDDEN) | _norm(f"{prefix}.post_attention_layernorm", HIDDEN)
    for name, rows, columns in (("gate_proj", INNER, HIDDEN), ("up_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        found |= _nvfp4(f"{prefix}.mlp.{name}", rows, columns)
    if is_full:
        attention = f"{prefix}.self_attn"
        for name, rows in (("q_proj", 2 * Q_ROWS), ("k_proj", KV_ROWS), ("v_proj", KV_ROWS)):
            found |= _fp8(f"{attention}.{name}", rows, HIDDEN)
        found |= _norm(f"{attention}.q_norm", 256) | _norm(f"{attention}.k_norm", 256)
        return found | _fp8(f"{attention}.o_proj", HIDDEN, Q_ROWS)
    linear = f"{prefix}.linear_attn"
    found |= _fp8(f"{linear}.in_proj_qkv", CONV_ROWS, HIDDEN) | _fp8(f"{linear}.in_proj_z", VALUE_ROWS, HIDDEN)
    found |= _dense(f"{linear}.in_proj_a", VALUE_HEADS, HIDDEN) | _dense(f"{linear}.in_proj_b", VALUE_HEADS, HIDDEN)
    found |= {f"{linear}.{name}": ("BF16", (VALUE_HEADS,)) for name in ("A_log", "dt_bias")}
    found[f"{linear}.conv1d.weight"] = ("BF16", (CONV_ROWS, 1, 4))
    return found | _norm(f"{linear}.norm", 128) | _fp8(f"{linear}.out_proj", HIDDEN, VALUE_ROWS)


def _dense(module: str, rows: int, columns: int) -> Header:
    return {f"{module}.weight": ("BF16", (rows, columns))}


def _norm(module: str, size: int) -> Header:
    return {f"{module}.weight": ("BF16", (size,))}


def _fp8(module: str, rows: int, columns: int) -> Header:
    scalars = {f"{module}.{scale}": ("F32", ()) for scale in ("weight_scale", "input_scale")}
    return {f"{module}.weight": ("F8_E4M3", (rows, columns)), **scalars}


def _nvfp4(module: str, rows: int, columns: int) -> Header:
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def _write(file: Path, header: Header) -> None:
    described: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in header.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
