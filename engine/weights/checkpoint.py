"""A checkpoint folder, open: its tensors by name, each of them used or passed over by name before it counts as read."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from engine.errors import WeightsError
from engine.progress import Advance, track
from engine.weights.formats import DenseWeight, LinearWeight, Nvfp4Weight
from engine.weights.kv_scales import (
    EVERY_KV_SCALE,
    OTHER_ATTENTION_SCALES,
    find_spelling,
    read_kv_scales,
    why_unused,
)
from engine.weights.linear import read_linear, take_floats
from engine.weights.quantization_config import QuantizationConfig, read_quantization_config
from engine.weights.safetensors_files import MappedFiles, TensorEntry, read_entries

_LEFT_OVER_NAMES = 5  # as many as a message can show
_PAGE_BYTES = 4096

logger = logging.getLogger("dalsegno.weights")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of the safetensors in `folder` and map the files; no tensor is read yet.

    Raises WeightsError that names the file: not a folder, no safetensors, a shard missing, truncated or corrupt, an
    index that disagrees with the shards, a quantisation that is not supported.
    """
    checkpoint = Checkpoint(folder, read_entries(folder), read_quantization_config(folder))
    checkpoint.skip(OTHER_ATTENTION_SCALES, "scales of an attention that is quantised in another way than by fp8 pages")
    reason = why_unused(checkpoint.names(), checkpoint.quantization.kv_cache if checkpoint.quantization else None)
    if reason is not None:
        checkpoint.skip(EVERY_KV_SCALE, f"scales of a quantised KV cache: {reason}")
    return checkpoint


class Checkpoint:
    """Tensors by name. Tensors are views of the mapped files: do not write to them. Used by one thread.

    A context manager; the progress bar appears with the first tensor and goes at `finish` or on leaving the context.
    """

    def __init__(
        self, folder: Path, entries: dict[str, TensorEntry], quantization: QuantizationConfig | None = None
    ) -> None:
        self.folder = folder
        self.quantization = quantization
        self._entries = entries
        self._unused = dict.fromkeys(entries)
        self._files = MappedFiles()
        self._stack = ExitStack()
        self._advance: Advance | None = None
        self._kv_spelling: tuple[str, str] | None = None
        self._knows_kv_spelling = False

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, the passed over and the used ones too."""
        return tuple(self._entries)

    def has(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry | None:
        """The tensor's header, or None. Does not count as a use."""
        return self._entries.get(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A tensor that is not quantised: float32, bfloat16 or float16, of `shape` where one is given.

        Raises WeightsError that names the tensor, what it is and what was expected.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise WeightsError(f"{self.folder}: tensor {name} is missing")
        return take_floats(self, entry, shape)

    def linear(self, prefix: str, out_features: int, in_features: int, *, has_bias: bool = False) -> LinearWeight:
        """The linear layer `prefix`, in the format that its tensors are in; all its scales count as used. One that was
        made for activations as they are has no `input_scale`.

        Raises WeightsError that names the tensor: missing, of a wrong shape or dtype, a scale without a weight or the
        other way round, a format that is not supported, a quantised layer that the checkpoint says it excludes.
        """
        weight = read_linear(self, prefix, out_features, in_features, has_bias=has_bias)
        if not isinstance(weight, DenseWeight) and self.quantization is not None:
            pattern = self.quantization.ignores(prefix)
            if pattern is not None:
                raise WeightsError(
                    f"{self.folder}: layer {prefix} is quantised, but the quantisation config excludes it "
                    f"({pattern!r}); the checkpoint contradicts itself"
                )
            if isinstance(weight, Nvfp4Weight) and self.quantization.leaves_activations(prefix):
                return replace(weight, input_scale=None)
        return weight

    def kv_scales(self, prefix: str) -> tuple[float, float] | None:
        """What fp8 keys and fp8 values of attention `prefix` are multiplied by, or None where no layer has scales.

        Call it after what is to be passed over. Raises WeightsError that names the tensor: a layer or a half of a pair
        without its scale, a scale that is not one positive number.
        """
        if not self._knows_kv_spelling:
            self._kv_spelling, self._knows_kv_spelling = find_spelling(self._unused), True
        return None if self._kv_spelling is None else read_kv_scales(self, prefix, self._kv_spelling)

    @property
    def has_kv_scales(self) -> bool:
        """Whether `kv_scales` has found any."""
        return self._kv_spelling is not None

    def skip(self, patterns: Sequence[str], reason: str) -> None:
        """Pass over the tensors that a pattern names: a glob, or the beginning of a name. Logged, with their bytes."""
        matched = [name for name in self._unused if any(_names(pattern, name) for pattern in patterns)]
        if not matched:
            return
        nbytes = sum(self._entries[name].nbytes for name in matched)
        logger.info("passing over %d tensors (%d bytes), e.g. %s: %s", len(matched), nbytes, matched[0], reason)
        for name in matched:
            del self._unused[name]
        if self._advance is not None:
            self._advance(nbytes)

    def take(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor as it is in the file, whatever its dtype; counts as a use."""
        tensor = self._files.get(entry)
        if entry.name in self._unused:
            if self._advance is None:
                self._advance = self._start_progress()
            del self._unused[entry.name]
            _touch(tensor)
            self._advance(entry.nbytes)
        return tensor

    def finish(self) -> None:
        """Close the checkpoint. Raises WeightsError that names the tensors that were neither used nor passed over."""
        self.close()
        left_over = list(self._unused)
        if left_over:
            shown = ", ".join(left_over[:_LEFT_OVER_NAMES])
            more = ", ..." if len(left_over) > _LEFT_OVER_NAMES else ""
            raise WeightsError(
                f"{self.folder}: {len(left_over)} tensors of the checkpoint are not used by this architecture: "
                f"{shown}{more}; config.json and the weights belong to different models"
            )

    def close(self) -> None:
        """End the progress bar and drop the file handles; tensors that were handed out stay valid."""
        self._stack.close()
        self._files.close()

    def _start_progress(self) -> Advance:
        total = sum(self._entries[name].nbytes for name in self._unused)
        return self._stack.enter_context(track(f"loading {self.folder.name}", total))


def _names(pattern: str, name: str) -> bool:
    return name.startswith(pattern) or fnmatch.fnmatchcase(name, pattern)


def _touch(tensor: torch.Tensor) -> None:
    """Read one byte of each page, so that the bytes come from the disk now, under the progress bar."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel():
        flat[::_PAGE_BYTES].max()
