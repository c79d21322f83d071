"""The gated delta rule and its convolution against the recurrence, token by token in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import StateCapture
from engine.kernels.torch import TorchKernels
from tests.engine.kernels.layouts import make_layout

SLOTS = 8
NAN = float("nan")


@pytest.fixture
def kernels():
    return TorchKernels()


def make_inputs(tokens, *, k_heads=2, v_heads=4, key_dim=32, value_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "q": random(tokens, k_heads, key_dim),
        "k": random(tokens, k_heads, key_dim),
        "v": random(tokens, v_heads, value_dim),
        "a": random(tokens, v_heads),
        "b": random(tokens, v_heads),
        "A_log": random(v_heads),
        "dt_bias": random(v_heads),
    }


def recurrence(inputs, state):
    """(outputs, states after each token) by Yang et al., 2024, equation 10; state [Hv, V, K] float64."""
    q, k, v, a, b, A_log, dt_bias = (inputs[name].double() for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias"))
    group = v.shape[1] // k.shape[1]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    outputs, states = [], []
    for t in range(len(v)):
        decay = torch.exp(-torch.exp(A_log) * F.softplus(a[t] + dt_bias))
        state = state * decay[:, None, None]
        correction = torch.sigmoid(b[t])[:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + correction[:, :, None] * k[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), states


def rows(inputs, start, end):
    return {name: x if name in ("A_log", "dt_bias") else x[start:end] for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("new_tokens", "contexts"),
    [
        ([1], [0]),
        ([64], [0]),
        ([65], [0]),
        ([200], [5]),
        ([3, 130, 64], [0, 7, 0]),
        ([1, 1, 1], [9, 9, 9]),
        ([1, 1, 100, 1], [4, 4, 0, 0]),
    ],
)
@pytest.mark.parametrize("slots", [(0, 1, 2, 3), (5, 1, 7, 2), (4, 3, 2, 1)])
@pytest.mark.parametrize(("k_heads", "v_heads"), [(2, 4), (3, 3)])
def test_outputs_and_states_are_those_of_the_recurrence(kernels, new_tokens, contexts, slots, k_heads, v_heads):
    inputs = make_inputs(sum(new_tokens), k_heads=k_heads, v_heads=v_heads)
    states = torch.full((SLOTS, v_heads, 16, 32), NAN)
    used = slots[: len(new_tokens)]
    for slot, context in zip(used, contexts, strict=True):
        if context:
            states[slot] = torch.randn(v_heads, 16, 32)
    before = states.clone()
    kernels.plan(make_layout(new_tokens, contexts, slots=used))
    out = kernels.gated_delta_rule(**inputs, states=states)
    start = 0
    for count, context, slot in zip(new_tokens, contexts, used, strict=True):
        initial = before[slot].double() if context else torch.zeros(v_heads, 16, 32, dtype=torch.float64)
        expected, after = recurrence(rows(inputs, start, start + count), initial)
        torch.testing.assert_close(out[start : start + count].double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states[slot].double(), after[-1], atol=2e-5, rtol=1e-4)
        start += count
    for slot in set(range(SLOTS)) - set(used):
        assert states[slot].isnan().all(), "a slot that belongs to no sequence was written"


@pytest.mark.parametrize("a", [-30.0, 30.0])
def test_extreme_decays_stay_finite_and_exact(kernels, a):
    inputs = make_inputs(130)
    inputs["a"] = torch.full_like(inputs["a"], a)
    inputs["A_log"] = torch.full_like(inputs["A_log"], 2.7)
    states = torch.full((SLOTS, 4, 16, 32), NAN)
    kernels.plan(make_layout([130]))
    out = kernels.gated_delta_rule(**inputs, states=states)
    expected, after = recurrence(inputs, torch.zeros(4, 16, 32, dtype=torch.float64))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0].double(), after[-1], atol=2e-5, rtol=1e-4)


def test_equal_keys_at_full_strength_stay_exact(kernels):
    """The worst case for the triangular inverse: every token overwrites the same key."""
    inputs = make_inputs(192)
    inputs["k"] = inputs["k"][:1].expand(192, -1, -1).contiguous()
    inputs["b"] = torch.full_like(inputs["b"], 20.0)
    inputs["a"] = torch.full_like(inputs["a"], -20.0)
    states = torch.full((SLOTS, 4, 16, 32), NAN)
    kernels.plan(make_layout([192]))
    out = kernels.gated_delta_rule(**inputs, states=states)
    expected, _ = recurrence(inputs, torch.zeros(4, 16, 32, dtype=torch.float64))
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-3)


def test_states_are_captured_on_the_grid_and_at_the_end(kernels):
    inputs = make_inputs(1 + 200 + 64)
    captures = (
        StateCapture(sequence=1, offset_tokens=128, destination_slot=5),
        StateCapture(sequence=1, offset_tokens=64, destination_slot=4),
        StateCapture(sequence=1, offset_tokens=200, destination_slot=6),
        StateCapture(sequence=2, offset_tokens=64, destination_slot=7),
        StateCapture(sequence=0, offset_tokens=1, destination_slot=3),
    )
    states = torch.full((SLOTS, 4, 16, 32), NAN)
    states[0] = torch.randn(4, 16, 32)
    kernels.plan(make_layout([1, 200, 64], [10, 0, 0], captures=captures))
    before = states[0].double()
    kernels.gated_delta_rule(**inputs, states=states)
    zero = torch.zeros(4, 16, 32, dtype=torch.float64)
    _, after = recurrence(rows(inputs, 1, 201), zero)
    for tokens, slot in ((64, 4), (128, 5), (200, 6)):
        torch.testing.assert_close(states[slot].double(), after[tokens - 1], atol=2e-5, rtol=1e-4)
    assert torch.equal(states[6], states[1])
    assert torch.equal(states[7], states[2])
    assert torch.equal(states[3], states[0])
    _, decoded = recurrence(rows(inputs, 0, 1), before)
    torch.testing.assert_close(states[3].double(), decoded[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("offset", [0, 32, 192])
def test_a_capture_off_the_grid_is_refused(kernels, offset):
    with pytest.raises(ValueError, match=f"captured {offset} tokens into a segment of 130"):
        kernels.plan(make_layout([130], captures=(StateCapture(0, offset, 5),)))


@pytest.mark.parametrize("slots", [(0, 1, 2, 3), (5, 1, 7, 2), (4, 3, 2, 1)])
@pytest.mark.parametrize(
    ("new_tokens", "contexts"),
    [([1], [0]), ([2], [9]), ([100], [0]), ([1, 1, 70, 2], [3, 3, 0, 5]), ([1, 1, 1], [3, 3, 3])],
)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("channels_side_by_side", [True, False])
def test_convolution_is_causal_and_keeps_its_tail(kernels, new_tokens, contexts, slots, width, channels_side_by_side):
    channels = 10
    x, weight = torch.randn(sum(new_tokens), channels), torch.randn(channels, width)
    states = torch.full((SLOTS, channels, width - 1), NAN)
    if channels_side_by_side:
        states = states.transpose(1, 2).contiguous().transpose(1, 2)
    used = slots[: len(new_tokens)]
    for slot, context in zip(used, contexts, strict=True):
        if context:
            states[slot] = torch.randn(channels, width - 1)
    before = states.clone()
    kernels.plan(make_layout(new_tokens, contexts, slots=used))
    out = kernels.causal_conv(x, weight, states)
    start = 0
    for count, context, slot in zip(new_tokens, contexts, used, strict=True):
        past = before[slot] if context else torch.zeros(channels, width - 1)
        padded = torch.cat((past, x[start : start + count].t()), dim=1)
        expected = F.silu(F.conv1d(padded[None], weight[:, None], groups=channels)[0].t())
        torch.testing.assert_close(out[start : start + count], expected)
        assert torch.equal(states[slot], padded[:, -(width - 1) :])
        start += count


def test_convolution_tails_are_captured(kernels):
    x, weight = torch.randn(1 + 150, 6), torch.randn(6, 4)
    states = torch.full((SLOTS, 6, 3), NAN)
    states[0] = torch.randn(6, 3)
    captures = (StateCapture(1, 64, 4), StateCapture(1, 150, 5), StateCapture(0, 1, 6))
    kernels.plan(make_layout([1, 150], [8, 0], captures=captures))
    kernels.causal_conv(x, weight, states)
    assert torch.equal(states[4], x[1 + 61 : 1 + 64].t())
    assert torch.equal(states[5], x[-3:].t())
    assert torch.equal(states[6], states[0])
