"""What flashinfer's kernels expect of a tensor and do not ask about: a wrong token is worse than a crash."""

from __future__ import annotations

import torch

_ALIGNED_BYTES = 16
NORM_BYTES = 128
"""The norms of dense rows are compiled for tensors that begin at a multiple of it, and refuse others."""


def aligned(x: torch.Tensor, first_bytes: int = _ALIGNED_BYTES) -> torch.Tensor:
    """x itself if it begins at a multiple of `first_bytes` and its rows can be read 16 bytes at a time, else a
    contiguous copy."""
    steps = (stride * x.element_size() for stride in x.stride()[:-1])
    is_aligned = x.data_ptr() % first_bytes == 0 and all(step % _ALIGNED_BYTES == 0 for step in steps)
    if is_aligned and x.stride(-1) == 1:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def expect(name: str, x: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError that says what `name` is and what it should be; None in `shape` is any size."""
    fits = x.dim() == len(shape) and all(size in (None, own) for size, own in zip(shape, x.shape, strict=True))
    if not fits or (dtypes and x.dtype not in dtypes):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        kinds = " or ".join(map(str, dtypes)) or "any dtype"
        raise ValueError(f"{name} is {list(x.shape)} of {x.dtype}, expected [{expected}] of {kinds}")
