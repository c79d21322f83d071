"""Run by test_delta_build.py: compiles flashinfer's delta rule for a GPU that is not here, by the backend's own calls.

flashinfer's entry points run as they are, and so does what they compile, up to where it asks the driver: by then it has
checked dtype, shape, strides and alignment of every argument. For that, tensors are dressed as a GPU's, and so is the
machine. Prints one line for each step: its name and `compiled`, or what went wrong.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from engine.kernels import StateCapture
from engine.kernels.flashinfer import delta
from engine.kernels.flashinfer.plan import Arena, bind, plan_on_host
from tests.engine.kernels.layouts import make_layout

K_HEADS, V_HEADS, HEAD_DIM = 16, 48, 128
"""Those of a 27B hybrid."""
MULTIPROCESSORS = 132
REFUSALS = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice")
"""What a compiled function answers without a GPU, once it has nothing against its arguments."""
STEPS = {
    "decodes": make_layout([1, 1], [5, 9]),
    "one decode": make_layout([1], [5]),
    "one token": make_layout([1], [0]),
    "resumed and fresh": make_layout([70, 64], [5, 0]),
    "captured on the grid": make_layout([70, 64], [5, 0], captures=(StateCapture(0, 64, 7),)),
}
CUDA_IN_DLPACK = 2


def as_of_a_gpu(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The tensor's DLPack capsule, with a GPU for its device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # DLTensor: a pointer, then DLDevice {int32 type, int32 number}.
    device = ctypes.cast(pointer_of(capsule, b"dltensor") + 8, ctypes.POINTER(ctypes.c_int32))
    device[0], device[1] = CUDA_IN_DLPACK, 0
    return capsule


class OfAGpu:
    """Speaks DLPack alone: of a torch.Tensor, TVM reads the device by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return as_of_a_gpu(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_IN_DLPACK, 0


def aligned_scratch(_name: str, size: int, _device: Any) -> torch.Tensor:
    memory = torch.empty(size + 512, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 512 :][:size]


def pretend(architecture: str, capability: tuple[int, int]) -> SimpleNamespace:
    """Dress tensors and machine, and return flashinfer's two functions. Imports it only after that."""
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    torch.Tensor.__dlpack__ = as_of_a_gpu
    torch.Tensor.__dlpack_device__ = lambda self: (CUDA_IN_DLPACK, 0)
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        del torch.Tensor.__dlpack_c_exchange_api__
    torch.version.cuda = "13.0"
    from cutlass import cute
    from flashinfer import gdn_decode, gdn_prefill
    from flashinfer.gdn_kernels import device_target
    from flashinfer.gdn_kernels.delta_rule_dsl import custom_compile_cache
    from flashinfer.jit import cute_dsl_core

    target = device_target.GdnDeviceTarget(0, architecture, *capability, MULTIPROCESSORS, capability[0] >= 10)
    from_dlpack = cute.runtime.from_dlpack

    def through_dlpack(tensor: torch.Tensor, *args: Any, enable_tvm_ffi: bool = False, **kwargs: Any) -> Any:
        return from_dlpack(tensor, *args, **kwargs)

    cute.runtime.from_dlpack = through_dlpack
    replace_everywhere(
        gdn_device_target=lambda device: target,
        gdn_compile_options=lambda device, *extra: device_target._arch_options(architecture) + extra,
        get_compute_capability=lambda device: capability,
        get_device_sm_count=lambda device: MULTIPROCESSORS,
        get_num_sm=lambda device: MULTIPROCESSORS,
        get_device_name=lambda device: "a GPU",
        _get_cache_buf=aligned_scratch,
        build_and_load_cute_dsl_kernel=dressing(cute_dsl_core.build_and_load_cute_dsl_kernel),
        cached_compile=dressing(custom_compile_cache.cached_compile),
        get_cached_compile=dressing(custom_compile_cache.get_cached_compile),
    )
    return SimpleNamespace(
        chunk_gated_delta_rule=gdn_prefill.chunk_gated_delta_rule,
        gated_delta_rule_decode_pretranspose=gdn_decode.gated_delta_rule_decode_pretranspose,
    )


def dressing(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns compiled ones: these get their tensors as a GPU's."""
    import tvm_ffi

    def dressed(function: Any) -> Any:
        return lambda *args: function(
            *(tvm_ffi.from_dlpack(OfAGpu(each)) if isinstance(each, torch.Tensor) else each for each in args)
        )

    def make_dressed(*args: Any, **kwargs: Any) -> Any:
        function = make(*args, **kwargs)
        return None if function is None else dressed(function)

    return make_dressed


def replace_everywhere(**replacements: Any) -> None:
    """In each module of flashinfer that has imported them by name."""
    for module in [module for name, module in sys.modules.items() if name.startswith("flashinfer")]:
        for name, replacement in replacements.items():
            if name in vars(module):
                setattr(module, name, replacement)


def build(library: Any, layout: Any) -> str:
    """Call as the backend does: with columns of a convolution and of a projection, and a pool with slots to spare."""
    host = plan_on_host(layout, 4)
    plan = bind(layout, host, Arena(torch.device("cpu")).lay({**host.arrays, **host.capture_arrays}))
    n, k_size, v_size = layout.num_tokens, K_HEADS * HEAD_DIM, V_HEADS * HEAD_DIM
    q, k, v = torch.zeros(n, 2 * k_size + v_size).bfloat16().split((k_size, k_size, v_size), dim=1)
    _, b, a = torch.zeros(n, v_size + 2 * V_HEADS).bfloat16().split((v_size, V_HEADS, V_HEADS), dim=1)
    q, k, v = q.view(n, K_HEADS, -1), k.view(n, K_HEADS, -1), v.view(n, V_HEADS, -1)
    out, states = torch.empty_like(v).contiguous(), torch.zeros(9, V_HEADS, HEAD_DIM, HEAD_DIM)
    run, part = (delta.decode, plan) if plan.chunks is None else (delta.by_chunks, plan.chunks)
    try:
        run(library, part, q, k, v, a, b, torch.zeros(V_HEADS), torch.zeros(V_HEADS), states, out)
    except Exception as error:  # noqa: BLE001 - it must be one of the refusals, and else it is the result
        message = f"{type(error).__name__}: {error}"
        return "compiled" if any(refusal in message for refusal in REFUSALS) else message
    return "ran without a GPU"


def main() -> None:
    architecture, *steps = sys.argv[1:]
    major, minor = re.match(r"sm_(\d+)(\d)", architecture).groups()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"CUTE_DSL_ARCH": architecture, "FLASHINFER_WORKSPACE_BASE": cache}
        library = pretend(architecture, (int(major), int(minor)))
        for step in steps:
            print(f"{step}: {build(library, STEPS[step])}")


if __name__ == "__main__":
    main()
