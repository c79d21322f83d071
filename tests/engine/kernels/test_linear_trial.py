"""A shape's trial: torch's own product unless the packed one gains at least what it loses."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.kernels.torch import TorchKernels
from engine.kernels.torch.linear import can_pack
from engine.kernels.torch.linear_trial import MANY_ROWS, Trial, Trials
from engine.weights.formats import DenseWeight

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("packed", "plain", "is_packed"),
    [
        ((1.0, 10.0), (2.0, 20.0), True),
        ((1.0, 10.0), (1.0, 10.0), True),
        ((1.26, 6.8), (1.0, 10.0), True),
        ((0.5, 11.0), (1.0, 10.0), True),
        ((1.1, 10.0), (1.0, 10.0), False),
        ((2.0, 6.8), (1.0, 10.0), False),
        ((0.7, 20.0), (1.0, 10.0), False),
    ],
    ids=[
        "faster",
        "as fast",
        "gains more for many",
        "gains more for one",
        "gains nothing",
        "loses more for one",
        "loses more for many",
    ],
)
def test_the_packed_product_is_taken_where_it_gains_at_least_what_it_loses(packed, plain, is_packed):
    assert Trial(packed, plain).prefers_packed is is_packed


@pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="torch was built without oneDNN")
def test_a_shape_is_tried_once_and_the_least_of_its_rounds_counts():
    """A clock that a neighbour makes late: what takes 1 ms takes 5 s in the first round, whoever was running."""
    ticks = itertools.count()
    trials = Trials(lambda: 1e-3 * (tick := next(ticks)) + 5.0 * min(tick, 4))
    plain = torch.randn(128, 256)
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    trials.prefers_packed(packed, plain)
    tried = next(ticks)
    trials.prefers_packed(packed, plain)
    assert next(ticks) == tried + 1
    (choice,) = trials.choices(torch.float32)
    assert not [*trials.choices(torch.bfloat16)]
    assert choice.kernel == "linear (128 x 256 in float32)"
    assert choice.implementation.startswith("oneDNN packed; packed takes 1.00")


@pytest.mark.parametrize("rows", [1, MANY_ROWS])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_layer_multiplies_right_whichever_is_chosen(monkeypatch, is_packed, rows):
    monkeypatch.setattr(Trials, "prefers_packed", lambda *_: is_packed)
    kernels = TorchKernels()
    weight, x = torch.randn(96, 256), torch.randn(rows, 256)
    layer = kernels.prepare_linear([DenseWeight(weight, torch.arange(96.0))])
    assert layer.weight.is_mkldnn == (is_packed and can_pack(torch.float32, CPU))
    expected = x.double() @ weight.double().t() + torch.arange(96.0).double()
    torch.testing.assert_close(kernels.linear(x, layer).double(), expected, atol=1e-4, rtol=1e-5)
