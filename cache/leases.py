"""What one request holds while it lives: what it matched, its pages, its state slot, its captures under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.checkpoints import Checkpoint
from cache.pages import Page
from cache.pools import Lease
from cache.tree import Tokens
from cache.types import Copy, CopyObject, Frontier, Tier, UnitHandle


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
    pages: tuple[Page, ...]
    tail: tuple[Page, int] | None
    checkpoint: Checkpoint | None
    """Pinned for its state; None where there are no states, for pinned pages alone are enough to resume then."""
    nearest: Checkpoint | None
    """The one whose worth a hit proves."""
    remembered_tokens: int
    """Leading tokens whose KV is in the tree, resumable or not; whole pages."""
    is_open: bool = True

    @property
    def held_pages(self) -> tuple[Page, ...]:
        """Every page that it pins."""
        return self.pages if self.tail is None else (*self.pages, self.tail[0])


@dataclass(slots=True)
class RequestLease:
    """Everything that one running request holds. Mutable: only the engine loop's task may touch it.

    `restore` lists the copies to run before its first step; they are confirmed with `ContextCache.confirm_restore`.
    """

    request_id: str
    namespace: str
    tokens: Tokens
    cached_tokens: int
    path: str
    pages: list[Page]
    slot: Lease | None
    restore: tuple[Copy, ...] = ()
    restore_sources: tuple[Page, ...] = ()
    restore_checkpoint: Checkpoint | None = None
    origin: Checkpoint | None = None
    """What it was resumed from."""
    wanted: list[Frontier] = field(default_factory=list)
    tickets: list[CaptureTicket] = field(default_factory=list)
    is_open: bool = True

    @property
    def page_units(self) -> tuple[int, ...]:
        """The block table: units of the device KV pool, in the order of the tokens."""
        return tuple(page.unit for page in self.pages)

    @property
    def state_unit(self) -> int | None:
        """The unit of the live recurrent state in the device state pool."""
        return None if self.slot is None else self.slot.units[0]

    @property
    def is_restoring(self) -> bool:
        return bool(self.restore)


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
