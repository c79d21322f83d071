"""The engine loop: one task that owns all mutable state and turns submissions into deltas, one step at a time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from cache import AuditReport
from engine.audit import Auditor
from engine.ending import broken_off, finished, last_delta
from engine.errors import EngineUnavailableError, NonFiniteLogitsError, QueueTimeoutError, RequestError
from engine.events import EngineEvent, LoopRestarted, Observer, StepFailed
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason, GenerationRequest
from engine.runner import Runner
from engine.scheduler import Scheduler, TokenOutcome
from engine.sequence import SequenceRecord, SequenceState
from engine.stream import Generation, Mailbox
from engine.text.answer import AnswerText
from engine.text.detokenizer import Detokenizer
from engine.totals import LoopTotals

_IDLE_TURN_SECONDS = 1.0
_FAILURES_BEFORE_RESTART = 3
_SEED_BITS = 63

Result = TypeVar("Result")

logger = logging.getLogger("dalsegno.engine")


@dataclass(frozen=True, slots=True)
class _Submission:
    request: GenerationRequest
    submitted_at: float


@dataclass(frozen=True, slots=True)
class _Consumer:
    mailbox: Mailbox
    answer: AnswerText
    submission: _Submission


@dataclass(frozen=True, slots=True)
class _Command:
    work: Callable[[Scheduler], Any]
    answer: asyncio.Future[Any]

    def run(self, scheduler: Scheduler) -> None:
        if self.answer.done():
            return
        try:
            self.answer.set_result(self.work(scheduler))
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
            self.answer.set_exception(error)


class EngineLoop:
    """Owner of the scheduler, the inbox and every answer. Mutable: only the event loop's thread may touch it; the
    runner works in a thread of its own, while nothing else touches what it works on.
    """

    def __init__(
        self,
        new_scheduler: Callable[[], Scheduler],
        runner: Runner,
        new_detokenizer: Callable[[], Detokenizer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = LoopTotals()
        self.consecutive_failures = 0
        """Steps that raised, one after the other."""
        self.failures_since_token = 0
        """Steps that raised or had rows without a token, since one last gave a token: only that proves the model."""
        self.scheduler = new_scheduler()
        self._new_scheduler = new_scheduler
        self._runner = runner
        self._new_detokenizer = new_detokenizer
        self._clock = clock
        self.observer: Observer | None = None
        self.auditor = Auditor(clock, self.tell)
        self._turned_at = clock()
        self._first_cause: Exception | None = None
        self._inbox: deque[_Submission] = deque()
        self._cancelled: deque[tuple[str, Mailbox]] = deque()
        self._commands: deque[_Command] = deque()
        self._consumers: dict[str, _Consumer] = {}
        self._has_work = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._is_idle = asyncio.Event()
        self._is_stopping = False
        self._is_closed = False
        self._thread = _new_thread()

    @property
    def heartbeat_age_seconds(self) -> float:
        return self._clock() - self._turned_at

    @property
    def inbox_size(self) -> int:
        return len(self._inbox)

    @property
    def suspensions_total(self) -> int:
        return self.totals.suspensions + self.scheduler.suspensions_total

    @property
    def recomputed_tokens_total(self) -> int:
        return self.totals.recomputed_tokens + self.scheduler.recomputed_tokens_total

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request, with a seed if it has none. Raises RequestError and its kinds for one that is refused."""
        if request.request_id in self._consumers:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        of_client = sum(each.request.client == request.client for each in self._inbox)
        self.scheduler.validate(request, len(self._inbox), of_client)
        seed = request.sampling.seed
        seed = secrets.randbits(_SEED_BITS) if seed is None else seed & (2**_SEED_BITS - 1)
        request = replace(request, sampling=replace(request.sampling, seed=seed))
        mailbox = Mailbox()
        submission = _Submission(request, self._clock())
        answer = AnswerText(self._new_detokenizer(), request.sampling, request.thinking)
        self._consumers[request.request_id] = _Consumer(mailbox, answer, submission)
        self._inbox.append(submission)
        self._is_empty.clear()
        self._is_idle.clear()
        self._has_work.set()
        return Generation(request.request_id, mailbox, partial(self._cancel, request.request_id, mailbox))

    async def between_steps(self, work: Callable[[Scheduler], Result]) -> Result:
        """Call `work` in the loop's task while no step runs. Raises what it raises, or EngineUnavailableError when the
        loop ends first."""
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._commands.append(_Command(work, answer))
        self._has_work.set()
        return await answer

    def tell(self, event: EngineEvent) -> None:
        """Let the observer know, if there is one."""
        if self.observer is None:
            return
        try:
            self.observer(event)
        except Exception:
            logger.exception("an observer of the engine failed at %s", type(event).__name__)

    def audit(self) -> AuditReport:
        """Check the books now. Not to be called while a step runs."""
        return self.auditor.audit(self.scheduler)

    async def run(self) -> None:
        """Turn until `stop`. A fault costs the requests it hits, never the loop."""
        try:
            while not self._is_stopping:
                try:
                    await self._turn()
                except Exception as error:
                    logger.exception("the engine loop failed, and with it every request; restarting it")
                    self.failures_since_token += 1
                    self._restart(error, keeps_waiting=False)
                    self._has_work.clear()
                    await self._wait_for_work()
        finally:
            self._close()

    async def wait_until_empty(self) -> None:
        """Returns when no request is alive and nothing is copied any more."""
        await self._is_empty.wait()
        await self._is_idle.wait()

    async def stop(self, task: asyncio.Task[None] | None) -> None:
        """End `run`'s task, if it was started, after its current step; what is left fails."""
        self._is_stopping = True
        self._has_work.set()
        if task is None:
            self._close()
        else:
            await asyncio.wait([task])

    def _close(self) -> None:
        for request_id in tuple(self._consumers):
            sequence = self.scheduler.cancel(request_id, self._clock())
            error = EngineUnavailableError("the engine was stopped; send the request again later")
            self._fail(request_id, error, sequence)
        self._inbox.clear()
        for command in self._commands:
            if not command.answer.done():
                command.answer.set_exception(EngineUnavailableError("the engine was stopped"))
        self._commands.clear()
        self._is_idle.set()
        self._close_runner()

    def _close_runner(self) -> None:
        """Behind the step that may still run. The runner, and with it the memory that copies under way read and write,
        is held until then."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._runner.close)
            self._thread.shutdown(wait=False)

    def _cancel(self, request_id: str, mailbox: Mailbox) -> None:
        """Note that a consumer has left. May be called from any thread, by the garbage collector; wakes nothing, for
        the loop turns as long as a request is alive."""
        self._cancelled.append((request_id, mailbox))

    async def _turn(self) -> None:
        self._turned_at = now = self._clock()
        self._take_in()
        self.auditor.audit_if_due(self.scheduler, is_idle=False)
        plan = self.scheduler.plan(now)
        for sequence in self.scheduler.expire(now):
            self._fail(sequence.request_id, self._waited_too_long(sequence, now), sequence)
        if plan is None:
            self._is_idle.set()
            self.auditor.audit_if_due(self.scheduler, is_idle=True)
            await self._wait_for_work()
            return
        self._is_idle.clear()
        self.auditor.worked()
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.run, plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is logged and costs this step's requests only
            self._step_failed(plan, error)
            return
        if plan.segments:
            self.consecutive_failures = 0
            self._first_cause = None
        if result.not_finite:
            self._give_up(result)
        if result.token_ids:
            self.failures_since_token = 0
        prefilled = self.totals.count_step(plan, result, self._clock() - now)
        if prefilled:
            prefill_seconds = result.compute_seconds * prefilled / plan.num_tokens
            self.scheduler.cache.costs.saw_prefill(prefilled, prefill_seconds, self._clock())
        self._log_failed_copies(result)
        for outcome in self.scheduler.apply(plan, result, self._clock()):
            self._hand_out(outcome)
        self.totals.count_turn(result, self._clock() - now)

    def _take_in(self) -> None:
        while self._inbox:
            submission = self._inbox.popleft()
            self.scheduler.submit(submission.request, submission.submitted_at)
        while self._cancelled:
            request_id, mailbox = self._cancelled.popleft()
            consumer = self._consumers.get(request_id)
            if consumer is not None and consumer.mailbox is mailbox:
                sequence = self.scheduler.cancel(request_id, self._clock())
                self._break_off(consumer, sequence, None)
        while self._commands:
            self._commands.popleft().run(self.scheduler)

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(_IDLE_TURN_SECONDS):
                await self._has_work.wait()
        except TimeoutError:
            return
        self._has_work.clear()

    def _hand_out(self, outcome: TokenOutcome) -> None:
        sequence, reason = outcome.sequence, outcome.finish_reason
        consumer = self._consumers[sequence.request_id]
        if reason is not FinishReason.STOP:
            piece = consumer.answer.push(outcome.token_id, outcome.logprob)
            consumer.mailbox.put(piece.text, outcome.token_id, piece.logprobs, piece.reasoning)
            if consumer.answer.is_stopped:
                reason = FinishReason.STOP
                self.scheduler.stop(sequence.request_id, self._clock())
        if reason is not None:
            consumer.mailbox.finish(last_delta(consumer.answer, sequence, reason))
            self._forget(sequence.request_id)
            self.tell(finished(sequence, reason))

    def _give_up(self, result: StepResult) -> None:
        """Rows without a token cost their own requests: nothing speaks against what others have in the pools."""
        self.failures_since_token += 1
        cause = NonFiniteLogitsError.__name__
        self.tell(StepFailed(cause, len(result.not_finite), self.consecutive_failures))
        for sequence in self.scheduler.give_up(result.not_finite, self._clock()):
            self._fail(sequence.request_id, _unavailable(cause), sequence)

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        self.totals.step_failures += 1
        self.consecutive_failures += 1
        self.failures_since_token += 1
        self._first_cause = self._first_cause or error
        logger.error("a step failed, and with it %d requests", len(plan.segments), exc_info=error)
        error.__traceback__ = None  # its frames hold the step's tensors
        self.tell(StepFailed(type(error).__name__, len(plan.segments), self.consecutive_failures))
        for sequence in self.scheduler.fail(plan, self._clock()):
            self._fail(sequence.request_id, _unavailable(type(self._first_cause).__name__), sequence)
        if self.consecutive_failures % _FAILURES_BEFORE_RESTART == 0:
            logger.error("%d steps failed in a row; restarting the engine loop", self.consecutive_failures)
            self._restart(self._first_cause, keeps_waiting=True)

    def _restart(self, cause: Exception, *, keeps_waiting: bool) -> None:
        """Begin anew with the weights that are there: fresh pools, a fresh thread.

        What lies in the pages and slots needs no cleaning, for a sequence reads only what it wrote itself. Requests
        that had begun fail; those that only waited stay in the queue, or fail too.
        """
        self.totals.restarts += 1
        self.totals.suspensions += self.scheduler.suspensions_total
        self.totals.recomputed_tokens += self.scheduler.recomputed_tokens_total
        begun = {each.request_id: each for each in (*self.scheduler.running, *self.scheduler.waiting)}
        waiting = [each for each in self.scheduler.waiting if each.state is SequenceState.WAITING]
        if not keeps_waiting:
            waiting.clear()
            self._inbox.clear()
        self.scheduler = self._new_scheduler()
        kept = {sequence.request_id for sequence in waiting} | {each.request.request_id for each in self._inbox}
        for request_id in self._consumers.keys() - kept:
            sequence = begun.get(request_id)
            if sequence is not None:
                sequence.finish(self._clock())
            self._fail(request_id, _unavailable(type(cause).__name__), sequence)
        for sequence in waiting:
            self.scheduler.submit(sequence.request, sequence.submitted_at)
        self._thread.shutdown(wait=False)
        self._thread = _new_thread()
        logger.warning("the engine loop restarted; %d waiting requests were kept", len(waiting))
        self.tell(LoopRestarted(type(cause).__name__))

    def _fail(self, request_id: str, error: RequestError, sequence: SequenceRecord | None) -> None:
        consumer = self._consumers.get(request_id)
        if consumer is not None:
            consumer.mailbox.fail(error)
            self._break_off(consumer, sequence, error)

    def _break_off(self, consumer: _Consumer, sequence: SequenceRecord | None, error: RequestError | None) -> None:
        request, submitted_at = consumer.submission.request, consumer.submission.submitted_at
        self._forget(request.request_id)
        self.tell(broken_off(request, submitted_at, sequence, error, self._clock()))

    def _forget(self, request_id: str) -> None:
        self._consumers.pop(request_id, None)
        if not self._consumers:
            self._is_empty.set()

    def _log_failed_copies(self, result: StepResult) -> None:
        for outcome in result.copied.values():
            if outcome.error is not None:
                logger.error("a copy to or from host memory failed", exc_info=outcome.error)
                outcome.error.__traceback__ = None  # its frames hold tensors

    def _waited_too_long(self, sequence: SequenceRecord, now: float) -> QueueTimeoutError:
        limit = self.scheduler.limits.pending_timeout_seconds
        waited = now - sequence.submitted_at
        return QueueTimeoutError(
            f"the request waited {waited:.1f} seconds for room; the limit is {limit:g}; try again later"
        )


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="dalsegno-engine")


def _unavailable(cause: str) -> EngineUnavailableError:
    """The client is told the type of what failed. The text is a driver's or a library's, and for the log alone."""
    return EngineUnavailableError(f"the engine failed while it computed this request ({cause}); send it again")
