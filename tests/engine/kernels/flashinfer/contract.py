"""What flashinfer demands of a call, read from the installed library: signatures, trace templates, dtypes, strides.

A check that the library has in plain Python is called, not written again; what only its CUDA sources check (and a CPU
would never tell) is written here, next to the name of the source.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer import api_logging
from flashinfer.trace.template import Scalar, TraceTemplate

from engine.kernels.flashinfer.library import FUNCTIONS

ALIGNED_BYTES = 16


class ContractError(AssertionError):
    """A call that flashinfer would refuse on a GPU, or would take for another one."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What is kept of a tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call: `name` is a key of FUNCTIONS, with `.plan` or `.run` behind a wrapper's."""

    name: str
    arguments: dict[str, Any]
    """Those that the caller gave, by the real parameter names; tensors as TensorRecord."""


def record(name: str, arguments: dict[str, Any]) -> Call:
    return Call(name, {key: _record_value(value) for key, value in arguments.items()})


def _record_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorRecord(tuple(value.shape), value.dtype, value.stride())
    return tuple(map(_record_value, value)) if isinstance(value, (tuple, list)) else value


@functools.cache
def real(name: str) -> Any:
    """The installed function or class; `Wrapper.plan` and `Wrapper.run` are methods."""
    first, _, method = name.partition(".")
    found = getattr(importlib.import_module(FUNCTIONS[first]), first)
    return getattr(found, method) if method else found


@functools.cache
def signature(name: str) -> inspect.Signature:
    """The real parameters, those included that a wrapper's public method hands on as keywords."""
    if name == "BatchDecodeWithPagedKVCacheWrapper.plan":
        return inspect.signature(real("BatchDecodeWithPagedKVCacheWrapper")._plan_impl)
    return inspect.signature(real(name))


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as given. Raises ContractError for one that the installed function has not, and for a
    tensor where it is annotated to take none."""
    parameters = signature(name)
    try:
        arguments = dict(parameters.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ContractError(f"{name}: {error}") from error
    for key, value in arguments.items():
        annotation = parameters.parameters[key].annotation
        takes_tensors = annotation is inspect.Parameter.empty or "Tensor" in str(annotation)
        require(takes_tensors or not isinstance(value, torch.Tensor), f"{name}: {key} is {annotation}, got a tensor")
    return arguments


def with_defaults(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        key: parameter.default
        for key, parameter in signature(name).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return {**defaults, **arguments}


@functools.cache
def templates(name: str) -> tuple[TraceTemplate, ...]:
    """The trace templates that the installed library has for a function, its default one first."""
    function = inspect.unwrap(real(name))
    return tuple(
        template for original, template, _ in api_logging._TRACE_REGISTRY if inspect.unwrap(original) is function
    )


def reference(name: str, which: int = 0) -> Any:
    """The plain torch function that the library has for a call."""
    found = templates(name)
    require(len(found) > which, f"flashinfer has no trace template for {name} any more")
    return found[which].reference


def check_template(template: TraceTemplate, arguments: dict[str, Any]) -> dict[str, int]:
    """Every tensor has the ranks that the template says, and its axes have one size each, the same in all; returns it.

    The template's constraints hold too, as far as their names are known.
    """
    axes: dict[str, int] = {}
    for key, spec in template.inputs.items():
        value = arguments.get(spec.param or key)
        if isinstance(spec, Scalar):
            if isinstance(value, int):
                axes.setdefault(key, value)
            continue
        if spec.tuple_idx is not None and isinstance(value, (tuple, list)):
            value = value[spec.tuple_idx]
        if not isinstance(value, torch.Tensor):
            require(value is None, f"{key} is no tensor")
            continue
        require(value.dim() == len(spec.dim_names), f"{key} must be {spec.dim_names}, got {tuple(value.shape)}")
        for axis, size in zip(spec.dim_names, value.shape, strict=True):
            known = axes.setdefault(axis, size)
            require(known == size, f"{key}: {axis} is {known} elsewhere, {size} here")
        if spec.dtype is not None:
            expected = getattr(torch, spec.dtype)
            require(value.dtype == expected, f"{key} must be {expected}, got {value.dtype}")
    for constraint in template.constraints:
        try:
            holds = eval(constraint, {"max": max}, {**arguments, **axes})
        except (NameError, AttributeError, TypeError):
            continue
        require(bool(holds), f"{template.name_prefix} demands {constraint}, with {axes}")
    return axes


def check_activations(dtype: torch.dtype, **tensors: torch.Tensor | None) -> None:
    """All in the library's activation dtype, the last dim dense (CHECK_LAST_DIM_CONTIGUOUS_INPUT of tvm_ffi_utils.h),
    and every row at a multiple of 16 bytes: the kernels read so many at once, and none asks.

    On a GPU the dtype is bfloat16. A test at float32 tolerances says float32, and gets the same arithmetic unrounded.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            require(tensor.dtype == dtype, f"{name} must be {dtype}, got {tensor.dtype}")
            require(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{name} has strides {tensor.stride()}")
            steps = (tensor.stride(i) for i in range(tensor.dim() - 1) if tensor.shape[i] > 1)
            starts = (tensor.data_ptr(), *(step * tensor.element_size() for step in steps))
            require(all(start % ALIGNED_BYTES == 0 for start in starts), f"{name}: rows at {tensor.stride()} elements")


def check_indices(*, dtypes: tuple[torch.dtype, ...] = (torch.int32,), **tensors: torch.Tensor | None) -> None:
    """One-dimensional, dense, of an index dtype (CHECK_INPUT_TYPE; static_cast<int32_t*> of page.cu)."""
    for name, tensor in tensors.items():
        if tensor is not None:
            require(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} must be 1-D and contiguous")
            require(tensor.dtype in dtypes, f"{name} must be one of {dtypes}, got {tensor.dtype}")
