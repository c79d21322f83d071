"""Random batches: decodes, prefills and both, with pages in no order and slots in no order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels import STATE_GRID_TOKENS, BatchLayout, StateCapture


def make_layout(
    new_tokens: Sequence[int],
    context_tokens: Sequence[int],
    *,
    page_size: int,
    pages: Sequence[Sequence[int]],
    slots: Sequence[int],
    captures: tuple[StateCapture, ...] = (),
) -> BatchLayout:
    """Sequences with `new_tokens` each behind `context_tokens`; decodes first."""
    totals = [new + old for new, old in zip(new_tokens, context_tokens, strict=True)]
    positions = [old + i for new, old in zip(new_tokens, context_tokens, strict=True) for i in range(new)]
    return BatchLayout(
        num_decodes=sum(new == 1 and old > 0 for new, old in zip(new_tokens, context_tokens, strict=True)),
        qo_indptr=torch.tensor([0, *itertools.accumulate(new_tokens)], dtype=torch.int32),
        kv_indptr=torch.tensor([0, *itertools.accumulate(map(len, pages))], dtype=torch.int32),
        kv_indices=torch.tensor(list(itertools.chain(*pages)), dtype=torch.int32),
        kv_last_page_len=torch.tensor([(total - 1) % page_size + 1 for total in totals], dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        state_slots=torch.tensor(list(slots), dtype=torch.int32),
        has_initial_state=torch.tensor([old > 0 for old in context_tokens]),
        page_size=page_size,
        captures=captures,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """A layout, and the pools that it lives in: more pages and slots than it uses."""

    name: str
    layout: BatchLayout
    new_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    num_pages: int
    num_slots: int

    @property
    def is_decodes(self) -> bool:
        return self.layout.num_decodes == len(self.new_tokens)

    def pages_of(self, sequence: int) -> torch.Tensor:
        first, end = self.layout.kv_indptr[sequence : sequence + 2].tolist()
        return self.layout.kv_indices[first:end].long()


def random_batch(
    name: str,
    new_tokens: Sequence[int],
    context_tokens: Sequence[int],
    page_size: int,
    generator: torch.Generator,
    *,
    has_captures: bool = True,
) -> Batch:
    """Pages and slots drawn at random from pools that are half again as large; each sequence's state is captured at its
    end, and a prefill's also at the first and the last multiple of the grid within it."""
    counts = [-(-(new + old) // page_size) for new, old in zip(new_tokens, context_tokens, strict=True)]
    num_pages = sum(counts) + sum(counts) // 2 + 2
    order = torch.randperm(num_pages, generator=generator).tolist()
    starts = [0, *itertools.accumulate(counts)]
    pages = [order[first : first + count] for first, count in zip(starts, counts, strict=False)]
    wanted = [
        (i, offset) for i, new in enumerate(new_tokens) for offset in (_capture_offsets(new) if has_captures else ())
    ]
    num_slots = len(new_tokens) + len(wanted) + 2
    slots = torch.randperm(num_slots, generator=generator).tolist()
    captures = tuple(
        StateCapture(i, offset, slot) for (i, offset), slot in zip(wanted, slots[len(new_tokens) :], strict=False)
    )
    layout = make_layout(
        new_tokens,
        context_tokens,
        page_size=page_size,
        pages=pages,
        slots=slots[: len(new_tokens)],
        captures=captures,
    )
    return Batch(name, layout, tuple(new_tokens), tuple(context_tokens), num_pages, num_slots)


def _capture_offsets(new: int) -> list[int]:
    grid = STATE_GRID_TOKENS
    return sorted({new, *([grid, new // grid * grid] if new >= grid else [])})


def random_batches(page_size: int, longest: int, generator: torch.Generator) -> list[Batch]:
    """The four kinds that a step can be; contexts up to `longest` tokens, and about every edge of a page and of the
    grid."""
    page, grid = page_size, STATE_GRID_TOKENS
    long, middle = longest, longest // 3
    return [
        random_batch("decodes", [1] * 6, [1, page - 1, page, page + 1, middle, long], page, generator),
        random_batch("prefills", [5, grid, middle + 3, 2 * grid + 1], [0, 0, 0, 0], page, generator),
        random_batch("prefills behind a context", [37, middle], [page + 6, long - 1], page, generator),
        random_batch(
            "decodes and prefills", [1, 1, 3 * grid + 8, 2, 1], [middle, page, 2 * page + 1, 0, 0], page, generator
        ),
    ]
