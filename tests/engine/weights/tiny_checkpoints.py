"""The parts of tiny random Qwen3.5 checkpoints: every tensor of a full one, and each format of a layer.

Packing and unpacking here use compressed-tensors' functions, not the engine's. `published.py` puts the parts together.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

LANGUAGE = "model.language_model."

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "image_token_id": 61,
    "video_token_id": 62,
    "vision_start_token_id": 59,
    "vision_end_token_id": 60,
    "tie_word_embeddings": False,
    "language_model_only": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "eos_token_id": 2,
        "full_attention_interval": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 1024,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 64,
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 32,
        "in_channels": 3,
        "intermediate_size": 48,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": 64,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def write_twin(folder: Path, twin: Tensors, config: Mapping[str, Any] = TINY_CONFIG) -> None:
    """The twin as a plain float32 checkpoint in one file, without vision and MTP."""
    config = copy.deepcopy(dict(config)) | {"dtype": "float32"}
    config.get("text_config", config)["dtype"] = "float32"
    write_folder(folder, config, twin, shards=1)


def bfloat16_state(config: Mapping[str, Any], seed: int) -> Tensors:
    """Every tensor of a full checkpoint, random, in an order that does not depend on a module's class."""
    generator = torch.Generator().manual_seed(seed)
    text = config["text_config"]
    shapes: dict[str, tuple[int, ...]] = {f"{LANGUAGE}embed_tokens.weight": (text["vocab_size"], text["hidden_size"])}
    for layer, kind in enumerate(text["layer_types"]):
        shapes |= _layer_shapes(f"{LANGUAGE}layers.{layer}.", kind, text)
    shapes[f"{LANGUAGE}norm.weight"] = (text["hidden_size"],)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (text["vocab_size"], text["hidden_size"])
    shapes |= _vision_shapes(config["vision_config"]) | _mtp_shapes(text)
    return {name: _random(name, shape, generator).bfloat16() for name, shape in shapes.items()}


def fp8_tensors(module: str, weight: torch.Tensor, *, per_channel: bool = False) -> Tensors:
    """`weight` and `weight_scale` (scalar, or [out, 1] as compressed-tensors has it)."""
    weight = weight.float()
    amax = weight.abs().amax(dim=1, keepdim=True) if per_channel else weight.abs().amax()
    scale = amax / 448
    return {f"{module}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{module}.weight_scale": scale}


def compressed_nvfp4_tensors(module: str, weight: torch.Tensor) -> Tensors:
    """`weight_packed`, `weight_scale`, `weight_global_scale` [1], which divides."""
    weight = weight.float()
    global_scale = 448 * 6 / weight.abs().amax()
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(dim=-1) / 6 * global_scale).clamp(2.0**-9, 448)
    scale = scale.to(torch.float8_e4m3fn)
    packed = quantize_and_pack_fp4(weight, scale.float(), global_scale=global_scale)
    return {
        f"{module}.weight_packed": packed,
        f"{module}.weight_scale": scale,
        f"{module}.weight_global_scale": global_scale.view(1),
    }


def modelopt_nvfp4_tensors(module: str, weight: torch.Tensor, amax: torch.Tensor | None = None) -> Tensors:
    """`weight`, `weight_scale`, `weight_scale_2` [], which multiplies; `amax` where layers share it."""
    weight = weight.float()
    scale_2 = (weight.abs().amax() if amax is None else amax) / (6 * 448)
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(dim=-1) / 6 / scale_2).clamp(2.0**-9, 448)
    scale = scale.to(torch.float8_e4m3fn)
    packed = quantize_and_pack_fp4(weight, scale.float(), global_scale=1 / scale_2)
    return {f"{module}.weight": packed, f"{module}.weight_scale": scale, f"{module}.weight_scale_2": scale_2}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors, *, shards: int) -> None:
    """config.json and the tensors, in one file or in `shards` files with an index."""
    names = list(tensors)
    if shards == 1:
        write_files(folder, config, tensors, {"model.safetensors": names})
        return
    edges = [shard * len(names) // shards for shard in range(shards + 1)]
    files = {
        f"model-{shard + 1:05d}-of-{shards:05d}.safetensors": names[edges[shard] : edges[shard + 1]]
        for shard in range(shards)
    }
    write_files(folder, config, tensors, files)


def write_files(folder: Path, config: Mapping[str, Any], tensors: Tensors, files: Mapping[str, Sequence[str]]) -> None:
    """config.json and the tensors that each file is to hold, with an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    for file, names in files.items():
        part = {name: tensors[name].contiguous() for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
    if len(files) == 1:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _layer_shapes(prefix: str, kind: str, text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if kind == "full_attention":
        head, q_heads, kv_heads = text["head_dim"], text["num_attention_heads"], text["num_key_value_heads"]
        shapes |= {
            "self_attn.q_proj.weight": (2 * q_heads * head, hidden),
            "self_attn.k_proj.weight": (kv_heads * head, hidden),
            "self_attn.v_proj.weight": (kv_heads * head, hidden),
            "self_attn.o_proj.weight": (hidden, q_heads * head),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
        }
    else:
        v_heads = text["linear_num_value_heads"]
        key_dim = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        value_dim = v_heads * text["linear_value_head_dim"]
        conv_dim = 2 * key_dim + value_dim
        shapes |= {
            "linear_attn.A_log": (v_heads,),
            "linear_attn.dt_bias": (v_heads,),
            "linear_attn.conv1d.weight": (conv_dim, 1, text["linear_conv_kernel_dim"]),
            "linear_attn.norm.weight": (text["linear_value_head_dim"],),
            "linear_attn.in_proj_qkv.weight": (conv_dim, hidden),
            "linear_attn.in_proj_z.weight": (value_dim, hidden),
            "linear_attn.in_proj_a.weight": (v_heads, hidden),
            "linear_attn.in_proj_b.weight": (v_heads, hidden),
            "linear_attn.out_proj.weight": (hidden, value_dim),
        }
    return {prefix + name: shape for name, shape in shapes.items()}


def _mtp_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = text["hidden_size"]
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        **_layer_shapes("mtp.layers.0.", "full_attention", text),
    }


def _vision_shapes(vision: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, merged = vision["hidden_size"], vision["intermediate_size"], vision["hidden_size"] * 4
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    layers: dict[str, tuple[int, ...]] = {"patch_embed.proj": (hidden, *patch)}
    for block in range(vision["depth"]):
        layers |= {
            f"blocks.{block}.norm1": (hidden,),
            f"blocks.{block}.norm2": (hidden,),
            f"blocks.{block}.attn.qkv": (3 * hidden, hidden),
            f"blocks.{block}.attn.proj": (hidden, hidden),
            f"blocks.{block}.mlp.linear_fc1": (inner, hidden),
            f"blocks.{block}.mlp.linear_fc2": (hidden, inner),
        }
    layers |= {
        "merger.norm": (hidden,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (vision["out_hidden_size"], merged),
    }
    shapes = {"model.visual.pos_embed.weight": (vision["num_position_embeddings"], hidden)}
    for layer, shape in layers.items():
        shapes |= {f"model.visual.{layer}.weight": shape, f"model.visual.{layer}.bias": shape[:1]}
    return shapes


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    rules: tuple[tuple[str, Callable[[], torch.Tensor]], ...] = (
        ("A_log", lambda: noise.abs().add(0.5).log()),
        ("dt_bias", lambda: noise),
        ("linear_attn.norm.weight", lambda: 1 + 0.1 * noise),
        ("norm.weight", lambda: 0.1 * noise),  # Qwen3.5 stores weight - 1
        ("conv1d.weight", lambda: 0.5 * noise),
        ("embed_tokens.weight", lambda: noise),
    )
    fitting = next((rule for suffix, rule in rules if name.endswith(suffix)), None)
    return fitting() if fitting else noise / shape[-1] ** 0.5


def nvfp4_values(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """float32 [out, in]; the global scale multiplies."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    values = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
    return values * (scale.float() * global_scale).repeat_interleave(16, dim=1)
