"""How a request to the door ended."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The values of the metrics' label `outcome`."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    OVERLOADED = "overloaded"
    """429: the queue was full."""
    CANCELLED = "cancelled"
    """The client left."""
    ERROR = "error"
    """The daemon failed, or was not there; a stream that ended in an error event as well."""


def outcome_of(status: int, has_failed: bool) -> Outcome:
    """From the HTTP status; 499 is a client that left. `has_failed`: the stream ended in an error event."""
    if has_failed or status >= 500 or status == 0:
        return Outcome.ERROR
    if status == 499:
        return Outcome.CANCELLED
    if status == 429:
        return Outcome.OVERLOADED
    return Outcome.BAD_REQUEST if status >= 400 else Outcome.OK
