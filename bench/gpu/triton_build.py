"""`python -m bench.gpu.triton_build`: do our Triton kernels compile to machine code for GPUs that are not here?

They are called as the backend calls them, on tensors of a 27B hybrid's shapes, with a driver in Triton's place that
says which GPU to compile for and launches nothing. Triton's package brings the assembler: neither a GPU nor nvcc is
needed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.gpu.built import Built, print_table
from engine.weights.formats import Nvfp4Weight

ARCHITECTURES = (80, 90, 120)
SHARED_MEMORY_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""By architecture, the most that one block may ask for (CUDA C++ Programming Guide, "Compute Capabilities")."""
_CPU = torch.device("cpu")
_HIDDEN, _INNER = 5120, 17_408
_CONV_CHANNELS, _HEADS, _HEAD_DIM = 10_240, 48, 128

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one kernel for one architecture."""

    kernel: str
    seconds: float
    cubin_bytes: int
    shared_bytes: int
    ptx: str


def calls() -> dict[str, Call]:
    """Every kernel of ours, as the backend calls it."""
    return {
        "w4a16, one row": _linear(1, _INNER),
        "w4a16, one row, few columns": _linear(1, 96),
        "w4a16, 20 rows": _linear(20, _INNER),
        "w4a16, 2048 rows": _linear(2048, 256),
        "conv, decodes": _conv_of_decodes,
        "conv, prefill": _conv_of_prefill,
        "gated norm": _gated_norm,
    }


def compile_call(name: str, architecture: int) -> list[Compiled]:
    """What the call launches, compiled for `architecture` (90 is SM90) instead. Raises what Triton raises, and
    ValueError where a block asks for more shared memory than the architecture has."""
    started = time.perf_counter()
    with _compiling_for(architecture) as kernels:
        calls()[name]()
    seconds = time.perf_counter() - started
    found = [
        Compiled(kernel_name, seconds, len(kernel.asm["cubin"]), int(kernel.metadata.shared), kernel.asm["ptx"])
        for kernel_name, kernel in kernels
    ]
    for each in found:
        if each.shared_bytes > SHARED_MEMORY_BYTES[architecture]:
            raise ValueError(
                f"{each.kernel} asks for {each.shared_bytes:,} bytes of shared memory; sm{architecture} has "
                f"{SHARED_MEMORY_BYTES[architecture]:,}"
            )
    return found


class _Driver:
    """What Triton asks of a driver before it launches a kernel. The device's number is its architecture, so that what
    was compiled for one is not taken for another."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def _compiling_for(architecture: int) -> Iterator[list[tuple[str, Any]]]:
    """Within it, kernels that are launched are compiled instead, and come into the list."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_Driver(architecture))
    try:
        yield found
    finally:
        JITFunction.run = run


def _linear(rows: int, out_features: int) -> Call:
    def call() -> object:
        from engine.kernels.device import DeviceTraits
        from engine.kernels.linear.nvfp4_triton import Nvfp4Triton

        weight = Nvfp4Weight(
            torch.zeros(out_features, _HIDDEN // 2, dtype=torch.uint8),
            torch.zeros(out_features, _HIDDEN // 16).to(torch.float8_e4m3fn),
            torch.tensor(1.0),
        )
        traits = DeviceTraits("any", (9, 0), multiprocessors=132)
        product = Nvfp4Triton(_CPU, torch.bfloat16, traits).prepare([weight])
        return product.apply(torch.zeros(rows, _HIDDEN, dtype=torch.bfloat16))

    return call


def _conv_of_decodes() -> object:
    kernels = importlib.import_module("engine.kernels.flashinfer.conv_kernel")
    x, weight = _zeros(8, _CONV_CHANNELS), _zeros(_CONV_CHANNELS, 4)
    return kernels.update(x, weight, _zeros(9, _CONV_CHANNELS, 3), torch.arange(8, dtype=torch.int32))


def _conv_of_prefill() -> object:
    kernels = importlib.import_module("engine.kernels.flashinfer.conv_kernel")
    windows = torch.zeros(4, 300, dtype=torch.int32)
    return kernels.convolve(_zeros(400, _CONV_CHANNELS), windows, _zeros(_CONV_CHANNELS, 4))


def _gated_norm() -> object:
    kernels = importlib.import_module("engine.kernels.flashinfer.gated_norm_kernel")
    x, gate = (_zeros(8, _HEADS, _HEAD_DIM) for _ in range(2))
    return kernels.gated_rms_norm(x, gate, _zeros(_HEAD_DIM), 1e-6)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.triton_build", description=__doc__)
    parser.add_argument(
        "--architectures",
        nargs="+",
        type=int,
        choices=sorted(SHARED_MEMORY_BYTES),
        default=list(ARCHITECTURES),
        help="90 is SM90 (default 80 90 120)",
    )
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("triton build: skipped: triton is not installed; pip install 'dalsegno[cuda]'")
        return 0
    # As it is compiled for a GPU, whatever the caller tests with; and compiled now, not found in a cache.
    os.environ.pop("TRITON_INTERPRET", None)
    results: list[Built] = []
    with tempfile.TemporaryDirectory(prefix="dalsegno-triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for architecture in options.architectures:
            for name in calls():
                results += _built(name, architecture)
    print_table("our Triton kernels", results)
    return 1 if any(result.error for result in results) else 0


def _built(name: str, architecture: int) -> list[Built]:
    architecture_name = f"sm{architecture}"
    try:
        found = compile_call(name, architecture)
        if not found:
            raise ValueError("nothing was launched")
    except Exception as error:  # noqa: BLE001 - one that does not compile must not hide the others
        detail = f"{type(error).__name__}: {str(error)[-2000:]}"
        return [Built(architecture_name, name, "triton", 0.0, 0, detail)]
    return [Built(architecture_name, name, "triton", each.seconds, each.cubin_bytes) for each in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
