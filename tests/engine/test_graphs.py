"""Decode steps as graphs: replayed at the same addresses they pick what eager steps pick; what does not is not kept."""

import logging

import numpy as np
import pytest
import torch

from engine.graphs import DecodeGraphs
from engine.kernels import StateCapture
from engine.kernels.flashinfer.backend import FlashinferKernels
from engine.kernels.torch import TorchKernels
from engine.models.registry import load_model, read_config
from engine.plan import Segment, StepPlan
from engine.request import SamplingParams
from engine.runner import Runner
from engine.storage import Storage, allocate_state
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.engine.kernels.flashinfer.rig import CPU, HOPPER
from tests.engine.kernels.flashinfer.tape import Tape, TapedLibrary
from tests.engine.kernels.layouts import make_layout
from tests.engine.models.cases import qwen3_5
from tests.engine.models.driver import make_twin

PAGE_SIZE, PAGES, SLOTS, LARGEST, MOST_PAGES = 4, 48, 8, 3, 24
SAMPLING = SamplingParams(seed=0, logprobs=3)


class TapeRecorder:
    """A tape instead of a CUDA graph; `room` is what it says of the device's memory, call by call."""

    def __init__(self, library, room=(5000, 3000), broken_at=None):
        self.library, self.room, self.broken_at = library, list(room), broken_at
        self.recorded = self.replayed = 0

    def warm_up(self, work):
        work()

    def record(self, work):
        self.recorded += 1
        if self.recorded == self.broken_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.library.tape = tape = Tape()
        try:
            with tape:
                work()
        finally:
            self.library.tape = None

        def replay():
            self.replayed += 1
            tape.replay()

        return replay

    def free_bytes(self):
        return self.room.pop(0)


class Rig:
    """A runner over flashinfer's references, and where it has graphs, their recorder."""

    def __init__(self, folder, *, has_graphs=True, **options):
        library = TapedLibrary(ReferenceLibrary(torch.float32))
        self.kernels = FlashinferKernels(CPU, torch.float32, read_config(folder), library, HOPPER)
        model = load_model(folder, self.kernels)
        sizes = {"num_pages": PAGES, "page_size": PAGE_SIZE, "num_slots": SLOTS}
        self.state = allocate_state(model.config, **sizes, dtype=torch.float32, device=CPU)
        self.recorder = TapeRecorder(library, **options)
        self.graphs = DecodeGraphs(
            model,
            self.kernels,
            self.state,
            page_size=PAGE_SIZE,
            max_batch=LARGEST,
            max_pages=MOST_PAGES,
            recorder=self.recorder,
        )
        self.runner = Runner(
            model, self.kernels, Storage(self.state), PAGE_SIZE, graphs=self.graphs if has_graphs else None
        )

    def serve(self) -> list:
        """What each step of a history picks: prompts, then decodes of other sequences, sizes and orders each time."""
        lengths = {"a": 9, "b": 15, "c": 4, "d": 7}
        tokens = {name: [ord(name) * i % 251 for i in range(1, length + 1)] for name, length in lengths.items()}
        results = []

        def step(*names, **changes):
            segments = [segment(name, tokens[name], 0 if not results else len(tokens[name]) - 1) for name in names]
            segments = [replace(each, **changes) for each in segments]
            results.append(self.runner.run(StepPlan(tuple(segments))))
            for name, token in results[-1].token_ids.items():
                tokens[name].append(token)

        step("a", "b", "c", "d")
        for names in ("a", "cb", "bca", "dcba", "d", "ab", "cad", "d", "cd", "a"):
            step(*names)
        step("b", "c", capture_slot=7)
        step("a", "b", is_sampled=False)
        return [(result.token_ids, result.logprobs) for result in results]


def replace(each, **changes):
    fields = {name: getattr(each, name) for name in Segment.__slots__}
    return Segment(**{**fields, **changes})


def segment(name, tokens, start) -> Segment:
    place = "abcd".index(name)
    pages = [place + 4 * i for i in range(-(-len(tokens) // PAGE_SIZE))][::-1]
    return Segment(
        request_id=name,
        token_ids=tuple(tokens[start:]),
        start=start,
        page_ids=np.array(pages, np.int32),
        state_slot=(place + 2) % 4,
        is_sampled=True,
        sampling=SAMPLING,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("twin")
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    dims = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    make_twin(qwen3_5(hidden_size=64, **heads, **dims), path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    return Rig(folder, has_graphs=False).serve()


def test_replayed_steps_pick_what_eager_ones_pick(folder, expected):
    rig = Rig(folder)
    rig.graphs.capture()
    rig.recorder.replayed = 0
    assert rig.serve() == expected
    assert rig.recorder.replayed == 10, "all steps of up to three decodes, but for the one that captures a state"


def test_each_size_is_captured_once_the_largest_first(folder, monkeypatch):
    rig, sizes, plan = Rig(folder), [], FlashinferKernels.plan
    monkeypatch.setattr(
        FlashinferKernels, "plan", lambda self, layout: (sizes.append(layout.num_decodes), plan(self, layout))
    )
    rig.graphs.capture()
    assert list(dict.fromkeys(sizes)) == [3, 2, 1]
    assert rig.recorder.recorded == 3
    assert rig.graphs.choice.implementation == "CUDA graphs for 1 to 3 sequences"


@pytest.mark.parametrize("broken_at", [None, 2])
def test_a_capture_leaves_pages_and_slots_as_they_were(folder, broken_at):
    rig = Rig(folder, broken_at=broken_at)
    rig.graphs.capture()
    tensors = (*rig.state.kv, *rig.state.conv, *rig.state.recurrent)
    assert tensors
    assert not any(tensor.any() for tensor in tensors)


def test_what_graphs_take_is_measured(folder, caplog):
    rig = Rig(folder, room=(7 * 2**20, 2 * 2**20))
    with caplog.at_level(logging.INFO, "dalsegno.kernels"):
        rig.graphs.capture()
    assert rig.graphs.taken_bytes == 5 * 2**20
    assert "CUDA graphs for 1 to 3 sequences, 5 MiB" in caplog.messages[-1]


def test_a_capture_that_fails_leaves_eager_steps_and_says_so_once(folder, expected, caplog):
    rig = Rig(folder, broken_at=2)
    rig.graphs.capture()
    choice = rig.graphs.choice
    assert (choice.kernel, choice.implementation) == ("decode step", "eager")
    assert "RuntimeError: operation not permitted when stream is capturing" in choice.reason
    assert [each.levelname for each in caplog.records if choice.reason in each.message] == ["WARNING"]
    rig.recorder.replayed = 0
    assert rig.serve() == expected
    assert rig.recorder.replayed == 0


def freeze_the_plan(rig, monkeypatch):
    """Plans go to other memory each time, which a graph does not know of."""
    monkeypatch.setattr(FlashinferKernels, "prepare_decodes", lambda self, max_batch, max_pages: None)


def replay_nothing(rig, monkeypatch):
    monkeypatch.setattr(Tape, "replay", lambda self: None)


@pytest.mark.parametrize("spoil", [freeze_the_plan, replay_nothing])
def test_a_graph_that_does_not_follow_the_plan_is_found_out_before_it_serves(folder, expected, monkeypatch, spoil):
    rig = Rig(folder)
    spoil(rig, monkeypatch)
    rig.graphs.capture()
    assert rig.graphs.choice.implementation == "eager"
    assert "a graph of 3 sequences gives other logits" in rig.graphs.choice.reason
    assert rig.serve() == expected


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(make_layout([5], page_size=PAGE_SIZE), id="a prompt"),
        pytest.param(make_layout([1], [0], page_size=PAGE_SIZE), id="a prompt of one token"),
        pytest.param(make_layout([1, 3], [7, 0], page_size=PAGE_SIZE), id="a decode and a prompt"),
        pytest.param(make_layout([1] * 4, [7] * 4, page_size=PAGE_SIZE), id="more decodes than were captured"),
        pytest.param(make_layout([1] * 2, [43, 55], page_size=PAGE_SIZE), id="more pages than there is room for"),
        pytest.param(
            make_layout([1], [7], page_size=PAGE_SIZE, captures=(StateCapture(0, 1, 5),)), id="a state to be captured"
        ),
    ],
)
def test_a_step_that_was_not_captured_is_left_to_the_caller(folder, layout):
    rig = Rig(folder)
    rig.graphs.capture()
    with torch.inference_mode():
        rig.kernels.plan(layout)
        assert rig.graphs.run(layout, torch.zeros(layout.num_tokens, dtype=torch.int64)) is None


def test_kernels_of_the_cpu_are_not_captured_and_that_is_no_fallback(folder):
    kernels = TorchKernels()
    model = load_model(folder, kernels)
    state = allocate_state(model.config, num_pages=2, page_size=4, num_slots=2, dtype=torch.float32, device=CPU)
    graphs = DecodeGraphs(model, kernels, state, page_size=4, max_batch=2, max_pages=4)
    graphs.capture()
    assert (graphs.choice.implementation, graphs.choice.reason, graphs.taken_bytes) == ("eager", "", 0)
    layout = make_layout([1], [3], page_size=4)
    assert graphs.run(layout, torch.zeros(1, dtype=torch.int64)) is None
