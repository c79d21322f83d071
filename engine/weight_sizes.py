"""What a checkpoint's weights take on a device, told from its headers: which layers keep their format, which do not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.kernels.device import DeviceTraits
from engine.models.config import ModelConfig
from engine.models.qwen3_5 import MTP_PATTERNS, VISION_PATTERNS
from engine.options import Activations
from engine.step_memory import Part
from engine.weights.nvfp4 import BLOCK_COLUMNS
from engine.weights.safetensors_files import TensorEntry, read_entries

NVFP4_SINCE = (8, 0)
"""The compute capability from which a class multiplies NVFP4 weights without unpacking them."""
FP8_SINCE = (8, 9)
"""And fp8 weights, by activations rounded to fp8 too."""
FP8_ALIGNMENT = 16
"""Of both sides of an fp8 matrix; others are unpacked."""
FLOAT_BYTES = 4

_PASSED_OVER = (*VISION_PATTERNS, *MTP_PATTERNS)
_FLOAT_TENSORS = ("A_log", "dt_bias")
_EMBEDDING = "embed_tokens"
_SCALE_TILE_ROWS, _SCALE_TILE_COLUMNS = 128, 4
"""Block scales lie in tiles of this size, padded where they do not fill the last."""


class Form(StrEnum):
    """How tensors lie on the device."""

    NVFP4 = "NVFP4"
    FP8 = "fp8"
    UNPACKED = "unpacked"
    DENSE = "dense"
    EMBEDDING = "embedding"
    OTHER = "norms and the rest"


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes on the device, by form."""

    parts: tuple[Part, ...]
    staging_bytes: int
    """The most that loading needs besides on the device, while the layers that share an input are brought together."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """While loading: KV pages and states are allocated after it."""
        return self.nbytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A module's weight, or a tensor of its own, as it will lie on the device."""

    form: Form
    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Device:
    """Where the weights will lie."""

    traits: DeviceTraits
    element_bytes: int
    activations: Activations

    def place(self, form: Form, shape: tuple[int, ...], nbytes: int) -> _Tensors:
        """`nbytes` of a quantised matrix, or what it takes unpacked."""
        values = math.prod(shape)
        if self._keeps(form, shape):
            return _Tensors(form, values, nbytes)
        return _Tensors(Form.UNPACKED, values, values * self.element_bytes)

    def _keeps(self, form: Form, shape: tuple[int, ...]) -> bool:
        capability = self.traits.capability
        if capability is None:
            return False
        if form is Form.NVFP4:
            return capability >= NVFP4_SINCE
        is_aligned = not any(side % FP8_ALIGNMENT for side in shape)
        return capability >= FP8_SINCE and is_aligned and self.activations != "bf16"


def size_weights(
    folder: Path, config: ModelConfig, traits: DeviceTraits, element_bytes: int, activations: Activations = "auto"
) -> WeightSizes:
    """Read the headers in `folder`; `element_bytes` is that of the kernels' dtype.

    Raises WeightsError as `read_entries` does. What the model's code passes over is left out; that every tensor fits
    the config is checked at load.
    """
    entries = {name: entry for name, entry in read_entries(folder).items() if _is_loaded(name, config)}
    table = next((entry for name, entry in entries.items() if _is_embedding(name)), None)
    if config.has_tied_embeddings and table is not None:
        entries["lm_head.weight"] = table
    device = _Device(traits, element_bytes, activations)
    found = {name: _tensors(name, entry, entries, device) for name, entry in entries.items()}
    kept = {name: tensors for name, tensors in found.items() if tensors is not None}
    rotary = config.max_position_embeddings * config.rope.rotary_dim
    rope = Part("  rotary table", rotary * FLOAT_BYTES, f"{config.max_position_embeddings:,} positions in float32")
    return WeightSizes((*_parts(kept.values(), element_bytes), rope), _staging_bytes(kept, traits))


def _is_loaded(name: str, config: ModelConfig) -> bool:
    if name.startswith(_PASSED_OVER) or name.endswith("rotary_emb.inv_freq"):
        return False
    return not (config.has_tied_embeddings and name.startswith("lm_head."))


def _is_embedding(name: str) -> bool:
    return name.endswith(f"{_EMBEDDING}.weight")


def _tensors(name: str, entry: TensorEntry, entries: Mapping[str, TensorEntry], device: _Device) -> _Tensors | None:
    """None for scales, which count with their weight."""
    module, _, suffix = name.rpartition(".")
    values = math.prod(entry.shape)
    is_matrix = len(entry.shape) == 2
    if is_matrix and (suffix == "weight_packed" or (suffix == "weight" and entry.dtype == "U8")):
        rows, columns = entry.shape[0], entry.shape[1] * 2
        return device.place(Form.NVFP4, (rows, columns), _nvfp4_bytes(rows, columns))
    if is_matrix and suffix == "weight" and entry.dtype == "F8_E4M3":
        scale = entries.get(f"{module}.weight_scale")
        scales = 1 if scale is None else math.prod(scale.shape)
        return device.place(Form.FP8, entry.shape, values + (scales * FLOAT_BYTES if scales > 1 else 0))
    if suffix.endswith(("_scale", "_scale_2", "scale_inv")):
        return None
    if _is_embedding(name):
        return _Tensors(Form.EMBEDDING, values, entry.nbytes)
    if suffix in _FLOAT_TENSORS:
        return _Tensors(Form.OTHER, values, values * FLOAT_BYTES)
    return _Tensors(
        Form.DENSE if is_matrix and suffix == "weight" else Form.OTHER, values, values * device.element_bytes
    )


def _nvfp4_bytes(rows: int, columns: int) -> int:
    """Two values to a byte, and an fp8 scale for each 16 in padded tiles. Single scales don't count."""
    scale_rows = -(-rows // _SCALE_TILE_ROWS) * _SCALE_TILE_ROWS
    scale_columns = -(-columns // BLOCK_COLUMNS // _SCALE_TILE_COLUMNS) * _SCALE_TILE_COLUMNS
    return rows * columns // 2 + scale_rows * scale_columns


def _parts(found: Iterable[_Tensors], element_bytes: int) -> Iterable[Part]:
    by_form: dict[Form, list[_Tensors]] = defaultdict(list)
    for tensors in found:
        by_form[tensors.form].append(tensors)
    for form in Form:
        if by_form[form]:
            members = by_form[form]
            values, nbytes = sum(each.values for each in members), sum(each.nbytes for each in members)
            yield Part(f"  {form}", nbytes, f"{values:,} values of {_how(form, element_bytes)}")


def _how(form: Form, element_bytes: int) -> str:
    each = f"{element_bytes} bytes"
    return {
        Form.NVFP4: "4 bits, and an fp8 scale for 16 of them",
        Form.FP8: "a byte",
        Form.UNPACKED: f"{each}: nothing here multiplies by them as stored",
        Form.DENSE: each,
        Form.EMBEDDING: "the checkpoint's dtype",
        Form.OTHER: f"{each}, some of 4",
    }[form]


def _staging_bytes(found: Mapping[str, _Tensors], traits: DeviceTraits) -> int:
    """Twice the largest block: its layers as they come, beside what they are made into. A GPU unpacks a layer in two
    float32 copies besides; the CPU does so piece by piece."""
    blocks: dict[str, int] = defaultdict(int)
    unpacked = [0]
    for name, tensors in found.items():
        if tensors.form not in (Form.EMBEDDING, Form.OTHER):
            blocks[".".join(name.split(".")[:-2])] += tensors.nbytes
        if tensors.form is Form.UNPACKED and traits.is_cuda:
            unpacked.append(tensors.values)
    return 2 * max(blocks.values(), default=0) + 2 * FLOAT_BYTES * max(unpacked)
