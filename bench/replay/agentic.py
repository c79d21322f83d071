"""Agentic traffic from a seed: people and their agents, as a list of calls in the order of their time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from bench.replay.conversations import Call, Message

_SECONDS_PER_TOKEN = 0.02
_MOST_TOKENS = 96_000
"""A longer history is replaced by a summary of it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How much, and which: the same values make the same calls."""

    sessions: int
    """Alive at any time; when one ends for good, another begins."""
    hours: float
    seed: int


@dataclass(frozen=True, slots=True)
class _App:
    """What many sessions have in common."""

    name: str
    preamble_tokens: int
    """System text and tools."""
    agent_preamble_tokens: int
    """The same of its sub-agents."""
    thinks: bool
    """Its answers are sent back without the thinking before them."""


@dataclass(slots=True)
class _Session:
    """One person's conversation. Mutable while it goes on."""

    name: str
    app: _App
    messages: list[Message]
    turns_left: int
    turn_starts: list[int] = field(default_factory=list)
    """Where each turn begins in `messages`, for edits and forks."""

    @property
    def tokens(self) -> int:
        return sum(message.tokens for message in self.messages)


def make_calls(traffic: Traffic) -> list[Call]:
    """Tool loops, sub-agents with a common preamble, side calls, edits deep in the history, forks, retries, bursts of
    one-shot prompts, and sessions that end."""
    return _World(traffic).calls()


class _World:
    """Everything that happens, as events on a clock. Mutable: draws from its own random numbers."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._random = random.Random(f"dalsegno agentic {traffic.seed}")
        self._end = traffic.hours * 3600
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._names = count()
        self._calls: list[Call] = []
        self._apps = [
            _App(
                name=f"app{number}",
                preamble_tokens=self._tokens(9000, 0.5, 2000, 24000),
                agent_preamble_tokens=self._tokens(5000, 0.4, 1500, 12000),
                thinks=number % 2 == 0,
            )
            for number in range(6)
        ]

    def calls(self) -> list[Call]:
        for _ in range(self._traffic.sessions):
            self._at(self._random.uniform(0, 1800), self._begin_session)
        self._at(self._random.expovariate(1 / 2400), self._burst)
        while self._events:
            at, _, what = heapq.heappop(self._events)
            if at < self._end:
                what(at)
        self._calls.sort(key=lambda call: call.at_seconds)
        return [call for call in self._calls if call.at_seconds < self._end]

    # -- sessions

    def _begin_session(self, now: float) -> None:
        app = self._random.choices(self._apps, weights=[1 / (1 + rank) for rank in range(len(self._apps))])[0]
        session = _Session(
            name=self._name("session"),
            app=app,
            messages=[Message("system", f"{app.name} preamble", app.preamble_tokens)],
            turns_left=1 + self._geometric(8),
        )
        self._turn(now, session)

    def _turn(self, now: float, session: _Session) -> None:
        """A person writes; the agent works until it has an answer."""
        if session.tokens > _MOST_TOKENS:
            self._summarise(session)
        elif len(session.turn_starts) > 2:
            self._rewrite_history(now, session)
        session.turn_starts.append(len(session.messages))
        session.messages.append(self._message("user", 300, 1.0, 20, 6000))
        if self._random.random() < 0.25:
            self._side_call(now + self._random.uniform(0, 2))
        self._step(now, session, self._geometric(4) - 1)

    def _step(self, now: float, session: _Session, steps_left: int) -> None:
        """One request; while steps are left its answer calls tools, and their results follow."""
        answered_at = self._ask(now, session.name, session.app, session.messages)
        if self._random.random() < 0.02:
            self._call_again(now, session.name)
        if steps_left > 0:
            if self._random.random() < 0.03:
                answered_at = self._sub_agents(answered_at, session.app)
            session.messages.append(self._message("tool", 700, 1.0, 40, 12000))
            tool_seconds = self._random.lognormvariate(1.0, 1.0)
            self._at(answered_at + tool_seconds, lambda at: self._step(at, session, steps_left - 1))
            return
        session.turns_left -= 1
        if session.turns_left > 0:
            pause = min(self._random.lognormvariate(7.1, 1.0), 10800.0)
            self._at(answered_at + pause, lambda at: self._turn(at, session))
        else:
            self._at(answered_at + self._random.uniform(1, 120), self._begin_session)

    def _rewrite_history(self, now: float, session: _Session) -> None:
        """Now and then a person edits an old message, or tries something else from an old point in a second window."""
        draw = self._random.random()
        start = session.turn_starts[self._random.randrange(1, len(session.turn_starts))]
        if draw < 0.02:
            del session.messages[start:]
            session.turn_starts = [each for each in session.turn_starts if each < start]
        elif draw < 0.035:
            fork = _Session(
                name=self._name("fork"),
                app=session.app,
                messages=session.messages[:start],
                turns_left=self._geometric(2),
                turn_starts=[each for each in session.turn_starts if each < start],
            )
            self._at(now + self._random.uniform(1, 60), lambda at: self._fork_turn(at, fork))

    def _fork_turn(self, now: float, fork: _Session) -> None:
        """As any turn, but no other session begins when a fork ends."""
        fork.messages.append(self._message("user", 300, 1.0, 20, 6000))
        for _ in range(self._geometric(2)):
            now = self._ask(now, fork.name, fork.app, fork.messages) + self._random.lognormvariate(1.0, 1.0)
            fork.messages.append(self._message("tool", 700, 1.0, 40, 12000))
        answered_at = self._ask(now, fork.name, fork.app, fork.messages)
        fork.turns_left -= 1
        if fork.turns_left > 0:
            self._at(answered_at + self._random.lognormvariate(5.0, 1.0), lambda at: self._fork_turn(at, fork))

    def _summarise(self, session: _Session) -> None:
        summary = self._message("user", 3000, 0.3, 1000, 8000)
        session.messages = [session.messages[0], summary]
        session.turn_starts = []

    # -- what comes with them

    def _sub_agents(self, now: float, app: _App) -> float:
        """Several at once, with the same preamble and each with its own task; returns when the last one is done."""
        done = now
        for _ in range(self._random.randint(2, 4)):
            name = self._name("agent")
            messages = [
                Message("system", f"{app.name} agent preamble", app.agent_preamble_tokens),
                self._message("user", 400, 0.6, 50, 3000),
            ]
            at = now + self._random.uniform(0, 1)
            for _ in range(self._geometric(5)):
                at = self._ask(at, name, app, messages)
                messages.append(self._message("tool", 900, 1.0, 40, 12000))
                at += self._random.lognormvariate(0.7, 0.9)
            done = max(done, self._ask(at, name, app, messages))
        return done

    def _side_call(self, now: float) -> None:
        """A title, a safety check: a short prompt that nobody continues."""
        message = self._message("user", 400, 0.8, 50, 4000)
        self._one_shot(now, message, self._random.randint(8, 60))

    def _burst(self, now: float) -> None:
        """A batch job: many long one-shot prompts within a minute."""
        for _ in range(self._random.randint(10, 40)):
            message = self._message("user", 3000, 0.6, 500, 16000)
            self._one_shot(now + self._random.uniform(0, 60), message, self._random.randint(50, 300))
        self._at(now + self._random.expovariate(1 / 2400), self._burst)

    def _one_shot(self, now: float, message: Message, answer_tokens: int) -> None:
        name = self._name("single")
        answer = Message("assistant", f"{name} answer", answer_tokens)
        self._calls.append(Call(now, name, (message,), answer))

    def _call_again(self, now: float, thread: str) -> None:
        """A client that lost its answer sends the same body again."""
        last = self._calls[-1]
        again = Message("assistant", self._name("again"), last.answer.tokens)
        at_seconds = now + self._random.uniform(2, 30)
        self._calls.append(Call(at_seconds, f"{thread} again", last.messages, again, last.thinking_tokens))

    def _ask(self, now: float, thread: str, app: _App, messages: list[Message]) -> float:
        """Send these messages, add the answer to them; returns about when it is there."""
        answer = self._message("assistant", 150, 0.8, 10, 3000)
        thinking_tokens = self._tokens(150, 0.8, 20, 3000) if app.thinks else 0
        self._calls.append(Call(now, thread, tuple(messages), answer, thinking_tokens))
        messages.append(answer)
        return now + 0.5 + _SECONDS_PER_TOKEN * (answer.tokens + thinking_tokens)

    # -- chance

    def _at(self, seconds: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), what))

    def _name(self, kind: str) -> str:
        return f"{kind}{next(self._names)}"

    def _message(self, role: str, median: float, spread: float, least: int, most: int) -> Message:
        return Message(role, self._name("text"), self._tokens(median, spread, least, most))

    def _tokens(self, median: float, spread: float, least: int, most: int) -> int:
        """Log-normal, within bounds."""
        return max(least, min(most, round(median * self._random.lognormvariate(0, spread))))

    def _geometric(self, mean: float) -> int:
        """At least 1."""
        number = 1
        while self._random.random() > 1 / mean:
            number += 1
        return number
