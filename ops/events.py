"""Everything that the daemon tells about itself: one frozen record for each kind of event.

The fields are a contract: `docs/events/` has a JSON Schema for each kind. What was not measured is None here and absent
in JSON, never 0. Prompts, outputs, keys, tool arguments, salts and namespaces have no place in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ops.insights.types import Insight


class EventKind(StrEnum):
    """The values of `event`."""

    SERVER_START = "server_start"
    REQUEST_START = "request_start"
    REQUEST_DONE = "request_done"
    REQUEST_ERROR = "request_error"
    REQUEST_REJECTED = "request_rejected"
    THROUGHPUT = "throughput"
    INSIGHT_OPENED = "insight_opened"
    INSIGHT_CLEARED = "insight_cleared"
    AUDIT = "audit"
    SERVER_STOP = "server_stop"


# -- parts


@dataclass(frozen=True, slots=True)
class Result:
    """What one answer came to."""

    finish_reason: str
    """`stop`, `length`, `cancelled` (its client left) or `error`."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """This and what follows: None for a request that was never let in."""
    computed_prefill_tokens: int | None = None
    """None where the prefill did not come to its end."""
    achievable_tokens: int | None = None
    expected_tokens: int | None = None
    """What a sound cache of the same size would have reused."""
    reuse: str | None = None
    """The path: `root`, or the kind of the checkpoint."""
    source: Mapping[str, int] | None = None
    """Reused tokens by tier."""
    lost: Mapping[str, int] | None = None
    """Tokens that were not reused, by reason; reasons that do not apply are left out."""
    diverged_at: int | None = None
    """The token at which a known conversation was rewritten."""
    preemptions: int | None = None
    """How often it was set aside while it ran, because others needed its room."""
    recomputed_tokens: int | None = None
    """Computed a second time because of that."""


@dataclass(frozen=True, slots=True)
class TimingsSeconds:
    """Phases of one answer; those that were not reached are None. All but `ttft` and `total` add up to `total`."""

    queue: float | None = None
    restore: float | None = None
    prefill: float | None = None
    ttft: float | None = None
    decode: float | None = None
    total: float | None = None
    stalled: float | None = None
    """Let in, but others' prompts were computed."""
    preempted: float | None = None
    """Set aside for others, until it was where it had been."""


@dataclass(frozen=True, slots=True)
class PoolUnits:
    """The same measure of each pool: units, but for host memory, which is in bytes."""

    device_state_slots: int
    host_state_slots: int
    kv_pages: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens computed."""

    prefill: int
    decode: int
    recomputed: int
    """Of the prefill, those of requests that had been set aside."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Answers that began and ended, and requests that were turned away."""

    started: int = 0
    done: int = 0
    errors: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Requests at this moment."""

    running: int
    waiting: int
    prefilling: int
    decoding: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """What gave way, was refused and came back."""

    evictions: Mapping[str, int]
    """Checkpoints that left a pool, by kind; one may live on in another tier."""
    private_owners_evicted: int
    shared_owners_evicted: int
    checkpoints_dropped: int
    checkpoints_demoted: int
    publish_skipped: Mapping[str, int]
    restores: int
    restore_failures: int
    preemptions: int
    """Requests that were set aside while they ran, because the rest needed their room."""


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """KV pages and state images that were copied."""

    bytes: int
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies between the tiers."""

    device_to_host: TransferCounts
    host_to_device: TransferCounts


@dataclass(frozen=True, slots=True)
class ContextCacheState:
    """Pools at this moment, and what the cache did in the interval. Mappings hold every name, those at 0 as well."""

    occupancy: PoolUnits
    """All that is not free."""
    capacity: PoolUnits
    pinned: PoolUnits
    in_flight: PoolUnits
    selections: Mapping[str, int]
    """Requests that were let in, by reuse path."""
    reused_tokens: int
    achievable_tokens: int
    expected_tokens: int
    """What a sound cache of the same size would have reused."""
    lost_tokens: Mapping[str, int]
    pressure: Pressure
    transfers: Transfers


# -- kinds


@dataclass(frozen=True, slots=True)
class ServerStart:
    """The daemon begins to serve."""

    KIND: ClassVar[EventKind] = EventKind.SERVER_START

    version: str
    model: str
    architecture: str
    backend: str
    max_context_tokens: int
    page_size_tokens: int
    capacity: PoolUnits
    startup_seconds: float


@dataclass(frozen=True, slots=True)
class RequestStart:
    """An answer is in the queue. One terminal event follows: request_done or request_error."""

    KIND: ClassVar[EventKind] = EventKind.REQUEST_START

    request_id: str
    """The `x-request-id`; a request for several answers has an event for each."""
    answer_id: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class RequestDone:
    """An answer came to its end, or its client left."""

    KIND: ClassVar[EventKind] = EventKind.REQUEST_DONE

    request_id: str
    answer_id: str
    endpoint: str
    result: Result
    timings_seconds: TimingsSeconds


@dataclass(frozen=True, slots=True)
class RequestError:
    """An answer failed, or waited too long."""

    KIND: ClassVar[EventKind] = EventKind.REQUEST_ERROR

    request_id: str
    answer_id: str
    endpoint: str
    code: str
    """As the client was told."""
    error_type: str
    """The name of the exception's type."""
    result: Result
    timings_seconds: TimingsSeconds


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """A request for an answer was turned away before it reached the queue."""

    KIND: ClassVar[EventKind] = EventKind.REQUEST_REJECTED

    request_id: str
    endpoint: str
    """The route, never a path that the client made up."""
    status: int
    """499: the client left."""
    code: str | None = None
    """None where the answer had none."""


@dataclass(frozen=True, slots=True)
class MedianSeconds:
    """Of the answers that came to their end in an interval; None where there was none of the kind."""

    queue: float | None
    ttft_hit: float | None
    """To the first token, of those that reused some of their prompt."""
    ttft_root: float | None
    """Of those that reused nothing."""
    stalled: float | None
    """Let in, but others' prompts were computed."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was done in an interval, and how things stand at its end."""

    KIND: ClassVar[EventKind] = EventKind.THROUGHPUT

    interval_seconds: float
    tokens: TokenCounts
    requests: RequestCounts
    scheduler: SchedulerState
    median_seconds: MedianSeconds
    context_cache: ContextCacheState


@dataclass(frozen=True, slots=True)
class InsightOpened:
    """Something is worth an operator's attention."""

    KIND: ClassVar[EventKind] = EventKind.INSIGHT_OPENED

    insight: Insight


@dataclass(frozen=True, slots=True)
class InsightCleared:
    """It is no longer so."""

    KIND: ClassVar[EventKind] = EventKind.INSIGHT_CLEARED

    insight: Insight
    """As it was when it was last seen."""
    active_seconds: float


@dataclass(frozen=True, slots=True)
class Audit:
    """The books were compared from scratch. Numbers only: the lines of a report may name a namespace."""

    KIND: ClassVar[EventKind] = EventKind.AUDIT

    violations: int
    reclaimed: Mapping[str, int]
    """Units that nobody held and that were given back, by pool; pools without any are left out."""
    remaining: int
    """Violations that healing did not mend."""
    audit_seconds: float

    @property
    def has_found_something(self) -> bool:
        return bool(self.violations or self.remaining or any(self.reclaimed.values()))


@dataclass(frozen=True, slots=True)
class ServerStop:
    """The daemon has ended; nothing follows from this instance."""

    KIND: ClassVar[EventKind] = EventKind.SERVER_STOP

    reason: str
    """`signal`, or `error` with what is in the log."""
    is_drained: bool
    """Whether every running request came to its own end."""
    uptime_seconds: float


Event = (
    ServerStart
    | RequestStart
    | RequestDone
    | RequestError
    | RequestRejected
    | Throughput
    | InsightOpened
    | InsightCleared
    | Audit
    | ServerStop
)

EVENT_TYPES: tuple[type[Event], ...] = (
    ServerStart,
    RequestStart,
    RequestDone,
    RequestError,
    RequestRejected,
    Throughput,
    InsightOpened,
    InsightCleared,
    Audit,
    ServerStop,
)


# -- on its way out


@dataclass(frozen=True, slots=True)
class Stamp:
    """What all events have in common, beside their kind."""

    timestamp_unix_ms: int
    server_instance_id: str


@dataclass(frozen=True, slots=True)
class Record:
    """An event, and when and by whom it was told."""

    event: Event
    stamp: Stamp
