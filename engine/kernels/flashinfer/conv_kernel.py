"""The Triton kernels of the causal depthwise convolution. Import it only where Triton is to run.

They sum in float32 and round once, as the torch functions of `conv.py` do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS, _CHANNELS = 16, 128
_DECODE_CHANNELS = 256


def convolve(source: torch.Tensor, windows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """source [rows, C], windows [W, n] int32, weight [C, W] -> silu(sum over taps) [n, C]; all contiguous."""
    channels, width = weight.shape
    n = windows.shape[1]
    out = torch.empty(n, channels, dtype=source.dtype, device=source.device)
    grid = (-(-n // _TOKENS), -(-channels // _CHANNELS))
    _convolve[grid](source, windows, weight, out, n, channels, WIDTH=width, TOKENS=_TOKENS, CHANNELS=_CHANNELS)
    return out


def update(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One token each: x [B, C], weight [C, W] contiguous, states [slots, C, W - 1] in place, slots [B] int32 -> [B, C].

    The rows of x may lie apart, and the states have any strides.
    """
    channels, width = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    grid = (len(x), -(-channels // _DECODE_CHANNELS))
    _update[grid](
        x, weight, states, slots, out, channels, x.stride(0), *states.stride(), WIDTH=width, CHANNELS=_DECODE_CHANNELS
    )
    return out


def _convolve_block(
    source: tl.tensor,
    windows: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """So many tokens of so many channels."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token, is_column = tokens < n, columns < channels
    is_both = is_token[:, None] & is_column[None, :]
    total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        rows = tl.load(windows + tap * n + tokens, mask=is_token, other=0).to(tl.int64)
        inputs = tl.load(source + rows[:, None] * channels + columns[None, :], mask=is_both, other=0.0)
        factors = tl.load(weight + columns * WIDTH + tap, mask=is_column, other=0.0).to(tl.float32)
        total += inputs.to(tl.float32) * factors[None, :]
    places = out + tokens.to(tl.int64)[:, None] * channels + columns[None, :]
    tl.store(places, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=is_both)


def _update_block(
    x: tl.tensor,
    weight: tl.tensor,
    states: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    channel_stride: tl.tensor,
    place_stride: tl.tensor,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """So many channels of one sequence: no other program reads or writes its tail."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_column = columns < channels
    slot = tl.load(slots + row).to(tl.int64)
    tail = states + slot * slot_stride + columns * channel_stride
    newest = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0)
    taps = weight + columns * WIDTH
    total = newest.to(tl.float32) * tl.load(taps + WIDTH - 1, mask=is_column, other=0.0).to(tl.float32)
    for place in tl.static_range(WIDTH - 1):
        past = tl.load(tail + place * place_stride, mask=is_column, other=0.0)
        total += past.to(tl.float32) * tl.load(taps + place, mask=is_column, other=0.0).to(tl.float32)
        if place > 0:
            tl.store(tail + (place - 1) * place_stride, past, mask=is_column)
    tl.store(tail + (WIDTH - 2) * place_stride, newest, mask=is_column)
    tl.store(out + row * channels + columns, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=is_column)


# Steps differ in n and in the rows' distance: one compilation for each serves them all.
_convolve = triton.jit(_convolve_block, do_not_specialize=("n",))
_update = triton.jit(_update_block, do_not_specialize=("x_stride",))
