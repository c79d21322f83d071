"""Which backend is taken where, and what is said about one that is not."""

import importlib.util
import logging

import pytest
import torch

from engine.errors import BackendUnavailableError
from engine.kernels import select
from engine.kernels.device import DeviceTraits
from engine.kernels.select import select_kernels

HOPPER = DeviceTraits("H200", (9, 0), 140 * 2**30, 132)
TURING = DeviceTraits("T4", (7, 5), 16 * 2**30, 40)


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine look like another: what torch is built for, the GPU that it sees, flashinfer, the driver."""

    def pretend(*, cuda="13.0", gpu=None, has_flashinfer=True, has_driver=True):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None and gpu is not None)
        monkeypatch.setattr(select, "find_gpu", lambda: gpu)
        monkeypatch.setattr(select, "driver_is_here", lambda: has_driver)
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: None if name == "flashinfer" and not has_flashinfer else find_spec(name),
        )

    return pretend


MISSING = [
    ({"cuda": None}, "is a build without CUDA; PyPI's for Linux has it: pip install --force-reinstall torch"),
    ({"gpu": None}, "is built for CUDA 13.0 and finds no device; compare `nvidia-smi`"),
    ({"gpu": TURING}, "T4 has compute capability 7.5, and bfloat16 needs 8.0"),
    ({"gpu": HOPPER, "has_flashinfer": False}, "flashinfer is missing; pip install 'dalsegno[cuda]'"),
]


@pytest.mark.parametrize(("here", "said"), MISSING)
def test_flashinfer_where_it_cannot_run_says_what_is_missing_and_what_to_do(machine, here, said):
    machine(**here)
    with pytest.raises(BackendUnavailableError) as caught:
        select_kernels("flashinfer")
    assert said in str(caught.value)


@pytest.mark.parametrize(("here", "said"), MISSING)
def test_auto_leaves_no_gpu_idle_without_a_warning(machine, caplog, here, said):
    machine(**here)
    assert select_kernels("auto").name == "torch"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "the CPU serves" in record.message
    assert said in record.message


def test_auto_says_nothing_where_there_is_no_gpu(machine, caplog):
    machine(gpu=None, has_driver=False)
    assert select_kernels("auto").name == "torch"
    assert caplog.records == []


def test_torch_is_taken_on_a_gpu_too_when_it_is_asked_for(machine, caplog):
    machine(gpu=HOPPER)
    kernels = select_kernels("torch")
    assert (kernels.name, kernels.device.type) == ("torch", "cpu")
    assert caplog.records == []


def test_the_backend_that_is_not_built_says_so():
    with pytest.raises(BackendUnavailableError, match=r"'native'.*not part of this version"):
        select_kernels("native")
