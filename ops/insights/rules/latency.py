"""Where the time of requests goes: in the queue, behind the prompts of others, set aside for others, in the prefill."""

from __future__ import annotations

import statistics

from engine.errors import QueueTimeoutError, ServerOverloadedError
from engine.events import LoopRestarted, RequestEnded
from engine.request import Timings
from engine.snapshot import EngineSnapshot
from ops.insights.recent import Recent
from ops.insights.rules.base import Facts, Rule, counted, percent
from ops.insights.types import Finding, InsightId, Severity

_WINDOW_SECONDS = 300.0
_MOST = 300
_LEAST_REQUESTS = 10
_REJECTION_SECONDS = 60.0
_LEAST_REJECTIONS = 3
_REJECTIONS_HELD_SECONDS = 120.0
_QUEUE_OPENS = (0.5, 1.0)
"""Share of the time to the first token, and the median in seconds."""
_QUEUE_CLEARS = (0.25, 0.5)
_STALL_OPENS = (0.5, 0.5)
"""Share of the time to the first token, and the median in seconds."""
_STALL_CLEARS = (0.25, 0.25)
_LEAST_PREEMPTED = 3
_PREEMPTED_OPENS = 0.1
"""Share of the requests that ended."""
_PREEMPTED_CLEARS = 0.05
_PREFILL_OPENS = (0.7, 3.0)
"""Share of the whole time, and the median in seconds."""
_MORE_MACHINES = (
    "This CPU computes for all of them in turn, so more at once would only make each slower: add a daemon on another "
    "machine"
)
_PREFILL_CLEARS = (0.5, 2.0)


class QueueSaturated(Rule):
    """Requests are turned away, or wait until they time out."""

    id = InsightId.QUEUE_SATURATED

    def __init__(self, facts: Facts | None = None) -> None:
        self._is_cpu = facts is not None and facts.is_cpu
        self._rejected: Recent[str] = Recent(_REJECTIONS_HELD_SECONDS, _MOST)
        self._soon: Recent[str] = Recent(_REJECTION_SECONDS, _MOST)

    def saw_rejection(self, code: str, now: float) -> None:
        if code in (ServerOverloadedError.code, QueueTimeoutError.code):
            self._rejected.add(code, now)
            self._soon.add(code, now)

    def saw_end(self, ended: RequestEnded, now: float) -> None:
        if isinstance(ended.error, QueueTimeoutError):
            self.saw_rejection("queue_timeout", now)

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        codes = (self._rejected if is_open else self._soon).items(now)
        if len(codes) < (1 if is_open else _LEAST_REJECTIONS):
            return None
        timeouts = sum(code == QueueTimeoutError.code for code in codes)
        seconds = _REJECTIONS_HELD_SECONDS if is_open else _REJECTION_SECONDS
        return Finding(
            severity=Severity.WARNING,
            title="More requests come than can be served",
            statement=f"{counted(len(codes), 'request was', 'requests were')} turned away in the last {seconds:.0f} s, "
            f"{timeouts:,} of them after waiting in vain. {snapshot.running:,} run and {snapshot.waiting:,} wait.",
            evidence={
                "turned_away": len(codes),
                "timed_out": timeouts,
                "running": snapshot.running,
                "waiting": snapshot.waiting,
            },
            measured_over={"seconds": seconds},
            recommendation=(
                _MORE_MACHINES if self._is_cpu else "Raise --max-concurrency if memory allows, or add a daemon"
            )
            + "; --max-pending-requests and --pending-timeout-s only lengthen the wait.",
        )


class _Timed(Rule):
    """Judges the timings of the requests that ended in the last minutes and had a first token."""

    def __init__(self) -> None:
        self._recent: Recent[Timings] = Recent(_WINDOW_SECONDS, _MOST)

    def saw_end(self, ended: RequestEnded, now: float) -> None:
        if ended.timings.ttft_seconds is not None:
            self._recent.add(ended.timings, now)

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._recent.clear()

    def _timings(self, now: float, *, is_open: bool) -> list[Timings]:
        """Empty where there are too few to say something new."""
        timings = self._recent.items(now)
        return timings if is_open or len(timings) >= _LEAST_REQUESTS else []


class QueuedBehindConcurrency(_Timed):
    """The first token is late because the request waits for one that runs."""

    id = InsightId.QUEUED_BEHIND_CONCURRENCY

    def __init__(self, facts: Facts | None = None) -> None:
        super().__init__()
        self._is_cpu = facts is not None and facts.is_cpu

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        timings = self._timings(now, is_open=is_open)
        waits = [each.queue_seconds or 0.0 for each in timings]
        first = sum(each.ttft_seconds or 0.0 for each in timings)
        share, least = _QUEUE_CLEARS if is_open else _QUEUE_OPENS
        if not waits or first <= 0 or sum(waits) < share * first or statistics.median(waits) < least:
            return None
        return Finding(
            severity=Severity.NOTICE,
            title="Requests wait for others to end",
            statement=f"{percent(sum(waits), first)} of the time to the first token was spent in the queue: "
            f"{statistics.median(waits):.1f} s in the middle, {max(waits):.1f} s at most, over "
            f"{counted(len(waits), 'request')}.",
            evidence={
                "queue_seconds_median": round(statistics.median(waits), 3),
                "queue_seconds_max": round(max(waits), 3),
                "queue_share_of_ttft": round(sum(waits) / first, 3),
                "running": snapshot.running,
                "waiting": snapshot.waiting,
            },
            measured_over={"requests": len(waits), "seconds": round(self._recent.span_seconds(now))},
            recommendation=self._advice(snapshot),
        )

    def _advice(self, snapshot: EngineSnapshot) -> str:
        pages = snapshot.kv_pages
        if pages.free + pages.cached < pages.capacity / 4:
            return "The KV pages are held by what runs: raise --kv-cache-mib, or shorten prompts and answers."
        if self._is_cpu:
            return f"{_MORE_MACHINES}, or shorten prompts and answers."
        return (
            "A quarter or more of the KV pages is not in use by requests: raise --max-concurrency (it is "
            f"{snapshot.running} that run now)."
        )


class StalledBehindPrompts(_Timed):
    """The first token is late because other prompts are computed, before this one or beside it."""

    id = InsightId.STALLED_BEHIND_PROMPTS

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        timings = self._timings(now, is_open=is_open)
        stalls = [each.stalled_seconds or 0.0 for each in timings]
        first = sum(each.ttft_seconds or 0.0 for each in timings)
        share, least = _STALL_CLEARS if is_open else _STALL_OPENS
        if not stalls or first <= 0 or sum(stalls) < share * first or statistics.median(stalls) < least:
            return None
        return Finding(
            severity=Severity.NOTICE,
            title="Requests stand behind the prompts of others",
            statement=f"{percent(sum(stalls), first)} of the time to the first token went into other prompts: "
            f"{statistics.median(stalls):.1f} s in the middle, {max(stalls):.1f} s at most, over "
            f"{counted(len(stalls), 'request')}.",
            evidence={
                "stalled_seconds_median": round(statistics.median(stalls), 3),
                "stalled_seconds_max": round(max(stalls), 3),
                "stalled_share_of_ttft": round(sum(stalls) / first, 3),
                "prefilling": snapshot.prefilling,
            },
            measured_over={"requests": len(stalls), "seconds": round(self._recent.span_seconds(now))},
            recommendation="Find who sends long prompts on GET /admin/requests: `lost` tells what of them need not be "
            "computed. Send those that are long and cold to a daemon of their own; a smaller --prefill-chunk gives "
            "short prompts their turn sooner.",
        )


class Preempted(Rule):
    """Requests are set aside while they run, because the KV pages do not last for all of them."""

    id = InsightId.PREEMPTED

    def __init__(self) -> None:
        self._recent: Recent[RequestEnded] = Recent(_WINDOW_SECONDS, _MOST)

    def saw_end(self, ended: RequestEnded, now: float) -> None:
        if ended.timings.queue_seconds is not None:
            self._recent.add(ended, now)

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        self._recent.clear()

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        ended = self._recent.items(now)
        preempted = [each for each in ended if each.usage.preemptions]
        least, share = (1, _PREEMPTED_CLEARS) if is_open else (_LEAST_PREEMPTED, _PREEMPTED_OPENS)
        if len(preempted) < least or len(preempted) < share * len(ended):
            return None
        seconds = sum(each.timings.preempted_seconds or 0.0 for each in preempted)
        tokens = sum(each.usage.recomputed_tokens for each in preempted)
        return Finding(
            severity=Severity.NOTICE,
            title="Requests are set aside while they run",
            statement=f"The KV pages did not last for all that ran: {len(preempted):,} of "
            f"{counted(len(ended), 'request')} had to make room and lost {seconds:.1f} s by it; {tokens:,} tokens were "
            "computed again.",
            evidence={
                "preempted_requests": len(preempted),
                "preemptions": sum(each.usage.preemptions for each in preempted),
                "preempted_seconds": round(seconds, 3),
                "recomputed_tokens": tokens,
            },
            measured_over={"requests": len(ended), "seconds": round(self._recent.span_seconds(now))},
            recommendation="Raise --kv-cache-mib (or --kv-pages), or lower --max-concurrency until what runs fits.",
        )


class PrefillDominated(_Timed):
    """Computing prompts takes most of the time."""

    id = InsightId.PREFILL_DOMINATED

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        timings = [each for each in self._timings(now, is_open=is_open) if each.prefill_seconds is not None]
        prefills = [each.prefill_seconds or 0.0 for each in timings]
        whole = sum(each.total_seconds or 0.0 for each in timings)
        share, least = _PREFILL_CLEARS if is_open else _PREFILL_OPENS
        if not prefills or whole <= 0 or sum(prefills) < share * whole or statistics.median(prefills) < least:
            return None
        evidence: dict[str, int | float] = {
            "prefill_seconds_median": round(statistics.median(prefills), 3),
            "prefill_share_of_total": round(sum(prefills) / whole, 3),
        }
        if snapshot.prefill_tokens_per_second is not None:
            evidence["prefill_tokens_per_second"] = round(snapshot.prefill_tokens_per_second)
        return Finding(
            severity=Severity.INFO,
            title="Reading prompts takes most of the time",
            statement=f"{percent(sum(prefills), whole)} of the time of {counted(len(prefills), 'request')} went into "
            f"computing their prompts, {statistics.median(prefills):.1f} s in the middle.",
            evidence=evidence,
            measured_over={"requests": len(prefills), "seconds": round(self._recent.span_seconds(now))},
            recommendation="See why on GET /admin/requests/{id}: `lost` tells what was computed that had been before. "
            "If it is `cold`, only shorter prompts or a faster --backend help.",
        )
