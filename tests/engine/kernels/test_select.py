"""Which backend is taken where, and what is said about one that is not."""

import logging
import os
import shutil

import pytest
import torch

from engine.catalog import resolve_model
from engine.errors import BackendUnavailableError
from engine.kernels import select
from engine.kernels.select import driver_release, select_kernels
from engine.models.registry import read_config
from engine.weights.formats import Fp8Weight
from tests.engine.kernels.flashinfer.reference_library import ReferenceLibrary
from tests.machine import HOPPER, TURING, pretend

CONFIG = read_config(resolve_model("demo"))
MISSING = [
    ({"cuda": None}, "is a build without CUDA; PyPI's for Linux has it: pip install --force-reinstall torch"),
    ({"gpu": None}, "is built for CUDA 13.0 and finds no device; compare `nvidia-smi`"),
    ({"gpu": TURING}, "T4 has compute capability 7.5, and bfloat16 needs 8.0"),
    ({"gpu": HOPPER, "without": ["flashinfer"]}, "flashinfer is missing; pip install 'dalsegno[cuda]'"),
]


@pytest.mark.parametrize(("here", "said"), MISSING)
def test_flashinfer_where_it_cannot_run_says_what_is_missing_and_what_to_do(monkeypatch, here, said):
    pretend(monkeypatch, **here)
    with pytest.raises(BackendUnavailableError) as caught:
        select_kernels("flashinfer")
    assert said in str(caught.value)


@pytest.mark.parametrize(("here", "said"), MISSING)
def test_auto_leaves_no_gpu_idle_without_a_warning(monkeypatch, caplog, here, said):
    pretend(monkeypatch, **here)
    assert select_kernels("auto").name == "torch"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "the CPU serves" in record.message
    assert said in record.message


def test_auto_says_nothing_where_there_is_no_gpu(monkeypatch, caplog):
    pretend(monkeypatch, gpu=None, has_driver=False)
    assert select_kernels("auto").name == "torch"
    assert caplog.records == []


def test_torch_is_taken_on_a_gpu_too_when_it_is_asked_for(monkeypatch, caplog):
    pretend(monkeypatch, gpu=HOPPER)
    kernels = select_kernels("torch")
    assert (kernels.name, kernels.device.type) == ("torch", "cpu")
    assert caplog.records == []


@pytest.mark.parametrize(("activations", "warnings"), [("auto", 0), ("bf16", 0), ("fp4", 1)])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_cpu_says_that_it_rounds_no_activations_to_fp4(monkeypatch, caplog, backend, activations, warnings):
    pretend(monkeypatch, gpu=None, has_driver=False)
    select_kernels(backend, CONFIG, activations)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["fp4" in line for line in said] == [True] * warnings


def test_the_backend_that_is_not_built_says_so():
    with pytest.raises(BackendUnavailableError, match=r"'native'.*not part of this version"):
        select_kernels("native")


@pytest.mark.parametrize(
    ("said", "release"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.06  Wed Jun 26 06:46:07 UTC 2024\n", "535.183.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
        ("NVRM version: none\n", None),
        (None, None),
    ],
)
def test_the_driver_tells_its_release(tmp_path, monkeypatch, said, release):
    file = tmp_path / "version"
    if said is not None:
        file.write_text(said)
    monkeypatch.setattr(select, "_DRIVER", file)
    assert driver_release() == release


@pytest.mark.parametrize("backend", ["auto", "flashinfer"])
def test_a_gpu_with_flashinfer_is_taken_and_told_what_activations_are_to_be(monkeypatch, backend):
    library = ReferenceLibrary()
    pretend(monkeypatch, gpu=HOPPER)
    monkeypatch.setattr(select, "gpu_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("engine.kernels.flashinfer.library.load_library", lambda: library)
    kernels = select_kernels(backend, CONFIG, "bf16")
    assert (kernels.name, kernels.dtype) == ("flashinfer", torch.bfloat16)
    layer = kernels.prepare_linear([Fp8Weight(torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(()))])
    assert layer.kind == "fp8 dequantised to bf16"
    assert "activations are to stay in bf16" in [choice.reason for choice in kernels.choices]


def test_ninja_is_found_although_the_environment_of_the_daemon_is_not_activated(monkeypatch, tmp_path):
    pretend(monkeypatch, gpu=HOPPER)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(select, "gpu_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("engine.kernels.flashinfer.library.load_library", ReferenceLibrary)
    for _twice in range(2):
        select_kernels("flashinfer", CONFIG)
    assert shutil.which("ninja") is not None
    assert os.environ["PATH"].split(os.pathsep)[0] == str(tmp_path)
    assert len(os.environ["PATH"].split(os.pathsep)) == 2


def test_auto_does_not_hide_a_flashinfer_that_cannot_be_imported(monkeypatch, caplog):
    def broken():
        raise BackendUnavailableError("flashinfer", "libcudart.so.13: cannot open shared object file")

    pretend(monkeypatch, gpu=HOPPER)
    monkeypatch.setattr("engine.kernels.flashinfer.library.load_library", broken)
    assert select_kernels("auto", CONFIG).name == "torch"
    assert "libcudart.so.13" in caplog.text
