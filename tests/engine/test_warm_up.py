"""The steps that a device takes before anybody waits for them."""

import pytest
import torch

from engine.errors import BackendUnavailableError
from engine.kernels.torch import TorchKernels
from engine.memory import plan_memory, system_ram
from engine.models.registry import load_model
from engine.options import EngineOptions
from engine.plan import StepPlan
from engine.runner import Runner
from engine.storage import Storage, allocate_state
from engine.warm_up import warm_up
from tests.engine.models.cases import qwen3_5
from tests.engine.models.driver import make_twin
from tests.engine.test_runner import segment


class Watched(Runner):
    """Keeps what each step was made of."""

    def __init__(self, *args):
        super().__init__(*args)
        self.steps = []

    def run(self, plan):
        self.steps.append([(each.is_decode, len(each.token_ids)) for each in plan.segments])
        return super().run(plan)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    make_twin(qwen3_5(num_hidden_layers=4), folder)
    return load_model(folder, TorchKernels())


def make(model, **options):
    options = EngineOptions(max_concurrency=2, page_size=16, host_cache_mib=0, **options)
    memory = plan_memory(model.config, options, 2**30, element_bytes=4, ram=system_ram())
    kernels = TorchKernels()
    state = allocate_state(
        model.config,
        num_pages=memory.kv_pages,
        page_size=memory.page_size,
        num_slots=memory.state_slots,
        dtype=torch.float32,
        device=kernels.device,
    )
    return Watched(model, kernels, Storage(state), memory.page_size), memory


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"prefill_chunk": 128, "kv_pages": 20, "max_context": 300}, [[128], [1], [1, 65]]),
        ({"prefill_chunk": 512, "kv_pages": 2, "max_context": 32}, [[31], [1]]),
        ({"prefill_chunk": 512, "kv_pages": 4, "max_context": 20, "device_state_slots": 0}, [[19], [1], [1, 19]]),
    ],
)
def test_each_kind_of_step_that_fits_is_run_once(model, options, steps):
    runner, memory = make(model, **options)
    warm_up(runner, memory)
    assert [[tokens for _, tokens in step] for step in runner.steps] == steps
    assert [[is_decode for is_decode, _ in step] for step in runner.steps[1:]] == [[True], [True, False]][
        : len(steps) - 1
    ]


def test_what_it_leaves_behind_changes_no_answer(model):
    options = {"prefill_chunk": 128, "kv_pages": 20, "max_context": 300}
    asked = segment("a", 0, 30, [3, 0], 0, temperature=0.0)
    (cold, _), (warm, memory) = make(model, **options), make(model, **options)
    warm_up(warm, memory)
    plan = StepPlan((asked,))
    assert warm.run(plan).token_ids == cold.run(plan).token_ids


def test_a_step_that_fails_is_told_at_load_by_its_name(model, monkeypatch):
    runner, memory = make(model, prefill_chunk=128, kv_pages=20, max_context=300)

    def fail(*_args):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(runner._kernels, "gated_delta_rule", fail)
    with pytest.raises(BackendUnavailableError, match=r"the first prefill failed \(RuntimeError: no kernel image"):
        warm_up(runner, memory)
