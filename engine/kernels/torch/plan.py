"""What all layers of one step share, worked out once from its layout."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from engine.kernels import STATE_GRID_TOKENS, BatchLayout


@dataclass(frozen=True, slots=True)
class Context:
    """Where the keys and values of one sequence lie, its new tokens included.

    `main` is its longest run of neighbouring pages, in ascending order; `rest` are its other pages.
    """

    tokens: int
    pages: torch.Tensor
    """int64, in the order of its tokens."""
    main_first_row: int
    """Row of the run's first token among all rows of all pages."""
    main_tokens: int
    rest: torch.Tensor | None
    """int64, in the order of their tokens; None if the run is the whole context."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The prefill tokens of a step, cut into chunks for the gated delta rule and put in the order of the scan.

    Sequences are ranked by falling number of chunks. Scan step c works on chunk c of the first `active[c]` ranks, and
    these lie side by side. A place past the end of its sequence repeats a token and has `is_token` 0.
    """

    token_rows: torch.Tensor
    """[chunks * STATE_GRID_TOKENS] int64: the row that each place takes its token from."""
    is_token: torch.Tensor | None
    """[chunks * STATE_GRID_TOKENS, 1] float32, or None if every place is a token."""
    places: torch.Tensor
    """[prefill tokens] int64: where each row, from the first prefill row on, went."""
    active: tuple[int, ...]
    ranks: tuple[int, ...]
    """The sequence at each rank."""
    captures: tuple[tuple[tuple[int, int], ...], ...]
    """For each scan step, (rank, destination slot) to copy the state to after it."""


@dataclass(slots=True)
class StepPlan:
    """One step. Mutable only in what it computes on first use; owned by the engine thread."""

    layout: BatchLayout
    starts: list[int]
    """Row of each sequence's first new token, then the number of rows."""
    contexts: tuple[Context, ...]
    positions: torch.Tensor
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    write_first_row: int | None
    """Row of the first new token among all rows of all pages, if all new tokens go to consecutive rows."""
    slots: list[int]
    has_initial_state: list[bool]
    captures: dict[int, tuple[tuple[int, int], ...]]
    """For each sequence that has any, (offset in tokens, destination slot), by rising offset."""
    decode_slots: slice | torch.Tensor
    """The decodes' slots: a slice if they are neighbours, else [num_decodes] int64."""
    decode_order: torch.Tensor | None
    """Permutation that puts the decodes in the order of that slice, or None if they are in order."""
    device: torch.device
    rope: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _chunks: Chunks | None = None

    @property
    def num_decodes(self) -> int:
        return self.layout.num_decodes

    @property
    def num_sequences(self) -> int:
        return len(self.contexts)

    @property
    def prefills(self) -> range:
        """Sequences that are not decodes."""
        return range(self.num_decodes, self.num_sequences)

    def capture_decodes(self, states: torch.Tensor) -> None:
        """Copy the decodes' new states [slots, ...] to where they are to be captured."""
        for i, captures in self.captures.items():
            if i < self.num_decodes:
                for _, slot in captures:
                    states[slot] = states[self.slots[i]]

    @property
    def chunks(self) -> Chunks:
        if self._chunks is None:
            self._chunks = _cut_into_chunks(self)
        return self._chunks


def make_plan(layout: BatchLayout, device: torch.device) -> StepPlan:
    """Raises ValueError for a layout that contradicts itself."""
    starts: list[int] = layout.qo_indptr.tolist()
    kv_indptr: list[int] = layout.kv_indptr.tolist()
    last_page_len: list[int] = layout.kv_last_page_len.tolist()
    has_initial_state: list[bool] = layout.has_initial_state.tolist()
    slots: list[int] = layout.state_slots.tolist()
    _check(layout, starts, has_initial_state)
    all_pages = layout.kv_indices.long()
    contexts = tuple(
        _context(all_pages[first:end], last_len, layout.page_size)
        for first, end, last_len in zip(kv_indptr, kv_indptr[1:], last_page_len, strict=False)
    )
    positions = layout.positions.long()
    sequence_of_row = torch.repeat_interleave(torch.arange(len(contexts)), layout.qo_indptr.diff().long())
    page_of_row = all_pages[layout.kv_indptr.long()[sequence_of_row] + positions // layout.page_size]
    offsets = positions % layout.page_size
    decode_slots, decode_order = _arrange_decodes(slots[: layout.num_decodes], device)
    captures: dict[int, tuple[tuple[int, int], ...]] = {}
    for capture in sorted(layout.captures, key=lambda capture: capture.offset_tokens):
        _check_offset(capture.offset_tokens, starts[capture.sequence + 1] - starts[capture.sequence])
        pair = (capture.offset_tokens, capture.destination_slot)
        captures[capture.sequence] = (*captures.get(capture.sequence, ()), pair)
    return StepPlan(
        layout=layout,
        starts=starts,
        contexts=contexts,
        positions=positions.to(device),
        write_pages=page_of_row.to(device),
        write_offsets=offsets.to(device),
        write_first_row=_first_of_run(page_of_row * layout.page_size + offsets),
        slots=slots,
        has_initial_state=has_initial_state,
        captures=captures,
        decode_slots=decode_slots,
        decode_order=decode_order,
        device=device,
    )


def _check(layout: BatchLayout, starts: list[int], has_initial_state: list[bool]) -> None:
    decodes = layout.num_decodes
    if starts[: decodes + 1] != list(range(decodes + 1)) or not all(has_initial_state[:decodes]):
        raise ValueError(f"the first {decodes} sequences must be decodes: one new token each, and an initial state")
    if len(layout.positions) != starts[-1]:
        raise ValueError(f"{len(layout.positions)} positions for {starts[-1]} tokens")


def _check_offset(offset_tokens: int, segment_tokens: int) -> None:
    on_grid = 0 < offset_tokens <= segment_tokens and offset_tokens % STATE_GRID_TOKENS == 0
    if not on_grid and offset_tokens != segment_tokens:
        raise ValueError(
            f"a state cannot be captured {offset_tokens} tokens into a segment of {segment_tokens}; "
            f"it must be a multiple of {STATE_GRID_TOKENS} within it, or its whole length"
        )


def _context(pages: torch.Tensor, last_page_len: int, page_size: int) -> Context:
    count = len(pages)
    unused = page_size - last_page_len
    # Places after which the next page is not the neighbour.
    breaks = ((pages[1:] - pages[:-1]) != 1).nonzero().flatten().tolist() if count > 1 else []
    if not breaks:
        return Context(count * page_size - unused, pages, int(pages[0]) * page_size, count * page_size - unused, None)
    edges = [0, *(place + 1 for place in breaks), count]
    first, end = max(itertools.pairwise(edges), key=lambda run: run[1] - run[0])
    return Context(
        tokens=count * page_size - unused,
        pages=pages,
        main_first_row=int(pages[first]) * page_size,
        main_tokens=(end - first) * page_size - (unused if end == count else 0),
        rest=torch.cat((pages[:first], pages[end:])),
    )


def _first_of_run(numbers: torch.Tensor) -> int | None:
    """The first of consecutive ascending numbers, or None for any others."""
    if len(numbers) > 1 and not bool((numbers.diff() == 1).all()):
        return None
    return int(numbers[0])


def _arrange_decodes(slots: list[int], device: torch.device) -> tuple[slice | torch.Tensor, torch.Tensor | None]:
    if not slots:
        return slice(0, 0), None
    if max(slots) - min(slots) != len(slots) - 1:
        return torch.tensor(slots, device=device), None
    neighbours = slice(min(slots), max(slots) + 1)
    if slots == sorted(slots):
        return neighbours, None
    return neighbours, torch.tensor(slots, device=device).argsort()


def _cut_into_chunks(plan: StepPlan) -> Chunks:
    size = STATE_GRID_TOKENS
    lengths = {i: plan.starts[i + 1] - plan.starts[i] for i in plan.prefills}
    ranks = tuple(sorted(lengths, key=lambda i: -lengths[i]))
    counts = [-(-lengths[i] // size) for i in ranks]
    active = tuple(sum(count > step for count in counts) for step in range(counts[0]))
    firsts = [sum(active[:step]) for step in range(len(active))]
    token_rows = torch.full((sum(active) * size,), plan.starts[plan.num_decodes])
    is_token = torch.zeros(len(token_rows), 1)
    places = torch.empty(plan.starts[-1] - plan.starts[plan.num_decodes], dtype=torch.int64)
    captures: list[tuple[tuple[int, int], ...]] = [() for _ in active]
    for rank, i in enumerate(ranks):
        offsets = torch.arange(lengths[i])
        where = (torch.tensor(firsts)[offsets // size] + rank) * size + offsets % size
        first = plan.starts[i] - plan.starts[plan.num_decodes]
        places[first : first + lengths[i]] = where
        token_rows[where] = plan.starts[i] + offsets
        is_token[where] = 1.0
        for offset, slot in plan.captures.get(i, ()):
            captures[(offset - 1) // size] += ((rank, slot),)
    return Chunks(
        token_rows=token_rows.to(plan.device),
        is_token=None if len(places) == len(token_rows) else is_token.to(plan.device),
        places=places.to(plan.device),
        active=active,
        ranks=ranks,
        captures=tuple(captures),
    )
