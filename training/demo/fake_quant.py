"""Quantisation-aware training: the forward pass sees NVFP4 weights, the gradient goes straight to the exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from engine.weights.nvfp4 import dequantize_nvfp4, matrix_amax, quantize_nvfp4

SHARED_SCALE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("linear_attn.out_proj",),
)
"""The quantised matrices of a layer; a group has one global scale, as `dalsegno quantize` writes it."""


def quantised_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = []
    for layer in model.get_submodule("model.layers").children():
        parameters = dict(layer.named_parameters())
        for names in SHARED_SCALE:
            group = [parameters[f"{name}.weight"] for name in names if f"{name}.weight" in parameters]
            if group:
                groups.append(group)
    return groups


def round_to_nvfp4(group: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the matrices are after the quantiser, float32. They pass through bfloat16, as the exported ones do."""
    half = [weight.detach().to(torch.bfloat16) for weight in group]
    amax = torch.stack([matrix_amax(weight) for weight in half]).amax()
    return [dequantize_nvfp4(quantize_nvfp4(weight, amax=amax)) for weight in half]


@contextmanager
def quantised(groups: list[list[nn.Parameter]]) -> Iterator[None]:
    """Within the block the parameters hold their rounded values; gradients taken there belong to the exact ones."""
    exact = [[parameter.data for parameter in group] for group in groups]
    for group in groups:
        for parameter, rounded in zip(group, round_to_nvfp4([p.data for p in group]), strict=True):
            parameter.data = rounded
    try:
        yield
    finally:
        for group, kept in zip(groups, exact, strict=True):
            for parameter, data in zip(group, kept, strict=True):
                parameter.data = data
