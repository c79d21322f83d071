"""Writes an NVFP4 copy of a checkpoint, in the layout of NVIDIA's ModelOpt, or nothing at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.errors import WeightsError
from engine.progress import track
from engine.weights.linear import DENSE_DTYPES
from engine.weights.nvfp4 import BLOCK_COLUMNS, dequantize_nvfp4, matrix_amax, quantize_nvfp4
from engine.weights.quantization_config import MODELOPT_FILE, read_quantization_config
from engine.weights.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    MappedFiles,
    TensorEntry,
    read_entries,
    read_json,
)

QUANTIZED_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
)
"""The linear layers that are rounded. in_proj_a and in_proj_b, which steer the recurrence, are small and stay."""

# Layers that engines stack into one and that therefore get one global scale, as ModelOpt gives them.
_SHARED_SCALE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))
# Parts of a full checkpoint that are copied as they are; ModelOpt's exclude list has them as globs.
_KEPT_PARTS = {"mtp.": "mtp*", "model.visual.": "model.visual*", "visual.": "visual*"}
_KEPT_FLOAT32 = (".A_log", ".dt_bias")
# Tokenizer, templates, generation defaults, licences; not the model card, which describes the source.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")
_NOT_COPIED = frozenset({"config.json", MODELOPT_FILE})
# Tensors of one file are held in memory until it is written.
_MAX_SHARD_BYTES = 2 << 30
_ALGORITHM = "W4A16_NVFP4"
_SPARE_BYTES = 64 << 20  # for headers and the small files

logger = logging.getLogger("dalsegno.weights")


class _Fate(StrEnum):
    QUANTIZE = "quantize"
    CAST = "cast"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class LayerError:
    """What rounding did to one layer: relative_error is |w - rounded w| / |w|, both norms Frobenius."""

    name: str
    relative_error: float


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What `quantize_checkpoint` wrote."""

    layers: tuple[LayerError, ...]
    kept: tuple[str, ...]
    """Layers of QUANTIZED_LAYERS whose in-features are no multiple of 16; they stay as they were."""
    source_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class _Item:
    entry: TensorEntry
    fate: _Fate

    @property
    def module(self) -> str:
        return self.entry.name.removesuffix(".weight")

    @property
    def written_bytes(self) -> int:
        if self.fate is _Fate.QUANTIZE:
            elements = self.entry.shape[0] * self.entry.shape[1]
            return elements // 2 + elements // BLOCK_COLUMNS + 4
        return self.entry.nbytes // (2 if self.fate is _Fate.CAST else 1)


def quantize_checkpoint(src: Path, dst: Path) -> QuantizeReport:
    """Round the linear layers of the checkpoint in `src` to NVFP4 and write the result to the folder `dst`.

    Embeddings, lm_head, conv1d, in_proj_a, in_proj_b, norms, vision and MTP tensors stay (float32 becomes bfloat16,
    except A_log and dt_bias). There is no calibration, hence no `input_scale`: the config says W4A16_NVFP4, weights
    only. `dst` appears whole at the end or not at all. Memory: one output file (at most 2 GiB) and one layer.

    Raises WeightsError: src broken or quantised already, dst not empty, too little disk (with bytes), a weight that is
    infinite or not a number.
    """
    dst = dst.absolute()
    config = _read_source_config(src)
    entries = read_entries(src)
    items = [_Item(entry, _fate(entry, config)) for entry in sorted(entries.values(), key=lambda e: (e.file, e.name))]
    if not any(item.fate is _Fate.QUANTIZE for item in items):
        expected = ", ".join(QUANTIZED_LAYERS)
        raise WeightsError(f"{src}: no layer to quantise; expected weights of layers named {expected}")
    _check_destination(dst, sum(item.written_bytes for item in items))
    with _whole_or_nothing(dst) as folder:
        layers, written = _write_tensors(items, folder)
        _write_configs(config, items, folder)
        _copy_small_files(src, folder)
    kept = tuple(item.module for item in items if item.fate is not _Fate.QUANTIZE and _is_listed(item.entry))
    if kept:
        logger.warning("%d layers stay as they were, their in-features are no multiple of 16: %s", len(kept), kept[0])
    return QuantizeReport(
        layers=tuple(layers),
        kept=kept,
        source_bytes=sum(item.entry.nbytes for item in items),
        written_bytes=written,
    )


def _read_source_config(src: Path) -> dict[str, Any]:
    if not src.is_dir():
        raise WeightsError(f"{src}: expected a folder in Hugging Face layout")
    quantization = read_quantization_config(src)
    if quantization is not None:
        what = " ".join(filter(None, (quantization.method, quantization.algorithm)))
        raise WeightsError(
            f"{src}: already quantised ({what}), so it can be served as it is; expected float32, bfloat16 or float16 "
            "weights to quantise"
        )
    return read_json(src / "config.json")


def _fate(entry: TensorEntry, config: dict[str, Any]) -> _Fate:
    if entry.dtype.startswith("F8") or entry.name.endswith(("_scale", "_scale_2", "_scale_inv", "weight_packed")):
        raise WeightsError(f"{entry.file}: already quantised: tensor {entry.name} is {entry.dtype}")
    if _is_listed(entry) and entry.shape[1] % BLOCK_COLUMNS == 0 and entry.dtype in DENSE_DTYPES:
        return _Fate.QUANTIZE
    if entry.dtype == "F32" and not entry.name.endswith(_KEPT_FLOAT32) and _is_float32_model(config):
        return _Fate.CAST
    return _Fate.KEEP


def _is_listed(entry: TensorEntry) -> bool:
    """Is this the weight of one of QUANTIZED_LAYERS, outside the parts that are kept?"""
    parts = entry.name.split(".")
    return (
        len(parts) >= 2
        and parts[-1] == "weight"
        and parts[-2] in QUANTIZED_LAYERS
        and len(entry.shape) == 2
        and not entry.name.startswith(tuple(_KEPT_PARTS))
    )


def _is_float32_model(config: dict[str, Any]) -> bool:
    """A float32 tensor in a 16-bit checkpoint is there on purpose, and stays."""
    text = config.get("text_config") or {}
    dtype = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), "float32")
    return bool(dtype == "float32")


def _check_destination(dst: Path, needed_bytes: int) -> None:
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise WeightsError(f"{dst}: exists and is not an empty folder; name another, or remove it")
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"{dst}: its folder cannot be made: {error.strerror}") from error
    free_bytes = shutil.disk_usage(dst.parent).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise WeightsError(
            f"{dst}: the quantised checkpoint needs {needed_bytes + _SPARE_BYTES:,} bytes of disk, but {free_bytes:,} "
            "are free; free some, or name a folder on another disk"
        )


@contextmanager
def _whole_or_nothing(dst: Path) -> Iterator[Path]:
    """A folder beside `dst` that takes its name at the end, or is removed if anything goes wrong, Ctrl-C included."""
    prefix = f".{dst.name}.partial-"
    for stale in dst.parent.iterdir():
        pid = stale.name.removeprefix(prefix)
        if stale.name.startswith(prefix) and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(stale, ignore_errors=True)  # its process was killed and could not tidy up
    folder = dst.parent / f"{prefix}{os.getpid()}"
    try:
        folder.mkdir()
        yield folder
        folder.rename(dst)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{dst}: cannot be written: {error}; nothing was left behind") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_tensors(items: list[_Item], folder: Path) -> tuple[list[LayerError], int]:
    shards = _plan_shards(items)
    files = MappedFiles()
    layers: list[LayerError] = []
    weight_map: dict[str, str] = {}
    total = 0
    shared = _SharedAmax(items, files)
    with track("quantising", sum(item.entry.nbytes for item in items)) as advance:
        for number, shard in enumerate(shards, start=1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for item in shard:
                tensors.update(_convert(files, item, shared, layers))
                advance(item.entry.nbytes)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # safetensors writes for its owner alone; a daemon often runs as another user
            weight_map.update(dict.fromkeys(tensors, file))
            total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX_FILE, index)
    return layers, total


def _plan_shards(items: list[_Item]) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item.written_bytes > _MAX_SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.written_bytes
    return shards


def _convert(files: MappedFiles, item: _Item, shared: _SharedAmax, layers: list[LayerError]) -> dict[str, torch.Tensor]:
    weight = files.get(item.entry)
    if item.fate is _Fate.KEEP:
        return {item.entry.name: weight}
    if item.fate is _Fate.CAST:
        return {item.entry.name: weight.bfloat16()}
    quantized = quantize_nvfp4(weight, item.entry.name, amax=shared.of(item))
    error = dequantize_nvfp4(quantized).sub_(weight).norm() / weight.float().norm().clamp(min=1e-30)
    layers.append(LayerError(item.module, error.item()))
    return {
        f"{item.module}.weight": quantized.packed,
        f"{item.module}.weight_scale": quantized.scale,
        f"{item.module}.weight_scale_2": quantized.global_scale,
    }


class _SharedAmax:
    """The common maximum of layers that share a global scale, read when the first of them is rounded."""

    def __init__(self, items: list[_Item], files: MappedFiles) -> None:
        self._files = files
        self._members: dict[str, list[_Item]] = {}
        self._amax: dict[str, torch.Tensor] = {}
        for item in items:
            if item.fate is _Fate.QUANTIZE:
                self._members.setdefault(self._group(item), []).append(item)

    def of(self, item: _Item) -> torch.Tensor:
        group = self._group(item)
        if group not in self._amax:
            maxima = [matrix_amax(self._files.get(m.entry), m.entry.name) for m in self._members[group]]
            self._amax[group] = torch.stack(maxima).amax()
        return self._amax[group]

    @staticmethod
    def _group(item: _Item) -> str:
        parent, _, layer = item.module.rpartition(".")
        return next((f"{parent}.{'+'.join(group)}" for group in _SHARED_SCALE if layer in group), item.module)


def _write_configs(config: dict[str, Any], items: list[_Item], folder: Path) -> None:
    exclude = _exclude_list(items)
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_COLUMNS}
    producer = {"name": "dalsegno"}
    section = {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": exclude,
        "quant_algo": _ALGORITHM,
        "producer": producer,
        "quant_method": "modelopt",
    }
    quantization = {
        "quant_algo": _ALGORITHM,
        "kv_cache_quant_algo": None,
        "group_size": BLOCK_COLUMNS,
        "exclude_modules": exclude,
    }
    if _is_float32_model(config):
        text = config.get("text_config")
        config = config | _as_bfloat16(config) | ({"text_config": text | _as_bfloat16(text)} if text else {})
    _write_json(folder / "config.json", config | {"quantization_config": section})
    _write_json(folder / MODELOPT_FILE, {"producer": producer, "quantization": quantization})


def _as_bfloat16(section: dict[str, Any]) -> dict[str, str]:
    return {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in section}


def _exclude_list(items: list[_Item]) -> list[str]:
    """Every layer with a weight of two or more dimensions that stays, as ModelOpt lists them; whole parts as globs."""
    exclude = {"lm_head"}
    for item in items:
        part = next((glob for prefix, glob in _KEPT_PARTS.items() if item.entry.name.startswith(prefix)), None)
        if part is not None:
            exclude.add(part)
        elif item.fate is not _Fate.QUANTIZE and len(item.entry.shape) >= 2 and item.entry.name.endswith(".weight"):
            exclude.add(item.module)
    return sorted(module for module in exclude if not module.endswith("embed_tokens"))


def _copy_small_files(src: Path, folder: Path) -> None:
    for pattern in _COPIED:
        for file in src.glob(pattern):
            if file.name not in _NOT_COPIED and not file.name.endswith(".index.json") and file.is_file():
                shutil.copyfile(file, folder / file.name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
