"""The host's part of a step's plan: what it says of each token, and that it refuses what contradicts itself."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.kernels import StateCapture
from engine.kernels.flashinfer.plan import Arena, bind, conv_windows, ints_of, plan_on_host
from tests.engine.kernels.layouts import make_layout

CPU = torch.device("cpu")
WIDTH = 4


def lay(layout, **options):
    host = plan_on_host(layout, WIDTH, **options)
    return bind(layout, host, Arena(CPU).lay({**host.arrays, **host.capture_arrays}))


@pytest.mark.parametrize(
    "lengths", [[1], [1, 1, 1], [2], [3, 1, 5], [1, 1, 4, 2], [7]], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_a_window_holds_the_inputs_up_to_its_token(lengths):
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    # Each input as (sequence, place); places before the segment are negative.
    own = [(i, place) for i, length in enumerate(lengths) for place in range(length)]
    before = [(i, place) for i in range(len(lengths)) for place in range(-(WIDTH - 1), 0)]
    found = conv_windows(starts, WIDTH)
    windows = [[(own + before)[row] for row in column] for column in found["windows"].T]
    assert windows == [[(i, place + tap) for tap in range(-WIDTH + 1, 1)] for i, place in own]
    tails = [(own + before)[row] for row in found["tails"]]
    assert tails == [(i, lengths[i] + back) for i in range(len(lengths)) for back in range(-WIDTH + 1, 0)]


def test_a_step_of_decodes_has_no_chunks_and_no_captures():
    plan = lay(make_layout([1, 1], [5, 20], slots=[7, 3]))
    assert plan.chunks is None
    assert plan.fresh is None
    assert plan.capture_slots is None
    assert plan.batch_indices.tolist() == [0, 1]
    assert plan.positions.tolist() == [5, 20]
    assert plan.slots_long.tolist() == [7, 3]


def test_chunks_start_behind_the_decodes_and_from_zero_where_there_is_no_state():
    plan = lay(make_layout([1, 30, 5], [5, 0, 9], slots=[7, 3, 4]))
    assert plan.chunks is not None
    assert plan.chunks.first_row == 1
    assert plan.chunks.cu_seqlens.tolist() == [0, 30, 35]
    assert plan.chunks.read_slots.tolist() == [-1, 4]
    assert plan.chunks.write_slots.tolist() == [3, 4]
    assert plan.chunks.grid_slots is None
    assert plan.fresh is not None
    assert plan.fresh.tolist() == [False, True, False]


def test_decodes_can_be_chunks_of_one_token():
    plan = lay(make_layout([1, 30], [5, 0], slots=[7, 3]), decodes_by_chunks=True)
    assert plan.chunks is not None
    assert plan.chunks.first_row == 0
    assert plan.chunks.cu_seqlens.tolist() == [0, 1, 31]
    assert plan.chunks.read_slots.tolist() == [7, -1]


def test_states_within_a_segment_are_captured_on_the_grid_and_the_last_from_its_slot():
    captures = (StateCapture(2, 128, 9), StateCapture(1, 64, 8), StateCapture(1, 70, 6), StateCapture(0, 1, 5))
    plan = lay(make_layout([1, 70, 200], [3, 0, 64], slots=[0, 1, 2], captures=captures))
    assert plan.chunks is not None
    assert plan.chunks.grid_starts is not None
    assert plan.chunks.grid_starts.tolist() == [0, 1, 4]
    assert plan.chunks.grid_slots is not None
    assert plan.chunks.grid_slots.tolist() == [8, -1, 9, -1]
    assert plan.end_sources is not None
    assert plan.end_sources.tolist() == [1, 0]
    assert plan.end_destinations is not None
    assert plan.end_destinations.tolist() == [6, 5]
    assert plan.capture_slots is not None
    assert plan.capture_slots.tolist() == [9, 8, 6, 5]


def test_a_segment_that_ends_on_the_grid_is_captured_from_its_slot():
    plan = lay(make_layout([64], [0], slots=[4], captures=(StateCapture(0, 64, 2),)))
    assert plan.chunks is not None
    assert plan.chunks.grid_slots is None
    assert plan.end_sources is not None
    assert plan.end_sources.tolist() == [4]


BROKEN = {
    "a decode of two tokens": (make_layout([2, 1], [4, 4]), {"num_decodes": 2}, "must be decodes"),
    "a decode without a state": (
        make_layout([1, 1], [4, 4]),
        {"has_initial_state": torch.tensor([True, False])},
        "must be decodes",
    ),
    "a sequence without tokens": (
        make_layout([3, 4], [0, 0]),
        {"qo_indptr": torch.tensor([0, 0, 7], dtype=torch.int32)},
        "must have a new token",
    ),
    "positions for other tokens": (
        make_layout([3], [0]),
        {"positions": torch.arange(4, dtype=torch.int32)},
        "positions has 4 of torch.int32",
    ),
    "slots in int64": (make_layout([3], [0]), {"state_slots": torch.tensor([0])}, "state_slots has 1 of torch.int64"),
    "a shared slot": (make_layout([3, 3], [0, 0], slots=[2, 2]), {}, "share a state slot"),
    "a page too many": (
        make_layout([3], [0]),
        {"kv_indices": torch.arange(2, dtype=torch.int32)},
        "2 page numbers, but kv_indptr ends at 1",
    ),
    "a last page that is longer": (
        make_layout([3], [0]),
        {"kv_last_page_len": torch.tensor([4], dtype=torch.int32)},
        "end at [3] tokens, but their pages hold [4]",
    ),
    "a full last page of none": (
        make_layout([16], [0]),
        {"kv_last_page_len": torch.tensor([0], dtype=torch.int32)},
        "end at [16] tokens, but their pages hold [0]",
    ),
    "a capture off the grid": (
        make_layout([100], [0], captures=(StateCapture(0, 65, 1),)),
        {},
        "cannot be captured 65 tokens into a segment of 100",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_layout_that_contradicts_itself_is_refused(case):
    layout, changes, message = BROKEN[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_on_host(replace(layout, **changes), WIDTH)


def test_arrays_lie_16_bytes_apart_in_the_device_memory():
    laid = Arena(CPU).lay({"a": np.arange(3, dtype=np.int32), "b": np.arange(8, dtype=np.int32).reshape(2, 4)})
    assert laid["a"].tolist() == [0, 1, 2]
    assert laid["b"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (laid["b"].data_ptr() - laid["a"].data_ptr()) % 16 == 0


def test_steps_of_as_many_decodes_lie_at_the_same_addresses():
    steps = [
        make_layout([1, 1], [5, 70], slots=[7, 3]),
        make_layout([1, 1], [300, 2], slots=[1, 2], captures=(StateCapture(1, 1, 9),)),
    ]
    arena = Arena(CPU, capacity=200)
    addresses = []
    for layout in steps:
        laid = arena.lay(plan_on_host(layout, WIDTH).arrays)
        addresses.append({name: tensor.data_ptr() for name, tensor in laid.items()})
        assert laid["positions"].tolist() == layout.positions.tolist()
    assert addresses[0] == addresses[1]


def test_a_step_beyond_what_was_set_aside_is_refused():
    arrays = {"a": np.zeros(9, np.int32)}
    with pytest.raises(ValueError, match="takes 12 numbers, but 11 were set aside"):
        Arena(CPU, capacity=11).lay(arrays)
    assert ints_of(9) == 12
