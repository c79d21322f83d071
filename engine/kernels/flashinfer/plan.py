"""What all layers of one step share, worked out on the host once and laid on the device in one copy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import STATE_GRID_TOKENS, BatchLayout
from engine.uploads import upload, upload_into

Ints: TypeAlias = npt.NDArray[np.int32]
AnyInts: TypeAlias = npt.NDArray[np.integer[Any]]

_ALIGNED_INTS = 4
"""16 bytes: flashinfer's kernels read indices that far at once."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step as arrays of int32, by name; what each holds stands at the field of `StepPlan` of the same name."""

    arrays: Mapping[str, Ints]
    """For steps of as many decodes, of the same sizes in the same order, but for the last."""
    capture_arrays: Mapping[str, Ints]
    first_chunked: int
    """The first sequence that the chunked delta rule works on; all before it have one row."""
    num_sequences: int


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The sequences of a step that the chunked delta rule works on, P of them; rows are counted from the first of
    theirs. int32."""

    first_row: int

    cu_seqlens: torch.Tensor
    """[P + 1]"""
    read_slots: torch.Tensor
    """[P]: the slot that each starts from; -1 where it starts from the zero state."""
    write_slots: torch.Tensor
    """[P]: the slot of each."""
    grid_starts: torch.Tensor | None
    """[P + 1]: where each sequence's entries of `grid_slots` begin; None if no state is captured on the grid."""
    grid_slots: torch.Tensor | None
    """One for each whole chunk of each sequence: the slot to copy the state after it to, or -1."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step on the device: B sequences, n tokens. All int32 where nothing else is said."""

    layout: BatchLayout
    positions: torch.Tensor
    """[n]"""
    batch_indices: torch.Tensor
    """[n]: the sequence of each token."""
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    slots: torch.Tensor
    """[B]"""
    slots_long: torch.Tensor
    """[B] int64, as scatters want them."""
    windows: torch.Tensor | None
    """[W, n]: see `conv_windows`; None for a model without convolutions."""
    tails: torch.Tensor | None
    """[B * (W - 1)]"""
    captured_tails: torch.Tensor | None
    """[captures * (W - 1)], in the order of `layout.captures`; None if there are none."""
    capture_slots: torch.Tensor | None
    """[captures] int64."""
    fresh: torch.Tensor | None
    """[B] bool: the sequences that start from zero; None if there are none."""
    end_sources: torch.Tensor | None
    """[end captures] int64: slots whose state is captured after the segment's last token; None if there are none."""
    end_destinations: torch.Tensor | None
    chunks: ChunkPart | None
    """All that are not decodes; or all, where decodes go by chunks too."""

    @property
    def num_decodes(self) -> int:
        return self.layout.num_decodes


def plan_on_host(layout: BatchLayout, conv_width: int | None, decodes_by_chunks: bool = False) -> HostStep:
    """Raises ValueError for a layout that contradicts itself."""
    check_layout(layout)
    starts = layout.qo_indptr.numpy()
    lengths = np.diff(starts)
    slots = layout.state_slots.numpy()
    has_initial_state = layout.has_initial_state.numpy()
    num_sequences, first = len(lengths), 0 if decodes_by_chunks else layout.num_decodes
    arrays: dict[str, Ints] = {
        "positions": layout.positions.numpy(),
        "batch_indices": np.repeat(np.arange(num_sequences, dtype=np.int32), lengths),
        "kv_indptr": layout.kv_indptr.numpy(),
        "kv_last_page_len": layout.kv_last_page_len.numpy(),
        "slots": slots,
    }
    if conv_width is not None:
        arrays |= conv_windows(starts, conv_width)
    if not has_initial_state.all():
        arrays["fresh"] = (~has_initial_state).astype(np.int32)
    if first < num_sequences:
        arrays["cu_seqlens"] = starts[first:] - starts[first]
        arrays["read_slots"] = np.where(has_initial_state, slots, -1)[first:].astype(np.int32)
        arrays["write_slots"] = slots[first:]
    arrays["kv_indices"] = layout.kv_indices.numpy()
    return HostStep(arrays, _capture_arrays(layout, conv_width, first), first, num_sequences)


def check_layout(layout: BatchLayout) -> None:
    """Raises ValueError that names what contradicts what."""
    starts = layout.qo_indptr.tolist()
    decodes, num_sequences = layout.num_decodes, len(starts) - 1
    has_initial_state = layout.has_initial_state.tolist()
    if starts[: decodes + 1] != list(range(decodes + 1)) or not all(has_initial_state[:decodes]):
        raise ValueError(f"the first {decodes} sequences must be decodes: one new token each, and an initial state")
    if any(end <= start for start, end in itertools.pairwise(starts)):
        raise ValueError(f"each sequence of a step must have a new token; qo_indptr is {starts}")
    for name, length in (("positions", starts[-1]), ("state_slots", num_sequences), ("kv_indptr", num_sequences + 1)):
        tensor: torch.Tensor = getattr(layout, name)
        if len(tensor) != length or tensor.dtype != torch.int32 or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} has {len(tensor)} of {tensor.dtype} on {tensor.device}; expected {length} of torch.int32 on "
                "the host"
            )
    slots: list[int] = layout.state_slots.tolist()
    if len(set(slots)) < len(slots):
        raise ValueError(f"two sequences share a state slot; state_slots is {slots}")
    _check_pages(layout)
    for capture in layout.captures:
        _check_offset(capture.offset_tokens, starts[capture.sequence + 1] - starts[capture.sequence])


def _check_pages(layout: BatchLayout) -> None:
    indptr, last = layout.kv_indptr.numpy(), layout.kv_last_page_len.numpy()
    if len(layout.kv_indices) != indptr[-1]:
        raise ValueError(f"{len(layout.kv_indices)} page numbers, but kv_indptr ends at {indptr[-1]}")
    held = (np.diff(indptr) - 1) * layout.page_size + last
    reached = layout.positions.numpy()[layout.qo_indptr.numpy()[1:] - 1] + 1
    if ((last < 1) | (last > layout.page_size) | (held != reached)).any():
        raise ValueError(f"the sequences end at {reached.tolist()} tokens, but their pages hold {held.tolist()}")


def _check_offset(offset_tokens: int, segment_tokens: int) -> None:
    on_grid = 0 < offset_tokens <= segment_tokens and offset_tokens % STATE_GRID_TOKENS == 0
    if not on_grid and offset_tokens != segment_tokens:
        raise ValueError(
            f"a state cannot be captured {offset_tokens} tokens into a segment of {segment_tokens}; "
            f"it must be a multiple of {STATE_GRID_TOKENS} within it, or its whole length"
        )


def conv_windows(starts: Ints, width: int) -> dict[str, Ints]:
    """Where a convolution of `width` taps finds its inputs: among the rows of all the step's n inputs, followed by the
    W - 1 inputs of each sequence before them, oldest first.

    `windows` [W, n]: tap w of token r multiplies row windows[w, r]. `tails` [B * (W - 1)]: each sequence's last inputs.
    """
    past, lengths = width - 1, np.diff(starts)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(starts[-1]) - starts[sequence]
    taps = np.arange(width)[:, None] - past
    return {
        "windows": _input_rows(starts, past, sequence, offsets + taps),
        "tails": _tail_rows(starts, past, np.arange(len(lengths)), lengths),
    }


def _input_rows(starts: Ints, past: int, sequence: AnyInts, offset: AnyInts) -> Ints:
    """The row of the input `offset` tokens into the segment of `sequence`; negative offsets lie before it."""
    before = starts[-1] + sequence * past + past + offset
    return np.where(offset >= 0, starts[sequence] + offset, before).astype(np.int32)


def _tail_rows(starts: Ints, past: int, sequences: AnyInts, tokens: AnyInts) -> Ints:
    """The rows of the last `past` inputs after so many `tokens` of each of `sequences`, one after the other."""
    return _input_rows(starts, past, sequences[:, None], tokens[:, None] + np.arange(past) - past).ravel()


def _capture_arrays(layout: BatchLayout, conv_width: int | None, first: int) -> dict[str, Ints]:
    """Nothing, if no state is captured."""
    captures = layout.captures
    if not captures:
        return {}
    starts, slots = layout.qo_indptr.numpy(), layout.state_slots.numpy()
    sequences = _ints([capture.sequence for capture in captures])
    tokens = _ints([capture.offset_tokens for capture in captures])
    destinations = _ints([capture.destination_slot for capture in captures])
    arrays = {"capture_slots": destinations}
    if conv_width is not None:
        arrays["captured_tails"] = _tail_rows(starts, conv_width - 1, sequences, tokens)
    lengths = np.diff(starts)
    at_end = tokens == lengths[sequences]
    if at_end.any():
        arrays |= {"end_sources": slots[sequences[at_end]], "end_destinations": destinations[at_end]}
    if not at_end.all():
        grid_starts = np.concatenate([[0], np.cumsum(lengths[first:] // STATE_GRID_TOKENS)]).astype(np.int32)
        grid_slots = np.full(grid_starts[-1], -1, np.int32)
        entries = grid_starts[sequences[~at_end] - first] + tokens[~at_end] // STATE_GRID_TOKENS - 1
        grid_slots[entries] = destinations[~at_end]
        arrays |= {"grid_starts": grid_starts, "grid_slots": grid_slots}
    return arrays


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)


class Arena:
    """A stretch of int32 on the device that arrays are laid into, each at a multiple of 16 bytes. Mutable: what was
    laid before is gone.

    With a capacity the stretch stays where it is, and arrays of the same sizes in the same order lie at the same
    addresses each time, as a captured graph needs them.
    """

    def __init__(self, device: torch.device, capacity: int | None = None) -> None:
        self._device = device
        self._fixed = None if capacity is None else torch.zeros(capacity, dtype=torch.int32, device=device)

    def lay(self, arrays: Mapping[str, Ints]) -> dict[str, torch.Tensor]:
        """Views of the device's copies; one copy moves them all, and later kernels of this stream wait for it."""
        places: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            places[name], end = end, end + ints_of(array.size)
        packed = np.zeros(end, np.int32)
        for name, array in arrays.items():
            packed[places[name] : places[name] + array.size] = array.ravel()
        host = torch.from_numpy(packed)
        if self._fixed is None:
            ints = upload(host, self._device)
        else:
            if end > len(self._fixed):
                raise ValueError(f"the plan takes {end} numbers, but {len(self._fixed)} were set aside for it")
            ints = self._fixed
            upload_into(ints[:end], host)
        return {name: ints[places[name] :][: array.size].view(array.shape) for name, array in arrays.items()}


class Fence:
    """Keeps the host from writing where an earlier copy to the device has yet to read. Nothing of a CPU's."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def put(self) -> None:
        """Behind all that this stream was given."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has passed it; at once, if none was put."""
        if self._event is not None:
            self._event.synchronize()


def ints_of(count: int) -> int:
    """What `count` numbers take up in an arena."""
    return -(-count // _ALIGNED_INTS) * _ALIGNED_INTS


def bind(
    layout: BatchLayout, host: HostStep, laid: Mapping[str, torch.Tensor], slots_long: torch.Tensor | None = None
) -> StepPlan:
    """The step from its arrays on the device. `slots_long` is written, if a buffer is given."""

    def long(name: str) -> torch.Tensor | None:
        return laid[name].long() if name in laid else None

    slots = laid["slots"]
    slots_long = slots.long() if slots_long is None else slots_long.copy_(slots)
    chunks = None
    if host.first_chunked < host.num_sequences:
        chunks = ChunkPart(
            first_row=host.first_chunked,
            cu_seqlens=laid["cu_seqlens"],
            read_slots=laid["read_slots"],
            write_slots=laid["write_slots"],
            grid_starts=laid.get("grid_starts"),
            grid_slots=laid.get("grid_slots"),
        )
    return StepPlan(
        layout=layout,
        positions=laid["positions"],
        batch_indices=laid["batch_indices"],
        kv_indptr=laid["kv_indptr"],
        kv_indices=laid["kv_indices"],
        kv_last_page_len=laid["kv_last_page_len"],
        slots=slots,
        slots_long=slots_long,
        windows=laid.get("windows"),
        tails=laid.get("tails"),
        captured_tails=laid.get("captured_tails"),
        capture_slots=long("capture_slots"),
        fresh=laid["fresh"].bool() if "fresh" in laid else None,
        end_sources=long("end_sources"),
        end_destinations=long("end_destinations"),
        chunks=chunks,
    )
