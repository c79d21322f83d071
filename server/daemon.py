"""The daemon's life: starting, serving, draining; and the engine while there is one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import Scope

from engine.engine import Delta, Engine, EngineOptions, EngineStatus, Generation
from ops.health import Health, Phase, judge_health
from ops.metrics import Metrics
from ops.outcome import outcome_of
from ops.requests import RecentRequests
from server.drill import NO_DRILL, FireDrill
from server.errors import ApiError
from server.isolation import Isolation
from server.sampling import SamplingDefaults
from server.settings import Auto, Settings
from server.version import package_version

DRAIN_LIMIT_SECONDS = 25.0
"""How long running requests may take to finish after SIGTERM; Kubernetes kills after 30."""

METERED_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
"""Whose requests the metrics count."""


class Daemon:
    """Owns the engine and the phase. Mutable: only the event loop's thread may touch it."""

    def __init__(self, settings: Settings, drill: FireDrill = NO_DRILL) -> None:
        self.settings = settings
        self.drill = drill
        self.model_id = public_model_id(settings)
        self.created_unix = int(time.time())
        self.phase = Phase.STARTING
        self.sampling_defaults = SamplingDefaults()
        self.metrics = Metrics(package_version(), METERED_PATHS)
        self.requests = RecentRequests()
        self.isolation = Isolation(is_by_key=settings.cache.cache_isolation == "key")
        self._engine: Engine | None = None

    async def start(self) -> Engine:
        """Load the model in a thread, so that probes are answered meanwhile. Raises what `Engine.load` raises."""
        engine = await _in_abandonable_thread(lambda: load_engine(self.settings))
        await self.attach(engine)
        return engine

    async def attach(self, engine: Engine) -> None:
        """Start a loaded engine in this event loop and serve with it."""
        await engine.start()
        if self.drill.faults:
            await engine.set_faults(self.drill.faults)
        self.sampling_defaults = SamplingDefaults.from_folder(engine.model_folder, self.settings)
        self.metrics.watch_engine(engine.snapshot, self.model_id, engine.config.architecture, engine.backend_name)
        self._engine = engine
        if self.phase is Phase.STARTING:
            self.phase = Phase.SERVING

    @property
    def engine(self) -> Engine:
        """The engine, for a request. Raises ApiError (503) while there is none to serve with."""
        if self._engine is None or self.phase is not Phase.SERVING:
            reason = "is shutting down" if self.phase is Phase.DRAINING else "is still loading its model"
            raise ApiError(503, f"the daemon {reason}", code="engine_unavailable", headers={"Retry-After": "1"})
        return self._engine

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) unless `model` is the served one, or left out."""
        if model is not None and model != self.model_id:
            message = f"no such model here; {self.model_id!r} is served"
            raise ApiError(404, message, param="model", code="model_not_found")

    def watch(self, scope: Scope, answers: Sequence[Generation]) -> list[Callable[[Delta], None]]:
        """What is to see the deltas of each answer to a request: it counts them and keeps what they cost."""
        record = self.requests.begin(scope["state"]["request_id"], scope["path"], [each.request_id for each in answers])
        scope["state"]["record"] = record
        return [_both(self.metrics.new_generation(), answer) for answer in record.answers]

    def request_ended(self, scope: Scope, status: int, seconds: float) -> None:
        """To be told of each request over HTTP."""
        state = scope["state"]
        outcome = outcome_of(status, bool(state.get("has_failed")))
        self.metrics.request_ended(scope["path"], outcome, seconds)
        if "record" in state:
            state["record"].end(outcome)

    def health(self) -> Health:
        engine = self._engine
        if engine is None or engine.status is EngineStatus.STOPPED:
            return judge_health(self.phase, None)
        return judge_health(self.phase, engine.heartbeat_age_seconds())

    async def drain(self, limit_seconds: float = DRAIN_LIMIT_SECONDS) -> bool:
        """Take no more requests; wait for the running ones. False when the limit came first."""
        self.phase = Phase.DRAINING
        return True if self._engine is None else await self._engine.drain(limit_seconds)

    async def stop(self) -> None:
        """End what still runs, with an error to each. Safe to call twice."""
        self.phase = Phase.DRAINING
        if self._engine is not None:
            await self._engine.stop()


def _both(first: Callable[[Delta], None], second: Callable[[Delta], None]) -> Callable[[Delta], None]:
    def watch(delta: Delta) -> None:
        first(delta)
        second(delta)

    return watch


def load_engine(settings: Settings) -> Engine:
    """Find the model and load it. Blocking. Raises ModelLoadError or InsufficientMemoryError."""
    from engine.catalog import resolve_model

    return Engine.load(resolve_model(settings.server.model), engine_options(settings))


def engine_options(settings: Settings) -> EngineOptions:
    """The engine's part of the settings."""
    engine, cache = settings.engine, settings.cache
    return EngineOptions(
        max_concurrency=engine.max_concurrency,
        max_pending_requests=engine.max_pending_requests,
        pending_timeout_s=engine.pending_timeout_s,
        max_context=_automatic(engine.max_context),
        prefill_chunk=_automatic(engine.prefill_chunk),
        default_max_tokens=engine.default_max_tokens,
        backend=engine.backend,
        kv_pages=_automatic(cache.kv_pages),
        kv_cache_mib=_automatic(cache.kv_cache_mib),
        page_size=_automatic(cache.page_size),
        device_state_slots=cache.device_state_slots,
        host_cache_mib=_automatic(cache.host_cache_mib),
        host_state_slots=None if cache.host_state_slots == "none" else cache.host_state_slots,
        prefix_reuse=cache.prefix_reuse,
        self_heal=cache.self_heal,
    )


def public_model_id(settings: Settings) -> str:
    """The configured name, or that of the checkpoint: a folder's last part, a hub id or a short name as it is."""
    if settings.server.model_name != "auto":
        return settings.server.model_name
    model = settings.server.model
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def _automatic(value: int | Auto) -> int | None:
    return None if value == "auto" else value


async def _in_abandonable_thread(work: Callable[[], Engine]) -> Engine:
    """Like `asyncio.to_thread`, but a shutdown meanwhile doesn't wait for the work."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            assert engine is not None
            outcome.set_result(engine)

    def run() -> None:
        engine, failure = None, None
        try:
            engine = work()
        except BaseException as error:  # noqa: BLE001  (handed to the waiter, which raises it)
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, engine, failure)

    threading.Thread(target=run, name="dalsegno-load", daemon=True).start()
    return await outcome
