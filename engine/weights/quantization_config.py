"""What a checkpoint says about its own quantisation: `quantization_config` in config.json, and hf_quant_config.json."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import WeightsError
from engine.weights.safetensors_files import read_json

MODELOPT_FILE = "hf_quant_config.json"

_MODELOPT = "modelopt"
_COMPRESSED_TENSORS = "compressed-tensors"
_WEIGHTS_ONLY = "W4A16_NVFP4"
# Each method with the formats or algorithms that are read here; None is "does not say".
_SUPPORTED: dict[str, frozenset[str | None]] = {
    _MODELOPT: frozenset({None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", _WEIGHTS_ONLY, "MIXED_PRECISION"}),
    _COMPRESSED_TENSORS: frozenset(
        {None, "dense", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision"}
    ),
    "fp8": frozenset({None}),
    "fbgemm_fp8": frozenset({None}),
}


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The checkpoint's own statement. Which format a layer has is decided by its tensors, never by this."""

    method: str
    """`modelopt`, `compressed-tensors`, `fp8` or `fbgemm_fp8`."""
    algorithm: str | None
    """ModelOpt's `quant_algo`, or compressed-tensors' `format`."""
    producer: str | None
    ignore: tuple[str, ...]
    """Modules that are not quantised: exact names, globs, or `re:` and a regular expression that matches from the
    start."""
    kv_cache: str | None
    """The KV cache's format that the checkpoint was calibrated for, or None."""

    layers: Mapping[str, str]
    """The algorithm of each layer, where ModelOpt mixes several."""

    def leaves_activations(self, module: str) -> bool:
        """Whether an NVFP4 layer was made for activations that are not quantised, whatever scales it comes with."""
        return self.layers.get(module, self.algorithm) == _WEIGHTS_ONLY

    def ignores(self, module: str) -> str | None:
        """The first entry of `ignore` that names `module`, or None."""
        return next((pattern for pattern in self.ignore if _matches(pattern, module)), None)


def read_quantization_config(folder: Path) -> QuantizationConfig | None:
    """The statement of both files together, or None where there is none.

    Raises WeightsError that names the method or format where it is one that is not read here (awq, gptq, mxfp4,
    block-wise fp8, ...), and for a pattern that is not a regular expression.
    """
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    text_config = config.get("text_config")
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None and isinstance(text_config, dict):
        section = text_config.get("quantization_config")
    modelopt = read_json(folder / MODELOPT_FILE) if (folder / MODELOPT_FILE).is_file() else {}
    if section is None and not modelopt:
        return None
    section = _object(folder / "config.json", "quantization_config", section)
    file = folder / ("config.json" if section else MODELOPT_FILE)
    algorithms = _object(folder / MODELOPT_FILE, "quantization", modelopt.get("quantization"))
    says_modelopt = bool(modelopt) or "quant_algo" in section
    method = str(section.get("quant_method") or (_MODELOPT if says_modelopt else None)).lower()
    algorithm = section.get("quant_algo") or algorithms.get("quant_algo") or section.get("format")
    _refuse_unsupported(file, method, algorithm, section)
    ignore = [*_strings(section.get("ignore")), *_strings(algorithms.get("exclude_modules"))]
    for pattern in ignore:
        _check_pattern(file, pattern)
    kv_cache = (
        algorithms.get("kv_cache_quant_algo") or section.get("kv_cache_quant_algo") or section.get("kv_cache_scheme")
    )
    producer = section.get("producer") or modelopt.get("producer")
    return QuantizationConfig(
        method=method,
        algorithm=algorithm,
        producer=_producer(producer),
        ignore=tuple(dict.fromkeys(ignore)),
        kv_cache=_kv_cache(kv_cache),
        layers=_layers(algorithms.get("quantized_layers")) | _layers(section.get("quantized_layers")),
    )


def _refuse_unsupported(file: Path, method: str, algorithm: str | None, section: dict[str, Any]) -> None:
    if section.get("weight_block_size"):
        raise WeightsError(
            f"{file}: fp8 in blocks of {section['weight_block_size']} (weight_scale_inv) is not supported; "
            "use a checkpoint with fp8 per tensor or per channel, or NVFP4"
        )
    if method not in _SUPPORTED:
        known = ", ".join(sorted(_SUPPORTED))
        raise WeightsError(
            f"{file}: quant_method {method!r} is not supported; expected one of {known}, or bf16 weights"
        )
    if algorithm not in _SUPPORTED[method]:
        known = ", ".join(sorted(name for name in _SUPPORTED[method] if name))
        raise WeightsError(f"{file}: {method} format {algorithm!r} is not supported; expected one of {known}")


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def _check_pattern(file: Path, pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except re.error as error:
        raise WeightsError(
            f"{file}: the ignore list has {pattern!r}, which is no regular expression: {error}"
        ) from None


def _object(file: Path, key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: {key} is a {type(value).__name__}; expected an object")
    return value


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _layers(value: Any) -> dict[str, str]:
    entries = value.items() if isinstance(value, dict) else ()
    return {module: str(entry["quant_algo"]) for module, entry in entries if _names_algorithm(entry)}


def _names_algorithm(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("quant_algo"), str)


def _producer(value: Any) -> str | None:
    if not isinstance(value, dict) or "name" not in value:
        return None
    return " ".join(str(value[key]) for key in ("name", "version") if key in value)


def _kv_cache(value: Any) -> str | None:
    if isinstance(value, dict):
        return f"{value.get('type', '?')}{value.get('num_bits', '?')}"
    return str(value) if value else None
