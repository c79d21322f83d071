"""The roofline: what this device reads and multiplies in a second, and what a step must read and multiply at least."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu.layers import Stack
from bench.gpu.report import Figure, figure_of
from bench.gpu.timing import seconds_of
from engine.models.config import LayerKind

SECTION = "speed"


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured here and now, not from a data sheet."""

    bytes_per_second: float
    operations_per_second: float
    """Multiplications and additions of bf16 matrices, each counted."""

    def seconds(self, bytes_moved: float, operations: float) -> float:
        """The least that a step can take: its bytes or its operations, whichever takes longer."""
        return max(bytes_moved / self.bytes_per_second, operations / self.operations_per_second)


def measure_peaks(device: torch.device, *, copy_bytes: int = 2**30, side: int = 8192) -> tuple[Peaks, list[Figure]]:
    """Bandwidth by a copy within the device (read and written), peak by a square bf16 product. The best quarter of the
    timings counts as what the device can do."""
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    destination = torch.empty_like(source)
    copy_seconds = seconds_of(lambda: destination.copy_(source), device)
    rates = [2 * copy_bytes / each for each in copy_seconds]
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_seconds = seconds_of(lambda: a @ b, device)
    speeds = [2 * side**3 / each for each in product_seconds]
    figures = [
        figure_of(SECTION, "device memory, copy", "GB/s", [rate / 1e9 for rate in rates], note="read and written"),
        figure_of(SECTION, f"bf16 product of {side}", "TFLOP/s", [speed / 1e12 for speed in speeds]),
    ]
    return Peaks(figures[0].high * 1e9, figures[1].high * 1e12), figures


def step_bytes(stack: Stack, new: int, old: int, batch: int) -> float:
    """Bytes that one step over `stack` cannot help moving: the weights once, each sequence's keys and values, and its
    states, read and written. Activations are left out."""
    config, itemsize = stack.config, stack.kernels.dtype.itemsize
    kv = batch * (old + new) * config.kv_bytes_per_token(itemsize)
    states = 2 * batch * config.state_image_bytes(itemsize)
    return stack.linear_bytes + kv + states


def step_operations(stack: Stack, new: int, old: int, batch: int) -> float:
    """Multiplications and additions of one step: the linear layers, the causal half of attention, and the delta rule as
    the recurrence has it (three products with the state for each token)."""
    config = stack.config
    tokens = batch * new
    linear = 2 * stack.linear_weights * tokens
    heads, gdn = config.attention, config.gated_delta_net
    pairs = batch * (new * old + new * (new + 1) / 2)
    attention = 4 * heads.num_q_heads * heads.head_dim * pairs * config.layer_kinds.count(LayerKind.FULL_ATTENTION)
    if gdn is None:
        return linear + attention
    state = gdn.num_v_heads * gdn.value_head_dim * gdn.key_head_dim
    return linear + attention + 6 * state * tokens * config.num_linear_layers
