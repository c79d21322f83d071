"""Batch layouts for kernel tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

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
    totals = [new + old for new, old in zip(new_tokens, contexts, strict=True)]
    if pages is None:
        counter = itertools.count()
        pages = [[next(counter) for _ in range(-(-total // page_size))] for total in totals]
    positions = [old + i for new, old in zip(new_tokens, contexts, strict=True) for i in range(new)]
    return BatchLayout(
        num_decodes=sum(new == 1 and old > 0 for new, old in zip(new_tokens, contexts, strict=True)),
        qo_indptr=torch.tensor([0, *itertools.accumulate(new_tokens)], dtype=torch.int32),
        kv_indptr=torch.tensor([0, *itertools.accumulate(len(own) for own in pages)], dtype=torch.int32),
        kv_indices=torch.tensor([page for own in pages for page in own], dtype=torch.int32),
        kv_last_page_len=torch.tensor([(total - 1) % page_size + 1 for total in totals], dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        state_slots=torch.tensor(list(slots or range(len(totals))), dtype=torch.int32),
        has_initial_state=torch.tensor([old > 0 for old in contexts]),
        page_size=page_size,
        captures=captures,
    )
