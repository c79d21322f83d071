"""What a checkpoint holds, told from the headers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine.weights.linear import DENSE_DTYPES
from engine.weights.quantization_config import QuantizationConfig, read_quantization_config
from engine.weights.safetensors_files import TensorEntry, read_entries

NVFP4_MODELOPT = "NVFP4 (ModelOpt)"
NVFP4_COMPRESSED_TENSORS = "NVFP4 (compressed-tensors)"
FP8 = "fp8 e4m3"

_PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SCALE_SUFFIXES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
)


@dataclass(frozen=True, slots=True)
class FormatSummary:
    """All tensors of one format, their scales included in `nbytes`."""

    name: str
    tensors: int
    """Weights and other tensors; scales are not counted."""
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint folder in figures. Everything in the files counts, also what the daemon passes over."""

    folder: Path
    shards: tuple[tuple[str, int], ...]
    """File name and bytes."""
    formats: tuple[FormatSummary, ...]
    """The largest first."""
    quantization: QuantizationConfig | None

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.formats)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.formats)


def inspect_checkpoint(folder: Path) -> CheckpointSummary:
    """Sum up the checkpoint in `folder`, reading headers only. Raises WeightsError as `open_checkpoint` does."""
    entries = read_entries(folder)
    totals: dict[str, FormatSummary] = {}
    for entry in entries.values():
        name = _format(entry, entries)
        old = totals.get(name, FormatSummary(name, 0, 0, 0))
        is_scale = _owner(entry.name) is not None
        totals[name] = FormatSummary(
            name=name,
            tensors=old.tensors + (not is_scale),
            parameters=old.parameters + (0 if is_scale else _parameters(entry, name)),
            nbytes=old.nbytes + entry.nbytes,
        )
    files = sorted({entry.file for entry in entries.values()})
    return CheckpointSummary(
        folder=folder,
        shards=tuple((file.name, file.stat().st_size) for file in files),
        formats=tuple(sorted(totals.values(), key=lambda part: (-part.nbytes, part.name))),
        quantization=read_quantization_config(folder),
    )


def _format(entry: TensorEntry, entries: dict[str, TensorEntry]) -> str:
    owner = _owner(entry.name)
    prefix = owner if owner is not None else entry.name.rpartition(".")[0]
    is_part = owner is not None or entry.name.endswith((".weight", ".weight_packed"))
    if is_part and f"{prefix}.weight_packed" in entries and f"{prefix}.weight_global_scale" in entries:
        return NVFP4_COMPRESSED_TENSORS
    weight = entries.get(f"{prefix}.weight")
    if is_part and weight is not None and weight.dtype == "U8" and f"{prefix}.weight_scale_2" in entries:
        return NVFP4_MODELOPT
    if is_part and weight is not None and weight.dtype == "F8_E4M3":
        return FP8
    return _PLAIN[entry.dtype] if entry.dtype in DENSE_DTYPES else entry.dtype


def _owner(name: str) -> str | None:
    """The layer whose scale `name` is, or None."""
    prefix, _, suffix = name.rpartition(".")
    return prefix if suffix in _SCALE_SUFFIXES else None


def _parameters(entry: TensorEntry, format_name: str) -> int:
    packed = format_name in (NVFP4_MODELOPT, NVFP4_COMPRESSED_TENSORS)
    return math.prod(entry.shape) * (2 if packed else 1)
