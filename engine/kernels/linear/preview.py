"""Which linear class each format of weights would get on a GPU, told without a model: for `doctor` and the docs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from engine.kernels import KernelChoice
from engine.kernels.device import DeviceTraits
from engine.kernels.flashinfer.library import Library
from engine.kernels.linear.room import LinearRoom
from engine.options import Activations
from engine.weights.formats import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight

_SIZE = 256
"""Rows and columns of the layers that stand for all: a multiple of what every kernel asks for."""


def preview_linear(traits: DeviceTraits, activations: Activations, library: Library) -> tuple[KernelChoice, ...]:
    """One choice for each format. No memory of a GPU is touched, so `traits` may be those of one that is not here."""
    room = LinearRoom(torch.device("cuda"), torch.bfloat16, traits, activations, library)
    return tuple(replace(room.would_serve(shard), kernel=f"linear ({name})") for name, shard in _samples())


def _samples() -> Iterator[tuple[str, LinearWeight]]:
    one = torch.ones(())
    packed = torch.zeros(_SIZE, _SIZE // 2, dtype=torch.uint8)
    scale = torch.ones(_SIZE, _SIZE // 16).to(torch.float8_e4m3fn)
    yield "nvfp4, with activation scales", Nvfp4Weight(packed, scale, one, input_scale=one)
    yield "nvfp4, without", Nvfp4Weight(packed, scale, one)
    yield "fp8", Fp8Weight(torch.zeros(_SIZE, _SIZE).to(torch.float8_e4m3fn), one)
    yield "dense", DenseWeight(torch.zeros(_SIZE, _SIZE, dtype=torch.bfloat16))
