"""From a plan to the kernels' tensors, with computed expectations; and steps while copies run beside them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cache import Copy, CopyObject, Fault, Faults, Tier, UnitHandle
from engine.copier import StreamCopier
from engine.errors import FireDrillError
from engine.kernels.torch import TorchKernels
from engine.models.registry import load_model
from engine.plan import CopyBatch, Segment, StepPlan
from engine.request import SamplingParams
from engine.runner import Runner, build_layout, build_sampling
from engine.storage import Storage, allocate_host_memory, allocate_state
from tests.engine.late_stream import LateStream
from tests.engine.models.cases import qwen3_5
from tests.engine.models.driver import make_twin


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


TO_HOST, TO_DEVICE = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("twin")
    make_twin(qwen3_5(num_hidden_layers=4), path)
    return path


@pytest.fixture
def make_runner(folder):
    """A runner over a real model, whose copies end when `stream` says so."""
    kernels = TorchKernels()
    model = load_model(folder, kernels)
    sizes = {"num_pages": 10, "page_size": 4, "num_slots": 4, "dtype": torch.float32}
    state = allocate_state(model.config, **sizes, device=kernels.device)
    unit_bytes = Storage(state).image_bytes(CopyObject.KV_PAGE)
    storage = Storage(state, allocate_host_memory(16, unit_bytes, kernels.device))

    def make():
        faults, stream = Faults(), LateStream()
        copier = StreamCopier(storage.queue, stream, faults)
        runner = Runner(model, kernels, storage, 4, faults, copier=copier)
        runner.stream = stream
        return runner

    return make


def page_of(runner, page: int) -> list[bytes]:
    return [layer[page].contiguous().numpy().tobytes() for layer in runner._storage.state.kv]


def test_tokens_are_out_while_copies_are_under_way_and_a_step_without_tokens_waits_for_them(make_runner):
    runner = make_runner()
    alone = runner.run(StepPlan((segment("b", 0, 4, [9], 0),)))
    batches = (CopyBatch(1, (copy(9, *TO_HOST),)), CopyBatch(2, (copy(5, *TO_HOST),)))
    beside = runner.run(StepPlan((segment("b", 0, 4, [9], 0),), background=batches))
    assert beside.token_ids == alone.token_ids
    assert (beside.copied, beside.under_way) == ({}, {1, 2})
    runner.stream.do_next()
    told = runner.run(StepPlan((segment("b", 4, 1, [9, 7], 0),), under_way=frozenset([1, 2])))
    assert (set(told.copied), told.under_way) == ({1}, {2})
    last = runner.run(StepPlan((), background=(CopyBatch(3, (copy(9, *TO_DEVICE),)),), under_way=frozenset([2])))
    assert (set(last.copied), last.under_way, last.token_ids) == ({2, 3}, frozenset(), {})


def test_a_page_comes_back_as_it_was_when_the_step_began_that_sent_it(make_runner):
    runner = make_runner()
    runner.run(StepPlan((segment("b", 0, 4, [9], 0),)))
    kept = page_of(runner, 9)
    runner.run(StepPlan((), background=(CopyBatch(1, (copy(9, *TO_HOST),)),)))
    runner.run(StepPlan((segment("c", 4, 3, [8, 9], 1),)))
    assert page_of(runner, 9) != kept
    runner.run(StepPlan((), background=(CopyBatch(2, (copy(9, *TO_DEVICE),)),)))
    assert page_of(runner, 9) == kept


def test_what_was_given_up_is_over_before_the_step_writes(make_runner):
    runner = make_runner()
    expected = runner.run(StepPlan((segment("b", 0, 4, [9], 0),)))
    kept = page_of(runner, 9)
    runner.run(StepPlan((segment("c", 0, 3, [8], 1),), background=(CopyBatch(1, (copy(9, *TO_DEVICE),)),)))
    assert page_of(runner, 9) == kept, "its copy is under way"
    assert runner.run(StepPlan((segment("b", 0, 4, [9], 0),))).token_ids == expected.token_ids
    assert page_of(runner, 9) == kept


def test_nothing_is_under_way_when_a_step_has_raised(make_runner):
    runner = make_runner()
    runner.run(StepPlan((segment("c", 0, 3, [8], 1),), background=(CopyBatch(1, (copy(9, *TO_HOST),)),)))
    runner._faults.switch(frozenset([Fault.STEP_FAIL]))
    failing = StepPlan((segment("c", 3, 1, [8], 1),), background=(CopyBatch(2, (copy(8, *TO_HOST),)),))
    with pytest.raises(FireDrillError):
        runner.run(replace(failing, under_way=frozenset([1])))
    assert not runner.stream.queued
    runner._faults.switch(frozenset())
    after = runner.run(failing)
    assert (after.copied, after.under_way) == ({}, {2})


def test_a_device_that_fails_while_copies_alone_are_waited_for_fails_the_step(make_runner):
    runner = make_runner()
    refused = CopyBatch(1, (Copy(CopyObject.STATE, UnitHandle(Tier.DEVICE, (0,)), UnitHandle(Tier.HOST, (1,))),))
    with pytest.raises(ValueError, match="state takes"):
        runner.run(StepPlan((), background=(refused, CopyBatch(2, (copy(8, *TO_HOST),)))))
    assert not runner.stream.queued
    assert runner.run(StepPlan(())).copied == {}


def test_without_a_copier_copies_are_done_when_the_step_is(make_runner):
    given = make_runner()
    runner = Runner(given._model, given._kernels, given._storage, 4)
    background = (CopyBatch(1, (copy(9, *TO_HOST),)), CopyBatch(2, (copy(9, *TO_DEVICE),)))
    result = runner.run(StepPlan((segment("b", 0, 4, [9], 0),), background=background))
    assert (set(result.token_ids), set(result.copied), result.under_way) == ({"b"}, {1, 2}, frozenset())
    assert result.copy_seconds >= sum(outcome.seconds for outcome in result.copied.values()) > 0
