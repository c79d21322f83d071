"""The daemon's life: starting, serving, draining; the engine while there is one, and what watches it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from starlette.types import Scope

from engine.engine import Delta, Engine, EngineOptions, EngineStatus, Generation
from engine.errors import EngineError, EngineUnavailableError
from ops.console import Console
from ops.event_log import EventLog
from ops.health import FAILED_STEPS_LIMIT, Health, Phase
from ops.journal import Sink
from ops.metrics import Compat, Metrics
from ops.operations import Operations, Served
from ops.outcome import outcome_of
from server.drill import NO_DRILL, FireDrill
from server.errors import ApiError
from server.heap import LARGE_BYTES, give_back
from server.isolation import Isolation
from server.limits import BodyLimits
from server.sampling import SamplingDefaults
from server.settings import Auto, Settings
from server.text_pool import TextPool
from server.version import package_version

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions")
"""Whose requests are events."""

METERED_PATHS = (*GENERATING_PATHS, "/tokenize", "/detokenize")
"""Whose requests the metrics count."""

ERROR_CODE = "error_code"
"""In a request's state: the code of the error that it was answered with."""

_TICK_SECONDS = 1.0
_TRIAL_SECONDS = 5.0
"""Between two requests of its own to an engine whose steps fail."""

logger = logging.getLogger("dalsegno.server")


class Daemon:
    """Owns the engine and the phase. Mutable: only the event loop's thread may touch it."""

    def __init__(self, settings: Settings, drill: FireDrill = NO_DRILL) -> None:
        self.settings = settings
        self.drill = drill
        self.model_names = model_names(settings)
        """What the model is called, its public id first."""
        self.model_id = self.model_names[0]
        self.created_unix = int(time.time())
        self.phase = Phase.STARTING
        self.sampling_defaults = SamplingDefaults()
        self.event_log = None if settings.ops.event_log == "none" else EventLog(settings.ops.event_log)
        self.metrics = Metrics(package_version(), METERED_PATHS, compat=Compat(settings.ops.metrics_compat))
        sinks: list[Sink] = [Console()]
        if self.event_log is not None:
            sinks.append(self.event_log)
            self.metrics.watch_event_log(partial(getattr, self.event_log, "lost_total"))
        self.operations = Operations(self.metrics, sinks, interval_seconds=settings.ops.throughput_interval_s)
        self.url = f"http://{settings.server.host}:{settings.server.port}"
        """Where it answers; to be told anew when the port is known."""
        self.is_over = False
        """Whether `stop` was called: whoever streams what the daemon says about itself is to end."""
        self.body_limits = BodyLimits.of(settings.server)
        """What a body may hold; to be told anew when the context is known."""
        self._began_at = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self.text_pool = TextPool()
        self._tries_next_at = 0.0
        self._has_memory_to_give_back = False
        self.isolation = Isolation(is_by_key=settings.isolates_keys)
        self._engine: Engine | None = None

    async def start(self) -> Engine:
        """Load the model in a thread, so that probes are answered meanwhile. Raises what `Engine.load` raises."""
        engine = await _in_abandonable_thread(lambda: load_engine(self.settings))
        await self.attach(engine)
        return engine

    async def attach(self, engine: Engine) -> None:
        """Start a loaded engine in this event loop and serve with it."""
        self.operations.started(self._served(engine), engine.snapshot())
        engine.observe(self.operations.engine_event)
        await engine.start()
        if self.drill.faults:
            await engine.set_faults(self.drill.faults)
        self.sampling_defaults = SamplingDefaults.from_folder(engine.model_folder, self.settings)
        self.metrics.watch_engine(engine.snapshot, self.model_id, engine.config.architecture, engine.backend_name)
        self.body_limits = BodyLimits.of(self.settings.server, engine.max_context_tokens)
        self._engine = engine
        self._watching = asyncio.create_task(self._watch(engine), name="dalsegno-watch")
        if self.phase is Phase.STARTING:
            self.phase = Phase.SERVING

    @property
    def engine(self) -> Engine:
        """The engine, for a client's request. Raises ApiError (503) while there is none to serve with."""
        if self._engine is None or self.phase is not Phase.SERVING:
            raise self._unavailable()
        return self._engine

    @property
    def loaded_engine(self) -> Engine:
        """The engine, for an operator, who looks at a drained one too. Raises ApiError (503) before there is one and
        when the process ends."""
        if self._engine is None or self.phase is Phase.ENDING:
            raise self._unavailable()
        return self._engine

    def _unavailable(self) -> ApiError:
        reasons = {Phase.DRAINING: "was drained and takes no requests", Phase.ENDING: "is shutting down"}
        reason = reasons.get(self.phase, "is still loading its model")
        return ApiError(503, f"the daemon {reason}", code="engine_unavailable", headers={"Retry-After": "1"})

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) unless `model` is a name of the served one, or left out, or any name will do."""
        if not (model is None or model in self.model_names or self.settings.server.any_model):
            message = f"no such model here; {' or '.join(map(repr, self.model_names))} is served"
            raise ApiError(404, message, param="model", code="model_not_found")

    def watch(self, scope: Scope, answers: Sequence[Generation]) -> list[Callable[[Delta], None]]:
        """Note that these answers to a request are in the queue; returns what is to see the deltas of each.

        They end with the request, however it ends: a generator that would leave them may never have begun.
        """
        names = [each.request_id for each in answers]
        state = scope["state"]
        state["answers"] = answers
        state["record"] = self.operations.request_began(state["request_id"], scope["path"], names)
        return [self.metrics.new_generation() for _ in answers]

    def request_ended(self, scope: Scope, status: int, seconds: float) -> None:
        """To be told of each request over HTTP."""
        state = scope["state"]
        path, outcome = scope["path"], outcome_of(status, bool(state.get("has_failed")))
        self.metrics.request_ended(path, outcome, seconds)
        for answer in state.get("answers", ()):
            answer.abandon()
        self._has_memory_to_give_back |= state.get("body_bytes", 0) >= LARGE_BYTES
        if "record" in state:
            state["record"].outcome = outcome
        elif path in GENERATING_PATHS:
            self.operations.request_rejected(state["request_id"], path, status, state.get(ERROR_CODE))

    def health(self) -> Health:
        engine = self._engine
        if engine is None or engine.status is EngineStatus.STOPPED:
            return self.operations.health(self.phase, None)
        beat = engine.heartbeat_age_seconds()
        return self.operations.health(self.phase, beat, engine.faults, engine.failures_since_token)

    def reopen_logs(self) -> None:
        """Go on in the files that their paths lead to now, for who rotates them; without any, only say so."""
        if self.event_log is None:
            logger.info("SIGHUP: there is no log file to reopen; the daemon goes on")
        else:
            self.event_log.reopen()

    def begin_drain(self) -> None:
        """Take no more requests from now on, until `undo_drain`; the running ones finish."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def undo_drain(self) -> None:
        """Take requests again. Raises ApiError (409) when the process was told to end."""
        if self.phase is Phase.ENDING:
            raise ApiError(409, "the daemon was told to end; that cannot be undone", code="ending")
        if self.phase is Phase.DRAINING:
            self.phase = Phase.SERVING

    async def drain(self, limit_seconds: float | None = None) -> bool:
        """Take no more requests, for good; wait for the running ones. False when the limit came first."""
        self.phase = Phase.ENDING
        return True if self._engine is None else await self._engine.drain(limit_seconds)

    async def stop(self, reason: str = "signal") -> None:
        """End what still runs, with an error to each. Safe to call twice."""
        if self.is_over:
            return
        self.is_over = True
        self.phase = Phase.ENDING
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        left = 0
        if self._engine is not None:
            now = self._engine.snapshot()
            left = now.running + now.waiting
            # What came about since the last look is told too.
            self.operations.tick(now, self.health())
            await self._engine.stop()
        self.text_pool.close()
        self.operations.changes.happened()
        self.operations.stopped(reason, is_drained=left == 0)
        if self.event_log is not None:
            await asyncio.to_thread(self.event_log.close)

    async def _watch(self, engine: Engine) -> None:
        """Judge how things stand each second; compare the books as soon as something looks amiss."""
        due = self.operations.audit_is_due
        while True:
            # A daemon that answers twenty requests a second would lose them all while an audit waits for the next tick.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await due.wait()
            due.clear()
            try:
                self.operations.tick(engine.snapshot(), self.health())
                if self.operations.wants_audit:
                    await engine.audit_cache()
                await self._try_again(engine)
                if self._has_memory_to_give_back:
                    self._has_memory_to_give_back = False
                    await asyncio.to_thread(give_back)
            except EngineUnavailableError:
                return
            except Exception:
                logger.exception("what watches the engine failed; it goes on in %g s", _TICK_SECONDS)

    async def _try_again(self, engine: Engine) -> None:
        """A daemon that is not ready because steps fail gets no requests from a balancer, so it sends itself one now
        and then: nothing else would find out that steps work again."""
        now = time.monotonic()
        if engine.failures_since_token < FAILED_STEPS_LIMIT or now < self._tries_next_at:
            return
        self._tries_next_at = now + _TRIAL_SECONDS
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_TRIAL_SECONDS):
                await engine.try_step()
                logger.warning("a step of the engine works again after failures; the daemon is ready")

    def _served(self, engine: Engine) -> Served:
        return Served(
            version=package_version(),
            model=self.model_id,
            architecture=engine.config.architecture,
            backend=engine.backend_name,
            max_context_tokens=engine.max_context_tokens,
            page_size_tokens=engine.page_size,
            max_concurrency=engine.options.max_concurrency,
            host_unit_bytes=engine.memory.host_unit_bytes,
            startup_seconds=time.monotonic() - self._began_at,
            url=self.url,
            is_cpu=engine.is_on_cpu,
        )


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
        activations=engine.activations,
        parse_special_tokens=engine.parse_special_tokens,
        kv_pages=_automatic(cache.kv_pages),
        kv_cache_mib=_automatic(cache.kv_cache_mib),
        kv_cache_dtype=cache.kv_cache_dtype,
        page_size=_automatic(cache.page_size),
        device_state_slots=_automatic(cache.device_state_slots),
        host_cache_mib=_automatic(cache.host_cache_mib),
        host_state_slots=None if cache.host_state_slots == "none" else cache.host_state_slots,
        prefix_reuse=cache.prefix_reuse,
        self_heal=cache.self_heal,
    )


def model_names(settings: Settings) -> tuple[str, ...]:
    """The configured names, or that of the checkpoint: a folder's last part, a hub id or a short name as it is."""
    server = settings.server
    named = () if server.model_name == "auto" else (server.model_name,)
    names = tuple(dict.fromkeys((*named, *server.served_model_names)))
    path = Path(server.model).expanduser()
    return names or (path.resolve().name if path.is_dir() else server.model,)


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
