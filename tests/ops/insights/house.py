"""An engine that only tells: reports, events and snapshots made by hand, and a book of insights with its clock."""

from dataclasses import replace

from cache import AuditReport, CacheStats, PoolCounts, ReuseReport, Tier
from engine.events import AuditDone, CacheReset, LoopRestarted, RequestEnded, ReuseDecided, StepFailed
from engine.request import FinishReason, Timings, Usage
from engine.snapshot import EngineSnapshot, EngineStatus
from ops.events import InsightOpened
from ops.insights.book import Insights
from ops.insights.rules.base import Facts

FULL = PoolCounts(capacity=16, free=0, cached=16, pinned=0, in_flight=0)
UNIX_SECONDS = 1_800_000_000.0


def snapshot(**counts):
    """Of an idle engine whose pools are full of what is remembered, but for `counts`."""
    zeros = dict.fromkeys(EngineSnapshot.__dataclass_fields__, 0)
    pools = dict.fromkeys(("kv_pages", "state_slots", "host_units", "host_state_slots"), FULL)
    rest = {"status": EngineStatus.RUNNING, "cache": CacheStats(), "transfers": {}, "faults": frozenset()}
    unmeasured = {"restore_bytes_per_second": None, "prefill_tokens_per_second": None, "last_audit": None}
    return EngineSnapshot(**zeros | pools | rest | unmeasured | counts)


def pool(free=0, cached=0, pinned=0, in_flight=0):
    return PoolCounts(free + cached + pinned + in_flight, free, cached, pinned, in_flight)


def report(
    cached=0, expected=0, *, achievable=None, path=None, prompt=2000, host=0, lost=None, diverged_at=None, fault=None
):
    """What was lost gave way, unless `lost` says otherwise; what was not kept is a fault, unless `fault` does."""
    achievable = max(cached, expected) if achievable is None else achievable
    missing = achievable - cached
    fault = (lost or {}).get("publish_skipped", 0) if fault is None else fault
    return ReuseReport(
        path=path or ("private_turn_closure" if cached else "root"),
        prompt_tokens=prompt,
        cached_tokens=cached,
        achievable_tokens=achievable,
        source={Tier.DEVICE: cached - host, Tier.HOST: host, Tier.DISK: 0},
        lost=({"evicted_state": missing} if missing else {}) if lost is None else lost,
        diverged_at=diverged_at,
        expected_tokens=expected,
        fault_tokens=fault,
    )


GOOD = report(1800, 1800)
REFUSED = report(0, 1800, lost={"publish_skipped": 1800, "cold": 200})
GAVE_WAY = report(0, 1800)
COLD = report(lost={"cold": 2000})
SOUND = AuditReport((), {}, ())


class Desk:
    """Insights, and the time: each request comes a second after the one before, and all is judged each time."""

    def __init__(self, facts=Facts(page_tokens=16, max_concurrency=2), **counts):  # noqa: B008
        self.now = 1000.0
        self.snapshot = snapshot(**counts)
        self.changes = []
        self.facts = facts
        self.insights = Insights(lambda: UNIX_SECONDS + self.now, facts)

    def ask(self, *reports, namespace="", seconds=1.0):
        for each in reports:
            self.insights.saw_reuse(ReuseDecided("request", namespace, each), self.now)
            self.wait(seconds)
        return self.insights.reuse

    def wait(self, seconds=1.0, **counts):
        """Time passes; `counts` are what a snapshot tells at its end."""
        self.now += seconds
        self.snapshot = replace(self.snapshot, **counts)
        found = self.insights.evaluate(self.snapshot, self.now)
        self.changes += [(type(change), change.insight.id.value) for change in found]
        return found

    def audit(self, report=SOUND):
        self.insights.saw_audit(AuditDone(report, 0.01), self.now)
        return self.wait(0.0)

    def reset(self, *tiers):
        self.insights.saw_reset(CacheReset(tiers or (Tier.DEVICE, Tier.HOST)), self.now)
        return self.wait(0.0)

    def restart(self):
        self.insights.saw_restart(LoopRestarted("RuntimeError"), self.now)
        return self.wait(0.0)

    def fail_step(self, consecutive=1):
        self.insights.saw_step_failure(StepFailed("RuntimeError", 2, consecutive), self.now)
        return self.wait(0.0)

    def reject(self, code, times=1):
        for _ in range(times):
            self.insights.saw_rejection(code, self.now)
        return self.wait(1.0)

    def end(self, times=1, error=None, preemptions=0, recomputed_tokens=0, **timings):
        usage = Usage(100, 10, preemptions=preemptions, recomputed_tokens=recomputed_tokens)
        ended = RequestEnded("request", FinishReason.STOP, usage, Timings(**timings), None, error)
        for _ in range(times):
            self.insights.saw_end(ended, "/v1/completions", self.now)
        return self.wait(1.0)

    @property
    def open(self):
        """The ids of what holds."""
        return {insight.id.value for insight in self.insights.active}

    def insight(self, insight_id):
        return next(insight for insight in self.insights.active if insight.id == insight_id)

    @property
    def opened(self):
        """The ids of all that was ever opened."""
        return {name for kind, name in self.changes if kind is InsightOpened}
