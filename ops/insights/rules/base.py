"""What all rules have in common: what they are fed, and what they are asked."""

from __future__ import annotations

from dataclasses import dataclass

from cache import AuditReport, ReuseReport, Tier
from engine.events import LoopRestarted, RequestEnded, StepFailed
from engine.snapshot import EngineSnapshot
from ops.insights.types import Finding, InsightId

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Facts:
    """What no snapshot tells of how the engine was set up."""

    page_tokens: int
    max_concurrency: int
    url: str = DEFAULT_URL
    """Where the daemon answers, for the commands that are recommended."""
    is_cpu: bool = False
    """Whether the model is computed on the CPU, where more requests at once only make each slower."""


class Rule:
    """Watches one thing. Mutable: fed and asked in the order of time, by the thread that owns the insights."""

    id: InsightId

    def saw_reuse(self, report: ReuseReport, now: float) -> None:
        """A request was let in."""

    def saw_end(self, ended: RequestEnded, now: float) -> None:
        """A request has ended."""

    def saw_audit(self, report: AuditReport, now: float) -> None:
        """The books were compared."""

    def saw_reset(self, tiers: tuple[Tier, ...], now: float) -> None:
        """An operator emptied these tiers."""

    def saw_rejection(self, code: str, now: float) -> None:
        """A request was turned away."""

    def saw_step_failure(self, failure: StepFailed, now: float) -> None:
        """A step raised."""

    def saw_restart(self, restart: LoopRestarted, now: float) -> None:
        """The engine began anew: what was learned about the former pools is void."""

    def judge(self, snapshot: EngineSnapshot, now: float, *, is_open: bool) -> Finding | None:
        """What is to be said at this moment; `is_open` is whether it was said the last time, for less is enough to go
        on saying something than to begin."""
        raise NotImplementedError


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 request`, `1,204 requests`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent(part: float, whole: float) -> str:
    """`37 %`; whole must not be 0."""
    return f"{100 * part / whole:.0f} %"


def admin(path: str, body: str | None = None) -> str:
    """The command that asks the admin door of a daemon at the default address; the book puts the real one in."""
    data = f" -H 'content-type: application/json' -d '{body}'" if body is not None else ""
    return f"curl -X POST {DEFAULT_URL}{path}{data}"
