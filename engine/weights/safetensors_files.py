"""The safetensors files of a checkpoint folder: which they are, their headers, and their tensors as mapped memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The names and sizes in https://github.com/huggingface/safetensors (dtype enum); sub-byte types are not read here.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones too
_OTHER_FORMATS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file's header describes it. `dtype` is safetensors' name for it, e.g. `BF16`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class MappedFiles:
    """Files mapped on first use. Tensors are views of the files: do not write to them. Used by one thread."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def get(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor, whatever its dtype; nothing is copied. Raises WeightsError that names the file."""
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(entry.file, framework="pt")
            tensor: torch.Tensor = self._open[entry.file].get_tensor(entry.name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{entry.file}: the safetensors library cannot read {entry.name}: {error}") from error
        return tensor

    def close(self) -> None:
        """Drop the file handles; tensors that were handed out stay valid."""
        self._open.clear()


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `folder`, by name; headers only.

    Raises WeightsError that names the file: no safetensors, a shard that is missing, truncated or corrupt, a tensor in
    two shards, an index that disagrees with its shards.
    """
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise WeightsError(
            f"{folder} {what}; expected a folder in Hugging Face layout with config.json and safetensors"
        )
    index_path = folder / INDEX_FILE
    if index_path.is_file():
        weight_map = _read_index(index_path)
        files = sorted({folder / shard for shard in weight_map.values()})
        _refuse_both_layouts(folder, files)
    else:
        weight_map = None
        files = [_single_file(folder)]
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise WeightsError(
                    f"tensor {name} is in two shards, {entries[name].file.name} and {file.name}; expected it in one"
                )
            entries[name] = entry
    if weight_map is not None:
        _check_index(index_path, weight_map, entries)
    return entries


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises WeightsError when the file is missing, truncated or corrupt."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise WeightsError(
                    f"{file}: not a whole safetensors file: {size:,} bytes, of which the header alone should take "
                    f"{8 + length:,}; download it again"
                )
            header = stream.read(length)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        parsed = json.loads(header)
        entries = {name: _entry(name, file, fields) for name, fields in parsed.items() if name != "__metadata__"}
        end = max((fields["data_offsets"][1] for name, fields in parsed.items() if name != "__metadata__"), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WeightsError(f"{file}: the safetensors header is corrupt ({error}); download it again") from error
    if 8 + length + end != size:
        raise WeightsError(
            f"{file}: truncated or overwritten: {size:,} bytes, but its header describes {8 + length + end:,}; "
            "download it again"
        )
    return entries


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises WeightsError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def _entry(name: str, file: Path, fields: Mapping[str, Any]) -> TensorEntry:
    dtype, (begin, end) = fields["dtype"], fields["data_offsets"]
    shape = tuple(int(dim) for dim in fields["shape"])
    expected = math.prod(shape) * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else end - begin
    if end - begin != expected:
        raise ValueError(f"tensor {name}: {dtype} {list(shape)} takes {expected:,} bytes, not {end - begin:,}")
    return TensorEntry(name=name, file=file, dtype=dtype, shape=shape, nbytes=expected)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: expected an object `weight_map` from tensor names to shard files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise WeightsError(f"{path}: tensor {name} is said to be in {shard!r}; expected a file in this folder")
        if not (path.parent / shard).is_file():
            raise WeightsError(f"{path}: names the shard {shard}, which is not there; download it, or the whole folder")
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for name, shard in weight_map.items():
        entry = entries.get(name)
        if entry is None or entry.file != path.parent / shard:
            where = f"is in {entry.file.name}" if entry else "is in none of the shards"
            raise WeightsError(f"{path}: says that tensor {name} is in {shard}, but it {where}")
    unlisted = sorted(entries.keys() - weight_map.keys())
    if unlisted:
        raise WeightsError(
            f"{path}: does not list {unlisted[0]}, which is in {entries[unlisted[0]].file.name} "
            f"({len(unlisted)} such tensors); index and shards belong to different checkpoints"
        )


def _refuse_both_layouts(folder: Path, files: list[Path]) -> None:
    single = folder / SINGLE_FILE
    if single.is_file() and single not in files:
        raise WeightsError(
            f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}, which does not list it; remove one of the two"
        )


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE_FILE).is_file():
        return folder / SINGLE_FILE
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"{folder}: holds {len(found)} safetensors files ({found[0].name}, ...) but no {INDEX_FILE} that says what "
            "is in which; download it"
        )
    others = sorted(file.name for pattern in _OTHER_FORMATS for file in folder.glob(pattern))
    hint = f"; {others[0]} is there, but only safetensors are read: convert it, or download those" if others else ""
    raise WeightsError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}{hint}")
