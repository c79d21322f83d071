"""What every policy is asked, and the part that those which hold states by number share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from bench.replay.history import Ask, Place
from bench.replay.requests import SimRequest


class Policy(Protocol):
    """Serves requests one after the other, with KV unlimited and so many slots for states."""

    name: str

    def serve(self, ask: Ask, request: SimRequest) -> int:
        """Prompt tokens that this request does not have to compute."""
        ...


class SlotPolicy(ABC):
    """Resumes from the deepest held place and holds each offer behind it, evicting for each. Mutable in what it holds.

    An offer before the place that a request resumes from is not computed again, so it cannot be held anew.
    """

    name: str

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: set[int] = set()

    def serve(self, ask: Ask, request: SimRequest | None = None) -> int:
        hit = next((place for place in reversed(self.path(ask)) if place.number in self.held), None)
        hit_tokens = hit.tokens if hit is not None else 0
        if hit is not None:
            self.used(hit, ask)
        for place in self.offered(ask):
            if place.tokens <= hit_tokens:
                continue
            if place.number in self.held:
                self.used(place, ask)
            elif self.slots:
                self._hold(place, ask)
        return hit_tokens

    def _hold(self, place: Place, ask: Ask) -> None:
        self.held.add(place.number)
        self.taken(place, ask)
        if len(self.held) > self.slots:
            victim = self.victim(ask, place)
            self.held.remove(victim)
            self.dropped(victim)

    def path(self, ask: Ask) -> Sequence[Place]:
        """The places that this request can be resumed from, shortest first."""
        return ask.path

    def offered(self, ask: Ask) -> Iterable[Place]:
        """The places of this request that can be held, shortest first."""
        return (offer.place for offer in ask.offers)

    @abstractmethod
    def used(self, place: Place, ask: Ask) -> None:
        """A held place was resumed from, or computed again."""

    @abstractmethod
    def taken(self, place: Place, ask: Ask) -> None:
        """A place is held from now on."""

    @abstractmethod
    def victim(self, ask: Ask, newest: Place) -> int:
        """Which of the held places goes, `newest` being among them."""

    @abstractmethod
    def dropped(self, number: int) -> None:
        """A place was evicted."""
