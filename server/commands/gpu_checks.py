"""What `dalsegno doctor` finds out about the GPU and what computes on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from server.commands.findings import Finding, Verdict
from server.settings import Settings

if TYPE_CHECKING:
    from engine.kernels import KernelChoice

# torch, and what imports it, takes seconds: only when a check is made.
_PREBUILT = "flashinfer_jit_cache"


def check_gpu(_settings: Settings) -> Iterator[Finding]:
    """Which GPU torch would use, or why it uses none."""
    import torch

    from engine.kernels.select import driver_is_here, driver_release, find_gpu, gpu_device, gpu_trouble

    trouble = gpu_trouble()
    if trouble is None:
        gpu = find_gpu()
        free, total = torch.cuda.mem_get_info(gpu_device())
        found = (
            f"{gpu.name} ({gpu.architecture}, {gpu.multiprocessors} multiprocessors), {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free; torch for CUDA {torch.version.cuda}, driver {driver_release() or 'unknown'}"
        )
        yield Finding("gpu", Verdict.OK, found)
    elif driver_is_here():
        yield Finding("gpu", Verdict.NOTE, f"a driver ({driver_release() or 'of unknown release'}), but idle", trouble)
    else:
        yield Finding("gpu", Verdict.NOTE, "none that torch can use", "the CPU serves; no need to do anything")


def check_flashinfer(_settings: Settings) -> Iterator[Finding]:
    """Whether the CUDA kernels are installed, and what compiles them."""
    from engine.kernels.select import INSTALL_FLASHINFER, gpu_trouble

    has_gpu = gpu_trouble() is None
    if importlib.util.find_spec("flashinfer") is None:
        advice = f"{INSTALL_FLASHINFER}: without it the CPU serves" if has_gpu else "only a GPU needs it"
        yield Finding("flashinfer", Verdict.NOTE, "not installed", advice)
        return
    yield Finding("flashinfer", Verdict.OK, importlib.metadata.version("flashinfer-python"))
    nvcc = find_nvcc()
    if nvcc is not None:
        found = f"{nvcc}, CUDA {_nvcc_release(nvcc) or 'unknown'}"
        yield Finding("nvcc", Verdict.OK, found, "flashinfer compiles with it what it has not compiled before")
    elif importlib.util.find_spec(_PREBUILT) is not None:
        yield Finding(
            "nvcc", Verdict.OK, f"none; flashinfer-jit-cache {importlib.metadata.version(_PREBUILT)} is there"
        )
    elif has_gpu:
        advice = "flashinfer compiles its kernels at first use: install the CUDA toolkit, or set CUDA_HOME to it"
        yield Finding("nvcc", Verdict.NOTE, "none", f"{advice}; what was compiled before still runs")
    else:
        yield Finding("nvcc", Verdict.NOTE, "none", "only a GPU needs it")


def check_triton(_settings: Settings) -> Iterator[Finding]:
    """Whether our own kernels for a GPU can be compiled."""
    from engine.kernels.select import INSTALL_FLASHINFER, gpu_trouble

    if importlib.util.find_spec("triton") is None:
        has_gpu = gpu_trouble() is None
        advice = f"{INSTALL_FLASHINFER} brings it" if has_gpu else "only a GPU needs it"
        yield Finding("triton", Verdict.NOTE, "not installed", advice)
    else:
        yield Finding("triton", Verdict.OK, importlib.metadata.version("triton"))


def kernel_findings(choices: tuple[KernelChoice, ...]) -> Iterator[Finding]:
    """One for each kernel, those that are not served by the first choice with the reason."""
    for choice in choices:
        verdict = Verdict.NOTE if choice.reason else Verdict.OK
        yield Finding("kernel", verdict, f"{choice.kernel}: {choice.implementation}", choice.reason)


def linear_findings(settings: Settings) -> Iterator[Finding]:
    """What each format of weights is multiplied by on this GPU, which a model's layers prove when they are loaded."""
    from engine.kernels.flashinfer.library import load_library
    from engine.kernels.linear.preview import preview_linear
    from engine.kernels.select import find_gpu

    return kernel_findings(preview_linear(find_gpu(), settings.engine.activations, load_library()))


def find_nvcc() -> Path | None:
    """Where flashinfer looks for it, in its order."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if home is not None:
        nvcc = Path(home) / "bin" / "nvcc"
    elif on_path is not None:
        nvcc = Path(on_path)
    else:
        nvcc = Path("/usr/local/cuda/bin/nvcc")
    return nvcc if nvcc.is_file() else None


def _nvcc_release(nvcc: Path) -> str | None:
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release ([\d.]+)", said)
    return found[1] if found else None
