"""The Triton kernels: their results in Triton's interpreter, their compilation for GPUs, and that a fault is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.kernels.flashinfer import conv, gated_norm

CPU = torch.device("cpu")


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ".", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_they_agree_with_torch_on_any_shape():
    found = json.loads(run("-m", "tests.engine.kernels.flashinfer.interpreted", TRITON_INTERPRET="1"))
    assert len(found) >= 38
    assert {name: error for name, error in found.items() if not error < conv.TRIAL_TOLERANCE} == {}


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engine.kernels.flashinfer.conv_kernel import _convolve, _update
from engine.kernels.flashinfer.gated_norm_kernel import _kernel
numbers = ["n", "channels", "x_stride", "slot_stride", "channel_stride", "place_stride"]
numbers += ["rows", "heads", "size", "x_head_stride", "gate_stride", "gate_head_stride"]
types = dict.fromkeys(numbers, "i32")
types |= dict.fromkeys(("source", "weight", "out", "x", "states", "gate"), "*bf16") | {"eps": "fp32"}
types |= dict.fromkeys(("windows", "slots"), "*i32")
for architecture in map(int, sys.argv[1:]):
    for kernel in (_convolve, _update, _kernel):
        constants = {"WIDTH": 4, "TOKENS": 16, "CHANNELS": 128, "ROWS": 4, "SIZE": 128}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        built = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", architecture, 32))
        assert len(built.asm["cubin"])
        print(architecture)
"""


@pytest.mark.parametrize(
    "architectures",
    [["90"], pytest.param(["80", "86", "89", "100", "103", "120", "121"], marks=pytest.mark.slow)],
    ids=lambda architectures: " ".join(architectures),
)
def test_they_compile_for(architectures, tmp_path):
    """By the ptxas that comes with Triton."""
    printed = run("-c", COMPILE, *architectures, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert len(printed.splitlines()) == 3 * len(architectures)


def off_by_one(source, windows, weight):
    return conv.convolve(source, windows.roll(1, 0), weight)


def not_a_number(source, windows, weight):
    return torch.full_like(source[: windows.shape[1]], torch.nan)


def forgetful(x, weight, states, slots):
    return conv.update(x, weight, states.clone(), slots)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ({"convolve": off_by_one}, "convolve"),
        ({"convolve": not_a_number}, "convolve"),
        ({"update": forgetful}, "states"),
        ({}, ""),
    ],
    ids=["taps in another order", "not a number", "the tail is not kept", "nothing"],
)
def test_a_trial_finds_what_is_wrong(broken, name):
    kernels = SimpleNamespace(**{"convolve": conv.convolve, "update": conv.update, **broken})
    fault = conv.find_fault(kernels, CPU, torch.float32, 4)
    assert name in fault
    assert bool(fault) == bool(broken)


def test_a_trial_of_the_gated_norm_finds_what_is_wrong():
    def right(x, gate, weight, eps):
        return gated_norm.in_parts(
            lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps), x, gate, weight, eps
        )

    def without_eps(x, gate, weight, eps):
        return right(x, gate, weight, 0.1)

    faults = [
        gated_norm.find_fault(SimpleNamespace(gated_rms_norm=norm), CPU, torch.float32, 128)
        for norm in (right, without_eps)
    ]
    assert faults[0] == ""
    assert faults[1].startswith("Triton's gated norm is off by")
