"""Turn a GGUF file of the llama architecture into a checkpoint folder in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file

from engine.errors import WeightsError
from engine.progress import track
from engine.weights.gguf_tokenizer import write_tokenizer

_MAGIC = b"GGUF"
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a GGUF tensor goes. `rope_heads` is 0 except for q and k, whose rows llama.cpp reorders head by head."""

    name: str
    shape: tuple[int, ...]
    rope_heads: int = 0


def import_gguf(gguf_path: Path, dst_folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `dst_folder`.

    `dst_folder` is made if it is not there; the caller makes it appear whole or not at all. Quantised tensors are
    dequantised and stored as `dtype`; the whole model is held in memory meanwhile. WeightsError names what is broken
    or not supported: a truncated file, another architecture, a tensor missing, left over, or of an unknown type.
    """
    reader = _open(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _hf_config(metadata, {tensor.name for tensor in reader.tensors}, dtype)
    targets = _targets(config)
    _check_complete(reader, targets)
    dst_folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(metadata, dst_folder)
    _write_json(dst_folder / "config.json", config)
    token_ids = {key: config[key] for key in _TOKEN_IDS if key in config}
    _write_json(dst_folder / "generation_config.json", token_ids)
    converted: dict[str, torch.Tensor] = {}
    with track(f"importing {gguf_path.name}", sum(tensor.n_bytes for tensor in reader.tensors)) as advance:
        for tensor in reader.tensors:
            target = targets[tensor.name]
            converted[target.name] = _convert(tensor, target).to(dtype)
            advance(float(tensor.n_bytes))
    save_file(converted, dst_folder / "model.safetensors", metadata={"format": "pt"})


def _open(path: Path) -> GGUFReader:
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise WeightsError(f"{path}: not a GGUF file: it starts with {magic!r}; expected {_MAGIC!r}")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise WeightsError(f"{path}: the GGUF is truncated or damaged ({error}); fetch it again") from error


def _require(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise WeightsError(f"GGUF: {key} is missing from the metadata; the file is incomplete")
    return metadata[key]


def _hf_config(metadata: Mapping[str, Any], tensor_names: set[str], dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a LlamaForCausalLM with the GGUF's own figures."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise WeightsError(f"GGUF: general.architecture is {architecture!r}, which is not supported; expected 'llama'")
    if metadata.get("llama.expert_count", 0):
        raise WeightsError(
            "GGUF: llama.expert_count is set: mixtures of experts are not supported; expected a dense model"
        )
    num_heads = _require(metadata, "llama.attention.head_count")
    num_kv_heads = metadata.get("llama.attention.head_count_kv", num_heads)
    hidden_size = _require(metadata, "llama.embedding_length")
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    rotary_dim = metadata.get("llama.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise WeightsError(f"GGUF: llama.rope.dimension_count is {rotary_dim}; expected the head's {head_dim}")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "attention_dropout": 0.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": _require(metadata, "llama.feed_forward_length"),
        "max_position_embeddings": _require(metadata, "llama.context_length"),
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_names,
        "num_attention_heads": num_heads,
        "num_hidden_layers": _require(metadata, "llama.block_count"),
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": _float32(_require(metadata, "llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": _rope_scaling(metadata, tensor_names),
        "rope_theta": _float32(metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": len(_require(metadata, "tokenizer.ggml.tokens")),
    }
    for key, name in _TOKEN_IDS.items():
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            config[key] = index
    return config


def _rope_scaling(metadata: Mapping[str, Any], tensor_names: set[str]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensor_names:
        raise WeightsError(
            "GGUF: rope_freqs.weight holds frequencies scaled beforehand, whose parameters are not in the file; "
            "use the model's own Hugging Face checkpoint"
        )
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _float32(_require(metadata, "llama.rope.scaling.factor"))}
    raise WeightsError(
        f"GGUF: llama.rope.scaling.type is {kind!r}, which is not supported; expected 'none' or 'linear'"
    )


def _float32(value: float) -> float:
    """The shortest decimal that a float32 of the metadata stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _targets(config: Mapping[str, Any]) -> dict[str, _Target]:
    """Every tensor that a model of this `config` has, by its GGUF name."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q_rows, kv_rows = q_heads * head_dim, kv_heads * head_dim
    weights: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q_rows, hidden),
        "attn_k": (kv_rows, hidden),
        "attn_v": (kv_rows, hidden),
        "attn_output": (hidden, q_rows),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    rope_heads = {"attn_q": q_heads, "attn_k": kv_heads}
    targets = {
        "token_embd.weight": _Target(_TOP_LEVEL["token_embd.weight"], (vocabulary, hidden)),
        "output_norm.weight": _Target(_TOP_LEVEL["output_norm.weight"], (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        targets["output.weight"] = _Target(_TOP_LEVEL["output.weight"], (vocabulary, hidden))
    for layer in range(config["num_hidden_layers"]):
        for part, shape in weights.items():
            name = f"model.layers.{layer}.{_LAYER[part]}"
            targets[f"blk.{layer}.{part}.weight"] = _Target(f"{name}.weight", shape, rope_heads.get(part, 0))
            if _has_bias(part, config):
                targets[f"blk.{layer}.{part}.bias"] = _Target(f"{name}.bias", shape[:1], rope_heads.get(part, 0))
    return targets


def _has_bias(part: str, config: Mapping[str, Any]) -> bool:
    if part.endswith("_norm"):
        return False
    return bool(config["attention_bias"] if part.startswith("attn_") else config["mlp_bias"])


def _check_complete(reader: GGUFReader, targets: Mapping[str, _Target]) -> None:
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    missing, left_over = sorted(targets.keys() - shapes.keys()), sorted(shapes.keys() - targets.keys())
    if missing:
        raise WeightsError(f"GGUF: {len(missing)} tensors are missing, {missing[0]} among them; fetch the file again")
    if left_over:
        raise WeightsError(f"GGUF: {len(left_over)} tensors are not part of a llama model, {left_over[0]} among them")
    for name, target in targets.items():
        if shapes[name] != target.shape:
            raise WeightsError(f"GGUF: {name} has shape {list(shapes[name])}; expected {list(target.shape)}")


def _convert(tensor: ReaderTensor, target: _Target) -> torch.Tensor:
    """One tensor as float32, in Hugging Face's row order."""
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise WeightsError(
            f"GGUF: {tensor.name} is of type {tensor.tensor_type.name}, which cannot be dequantised; "
            "expected a float, Q4, Q5, Q8 or K-quant type"
        ) from error
    weight = torch.from_numpy(values.copy()).float()
    return _halves_from_pairs(weight, target.rope_heads) if target.rope_heads else weight


def _halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, [heads * head_dim, ...].

    llama.cpp rotates neighbouring rows (2i, 2i+1) together; Hugging Face rotates (i, i + head_dim / 2).
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
