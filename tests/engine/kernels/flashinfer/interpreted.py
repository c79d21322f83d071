"""Run by test_triton_kernels.py in a process where TRITON_INTERPRET is 1: prints the kernels' greatest errors as JSON.

Surroundings are poisoned: what is read beside a tensor becomes not-a-number, and what is written there shows.
"""

from __future__ import annotations

import json

import torch

from engine.kernels.flashinfer import conv, conv_kernel, gated_norm, gated_norm_kernel

SHAPES = [
    # tokens, rows before them, channels, width
    (1, 3, 8, 4),
    (1, 3, 256, 4),
    (2, 6, 257, 4),
    (5, 2, 128, 2),
    (7, 9, 40, 3),
    (15, 3, 130, 4),
    (16, 3, 128, 4),
    (17, 12, 264, 4),
    (19, 4, 64, 5),
    (35, 21, 140, 4),
    (3, 5, 1, 4),
]
GATED_SHAPES = [(3, 2, 128), (1, 1, 128), (5, 3, 64), (2, 5, 96), (1, 4, 256)]
"""Tokens, heads, size."""
GENERATOR = torch.Generator().manual_seed(11)


def draw(dtype, *shape):
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def poisoned(tensor, pad=3):
    """The same numbers within a larger tensor of not-a-number, rows apart."""
    around = torch.full((len(tensor) + 2, tensor.shape[1] + pad), torch.nan, dtype=tensor.dtype)
    around[1:-1, : tensor.shape[1]] = tensor
    return around[1:-1, : tensor.shape[1]], around


def error(got, expected):
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def ragged(dtype, n, before, channels, width):
    source, weight = draw(dtype, n + before, channels), draw(dtype, channels, width)
    windows = torch.randint(n + before, (width, n), generator=GENERATOR, dtype=torch.int32)
    return error(conv_kernel.convolve(source, windows, weight), conv.convolve(source, windows, weight))


def decodes(dtype, n, channels, width):
    x, _ = poisoned(draw(dtype, n, channels))
    weight, states = draw(dtype, channels, width), draw(dtype, n + 3, channels, width - 1)
    slots = torch.randperm(n + 3, generator=GENERATOR)[:n].int()
    updated, expected = states.clone(), states.clone()
    out = conv_kernel.update(x, weight, updated, slots)
    worst = error(out, conv.update(x, weight, expected, slots))
    return max(worst, 0.0 if torch.equal(updated, expected) else 1.0)


def gated(dtype, n, heads, size):
    """The gate lies in a wider projection, at a distance that is not the input's."""
    x, around = draw(dtype, n, heads, size), torch.full((n, heads + 2, size), torch.nan, dtype=dtype)
    gate, weight = around[:, 1:-1], draw(dtype, size)
    gate.copy_(draw(dtype, n, heads, size))
    got = gated_norm_kernel.gated_rms_norm(x, gate, weight, 1e-6)
    right = torch.nn.functional.rms_norm(x.float(), (size,), weight.float(), 1e-6)
    return error(got, right * torch.nn.functional.silu(gate.float()))


def main() -> None:
    found = {}
    for dtype, shapes in ((torch.bfloat16, GATED_SHAPES), (torch.float32, GATED_SHAPES[:1])):
        for shape in shapes:
            found[f"gated norm {dtype} {shape}"] = gated(dtype, *shape)
        fault = gated_norm.find_fault(gated_norm_kernel, torch.device("cpu"), dtype, 128)
        found[f"trial of the gated norm {dtype}"] = 1.0 if fault else 0.0
    for dtype, shapes in ((torch.bfloat16, SHAPES), (torch.float32, SHAPES[1:4])):
        for n, before, channels, width in shapes:
            name = f"{dtype} {n}+{before} x {channels}, {width} taps"
            found[f"ragged {name}"] = ragged(dtype, n, before, channels, width)
            found[f"decodes {name}"] = decodes(dtype, n, channels, width)
        trial = conv.find_fault(conv_kernel, torch.device("cpu"), dtype, 4)
        found[f"trial {dtype}"] = 1.0 if trial else 0.0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
