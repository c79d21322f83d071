"""Tiny random checkpoints with the tensor sets, dtypes, files and configs of published ones: `write_published`.

    published = write_published("llm-compressor mixed", folder)   # any key of LAYOUTS
    published.twin        # what each tensor of the language model stands for, float32, under its plain name
    published.kv_scales   # (k, v) of each attention layer, or () where the checkpoint has none
    write_published_twin(published, other_folder)                 # the same model as a plain float32 checkpoint

What is known of each layout, and what is inferred, is in docs/models.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine.weights import tiny_checkpoints as tiny
from tests.engine.weights.tiny_checkpoints import LANGUAGE, Tensors

_FLOAT32 = {"A_log", "linear_attn.norm.weight"}
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


@dataclass(frozen=True)
class Published:
    """What `write_published` wrote."""

    twin: Tensors
    config: dict[str, Any]
    kv_scales: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Layout:
    """Which format each linear layer is in, and what else is in the folder."""

    like: str
    """A published checkpoint of this layout."""
    format_of: Callable[[str, bool], str]
    """(`self_attn.q_proj`, whether it is of the last eighth of the layers) -> a key of _FORMATS, or "" for bfloat16."""
    kv_scales: tuple[str, str, torch.dtype, tuple[int, ...]] | None = None
    """Names after the attention's own, dtype and shape."""
    has_mtp: bool = True
    mtp_file: str = ""
    """The file that holds the MTP layers alone, where they have one."""
    has_float32: bool = False
    """Whether A_log and the norm of Gated DeltaNet are float32, as 3.5 has them."""
    is_text_only: bool = False
    shards: int = 1
    algorithm: str = ""
    """ModelOpt's for its four-bit layers, where ModelOpt wrote it."""


def write_published(
    layout: str, folder: Path, *, config: Mapping[str, Any] = tiny.TINY_CONFIG, seed: int = 0
) -> Published:
    """Write the checkpoint of `layout`, a key of LAYOUTS, to `folder`. Weights are random, a function of `seed`."""
    how = LAYOUTS[layout]
    config = copy.deepcopy(dict(config))
    layers = len(config["text_config"]["layer_types"])
    last = tuple(f"{LANGUAGE}layers.{layer}." for layer in range(layers - max(layers // 8, 1), layers))
    tensors: Tensors = {}
    twin: Tensors = {}
    formats: dict[str, str] = {}
    dense = tiny.bfloat16_state(config, seed)
    for name, weight in dense.items():
        module = name.removesuffix(".weight")
        is_mtp, is_text = name.startswith("mtp."), name.startswith((LANGUAGE, "lm_head"))
        if (is_mtp and not how.has_mtp) or (how.is_text_only and name.startswith("model.visual.")):
            continue
        kind = ""
        if is_text and weight.dim() == 2 and "embed_tokens" not in name:
            formats[module] = kind = how.format_of(_inside(module), name.startswith(last))
        if kind:
            tensors |= _FORMATS[kind](module, weight, dense)
            twin[name] = _values(tensors, module)
        else:
            if how.has_float32 and name.endswith(tuple(_FLOAT32)):
                weight = weight.float()
            tensors[name] = weight
            if is_text:
                twin[name] = weight.float()
    scales = _add_kv_scales(tensors, how, config)
    if how.is_text_only:
        tensors, twin, formats = (_without_tower(one) for one in (tensors, twin, formats))
        config = config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    if not how.has_float32:
        config.get("text_config", config)["output_gate_type"] = "swish"
    plain = copy.deepcopy(config)
    _add_quantization(folder, how, config, formats)
    _write(folder, how, config, tensors)
    return Published(twin, plain, scales)


def write_published_twin(published: Published, folder: Path) -> None:
    """The same model as a plain float32 checkpoint, without vision and MTP."""
    tiny.write_twin(folder, published.twin, published.config)


def _attention_fp8(module: str, is_last: bool) -> str:
    """fp8 attention and Gated DeltaNet, NVFP4 for the rest; its two gates in bfloat16."""
    if module.endswith(("in_proj_a", "in_proj_b")):
        return ""
    return "fp8" if module.startswith(("self_attn", "linear_attn")) else "nvfp4"


def _attention_fp8_weights_only(module: str, is_last: bool) -> str:
    return _attention_fp8(module, is_last).replace("nvfp4", "nvfp4 weights only")


def _all_but_inputs(module: str, is_last: bool) -> str:
    """NVFP4, but for what goes into Gated DeltaNet and for the head."""
    return "" if module.startswith(("linear_attn.in_proj", "lm_head")) else "nvfp4"


def _compressed_mixed(module: str, is_last: bool) -> str:
    if module.endswith(("in_proj_a", "in_proj_b")):
        return ""
    return "compressed nvfp4" if module.startswith("mlp") and not is_last else "compressed fp8"


_MODELOPT_KV = ("k_proj.k_scale", "v_proj.v_scale", torch.float32, ())
_COMPRESSED_KV = ("k_scale", "v_scale", torch.bfloat16, (1,))

LAYOUTS: dict[str, Layout] = {
    "bf16 3.5": Layout("Qwen/Qwen3.5-27B", lambda module, is_last: "", has_float32=True, shards=3),
    "bf16 3.8": Layout("Qwen/Qwen3.8-27B", lambda module, is_last: "", shards=3),
    "modelopt mixed w4a16": Layout("nvidia/Qwen3.6-27B-NVFP4", _attention_fp8, shards=2, algorithm="W4A16_NVFP4"),
    "modelopt mixed w4a4": Layout("nvidia/Qwen3.8-27B-NVFP4", _attention_fp8, shards=2, algorithm="NVFP4"),
    "modelopt mixed w4a4, bf16 head": Layout(
        "RadixArk/Qwen3.8-27B-NVFP4-BF16-LMHead",
        lambda module, is_last: "" if module == "lm_head" else _attention_fp8(module, is_last),
        algorithm="NVFP4",
    ),
    "modelopt mixed, weights only": Layout(
        "r0b0tlab/Qwen3.8-27B-NVFP4-MTP-sm121", _attention_fp8_weights_only, shards=4, algorithm="W4A16_NVFP4"
    ),
    "modelopt mixed with kv scales": Layout(
        "ModelOpt's export of a calibrated fp8 KV cache",
        _attention_fp8,
        kv_scales=_MODELOPT_KV,
        algorithm="NVFP4",
    ),
    "modelopt nvfp4": Layout("Inferact/Qwen3.8-27B-NVFP4", _all_but_inputs, shards=2, algorithm="NVFP4"),
    "modelopt nvfp4 with kv scales": Layout(
        "berkerdooo/Qwen3.6-27B-NVFP4",
        lambda module, is_last: "" if module == "lm_head" else "nvfp4",
        kv_scales=_MODELOPT_KV,
        algorithm="NVFP4",
    ),
    "modelopt nvfp4, text only": Layout(
        "sakamakismile/Qwen3.6-27B-Text-NVFP4-MTP",
        _all_but_inputs,
        is_text_only=True,
        algorithm="NVFP4",
    ),
    "llm-compressor": Layout(
        "RedHatAI/Qwen3.5-27B-NVFP4",
        lambda module, is_last: "compressed nvfp4" if module.startswith(("self_attn", "mlp")) else "",
        has_mtp=False,
    ),
    "llm-compressor with out_proj": Layout(
        "unsloth/Qwen3.6-27B-NVFP4, first revision",
        lambda module, is_last: _all_but_inputs(module, is_last).replace("nvfp4", "compressed nvfp4"),
    ),
    "llm-compressor mixed": Layout(
        "unsloth/Qwen3.8-27B-NVFP4",
        _compressed_mixed,
        kv_scales=_COMPRESSED_KV,
        mtp_file="model_mtp.safetensors",
    ),
}
"""By name. Unless said otherwise a checkpoint has the vision tower and the MTP layers, in bfloat16."""


def _fp8(module: str, weight: torch.Tensor, dense: Tensors) -> Tensors:
    return tiny.fp8_tensors(module, weight) | {f"{module}.input_scale": torch.tensor(0.02)}


def _nvfp4(module: str, weight: torch.Tensor, dense: Tensors) -> Tensors:
    """ModelOpt gives layers that engines stack one weight_scale_2."""
    members = {module.replace("up_proj", "gate_proj"), module.replace("gate_proj", "up_proj")}
    amax = torch.stack([dense[f"{member}.weight"].float().abs().amax() for member in members]).amax()
    return tiny.modelopt_nvfp4_tensors(module, weight, amax=amax)


def _nvfp4_and_input(module: str, weight: torch.Tensor, dense: Tensors) -> Tensors:
    return _nvfp4(module, weight, dense) | {f"{module}.input_scale": torch.tensor(0.003)}


def _compressed_fp8(module: str, weight: torch.Tensor, dense: Tensors) -> Tensors:
    tensors = tiny.fp8_tensors(module, weight, per_channel=True)
    # Rounded to bfloat16 before it divides, so that the stored scale is the one that was used.
    scale = tensors[f"{module}.weight_scale"].bfloat16()
    quantized = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{module}.weight": quantized, f"{module}.weight_scale": scale}


def _compressed_nvfp4(module: str, weight: torch.Tensor, dense: Tensors) -> Tensors:
    return tiny.compressed_nvfp4_tensors(module, weight) | {f"{module}.input_global_scale": torch.tensor([700.0])}


_FORMATS: dict[str, Callable[[str, torch.Tensor, Tensors], Tensors]] = {
    "fp8": _fp8,
    "nvfp4": _nvfp4_and_input,
    "nvfp4 weights only": _nvfp4,
    "compressed fp8": _compressed_fp8,
    "compressed nvfp4": _compressed_nvfp4,
}


def _values(tensors: Tensors, module: str) -> torch.Tensor:
    """float32 [out, in] of a quantised layer."""
    scale = tensors[f"{module}.weight_scale"]
    if f"{module}.weight_packed" in tensors:
        return tiny.nvfp4_values(
            tensors[f"{module}.weight_packed"], scale, 1 / tensors[f"{module}.weight_global_scale"]
        )
    if f"{module}.weight_scale_2" in tensors:
        return tiny.nvfp4_values(tensors[f"{module}.weight"], scale, tensors[f"{module}.weight_scale_2"])
    return tensors[f"{module}.weight"].float() * scale.float()


def _inside(module: str) -> str:
    """`self_attn.q_proj` of a layer's module; `lm_head` as it is."""
    return module.removeprefix(f"{LANGUAGE}layers.").partition(".")[2] or module


def _add_kv_scales(tensors: Tensors, how: Layout, config: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """Scales as calibration gives them: the largest key or value over 448, another in each layer."""
    if how.kv_scales is None:
        return ()
    k_name, v_name, dtype, shape = how.kv_scales
    pairs = []
    for layer, kind in enumerate(config["text_config"]["layer_types"]):
        if kind == "full_attention":
            pair = [torch.full(shape, value * (layer + 1), dtype=dtype) for value in (0.006, 0.002)]
            attention = f"{LANGUAGE}layers.{layer}.self_attn"
            tensors |= {f"{attention}.{k_name}": pair[0], f"{attention}.{v_name}": pair[1]}
            pairs.append((float(pair[0]), float(pair[1])))
    return tuple(pairs)


def _without_tower(by_name: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(LANGUAGE, "model."): value for name, value in by_name.items()}


def _add_quantization(folder: Path, how: Layout, config: dict[str, Any], formats: Mapping[str, str]) -> None:
    """`quantization_config`, and ModelOpt's file of its own."""
    if not any(formats.values()):
        return
    if how.algorithm:
        config["quantization_config"], statement = _modelopt(how, formats)
        folder.mkdir(parents=True, exist_ok=True)
        tiny.write_json(folder / "hf_quant_config.json", statement)
    else:
        config["quantization_config"] = _compressed_tensors(how, formats)


def _modelopt(how: Layout, formats: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    four_bit = {"quant_algo": how.algorithm, "group_size": 16}
    layers = {module: {"quant_algo": "FP8"} if kind == "fp8" else four_bit for module, kind in formats.items() if kind}
    is_mixed = "fp8" in formats.values()
    algorithm = "MIXED_PRECISION" if is_mixed else how.algorithm
    excluded = ["mtp*", "mtp.layers.0*", *(() if is_mixed else (name for name, kind in formats.items() if not kind))]
    producer = {"name": "modelopt", "version": "0.45.0"}
    section = {
        "config_groups": {
            "group_0": {"input_activations": _FP4, "weights": _FP4, "targets": ["Linear"]},
        },
        "ignore": excluded,
        "quant_algo": algorithm,
        "kv_cache_scheme": _FP8,
        "producer": producer,
        "quant_method": "modelopt",
    } | ({"quantized_layers": layers} if is_mixed else {})
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": excluded}
    if is_mixed:
        quantization["quantized_layers"] = layers
    return section, {"producer": producer, "quantization": quantization}


def _compressed_tensors(how: Layout, formats: Mapping[str, str]) -> dict[str, Any]:
    fp4 = _FP4 | {"strategy": "tensor_group", "symmetric": True, "scale_dtype": "torch.float8_e4m3fn"}
    groups = {
        "compressed nvfp4": {
            "format": "nvfp4-pack-quantized",
            "input_activations": fp4 | {"dynamic": "local"},
            "weights": fp4,
            "targets": ["Linear"],
        },
        "compressed fp8": {
            "format": "float-quantized",
            "input_activations": _FP8 | {"dynamic": True, "strategy": "token", "symmetric": True},
            "weights": _FP8 | {"strategy": "channel", "symmetric": True},
            "targets": ["re:.*self_attn.*_proj$", "re:.*linear_attn.(in_proj_qkv|in_proj_z|out_proj)$", "lm_head"],
        },
    }
    used = [group for kind, group in groups.items() if kind in formats.values()]
    # llm-compressor lists the parents of what it leaves alone too.
    left = [module for module, kind in formats.items() if not kind]
    parents = {module.rpartition(".")[0] for module in left if "linear_attn" in module}
    return {
        "config_groups": {f"group_{i}": group for i, group in enumerate(used)},
        "format": "mixed-precision" if len(used) > 1 else used[0]["format"],
        "ignore": [*left, *sorted(parents), "re:^mtp.*", "model.visual.blocks.0.attn.qkv"],
        "kv_cache_scheme": None if how.kv_scales is None else _FP8 | {"strategy": "tensor", "symmetric": True},
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": "0.17.2",
    }


def _write(folder: Path, how: Layout, config: Mapping[str, Any], tensors: Tensors) -> None:
    if not how.mtp_file:
        tiny.write_folder(folder, config, tensors, shards=how.shards)
        return
    mtp = [name for name in tensors if name.startswith("mtp.")]
    rest = [name for name in tensors if not name.startswith("mtp.")]
    tiny.write_files(folder, config, tensors, {"model.safetensors": rest, how.mtp_file: mtp})
