"""The tensors behind the cache's units (KV pages and state slots, for every layer), and its copies between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from cache import Copy, CopyObject
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelState:
    """Everything that a model reads and writes besides its weights. Owned by the engine thread while a step runs."""

    kv: tuple[torch.Tensor, ...]
    """For each attention layer, [pages, 2, page_size, kv_heads, head_dim]."""
    conv: tuple[torch.Tensor, ...]
    """For each linear layer, [slots, conv_dim, kernel - 1]."""
    recurrent: tuple[torch.Tensor, ...]
    """For each linear layer, [slots, v_heads, V, K] float32."""


def allocate_state(
    config: ModelConfig, *, num_pages: int, page_size: int, num_slots: int, dtype: torch.dtype, device: torch.device
) -> ModelState:
    """Zeroed tensors for `num_pages` KV pages and `num_slots` state slots."""
    attention, gdn = config.attention, config.gated_delta_net
    kv_shape = (num_pages, 2, page_size, attention.num_kv_heads, attention.head_dim)
    kv = tuple(_zeroed_kv(kv_shape, dtype, device) for _ in range(config.num_attention_layers))
    if gdn is None:
        return ModelState(kv=kv, conv=(), recurrent=())
    conv_shape = (num_slots, gdn.conv_dim, gdn.conv_kernel_size - 1)
    recurrent_shape = (num_slots, gdn.num_v_heads, gdn.value_head_dim, gdn.key_head_dim)
    layers = range(config.num_linear_layers)
    return ModelState(
        kv=kv,
        conv=tuple(_zeroed_conv(conv_shape, dtype, device) for _ in layers),
        recurrent=tuple(torch.zeros(recurrent_shape, dtype=torch.float32, device=device) for _ in layers),
    )


def run_copies(state: ModelState, copies: Iterable[Copy]) -> None:
    """Copy pages and state images, one after the other, as the cache decided."""
    for copy in copies:
        tensors = state.kv if copy.what is CopyObject.KV_PAGE else (*state.conv, *state.recurrent)
        for tensor in tensors:
            tensor[copy.destination.unit].copy_(tensor[copy.source.unit])


def _zeroed_kv(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # On the host all keys lie before all values, under the same shape: neighbouring pages are then one matrix, which
    # attention reads in place instead of gathering it.
    pages, two, *page = shape
    return _lazily_zeroed((two, pages, *page), dtype).transpose(0, 1)


def _lazily_zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host that take up no memory until they are written: torch.zeros writes gigabytes at start."""
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, np.uint8)).view(dtype).view(shape)


def _zeroed_conv(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # On the host the channels lie side by side, as they do in the activations.
    slots, channels, tail = shape
    return torch.zeros((slots, tail, channels), dtype=dtype, device=device).transpose(1, 2)
