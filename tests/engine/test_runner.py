"""From a plan to the kernels' tensors: layouts and sampling batches with computed expectations."""

import numpy as np
import pytest
import torch

from engine.plan import Segment, StepPlan
from engine.request import SamplingParams
from engine.runner import build_layout, build_sampling


def segment(name: str, start: int, length: int, pages: list[int], slot: int, **sampling) -> Segment:
    return Segment(
        request_id=name,
        token_ids=tuple(range(start, start + length)),
        start=start,
        page_ids=np.array(pages, np.int32),
        state_slot=slot,
        is_sampled=True,
        sampling=SamplingParams(**sampling),
    )


PLAN = StepPlan((segment("a", 7, 1, [5, 2], 3), segment("b", 0, 4, [9], 0), segment("c", 4, 3, [1, 8], 1)))


@pytest.mark.parametrize(
    ("name", "expected", "dtype"),
    [
        ("qo_indptr", [0, 1, 5, 8], torch.int32),
        ("kv_indptr", [0, 2, 3, 5], torch.int32),
        ("kv_indices", [5, 2, 9, 1, 8], torch.int32),
        ("kv_last_page_len", [4, 4, 3], torch.int32),
        ("positions", [7, 0, 1, 2, 3, 4, 5, 6], torch.int32),
        ("state_slots", [3, 0, 1], torch.int32),
        ("has_initial_state", [True, False, True], torch.bool),
    ],
)
def test_a_plan_becomes_the_kernels_layout(name, expected, dtype):
    lengths = np.array([len(each.token_ids) for each in PLAN.segments], np.int32)
    tensor = getattr(build_layout(PLAN, lengths, page_size=4), name)
    assert (tensor.tolist(), tensor.dtype) == (expected, dtype)


def test_decodes_are_counted():
    lengths = np.array([1, 4, 3], np.int32)
    assert build_layout(PLAN, lengths, page_size=4).num_decodes == 1


@pytest.mark.parametrize(
    ("name", "expected", "dtype"),
    [
        ("temperature", [0.0, 0.5], torch.float32),
        ("top_k", [0, 40], torch.int32),
        ("top_p", [1.0, 0.75], torch.float32),
        ("min_p", [0.0, 0.125], torch.float32),
        ("seeds", [0, 2**63 - 1], torch.int64),
        ("offsets", [8, 4], torch.int64),
    ],
)
def test_sampling_is_by_request_and_position(name, expected, dtype):
    params = {"temperature": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.125, "seed": 2**63 - 1}
    batch = build_sampling([segment("a", 7, 1, [5, 2], 3, temperature=0.0), segment("b", 0, 4, [9], 0, **params)])
    tensor = getattr(batch, name)
    assert (tensor.tolist(), tensor.dtype) == (expected, dtype)
