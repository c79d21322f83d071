"""What a checkpoint says of the scales of fp8 keys and values: one pair for each attention layer."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from engine.errors import WeightsError
from engine.weights.linear import TensorSource, take_positive_scalar

# Each spelling's names for the scales of the keys and of the values, after the attention's own name. All hold what a
# stored fp8 number is multiplied by.
_SPELLINGS = (
    ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
    ("k_scale", "v_scale"),  # compressed-tensors with a kv_cache_scheme
    ("attn.k_scale", "attn.v_scale"),  # checkpoints saved by vLLM
    ("k_proj.output_scale", "v_proj.output_scale"),  # compressed-tensors before it had a kv_cache_scheme
    ("kv_scale", "kv_scale"),  # AutoFP8
)

# Of a quantisation that fp8 pages here do not have: of queries and probabilities, with an offset, not yet exported.
OTHER_ATTENTION_SCALES = (
    "*.self_attn.q_scale",
    "*.self_attn.attn.q_scale",
    "*.self_attn.prob_scale",
    "*.self_attn.attn.prob_scale",
    "*.self_attn.k_bmm_quantizer.*",
    "*.self_attn.v_bmm_quantizer.*",
)
_OFFSETS = (
    "*.self_attn.k_proj.k_bias",
    "*.self_attn.v_proj.v_bias",
    "*.self_attn.k_zero_point",
    "*.self_attn.v_zero_point",
)
EVERY_KV_SCALE = tuple(dict.fromkeys(f"*.self_attn.{name}" for pair in _SPELLINGS for name in pair)) + _OFFSETS

_FP8_FORMATS = ("fp8", "float8")


def why_unused(names: Iterable[str], declared: str | None) -> str | None:
    """Why the KV scales among `names` are not for fp8 pages, or None where they are.

    `declared` is the format of the KV cache that the checkpoint was calibrated for, where it says so.
    """
    if declared is not None and declared.lower() not in _FP8_FORMATS:
        return f"they are for a KV cache in {declared}; fp8 pages use the scale 1"
    if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in _OFFSETS):
        return "they belong to keys and values with an offset; fp8 pages use the scale 1"
    return None


def find_spelling(names: Iterable[str]) -> tuple[str, str] | None:
    """The first spelling that any of `names` has, or None where there are no scales."""
    names = tuple(names)
    for pair in _SPELLINGS:
        if any(name.endswith(tuple(f".self_attn.{suffix}" for suffix in pair)) for name in names):
            return pair
    return None


def read_kv_scales(source: TensorSource, prefix: str, spelling: tuple[str, str]) -> tuple[float, float]:
    """The scales of the keys and values of attention `prefix`. Raises WeightsError that names the tensor."""
    scales = []
    for suffix in spelling:
        entry = source.entry(f"{prefix}.{suffix}")
        if entry is None:
            raise WeightsError(
                f"tensor {prefix}.{suffix} is missing: the checkpoint has scales of an fp8 KV cache, which each "
                "attention layer needs for its keys and for its values"
            )
        scales.append(float(take_positive_scalar(source, entry, "one value for all heads")))
    return scales[0], scales[1]
