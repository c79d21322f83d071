"""Batch layouts for kernel tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bench.gpu import batches
from engine.kernels import BatchLayout, StateCapture


def make_layout(
    new_tokens: Sequence[int],
    context_tokens: Sequence[int] | None = None,
    *,
    pages: Sequence[Sequence[int]] | None = None,
    page_size: int = 16,
    slots: Sequence[int] | None = None,
    captures: tuple[StateCapture, ...] = (),
) -> BatchLayout:
    """Sequences with `new_tokens` each behind `context_tokens`; pages and slots ascending unless given."""
    contexts = list(context_tokens or [0] * len(new_tokens))
    if pages is None:
        counter = itertools.count()
        totals = [new + old for new, old in zip(new_tokens, contexts, strict=True)]
        pages = [[next(counter) for _ in range(-(-total // page_size))] for total in totals]
    slots = slots or range(len(new_tokens))
    return batches.make_layout(new_tokens, contexts, page_size=page_size, pages=pages, slots=slots, captures=captures)
