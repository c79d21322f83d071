"""Choosing a backend by name."""

from __future__ import annotations

from typing import Literal, TypeAlias

from engine.errors import BackendUnavailableError
from engine.kernels import Kernels
from engine.kernels.torch import TorchKernels

Backend: TypeAlias = Literal["auto", "torch", "native", "flashinfer"]

_NOT_THERE = {
    "native": "the C++ kernels for the CPU are not part of this version",
    "flashinfer": "the CUDA kernels are not part of this version",
}


def select_kernels(backend: Backend) -> Kernels:
    """Make the backend; `auto` takes the best there is. Raises BackendUnavailableError that says what is missing."""
    if backend in ("auto", "torch"):
        return TorchKernels()
    raise BackendUnavailableError(backend, _NOT_THERE[backend])
