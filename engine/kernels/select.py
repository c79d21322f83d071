"""Choosing a backend by name, or by what is here."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sysconfig
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from engine.errors import BackendUnavailableError
from engine.kernels import Kernels
from engine.kernels.device import DeviceTraits, read_traits
from engine.kernels.torch import TorchKernels
from engine.models.config import ModelConfig
from engine.options import Activations

Backend: TypeAlias = Literal["auto", "torch", "native", "flashinfer"]

INSTALL_FLASHINFER = "pip install 'dalsegno[cuda]'"
LEAST_CAPABILITY = (8, 0)
"""bfloat16 begins here."""

_DRIVER = Path("/proc/driver/nvidia/version")

logger = logging.getLogger("dalsegno.kernels")


def select_kernels(backend: Backend, config: ModelConfig | None = None, activations: Activations = "auto") -> Kernels:
    """Make the backend; `auto` takes flashinfer on a GPU where both are there, else torch on the CPU, and warns where a
    GPU is left idle.

    `flashinfer` needs `config`, the model that it is to compute. Raises BackendUnavailableError that says what is
    missing and what to do.
    """
    if backend == "torch":
        return _torch_kernels(activations)
    if backend == "native":
        raise BackendUnavailableError(backend, "the C++ kernels for the CPU are not part of this version")
    trouble = gpu_trouble()
    if trouble is not None:
        if backend == "flashinfer":
            raise BackendUnavailableError(backend, trouble)
        if driver_is_here():
            logger.warning("a GPU is left idle, the CPU serves: %s", trouble)
        return _torch_kernels(activations)
    try:
        return _flashinfer_kernels(config, activations)
    except BackendUnavailableError as error:
        if backend == "flashinfer":
            raise
        logger.warning("the GPU %s is left idle, the CPU serves: %s", find_gpu().name, error)
        return _torch_kernels(activations)


def gpu_trouble() -> str | None:
    """Why torch cannot compute on a GPU here, and what to do about it; None where it can."""
    if torch.version.cuda is None:
        return (
            f"a GPU that torch can use is missing: torch {torch.__version__} is a build without CUDA; PyPI's for Linux "
            "has it: pip install --force-reinstall torch"
        )
    if not torch.cuda.is_available():
        seen = "CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in os.environ else "the driver"
        return (
            f"a GPU that torch can use is missing: torch {torch.__version__} is built for CUDA {torch.version.cuda} "
            f"and finds no device; compare `nvidia-smi`, and look at {seen}"
        )
    gpu = find_gpu()
    if gpu.capability is not None and gpu.capability < LEAST_CAPABILITY:
        return (
            f"a GPU that these kernels run on is missing: {gpu.name} has compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]}, and bfloat16 needs {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
        )
    return None


def driver_is_here() -> bool:
    """Whether the kernel has NVIDIA's driver, whatever torch can do with it."""
    return _DRIVER.exists()


def driver_release() -> str | None:
    """NVIDIA's driver, such as 580.95.05; None where it does not say."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def gpu_device() -> torch.device:
    """The device that the kernels run on: the first that torch sees. `CUDA_VISIBLE_DEVICES` chooses another."""
    return torch.device("cuda", 0)


def find_gpu() -> DeviceTraits:
    """That device's traits; call it only where `gpu_trouble` finds none."""
    return read_traits(gpu_device())


def _torch_kernels(activations: Activations) -> Kernels:
    if activations == "fp4":
        logger.warning(
            "activations are to be fp4, but the CPU multiplies unpacked weights in float32: it stays at that"
        )
    return TorchKernels()


def _flashinfer_kernels(config: ModelConfig | None, activations: Activations) -> Kernels:
    if importlib.util.find_spec("flashinfer") is None:
        raise BackendUnavailableError("flashinfer", f"flashinfer is missing; {INSTALL_FLASHINFER}")
    if config is None:
        raise ValueError("the flashinfer backend is made for one model: give its config")
    from engine.kernels.flashinfer.backend import FlashinferKernels
    from engine.kernels.flashinfer.library import load_library

    _put_ninja_on_the_path()
    return FlashinferKernels(gpu_device(), torch.bfloat16, config, load_library(), find_gpu(), activations=activations)


def _put_ninja_on_the_path() -> None:
    """flashinfer compiles with the program `ninja`, which pip puts beside python; a daemon that was started by its
    path does not have that folder on its PATH."""
    scripts = sysconfig.get_path("scripts")
    path = os.environ.get("PATH", "")
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([*([path] if path else []), scripts])
