"""Rotary position embedding: the table of cosines and sines for each kind of scaling."""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeConfig


def cos_sin_cache(rope: RopeConfig, max_position_embeddings: int) -> torch.Tensor:
    """[max_position_embeddings, rotary_dim] float32: cosines in the left half, sines in the right."""
    inverse_frequencies, factor = inverse_frequencies_of(rope)
    positions = torch.arange(max_position_embeddings, dtype=torch.float32)
    angles = positions.unsqueeze(1) * inverse_frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor)


def inverse_frequencies_of(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """[rotary_dim / 2] float32, and the factor on cosines and sines (1 but for yarn)."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    parameters = dict(rope.parameters)
    if rope.scaling == "linear":
        return plain / parameters["factor"], 1.0
    if rope.scaling == "llama3":
        return _llama3(plain, parameters), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, parameters), _yarn_attention_factor(parameters)
    return plain, 1.0


def _llama3(plain: torch.Tensor, parameters: dict[str, float]) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    original_context = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / plain
    smooth = (original_context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelengths > original_context / low, plain / factor, blended)
    return torch.where(wavelengths < original_context / high, plain, scaled)


def _yarn(rope: RopeConfig, parameters: dict[str, float]) -> torch.Tensor:
    """Interpolate slow dimensions, extrapolate fast ones, with a ramp between (Peng et al., 2023, section 3.2)."""
    dim, factor = rope.rotary_dim, parameters["factor"]
    original_context = parameters["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_of(parameters.get("beta_fast") or 32.0)
    high = dimension_of(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return ramp / (factor * powers) + (1 - ramp) / powers


def _yarn_attention_factor(parameters: dict[str, float]) -> float:
    """The temperature of Peng et al., 2023, equation 22, put on cosines and sines; `mscale` is DeepSeek's variant."""
    if "attention_factor" in parameters:
        return parameters["attention_factor"]

    def magnitude(mscale: float) -> float:
        factor = parameters["factor"]
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, over_all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and over_all_dims:
        return magnitude(mscale) / magnitude(over_all_dims)
    return magnitude(1.0)
