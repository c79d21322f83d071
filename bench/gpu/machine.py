"""What machine this is, what is installed on it, and what therefore cannot be run."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

import psutil
import torch

from engine.kernels.device import CPU, DeviceTraits, read_traits
from engine.kernels.select import find_gpu, gpu_trouble

FP4_CAPABILITY = (10, 0)
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that is checked, and why some things cannot run: empty where they can."""

    device: torch.device
    traits: DeviceTraits
    no_gpu: str
    no_flashinfer: str
    no_triton: str
    facts: dict[str, str]

    @property
    def no_fp4(self) -> str:
        """Why activations cannot be multiplied in fp4 here."""
        return self._needs(FP4_CAPABILITY, "fp4")

    @property
    def no_fp8(self) -> str:
        """Why activations cannot be multiplied in fp8 here."""
        return self._needs(FP8_CAPABILITY, "fp8")

    def _needs(self, capability: tuple[int, int], what: str) -> str:
        own = self.traits.capability
        if own is not None and own >= capability:
            return ""
        return f"the tensor cores of {self.traits.architecture} do not multiply {what}"


def find_machine(*, is_rehearsal: bool = False) -> Machine:
    """Ask torch, the driver and the packages. A rehearsal is on the CPU, whatever there is."""
    no_gpu = "this is a rehearsal on the CPU" if is_rehearsal else gpu_trouble() or ""
    traits = CPU if no_gpu else find_gpu()
    device = torch.device("cpu") if no_gpu else torch.device("cuda", 0)
    return Machine(
        device=device,
        traits=traits,
        no_gpu=no_gpu,
        no_flashinfer=_why_no_package("flashinfer-python", "flashinfer"),
        no_triton=_why_no_package("triton", "triton"),
        facts=_facts(device, read_traits(device)),
    )


def _facts(device: torch.device, traits: DeviceTraits) -> dict[str, str]:
    facts = {
        "gpu": traits.name if traits.is_cuda else "none",
        "capability": traits.architecture,
        "gpu memory": f"{traits.total_bytes / 2**30:.1f} GiB" if traits.is_cuda else "-",
        "multiprocessors": str(traits.multiprocessors) if traits.is_cuda else "-",
        "driver": _driver(),
        "cpu": f"{_cpu_name()}, {psutil.cpu_count()} threads",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
    }
    for package in ("dalsegno", "flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin", "triton"):
        facts[package] = _version(package) or "not installed"
    return facts


def _driver() -> str:
    """As NVIDIA's management library says it, whatever torch can use."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return "unknown (nvidia-ml-py is not installed)"
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"none ({error})"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _why_no_package(package: str, module: str) -> str:
    return "" if _version(package) else f"{module} is not installed; pip install 'dalsegno[cuda]'"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
