"""What flashinfer's kernels expect of a tensor and do not ask about: a wrong token is worse than a crash."""

from __future__ import annotations

import torch

_ALIGNED_BYTES = 16


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if its rows can be read 16 bytes at a time, else a contiguous copy."""
    starts = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1]))
    if x.stride(-1) == 1 and all(start % _ALIGNED_BYTES == 0 for start in starts):
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def expect(name: str, x: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError that says what `name` is and what it should be; None in `shape` is any size."""
    fits = x.dim() == len(shape) and all(size in (None, own) for size, own in zip(shape, x.shape, strict=True))
    if not fits or (dtypes and x.dtype not in dtypes):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        kinds = " or ".join(map(str, dtypes)) or "any dtype"
        raise ValueError(f"{name} is {list(x.shape)} of {x.dtype}, expected [{expected}] of {kinds}")
