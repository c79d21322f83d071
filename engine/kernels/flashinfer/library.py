"""The functions of flashinfer that this backend calls, and no other: one seam between it and the library.

In the tests, flashinfer's own references in plain torch stand behind the same names.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, TypeAlias

from engine.errors import BackendUnavailableError
from engine.kernels.device import DeviceTraits

Library: TypeAlias = Any
"""An object with an attribute for each key of FUNCTIONS; flashinfer has no types that mypy could hold us to."""

FUNCTIONS: dict[str, str] = {
    "BatchPrefillWithPagedKVCacheWrapper": "flashinfer",
    "BatchDecodeWithPagedKVCacheWrapper": "flashinfer",
    "append_paged_kv_cache": "flashinfer",
    "apply_rope_with_cos_sin_cache_inplace": "flashinfer",
    "rmsnorm": "flashinfer",
    "fused_add_rmsnorm": "flashinfer",
    "silu_and_mul": "flashinfer",
    "chunk_gated_delta_rule": "flashinfer.gdn_prefill",
    "gated_delta_rule_decode_pretranspose": "flashinfer.gdn_decode",
    "softmax": "flashinfer.sampling",
    "top_k_renorm_probs": "flashinfer.sampling",
    "top_p_renorm_probs": "flashinfer.sampling",
    "mm_fp4": "flashinfer",
    "mm_bf16_fp4": "flashinfer",
    "prepare_bf16_fp4_weights": "flashinfer.gemm",
    "nvfp4_quantize": "flashinfer",
    "nvfp4_block_scale_interleave": "flashinfer",
    "bmm_fp8": "flashinfer",
}
"""Each function or class that is called, and the module that it is public in."""


def load_library() -> Library:
    """Import flashinfer. Raises BackendUnavailableError that says what to install, or which of its names is missing."""
    try:
        modules = {name: importlib.import_module(name) for name in set(FUNCTIONS.values())}
    except ImportError as error:
        raise BackendUnavailableError("flashinfer", f"{error}; pip install 'dalsegno[cuda]'") from error
    missing = sorted(name for name, module in FUNCTIONS.items() if not hasattr(modules[module], name))
    if missing:
        raise BackendUnavailableError(
            "flashinfer", f"the installed version has no {', '.join(missing)}; pip install 'dalsegno[cuda]'"
        )
    return SimpleNamespace(**{name: getattr(modules[module], name) for name, module in FUNCTIONS.items()})


def dsl_trouble(traits: DeviceTraits) -> str:
    """Why the installed CuTe DSL, in which flashinfer's delta rule is written, has no such GPU; empty if it has."""
    if traits.capability is None:
        return ""
    try:
        availability = importlib.import_module("flashinfer.cute_dsl.availability")
        if availability.is_cute_dsl_arch_supported(*traits.capability):
            return ""
    except ImportError as error:
        return f"flashinfer's CuTe DSL cannot be imported: {error}"
    return f"the installed CuTe DSL (nvidia-cutlass-dsl) does not compile for {traits.architecture}"
