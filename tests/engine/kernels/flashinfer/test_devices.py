"""What lies on the host and what on the device, which a CPU cannot tell: models run on torch's `meta` device.

There tensors have no numbers, so that none can be read back. Operations over two devices are refused, and the library's
functions get tensors of the device alone, but for what the wrappers plan with.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.kernels import StateCapture
from engine.kernels.flashinfer.backend import FlashinferKernels
from engine.models.registry import load_model, read_config
from tests.engine.kernels.flashinfer.contract import bind, require, with_defaults
from tests.engine.kernels.flashinfer.rig import ARCHITECTURES
from tests.engine.kernels.flashinfer.test_models import MODELS, PROMPT
from tests.engine.models.driver import Driver, make_twin

META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Torch itself lets several operations of `meta` tensors have others on the host, which a GPU would refuse."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {
            leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        require(len(devices) < 2, f"{func} over {devices}")
        require(devices != {"cpu"}, f"{func} on the host within a forward")
        return func(*args, **kwargs or {})


class DeviceLibrary:
    """Every call is bound to the installed signature; its tensors must be on the device; results are empty."""

    def __getattr__(self, name):
        if name.endswith("Wrapper"):
            return lambda *args, **kwargs: _DeviceWrapper(name, bind(name, args, kwargs))
        return lambda *args, **kwargs: _answer(name, bind(name, args, kwargs))


class _DeviceWrapper:
    def __init__(self, name, arguments):
        self._name = name
        _check(name, arguments)

    def plan(self, *args, **kwargs):
        """What the planner reads lies on the host, or it would wait for the device; page numbers it only copies."""
        for key, value in bind(f"{self._name}.plan", (self, *args), kwargs).items():
            is_read = isinstance(value, torch.Tensor) and not key.endswith("indices")
            require(not is_read or value.device.type == "cpu", f"{key} is not on the host")

    def run(self, *args, **kwargs):
        arguments = bind(f"{self._name}.run", (self, *args), kwargs)
        _check(self._name, {key: value for key, value in arguments.items() if key != "self"})
        return torch.empty_like(arguments["q"]) if arguments.get("out") is None else arguments["out"]


def _check(name, arguments):
    for key, value in arguments.items():
        require(not isinstance(value, torch.Tensor) or value.device == META, f"{name}: {key} lies on {value}")


def _answer(name, given):
    _check(name, given)
    arguments = with_defaults(name, given)
    if name == "chunk_gated_delta_rule":
        return torch.empty_like(arguments["v"]), arguments["output_state"]
    if name == "gated_delta_rule_decode_pretranspose":
        return torch.empty_like(arguments["v"]), arguments["initial_state"]
    if name == "silu_and_mul":
        return arguments["input"].chunk(2, dim=-1)[0].contiguous() if arguments["out"] is None else arguments["out"]
    if name == "rmsnorm":
        return torch.empty_like(arguments["input"]) if arguments["out"] is None else arguments["out"]
    return None


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("twin")
    make_twin(MODELS[request.param](), path, dtype=torch.bfloat16)
    return path


@pytest.mark.parametrize("architecture", ["sm89", "sm90"])
def test_every_operation_of_a_step_is_on_one_device(folder, architecture, monkeypatch):
    # Only a driver locks pages.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    kernels = FlashinferKernels(META, torch.bfloat16, read_config(folder), DeviceLibrary(), ARCHITECTURES[architecture])
    driver = Driver(load_model(folder, kernels), kernels, num_pages=64, num_slots=8)
    kernels.prepare_decodes(2, 32)
    first, second = driver.open(), driver.open()
    captures = (StateCapture(0, 64, 6), StateCapture(0, 70, 7))
    steps = (
        ([(first, PROMPT[:70])], captures),
        ([(first, [3]), (second, PROMPT[:7])], ()),
        ([(first, [4]), (second, [5])], ()),
        ([(first, [6])], (StateCapture(0, 1, 6),)),
    )
    for work, taken in steps:
        kernels.plan(driver.layout(work, taken))
        token_ids = torch.tensor([token for _, tokens in work for token in tokens]).to(META)
        with torch.inference_mode(), OneDevice():
            hidden = driver.model.forward(kernels, driver.state, token_ids)
            assert driver.model.logits(kernels, hidden).device == META
