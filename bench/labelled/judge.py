"""One stream, run and judged: what was said, when, and after how many requests that could have hit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.labelled.drive import Drive
from bench.labelled.faults import is_caused_by, put_in, take_out
from bench.labelled.observers import ALARMS, Supervisor, Watched
from bench.labelled.streams import Stream
from bench.replay.garbage import collecting_rarely
from cache import PoolCounts
from engine.events import AuditDone, ReuseDecided
from engine.snapshot import EngineSnapshot
from ops.insights.rules.base import Facts
from ops.insights.types import InsightId, ReuseState

_LOST_SHARE = 0.05
_CHANCES_AFTER = 60
"""A stream goes on for so many requests that could have hit after it was detected."""
_SICK = (ReuseState.DEGRADED, ReuseState.COLLAPSED)


@dataclass(slots=True)
class Verdict:
    """What came of a stream. Mutable while it runs."""

    stream: Stream
    requests: int = 0
    chances: int = 0
    """Requests that could have hit."""
    losses_after_onset: int = 0
    missed_hits: int = 0
    """Requests that its twin without the fault served from its cache, from the first that reused less by a twentieth or
    more for the fault's sake, that one included."""
    detected_at: float | None = None
    detected_as: str = ""
    delay: int | None = None
    """In requests that its twin served from its cache; 0 where it was said before any had lost something."""
    degraded_delay: int | None = None
    """The same, until reuse was `degraded`."""
    collapsed_delay: int | None = None
    """The same, until `collapsed`."""
    reused: dict[str, int] = field(default_factory=dict)
    """Tokens by request."""
    false_alarms: list[str] = field(default_factory=list)
    """Alarms of a healthy stream, of the twin of one with a fault, and those before the onset of a fault."""
    told: list[InsightId] = field(default_factory=list)
    """Every insight that was opened."""
    supervisor_delay: int | None = None
    supervisor_false_alarms: int = 0
    supervisor_cleared: bool = False
    """Whether a hit cleared its alarm while the fault was there."""
    ends_as: ReuseState = ReuseState.HEALTHY

    @property
    def is_right(self) -> bool:
        return not self.false_alarms and (self.stream.fault is None or self.detected_at is not None)


class _Judge:
    """Sees everything of one stream and hands it on to the watchers. Mutable."""

    def __init__(self, stream: Stream, twin: Mapping[str, int]) -> None:
        """`twin` is what each request reused without the fault."""
        sizes = stream.setting.sizes
        self.twin = twin
        self.stream = stream
        self.verdict = Verdict(stream)
        self.ours = Watched(Facts(sizes.page_tokens, sizes.max_concurrency))
        self.theirs = Supervisor()
        self.is_on = False
        """Whether the fault is there."""
        self.victim: str | None = None
        """The only namespace that suffers."""

    def saw(self, decided: ReuseDecided, now: float, host_states: PoolCounts) -> None:
        verdict, report = self.verdict, decided.reuse
        verdict.requests += 1
        verdict.chances += report.expected_tokens > 0
        verdict.reused[decided.request_id] = report.cached_tokens
        served = self.twin.get(decided.request_id, 0)
        if self.is_on and served and self.victim in (None, decided.namespace):
            fault, is_lost = self.stream.fault, served - report.cached_tokens > _LOST_SHARE * served
            verdict.losses_after_onset += is_lost
            is_first = is_lost and fault is not None and is_caused_by(fault, report)
            if is_first or verdict.missed_hits:
                verdict.missed_hits += 1
        self.ours.saw(decided, now)
        was_alarmed, alarms = self.theirs.is_alarmed, len(self.theirs.alarms)
        self.theirs.saw(decided, now, host_states)
        if len(self.theirs.alarms) > alarms:
            if not self.is_on:
                verdict.supervisor_false_alarms += 1
            elif verdict.supervisor_delay is None:
                verdict.supervisor_delay = verdict.missed_hits
        if was_alarmed and not self.theirs.is_alarmed and self.is_on:
            verdict.supervisor_cleared = True
        self._look(now)

    def audited(self, done: AuditDone, now: float) -> None:
        self.ours.audited(done, now)
        self._look(now)

    def tick(self, snapshot: EngineSnapshot, now: float) -> bool:
        wants_audit = self.ours.tick(snapshot, now)
        self._look(now)
        return wants_audit

    @property
    def is_over(self) -> bool:
        verdict = self.verdict
        if verdict.detected_at is None or self.stream.ends_seconds is not None:
            return False
        return verdict.missed_hits > (verdict.delay or 0) + _CHANCES_AFTER

    def _look(self, now: float) -> None:
        verdict, state = self.verdict, self.ours.insights.reuse
        alarm = self._alarm(state)
        if alarm and not self.is_on:
            if alarm not in verdict.false_alarms and not self._was_on:
                verdict.false_alarms.append(alarm)
        elif alarm and verdict.detected_at is None:
            verdict.detected_at, verdict.detected_as = now, alarm
            verdict.delay = verdict.missed_hits
        if self.is_on and state in _SICK and verdict.degraded_delay is None:
            verdict.degraded_delay = verdict.missed_hits
        if self.is_on and state is ReuseState.COLLAPSED and verdict.collapsed_delay is None:
            verdict.collapsed_delay = verdict.missed_hits

    def _alarm(self, state: ReuseState) -> str:
        if state in _SICK:
            return state.value
        return next((each.id.value for each in self.ours.insights.active if each.id in ALARMS), "")

    @property
    def _was_on(self) -> bool:
        """The fault came and went: what is said after it is no false alarm."""
        return self.verdict.losses_after_onset > 0 or self.verdict.detected_at is not None

    def end(self) -> Verdict:
        self.verdict.told = list(dict.fromkeys(each for _, each in self.ours.opened))
        self.verdict.ends_as = self.ours.insights.reuse
        return self.verdict


def judge(stream: Stream, twin: Verdict | None = None) -> Verdict:
    """Run it to its end, or until it is clear what is said about it; a stream with a fault after its `twin` without."""
    if stream.fault is not None and twin is None:
        twin = judge(stream.twin)
    verdict = _run(stream, {} if twin is None else twin.reused)
    if twin is not None:
        verdict.false_alarms = list(dict.fromkeys((*twin.false_alarms, *verdict.false_alarms)))
    return verdict


def _run(stream: Stream, reused_by_twin: Mapping[str, int]) -> Verdict:
    judge = _Judge(stream, reused_by_twin)
    parts = [stream.calls]
    if stream.restarts_seconds is not None:
        at = stream.restarts_seconds
        parts = [
            tuple(call for call in stream.calls if call.at_seconds < at),
            tuple(call for call in stream.calls if call.at_seconds >= at),
        ]
    with collecting_rarely():
        for number, calls in enumerate(parts):
            if number:
                judge.ours.restart()
            drive = Drive(calls, stream.setting, judge)
            if stream.fault is not None:
                _plan(drive, judge, stream)
            drive.run()
    return judge.end()


def _plan(drive: Drive, judge: _Judge, stream: Stream) -> None:
    fault, rng = stream.fault, random.Random(f"{stream.name} {stream.seed} fault")
    assert fault is not None

    def begin(drive: Drive) -> None:
        judge.is_on = True
        judge.victim = put_in(fault, drive, rng)

    def end(drive: Drive) -> None:
        judge.is_on = False
        take_out(drive)

    drive.at(stream.onset_seconds, begin)
    if stream.ends_seconds is not None:
        drive.at(stream.ends_seconds, end)
