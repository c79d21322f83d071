"""Whose turn it is to be let in, and how much of the queue one client may take. Pure: no clock, no cache.

Clients take turns, one request each, so that one with a single request does not wait behind another's eighty. A request
gets its turn when it comes: one after the last that was let in, and one after what its client has before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.errors import ServerOverloadedError
from engine.sequence import SequenceRecord, SequenceState

_MOST_PASSES = 16
"""How often a request that lacks room is passed by others that fit, before what becomes free is kept for it."""
_MOST_LACKING = 4
"""Requests that lack room at once, of which more are not looked for behind them: each try costs a match."""
_KEPT_SHARE = 8
_KEPT_SHARE_OF_ONE = 4
_KNOWN_CLIENTS = 256


class Turns:
    """Numbers requests in the order in which they are to be let in. Mutable: only the scheduler may change it."""

    def __init__(self) -> None:
        self._last = 0
        self._last_of: dict[str, int] = {}
        """By client: the turn of the last request of its that was let in."""

    def take(self, client: str, waiting: Iterable[SequenceRecord]) -> int:
        """The turn of a request that comes now, behind those of its client that wait already."""
        before = (sequence.turn for sequence in waiting if sequence.request.client == client)
        return max(self._last, self._last_of.get(client, 0), *before, 0) + 1

    def let_in(self, sequence: SequenceRecord) -> None:
        """It was let in for the first time."""
        client = sequence.request.client
        self._last = max(self._last, sequence.turn)
        self._last_of[client] = max(self._last_of.get(client, 0), sequence.turn)
        if len(self._last_of) > _KNOWN_CLIENTS:
            self._last_of = {name: turn for name, turn in self._last_of.items() if turn > self._last}


def may_be_passed(lacking: Sequence[SequenceRecord], now: float, most_seconds: float) -> bool:
    """Whether what fits may go before these, which lack room: neither too often nor for too long. One that was
    suspended needs every page to go on."""
    return len(lacking) < _MOST_LACKING and all(
        each.state is SequenceState.WAITING
        and each.times_passed < _MOST_PASSES
        and now - (now if each.lacks_room_since is None else each.lacks_room_since) < most_seconds
        for each in lacking
    )


def kept_places(max_pending_requests: int) -> int:
    """Places of the queue that no client may fill alone."""
    return max(1, max_pending_requests // _KEPT_SHARE) if max_pending_requests > 1 else 0


def refuse_beyond_share(places: int, max_pending_requests: int, taken: int, taken_by_client: int, client: str) -> None:
    """The last eighth of the `places` is for clients that have few requests waiting, a quarter of that eighth at most.

    An unnamed client (embedded use) has no share. Raises ServerOverloadedError.
    """
    if taken >= places:
        raise ServerOverloadedError(
            f"{taken} requests are waiting, the queue holds {max_pending_requests}; try again later"
        )
    kept = kept_places(max_pending_requests)
    if client and taken >= places - kept and taken_by_client >= max(1, kept // _KEPT_SHARE_OF_ONE):
        raise ServerOverloadedError(
            f"{taken_by_client} requests of this client are waiting, and the last {kept} places of the queue are kept "
            "for others; try again later"
        )
