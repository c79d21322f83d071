"""What the last requests reused, how they ended and how long each part took; never a prompt, an output or a key."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cache import ReuseReport
from engine.request import Delta, FinishReason, Timings, Usage
from ops.outcome import Outcome

KEPT_REQUESTS = 1000


@dataclass(slots=True)
class AnswerRecord:
    """One answer to a request. Mutable until it has ended: call it with each delta."""

    answer_id: str
    finish: FinishReason | None = None
    """None while it runs."""
    usage: Usage | None = None
    """None, like what follows, where it did not end by itself."""
    timings: Timings | None = None
    reuse: ReuseReport | None = None

    def __call__(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self.finish = delta.finish_reason
            self.usage, self.timings, self.reuse = delta.usage, delta.timings, delta.reuse


@dataclass(slots=True)
class RequestRecord:
    """One request over HTTP. Mutable until it has ended."""

    request_id: str
    endpoint: str
    started_unix_ms: int
    answers: tuple[AnswerRecord, ...]
    outcome: Outcome | None = None
    """None while it runs."""

    def end(self, outcome: Outcome) -> None:
        """Whatever has not ended by itself never will."""
        self.outcome = outcome
        for answer in self.answers:
            if answer.finish is None:
                answer.finish = FinishReason.CANCELLED if outcome is Outcome.CANCELLED else FinishReason.ERROR


@dataclass(slots=True)
class RecentRequests:
    """The last `capacity` requests that reached the engine. Mutable: only the event loop's thread may touch it."""

    capacity: int = KEPT_REQUESTS
    unix_time: Callable[[], float] = time.time
    _ring: deque[RequestRecord] = field(default_factory=deque)
    _by_id: dict[str, RequestRecord] = field(default_factory=dict)

    def begin(self, request_id: str, endpoint: str, answer_ids: Iterable[str]) -> RequestRecord:
        """Keep a request, in the place of the oldest when there are too many."""
        answers = tuple(AnswerRecord(answer_id) for answer_id in answer_ids)
        record = RequestRecord(request_id, endpoint, round(self.unix_time() * 1000), answers)
        if len(self._ring) == self.capacity:
            self._forget(self._ring.popleft())
        self._ring.append(record)
        self._by_id |= dict.fromkeys(_names(record), record)
        return record

    def find(self, name: str) -> RequestRecord | None:
        """By the id of the request or of one of its answers; the newest, where a client gave an id twice."""
        return self._by_id.get(name)

    def _forget(self, record: RequestRecord) -> None:
        for name in _names(record):
            if self._by_id.get(name) is record:
                del self._by_id[name]


def _names(record: RequestRecord) -> list[str]:
    return [record.request_id, *(answer.answer_id for answer in record.answers)]
