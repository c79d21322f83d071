"""What the last requests reused, how they ended and how long each part took; never a prompt, an output or a key."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from engine.events import RequestEnded
from engine.request import FinishReason
from ops.outcome import Outcome

KEPT_REQUESTS = 1000


@dataclass(slots=True)
class AnswerRecord:
    """One answer to a request. Mutable until it has ended."""

    answer_id: str
    ended: RequestEnded | None = None
    """None while it runs."""

    @property
    def finish(self) -> FinishReason | None:
        return None if self.ended is None else self.ended.finish_reason


@dataclass(slots=True)
class RequestRecord:
    """One request over HTTP. Mutable until it has ended."""

    request_id: str
    endpoint: str
    started_unix_ms: int
    answers: tuple[AnswerRecord, ...]
    outcome: Outcome | None = None
    """None while it runs."""


@dataclass(slots=True)
class RecentRequests:
    """The last `capacity` requests that reached the engine. Mutable: only the event loop's thread may touch it."""

    capacity: int = KEPT_REQUESTS
    unix_time: Callable[[], float] = time.time
    _ring: deque[RequestRecord] = field(default_factory=deque)
    _by_id: dict[str, RequestRecord] = field(default_factory=dict)
    _running: dict[str, tuple[RequestRecord, AnswerRecord]] = field(default_factory=dict)
    """By the answer's id; those that were too many to be kept included."""

    def begin(self, request_id: str, endpoint: str, answer_ids: Iterable[str]) -> RequestRecord:
        """Keep a request, in the place of the oldest when there are too many."""
        answers = tuple(AnswerRecord(answer_id) for answer_id in answer_ids)
        record = RequestRecord(request_id, endpoint, round(self.unix_time() * 1000), answers)
        if len(self._ring) == self.capacity:
            self._forget(self._ring.popleft())
        self._ring.append(record)
        self._by_id |= dict.fromkeys(_names(record), record)
        self._running |= {answer.answer_id: (record, answer) for answer in answers}
        return record

    def end(self, ended: RequestEnded) -> RequestRecord | None:
        """An answer has ended; None for one that never began here."""
        found = self._running.pop(ended.request_id, None)
        if found is None:
            return None
        record, answer = found
        answer.ended = ended
        return record

    def find(self, name: str) -> RequestRecord | None:
        """By the id of the request or of one of its answers; the newest, where a client gave an id twice."""
        return self._by_id.get(name)

    def newest(self, most: int) -> Iterator[RequestRecord]:
        """At most so many, the last one first."""
        return islice(reversed(self._ring), most)

    def _forget(self, record: RequestRecord) -> None:
        for name in _names(record):
            if self._by_id.get(name) is record:
                del self._by_id[name]


def _names(record: RequestRecord) -> list[str]:
    return [record.request_id, *(answer.answer_id for answer in record.answers)]
