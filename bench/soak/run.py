"""Runs a soak: workers that carry sessions on, clients that leave, pauses in which the books are checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.soak.checks import (
    Account,
    Retries,
    breaches_of_pause,
    breaches_of_reply,
    difference_from_cold,
    missed_again,
)
from bench.soak.client import Leave, Manner, Reply, SoakClient
from bench.soak.observer import Observer, Page, Sample, resident_bytes
from bench.soak.sessions import CHAT, Ask, Session, sessions, words

MOST_BREACHES = 10
_LIVE_SESSIONS = 24
_LEAVE_SHARE = 0.08
_RETRY_SHARE = 0.08
_COMPARED_SHARE = 0.06
_DROPPED_SHARE = 0.01
_MOST_REQUESTS_PER_PAUSE = 250
_LEAST_PAUSES = 10
_BY_ITSELF = ("stop", "length")
"""How an answer ends that the counters count; one that was left or that failed has a result too, as far as it came."""
_REQUESTS_PER_AUDIT = 50
_REQUESTS_PER_RESET = 700
_SAMPLE_SECONDS = 2.0
_SETTLE_SECONDS = 30.0
_RESETS: tuple[list[str], ...] = (["device"], ["host"], ["device", "host", "disk"])


@dataclass(slots=True)
class Findings:
    """What a soak found. Mutable."""

    breaches: list[str] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    retries: Retries = field(default_factory=Retries)
    left: int = 0
    refused: int = 0
    overloaded: int = 0
    compared: int = 0
    audits: int = 0
    resets: int = 0
    resets_with_something_in_use: int = 0
    pauses: list[tuple[int, int]] = field(default_factory=list)
    """Requests sent and resident bytes at each pause."""

    def breach(self, lines: list[str]) -> None:
        self.breaches += lines


class Soak:
    """One run against one daemon, beside a cold one that remembers nothing. Mutable; made for one event loop."""

    def __init__(
        self,
        client: SoakClient,
        cold: SoakClient,
        pid: int,
        *,
        requests: int,
        workers: int,
        seed: int,
        tell: Callable[[Sample, int], None],
    ) -> None:
        self.findings = Findings()
        self.observer = Observer(pid)
        self._client = client
        self._cold = cold
        self._requests = requests
        self._requests_per_pause = min(_MOST_REQUESTS_PER_PAUSE, -(-requests // _LEAST_PAUSES))
        self._workers = workers
        self._tell = tell
        self._choice = random.Random(f"soak run {seed}")
        self._sessions = sessions(seed)
        self._idle: list[tuple[Session, str | None]] = []
        self._sent = 0
        self._unresolved: list[str] = []
        self._to_compare: asyncio.Queue[tuple[Ask, Reply]] = asyncio.Queue()
        self._started = time.monotonic()

    @property
    def sent(self) -> int:
        return self._sent

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    async def run(self) -> None:
        """Until all requests were sent, or too much was found to be wrong. Closes its clients."""
        helpers = [asyncio.create_task(self._watch()), asyncio.create_task(self._compare())]
        try:
            while self._sent < self._requests and not self._is_hopeless:
                goal = min(self._sent + self._requests_per_pause, self._requests)
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(self._workers):
                        tasks.create_task(self._work_until(goal))
                    tasks.create_task(self._interfere_until(goal))
                await self._pause()
            await self._look()
        finally:
            for helper in helpers:
                helper.cancel()
            ends = await asyncio.gather(*helpers, return_exceptions=True)
            self.findings.breach([f"a helper failed: {end!r}" for end in ends if isinstance(end, Exception)])
            await self._client.close()
            await self._cold.close()

    @property
    def _is_hopeless(self) -> bool:
        return len(self.findings.breaches) >= MOST_BREACHES

    # -- traffic

    async def _work_until(self, goal: int) -> None:
        while self._sent < goal and not self._is_hopeless:
            session, text = self._next_session()
            ask = _go_on(session, text)
            if ask is None:
                continue
            answer = await self._carry_out(ask)
            if answer is None or self._choice.random() < _DROPPED_SHARE:
                session.close()
            else:
                self._idle.append((session, answer))

    def _next_session(self) -> tuple[Session, str | None]:
        """A new one while there are few; else one of those that wait, sooner one that was active a short while ago."""
        if len(self._idle) + self._workers <= _LIVE_SESSIONS or not self._idle:
            return next(self._sessions), None
        place = int(len(self._idle) * (1 - self._choice.random() ** 2))
        return self._idle.pop(min(place, len(self._idle) - 1))

    async def _carry_out(self, ask: Ask) -> str | None:
        """The text of the answer, after whatever happens on the way; None ends the session."""
        choice = self._choice
        if choice.random() < _LEAVE_SHARE:
            await self._send(ask, _leaving(choice))
        ask = self._maybe_compared(ask)
        if ask.copies > 1:
            replies = await asyncio.gather(*(self._send(ask, _patient(choice)) for _ in range(ask.copies)))
            return replies[0].text if replies[0].is_answered else None
        reply = await self._send(ask, _patient(choice))
        if not reply.is_answered:
            return None
        if ask.body.get("logprobs") and reply.reuse["cached_tokens"]:
            self._to_compare.put_nowait((ask, reply))
        if choice.random() < _RETRY_SHARE:
            again = await self._send(ask, _patient(choice))
            if again.is_answered:
                self.findings.retries.total += 1
                missed = missed_again(reply, again)
                self.findings.retries.missed += [missed] if missed else []
        return reply.text

    def _maybe_compared(self, ask: Ask) -> Ask:
        is_fit = ask.path == CHAT and ask.body.get("temperature") == 0 and not ask.is_refused and "stop" not in ask.body
        if not is_fit or self._choice.random() >= _COMPARED_SHARE:
            return ask
        return Ask(ask.path, {**ask.body, "logprobs": True, "top_logprobs": 2}, copies=ask.copies)

    async def _send(self, ask: Ask, manner: Manner) -> Reply:
        self._sent += 1
        findings = self.findings
        try:
            reply = await self._client.ask(ask, manner)
        except httpx.HTTPError as error:
            findings.breach([f"request {self._sent}: the daemon did not answer: {error!r}"])
            return Reply("", error="no_answer")
        if reply.was_left:
            findings.left += 1
            self._unresolved.append(reply.request_id)
            return reply
        findings.breach(breaches_of_reply(reply, must_be_refused=ask.is_refused))
        if reply.is_answered:
            self._enter(reply.usage["prompt_tokens"], reply.reuse)
        elif ask.is_refused:
            findings.refused += 1
        else:
            findings.overloaded += 1
        return reply

    def _enter(self, prompt_tokens: int, reuse: dict[str, Any]) -> None:
        self.findings.account.add(prompt_tokens, reuse["cached_tokens"], reuse["source"]["host"])

    # -- what happens beside the traffic

    async def _interfere_until(self, goal: int) -> None:
        """Audits, and now and then a reset, while requests run."""
        next_audit = self._sent + _REQUESTS_PER_AUDIT
        while self._sent < goal and not self._is_hopeless:
            if self._sent >= next_audit:
                next_audit += _REQUESTS_PER_AUDIT
                await self._audit("while requests ran")
            if self._sent >= (self.findings.resets + 1) * _REQUESTS_PER_RESET:
                await self._reset()
            await asyncio.sleep(0.02)

    async def _reset(self) -> None:
        tiers = _RESETS[self.findings.resets % len(_RESETS)]
        self.findings.resets += 1
        answer = await self._client.post("/admin/cache/reset", {"tiers": tiers})
        self.findings.resets_with_something_in_use += answer.status_code == 409
        if answer.status_code not in (200, 409):
            self.findings.breach([f"a reset of {tiers} got {answer.status_code}: {answer.text}"])

    async def _audit(self, when: str) -> list[str]:
        self.findings.audits += 1
        violations = (await self._client.post("/admin/cache/audit")).json()["violations"]
        self.findings.breach([f"an audit {when}: {line}" for line in violations])
        return list(violations)

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _look(self) -> Page:
        page = Page.parse((await self._client.get("/metrics")).text)
        self._tell(self.observer.look(page, self.seconds, self._sent), self._requests)
        return page

    async def _compare(self) -> None:
        while True:
            ask, warm = await self._to_compare.get()
            try:
                breach = await self._difference(ask, warm)
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                breach = f"{warm.request_id}: cannot be compared: {error!r}"
            self.findings.breach([breach] if breach else [])
            self._to_compare.task_done()

    async def _difference(self, ask: Ask, warm: Reply) -> str:
        self.findings.compared += 1
        cold = await self._cold.ask(ask, Manner(is_streamed=False))
        if not cold.is_answered:
            return f"the cold daemon answered {cold.status} {cold.error}"
        return difference_from_cold(warm, cold)

    # -- pauses

    async def _pause(self) -> None:
        """Nobody asks anything: the books must be closed, and a new prompt must hit when it is sent again."""
        await self._to_compare.join()
        cache = await self._settled()
        self.findings.breach(breaches_of_pause(cache, await self._audit("in a pause")))
        self.findings.breach(await self._differences())
        await self._send_twice()
        self.findings.pauses.append((self._sent, resident_bytes(self.observer.pid)))

    async def _settled(self) -> dict[str, Any]:
        """/admin/cache once nothing runs, waits or is copied any more, or when that takes too long."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            cache: dict[str, Any] = (await self._client.get("/admin/cache")).json()
            held = sum(units["pinned"] + units["in_flight"] for units in cache["pools"].values())
            if not (cache["requests_running"] or cache["requests_waiting"] or held) or time.monotonic() > deadline:
                return cache
            await asyncio.sleep(0.05)

    async def _differences(self) -> list[str]:
        """Between what the answers said and the counters; those of clients that left are looked up."""
        deadline = time.monotonic() + _SETTLE_SECONDS / 6
        while True:
            await self._resolve()
            page = Page.parse((await self._client.get("/metrics")).text)
            differences = self.findings.account.differences(page.account())
            if not differences or time.monotonic() > deadline:
                return differences
            await asyncio.sleep(0.1)

    async def _resolve(self) -> None:
        """An answer may have ended though its client had left: then it counts."""
        open_ids, self._unresolved = self._unresolved, []
        for request_id in open_ids:
            response = await self._client.get(f"/admin/requests/{request_id}")
            if response.status_code == 404:
                continue
            record = response.json()
            if record["outcome"] is None:
                self._unresolved.append(request_id)
            for answer in record["answers"]:
                if answer["finish_reason"] in _BY_ITSELF:
                    self._enter(answer["result"]["prompt_tokens"], answer["result"])

    async def _send_twice(self) -> None:
        messages = [{"role": "user", "content": words(self._choice, 40, 80)}]
        ask = Ask(CHAT, {"messages": messages, "max_tokens": 2, "temperature": 0})
        first = await self._send(ask, Manner(is_streamed=True))
        again = await self._send(ask, Manner(is_streamed=False))
        if not (first.is_answered and again.is_answered):
            self.findings.breach([f"in a pause: {first.status} {first.error}, {again.status} {again.error}"])
            return
        missed = missed_again(first, again)
        self.findings.breach([f"in a pause, {missed}"] if missed else [])


def _go_on(session: Session, text: str | None) -> Ask | None:
    """The session's next ask; None when it is over."""
    with suppress(StopIteration):
        return next(session) if text is None else session.send(text)
    return None


def _patient(choice: random.Random) -> Manner:
    return Manner(is_streamed=choice.random() < 0.5)


def _leaving(choice: random.Random) -> Manner:
    leave = choice.choice((Leave.HALF_SENT, Leave.AT_ONCE, Leave.LATER, Leave.LATER, Leave.LATER, Leave.READING))
    return Manner(
        is_streamed=leave is Leave.READING or choice.random() < 0.5,
        leave=leave,
        after_seconds=choice.uniform(0.0, 0.6),
        after_events=choice.randint(1, 4),
    )
