"""What one request holds while it lives: what it matched, its pages, its state slot, its captures under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache.checkpoints import Checkpoint
from cache.matching import Known
from cache.pools import Holder, Lease
from cache.replicas import Replica
from cache.tree import Tokens, shared_tokens
from cache.types import Copy, CopyObject, Frontier, ReuseReport, Tier, UnitHandle


@dataclass(slots=True)
class Match:
    """The longest reusable prefix of a prompt, pinned until `admit` or `release`.

    Mutable only in `is_open`. `pages` are full pages from the prompt's start; `tail` is a page of which only the
    leading tokens are ours, to be copied before anything is written behind them.
    """

    request_id: str
    namespace: str
    tokens: Tokens
    cached_tokens: int
    path: str
    pages: tuple[Replica, ...]
    tail: tuple[Replica, int] | None
    checkpoint: Checkpoint | None
    """Pinned for its state; None where there are no states, for pinned pages alone are enough to resume then."""
    nearest: Checkpoint | None
    """The one whose worth a hit proves."""
    host_tokens: int
    """Of the cached ones, those that have to come from host memory."""
    known: Known
    """What was computed of the prompt before, kept or not."""
    holder: Holder
    """The request, as the pools know it."""
    is_open: bool = True
    is_chosen: bool = True
    """Whether it is what was found; False where nothing is to be reused for want of room."""

    @property
    def held_pages(self) -> tuple[Replica, ...]:
        """Every page that it pins."""
        return self.pages if self.tail is None else (*self.pages, self.tail[0])


@dataclass(slots=True)
class RequestLease:
    """Everything that one running request holds. Mutable: only the engine loop's task may touch it.

    `restore` lists the copies from host memory, to be run in the background and confirmed with
    `ContextCache.confirm_restore`; `resume` those within the device, to be run right before the first step and
    confirmed with `confirm_resume`.
    """

    request_id: str
    namespace: str
    tokens: Tokens
    cached_tokens: int
    path: str
    holder: Holder
    report: ReuseReport
    pages: list[Replica]
    slot: Lease | None
    restore: tuple[Copy, ...] = ()
    resume: tuple[Copy, ...] = ()
    restore_sources: tuple[Replica, ...] = ()
    resume_sources: tuple[Replica, ...] = ()
    pinned: Checkpoint | None = None
    """For its state, until that is copied."""
    origin: Checkpoint | None = None
    """What it was resumed from."""
    wanted: list[Frontier] = field(default_factory=list)
    tickets: list[CaptureTicket] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    """Lengths of the prefixes whose checkpoints came from it."""
    is_first: bool = True
    """Whether what it reuses counts: it does not for a request that comes a second time."""
    is_open: bool = True

    @property
    def page_units(self) -> tuple[int, ...]:
        """The block table: units of the device KV pool, in the order of the tokens."""
        return tuple(page.unit for page in self.pages)

    @property
    def state_unit(self) -> int | None:
        """The unit of the live recurrent state in the device state pool."""
        return None if self.slot is None else self.slot.units[0]

    def about_to_publish(self, tokens: Tokens) -> int:
        """The longest prefix of `tokens`, all of them not included, that it is about to publish; 0 for none."""
        best = 0
        for frontier in self.wanted:
            size = frontier.tokens
            # The last token tells most prompts apart, and costs nothing to look at.
            if best < size < len(tokens) and self.tokens[size - 1] == tokens[size - 1]:
                best = size if self.tokens[:size] == tokens[:size] else best
        return best

    def parting_tokens(self, tokens: Tokens) -> int:
        """How many leading tokens its prompt shares with `tokens`, where both go on otherwise; 0 for none. In a burst
        nothing else is known yet."""
        shared = shared_tokens(self.tokens, tokens)
        return shared if shared < min(len(self.tokens), len(tokens)) else 0

    def move(self, frontier: Frontier, tokens: int) -> None:
        """What is wanted at `frontier` is taken at `tokens` instead; nothing more, where something is wanted there."""
        self.wanted.remove(frontier)
        if all(each.tokens != tokens for each in self.wanted):
            self.wanted.append(Frontier(tokens, frontier.kind))

    @property
    def is_restoring(self) -> bool:
        """Whether something has still to come from host memory."""
        return bool(self.restore)

    @property
    def is_resuming(self) -> bool:
        return bool(self.resume)


@dataclass(slots=True, eq=False)
class CaptureTicket:
    """A reserved destination for one state image. Nobody can find it before `publish`; `discard` gives it back.

    Mutable only in `is_open`.
    """

    lease: RequestLease
    frontier: Frontier
    slot: Lease | None
    is_open: bool = True

    @property
    def copy(self) -> Copy | None:
        """The copy to run once the frontier is computed; None where there is no state to copy."""
        source = self.lease.state_unit
        if self.slot is None or source is None:
            return None
        destination = UnitHandle(Tier.DEVICE, self.slot.units)
        return Copy(CopyObject.STATE, UnitHandle(Tier.DEVICE, (source,)), destination)


def copies_of(
    match: Match, slot: Lease | None, fresh: Sequence[Replica], own: int
) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
    """What a request has to copy before it can be resumed: from host memory, and within the device.

    `own` pages of the match are used where they are; the rest, and the tail, go into the `fresh` ones, the state into
    `slot`.
    """
    far = [*match.pages[own:], *([match.tail[0]] if match.tail else [])]
    copies = [Copy(CopyObject.KV_PAGE, page.handle, into.handle) for page, into in zip(far, fresh, strict=False)]
    checkpoint = match.checkpoint
    if slot is not None and checkpoint is not None:
        state = checkpoint.slot or checkpoint.host_state
        if state is not None:
            tier = Tier.DEVICE if checkpoint.slot is not None else Tier.HOST
            copies.append(Copy(CopyObject.STATE, UnitHandle(tier, state.units), UnitHandle(Tier.DEVICE, slot.units)))
    restore = tuple(copy for copy in copies if copy.source.tier is not Tier.DEVICE)
    return restore, tuple(copy for copy in copies if copy.source.tier is Tier.DEVICE)


def slots_in_use(leases: Iterable[RequestLease], matches: Iterable[Match], copied: Iterable[Checkpoint]) -> int:
    """State slots on the device that requests run in, capture into or resume from, and those of what is `copied`."""
    held, read = 0, set[int]()
    for lease in leases:
        held += (lease.slot is not None) + sum(ticket.slot is not None for ticket in lease.tickets)
        read |= _number_of_slot(lease.pinned)
    for each in (*(match.checkpoint for match in matches), *copied):
        read |= _number_of_slot(each)
    return held + len(read)


def _number_of_slot(checkpoint: Checkpoint | None) -> set[int]:
    return set() if checkpoint is None or checkpoint.slot is None else {checkpoint.number}
