"""The tensors behind the cache's units: KV pages and state slots of every layer, host memory, the copies between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cache import Copy, CopyObject, Tier, UnitHandle
from engine.locked_memory import CudaLock, allocate_locked
from engine.models.config import ModelConfig

Rows: TypeAlias = torch.Tensor | npt.NDArray[np.uint8]
"""Bytes, uint8, on a GPU or of the host."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """Everything that a model reads and writes besides its weights. Owned by the engine thread while a step runs."""

    kv: tuple[torch.Tensor, ...]
    """For each attention layer, [pages, 2, page_size, kv_heads, head_dim]."""
    conv: tuple[torch.Tensor, ...]
    """For each linear layer, [slots, conv_dim, kernel - 1]."""
    recurrent: tuple[torch.Tensor, ...]
    """For each linear layer, [slots, v_heads, V, K] float32."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the cache keeps off the device: equal units, each with the bytes of one KV page of all layers. A state image
    is laid over several of them. Owned by the engine thread while a step runs."""

    units: torch.Tensor
    """[units, unit_bytes] uint8 on the host; page-locked where the device is a GPU."""


class Storage:
    """A model's state and the host memory beside it, each unit as rows of bytes. Mutable: `run` belongs to the engine
    thread.

    A row is one unit's part of one tensor, in the order in which it lies in memory; its image is its rows, one after
    the other.
    """

    def __init__(self, state: ModelState, host: HostMemory | None = None) -> None:
        """Raises ValueError where a KV page and a host unit differ in size."""
        self.state = state
        self._gpu = next((tensor.device for tensor in state.kv if tensor.is_cuda), None)
        self._rows = {
            CopyObject.KV_PAGE: tuple(map(self._as_rows, _split(state.kv))),
            CopyObject.STATE: tuple(map(self._as_rows, _split((*state.conv, *state.recurrent)))),
        }
        page_bytes = self.image_bytes(CopyObject.KV_PAGE)
        self._host = self._as_rows(torch.empty((0, page_bytes), dtype=torch.uint8) if host is None else host.units)
        if self._host.shape[1] != page_bytes:
            raise ValueError(f"a host unit has {self._host.shape[1]} bytes, expected those of a KV page: {page_bytes}")
        self._pieces = {
            what: cut_image([row.shape[1] for row in rows], page_bytes) for what, rows in self._rows.items()
        }

    def image_bytes(self, what: CopyObject) -> int:
        """Bytes of one KV page, or of one state image, over all layers."""
        return sum(rows.shape[1] for rows in self._rows[what])

    def run(self, copies: Iterable[Copy]) -> int:
        """Run copies in their order, as the cache decided; returns the bytes moved, which are there when this returns.

        Raises ValueError for a copy that no cache of this model asks for.
        """
        moved_bytes = self.queue(copies)
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()
        return moved_bytes

    def queue(self, copies: Iterable[Copy]) -> int:
        """The same, but on a GPU they are only queued on the current stream when this returns."""
        moved_bytes = 0
        for copy in copies:
            if not self._rows[copy.what]:
                raise ValueError(f"a copy of a {copy.what}, but this model has none")
            tiers = (copy.source.tier, copy.destination.tier)
            if tiers == (Tier.DEVICE, Tier.DEVICE):
                for row in self._rows[copy.what]:
                    _move(row[copy.source.unit], row[copy.destination.unit])
            elif tiers == (Tier.DEVICE, Tier.HOST):
                for device, host in self._pairs(copy.what, copy.source.unit, copy.destination):
                    _move(device, host)
            elif tiers == (Tier.HOST, Tier.DEVICE):
                for device, host in self._pairs(copy.what, copy.destination.unit, copy.source):
                    _move(host, device)
            else:
                raise ValueError(f"a copy from {tiers[0]} to {tiers[1]}; expected device or host, one of them device")
            moved_bytes += self.image_bytes(copy.what)
        return moved_bytes

    def _as_rows(self, tensor: torch.Tensor) -> Rows:
        # On the CPU by numpy: torch copies with all its threads, and where others are busy these wait for each other.
        return tensor if self._gpu is not None else tensor.numpy()

    def _pairs(self, what: CopyObject, unit: int, host: UnitHandle) -> Iterable[tuple[Rows, Rows]]:
        """The pieces of one image on the device and on the host."""
        rows, pieces = self._rows[what], self._pieces[what]
        needed = pieces[-1].unit + 1
        if len(host.units) != needed:
            raise ValueError(f"{what} takes {needed} host units, {len(host.units)} were given")
        for piece in pieces:
            device = rows[piece.row][unit, piece.start : piece.start + piece.size]
            yield device, self._host[host.units[piece.unit], piece.unit_start : piece.unit_start + piece.size]


class Piece(NamedTuple):
    """A run of bytes that lies in one row of an image and in one host unit."""

    row: int
    start: int
    unit: int
    unit_start: int
    size: int


def cut_image(row_bytes: Iterable[int], unit_bytes: int) -> tuple[Piece, ...]:
    """Rows one after the other, cut where a host unit ends; units are counted from 0."""
    pieces: list[Piece] = []
    offset = 0
    for row, total in enumerate(row_bytes):
        start = 0
        while start < total:
            size = min(total - start, unit_bytes - offset % unit_bytes)
            pieces.append(Piece(row, start, offset // unit_bytes, offset % unit_bytes, size))
            start, offset = start + size, offset + size
    return tuple(pieces)


def allocate_state(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> ModelState:
    """Zeroed tensors for `num_pages` KV pages (in `kv_dtype` where it is given, else in `dtype`) and `num_slots` state
    slots."""
    attention, gdn = config.attention, config.gated_delta_net
    kv_shape = (num_pages, 2, page_size, attention.num_kv_heads, attention.head_dim)
    kv = tuple(_zeroed_kv(kv_shape, kv_dtype or dtype, device) for _ in range(config.num_attention_layers))
    if gdn is None:
        return ModelState(kv=kv, conv=(), recurrent=())
    conv_shape = (num_slots, gdn.conv_dim, gdn.conv_kernel_size - 1)
    recurrent_shape = (num_slots, gdn.num_v_heads, gdn.value_head_dim, gdn.key_head_dim)
    layers = range(config.num_linear_layers)
    return ModelState(
        kv=kv,
        conv=tuple(_zeroed_conv(conv_shape, dtype, device) for _ in layers),
        recurrent=tuple(torch.zeros(recurrent_shape, dtype=torch.float32, device=device) for _ in layers),
    )


def allocate_host_memory(units: int, unit_bytes: int, device: torch.device) -> HostMemory:
    """Zeroed units for the cache of a model on `device`; on the CPU they take up no memory until they are written.

    On CUDA they are page-locked, as copies need that are to run beside the step, and take up all of it at once. Raises
    InsufficientMemoryError when the system refuses to lock that much.
    """
    if device.type == "cuda":
        return HostMemory(torch.from_numpy(allocate_locked(units, unit_bytes, CudaLock())))
    return HostMemory(_lazily_zeroed((units, unit_bytes), torch.uint8))


def _split(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """[units, bytes] of what lies together in memory, as views."""
    for tensor in tensors:
        for part in _contiguous(tensor):
            yield part.view(len(part), math.prod(part.shape[1:])).view(torch.uint8)


def _move(source: Rows, destination: Rows) -> None:
    if isinstance(destination, np.ndarray):
        np.copyto(destination, source)
    else:
        destination.copy_(torch.as_tensor(source), non_blocking=True)


def _contiguous(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensor itself, or views that are contiguous beneath their first dimension, as the host's layouts need."""
    if tensor.is_contiguous():
        return (tensor,)
    if tensor.transpose(0, 1).is_contiguous():
        return tuple(tensor.transpose(0, 1))
    return (tensor.transpose(1, 2),)


def _zeroed_kv(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # On the host all keys lie before all values, under the same shape: neighbouring pages are then one matrix, which
    # attention reads in place instead of gathering it.
    pages, two, *page = shape
    return _lazily_zeroed((two, pages, *page), dtype).transpose(0, 1)


def _lazily_zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host that take up no memory until they are written: torch.zeros writes gigabytes at start."""
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, np.uint8)).view(dtype).view(shape)


def _zeroed_conv(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # On the host the channels lie side by side, as they do in the activations.
    slots, channels, tail = shape
    return torch.zeros((slots, tail, channels), dtype=dtype, device=device).transpose(1, 2)
