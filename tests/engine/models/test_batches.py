"""What a step may not depend on: its company, the cut of the prompt, what lies in other pages and slots."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import StateCapture
from engine.kernels.select import select_kernels
from engine.models.registry import load_model
from tests.engine.models.cases import MAIN, qwen3_5
from tests.engine.models.driver import Driver, Sequence, make_twin

TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
PROMPT = [token * 37 % 256 for token in range(1, 200)]


@pytest.fixture(params=MAIN)
def model_and_kernels(request, tmp_path):
    make_twin(MAIN[request.param](), tmp_path)
    kernels = select_kernels("torch")
    return load_model(tmp_path, kernels), kernels


def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone(model_and_kernels):
    model, kernels = model_and_kernels
    first, then = [PROMPT[:20], PROMPT[:64], PROMPT[:5]], [[3], [4], PROMPT[5:90]]
    new = [PROMPT[:1], PROMPT[:130]]

    def alone(*pieces):
        driver = Driver(model, kernels)
        sequence = driver.open()
        return [driver.step([(sequence, piece)]) for piece in pieces][-1]

    driver = Driver(model, kernels)
    old = [driver.open() for _ in first]
    driver.step(list(zip(old, first, strict=True)))
    work = [*zip(old, then, strict=True), *((driver.open(), piece) for piece in new)]
    together = driver.step(work)
    expected = [alone(*pieces) for pieces in zip(first, then, strict=True)] + [alone(piece) for piece in new]
    torch.testing.assert_close(together, torch.cat(expected), **TOLERANCE)


@pytest.mark.parametrize("adjacent", [True, False])
def test_pages_and_slots_that_are_reused_leave_no_trace(model_and_kernels, adjacent):
    model, kernels = model_and_kernels
    driver = Driver(model, kernels, num_pages=13, num_slots=2, adjacent=adjacent)
    fresh = driver.open()
    expected = [driver.step([(fresh, PROMPT)]), driver.step([(fresh, [7])])]
    driver.close(fresh)
    again = driver.open()
    got = [driver.step([(again, PROMPT)]), driver.step([(again, [7])])]
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("frontier", [64, 128, 199])
def test_a_captured_state_resumes_as_the_run_that_stopped_there(tmp_path, frontier):
    make_twin(qwen3_5(), tmp_path)
    kernels = select_kernels("torch")
    model = load_model(tmp_path, kernels)
    driver = Driver(model, kernels, adjacent=True)
    whole, stopped = driver.open(), driver.open()
    image = driver.free_slots.pop()
    driver.step([(whole, PROMPT)], captures=(StateCapture(0, frontier, image),))
    driver.step([(stopped, PROMPT[:frontier])])
    for states in (driver.state.conv, driver.state.recurrent):
        for layer in states:
            torch.testing.assert_close(layer[image], layer[stopped.slot], **TOLERANCE)
    # Whole pages are shared, the partial tail is copied before it is written.
    resumed = Sequence(slot=image, pages=[driver.free_pages.pop() for _ in stopped.pages], length=frontier)
    for layer in driver.state.kv:
        layer[resumed.pages] = layer[whole.pages[: len(resumed.pages)]]
    continuation = [9, 8, 7]
    got, expected = driver.step([(resumed, continuation)]), driver.step([(stopped, continuation)])
    torch.testing.assert_close(got, expected, **TOLERANCE)
