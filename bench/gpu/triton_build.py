"""`python -m bench.gpu.triton_build`: does our Triton kernel compile to machine code for GPUs that are not here?

Triton's package brings the assembler: neither a GPU nor nvcc is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu.built import Built, print_table

if TYPE_CHECKING:
    from engine.kernels.linear.w4a16_kernel import Blocking

ARCHITECTURES = (80, 90, 120)

SHARED_MEMORY_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""By architecture, the most that one block may ask for (CUDA C++ Programming Guide, "Compute Capabilities")."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which the kernel is compiled at run time."""

    blocking: Blocking
    is_partial: bool

    def __str__(self) -> str:
        blocking = self.blocking
        partial = ", partial sums" if self.is_partial else ""
        return f"w4a16 {blocking.rows}x{blocking.columns}x{blocking.k}{partial}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code for one architecture."""

    seconds: float
    cubin_bytes: int
    shared_bytes: int
    ptx: str


def variants() -> Iterator[Variant]:
    """All that `multiply` can ask for."""
    from engine.kernels.linear.w4a16_kernel import BLOCKINGS

    for blocking in BLOCKINGS:
        yield Variant(blocking, is_partial=False)
    yield Variant(BLOCKINGS[0], is_partial=True)


def compile_variant(variant: Variant, architecture: int) -> Compiled:
    """Compile for `architecture` (90 is SM90). Raises what Triton raises, and ValueError where a block asks for more
    shared memory than the architecture has."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    from engine.kernels.linear.w4a16_kernel import _kernel as kernel

    blocking = variant.blocking
    constants = {
        "IS_PARTIAL": variant.is_partial,
        "IS_ALIGNED": True,
        "DOT_DTYPE": tl.bfloat16,
        **blocking.constants,
    }
    signature = {
        "x": "*bf16",
        "packed": "*i32",
        "scale": "*i32",
        "row_scale": "*fp32",
        "out": "*fp32" if variant.is_partial else "*bf16",
        **dict.fromkeys(("n", "N", "K", "x_stride", "columns_k"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = ("x", "packed", "scale", "row_scale", "out", "N", "K", "x_stride", "columns_k")
    names = list(kernel.arg_names)
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    started = time.perf_counter()
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": blocking.num_warps, "num_stages": blocking.num_stages},
    )
    shared_bytes = int(compiled.metadata.shared)
    if shared_bytes > SHARED_MEMORY_BYTES[architecture]:
        raise ValueError(
            f"{variant} asks for {shared_bytes:,} bytes of shared memory; sm{architecture} has "
            f"{SHARED_MEMORY_BYTES[architecture]:,}"
        )
    return Compiled(time.perf_counter() - started, len(compiled.asm["cubin"]), shared_bytes, compiled.asm["ptx"])


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
            results += [_built(variant, architecture) for variant in variants()]
    print_table("our Triton kernel", results)
    return 1 if any(result.error for result in results) else 0


def _built(variant: Variant, architecture: int) -> Built:
    name = f"sm{architecture}"
    try:
        compiled = compile_variant(variant, architecture)
    except Exception as error:  # noqa: BLE001 - one that does not compile must not hide the others
        return Built(name, str(variant), "triton", 0.0, 0, f"{type(error).__name__}: {str(error)[-2000:]}")
    return Built(name, str(variant), "triton", compiled.seconds, compiled.cubin_bytes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
