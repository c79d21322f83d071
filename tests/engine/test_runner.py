"""From a plan to the kernels' tensors: layouts and sampling batches with computed expectations."""

import numpy as np
import pytest
import torch

from cache import Copy, CopyObject, Fault, Faults, Tier, UnitHandle
from engine.plan import CopyBatch, Segment, StepPlan
from engine.request import SamplingParams
from engine.runner import Runner, build_layout, build_sampling


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


def copy(unit: int, source: Tier, destination: Tier) -> Copy:
    return Copy(CopyObject.KV_PAGE, UnitHandle(source, (unit,)), UnitHandle(destination, (unit,)))


class BrokenStorage:
    """Copies nothing, and raises at unit 13."""

    def __init__(self):
        self.copied: list[int] = []

    def run(self, copies):
        for each in copies:
            if each.source.unit == 13:
                raise OSError(each.source.unit)
            self.copied.append(each.source.unit)


def copies_alone(*batches: list[Copy]) -> StepPlan:
    return StepPlan((), background=tuple(CopyBatch(number, tuple(each)) for number, each in enumerate(batches)))


def test_a_batch_of_copies_that_fails_fails_alone():
    storage = BrokenStorage()
    to_host = [[copy(unit, Tier.DEVICE, Tier.HOST) for unit in units] for units in ([1, 2], [3, 13, 4], [5])]
    result = Runner(None, None, storage, 4).run(copies_alone(*to_host))
    assert storage.copied == [1, 2, 3, 5]
    assert [type(result.copied[number].error) for number in range(3)] == [type(None), OSError, type(None)]
    assert all(outcome.seconds > 0 for outcome in result.copied.values())
    assert result.token_ids == {}


def test_the_drill_of_failing_restores_spares_demotions():
    storage = BrokenStorage()
    plan = copies_alone([copy(1, Tier.HOST, Tier.DEVICE)], [copy(2, Tier.DEVICE, Tier.HOST)])
    result = Runner(None, None, storage, 4, Faults([Fault.RESTORE_FAIL])).run(plan)
    assert storage.copied == [2]
    assert "the fire drill restore_fail is on" in str(result.copied[0].error)
    assert result.copied[1].error is None
