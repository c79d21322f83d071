"""Traffic for labelled streams: small parts, each a list of calls from a source of chance, to be mixed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from enum import StrEnum
from itertools import count

from bench.replay.conversations import Call, Message

_SECONDS_PER_TOKEN = 0.02


class Writer:
    """Makes messages that nobody has written before. Mutable: draws from its own random numbers."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self._names = count()

    def name(self, kind: str) -> str:
        return f"{kind}{next(self._names)}"

    def message(self, role: str, median: float, spread: float = 0.7) -> Message:
        tokens = round(median * self.random.lognormvariate(0, spread))
        return Message(role, self.name("text"), max(4, min(tokens, round(median * 8))))

    def pause(self, median: float, spread: float = 0.8) -> float:
        return min(median * self.random.lognormvariate(0, spread), 20 * median)


def merge(*parts: Iterable[Call]) -> list[Call]:
    """In the order of time."""
    return sorted((call for part in parts for call in part), key=lambda call: call.at_seconds)


def chats(
    writer: Writer,
    *,
    hours: float,
    people: int,
    think_seconds: float = 40.0,
    turns: int = 12,
    system_tokens: int = 0,
    message_tokens: float = 250.0,
    namespaces: tuple[str, ...] = ("",),
    injects: bool = False,
) -> list[Call]:
    """People who write, read and write again; when one is done, another begins. `injects`: a proxy puts a message at
    the end of each call which it never sends again."""
    calls: list[Call] = []
    end = hours * 3600
    preamble = Message("system", writer.name("system"), system_tokens) if system_tokens else None
    for person in range(people):
        now = writer.random.uniform(0, min(end / 4, 300.0))
        namespace = namespaces[person % len(namespaces)]
        while now < end:
            name = writer.name("chat")
            messages = [preamble] if preamble is not None else []
            for _ in range(1 + int(writer.random.expovariate(1 / turns))):
                messages.append(writer.message("user", message_tokens))
                answer = writer.message("assistant", 120)
                sent = [*messages, writer.message("system", 30)] if injects else messages
                calls.append(Call(now, name, tuple(sent), answer, namespace=namespace))
                messages.append(answer)
                now += 0.5 + _SECONDS_PER_TOKEN * answer.tokens + writer.pause(think_seconds)
                if now >= end:
                    break
            now += writer.pause(think_seconds)
    return calls


def tool_loops(writer: Writer, *, hours: float, agents: int, preamble_tokens: int = 2000) -> list[Call]:
    """Agents that call tools: their next call comes within seconds."""
    calls: list[Call] = []
    end = hours * 3600
    preamble = Message("system", writer.name("tools"), preamble_tokens)
    for _ in range(agents):
        now = writer.random.uniform(0, 120.0)
        while now < end:
            name, messages = writer.name("agent"), [preamble, writer.message("user", 300)]
            for _ in range(2 + int(writer.random.expovariate(1 / 10))):
                answer = writer.message("assistant", 60)
                calls.append(Call(now, name, tuple(messages), answer))
                messages += [answer, writer.message("tool", 350, 1.0)]
                now += 0.5 + _SECONDS_PER_TOKEN * answer.tokens + writer.pause(3.0)
                if now >= end:
                    break
            now += writer.pause(60.0)
    return calls


def fan_out(writer: Writer, *, hours: float, every_seconds: float = 120.0, preamble_tokens: int = 3000) -> list[Call]:
    """A main agent that sends out several sub-agents at once, with one preamble and a task each."""
    calls: list[Call] = []
    preamble = Message("system", writer.name("preamble"), preamble_tokens)
    now = writer.random.uniform(0, every_seconds)
    while now < hours * 3600:
        for _ in range(writer.random.randint(3, 8)):
            name, messages = writer.name("sub"), [preamble, writer.message("user", 200)]
            at = now + writer.random.uniform(0, 2)
            for _ in range(1 + int(writer.random.expovariate(1 / 4))):
                answer = writer.message("assistant", 60)
                calls.append(Call(at, name, tuple(messages), answer))
                messages += [answer, writer.message("tool", 350, 1.0)]
                at += 0.5 + _SECONDS_PER_TOKEN * answer.tokens + writer.pause(3.0)
        now += writer.pause(every_seconds, 0.4)
    return calls


def forks(writer: Writer, *, hours: float, people: int) -> list[Call]:
    """Chats out of which others are begun at an old point: best of several, edits, second windows."""
    calls: list[Call] = []
    end = hours * 3600
    for _ in range(people):
        now, messages = writer.random.uniform(0, 120), [writer.message("user", 250)]
        name = writer.name("trunk")
        while now < end:
            answer = writer.message("assistant", 120)
            calls.append(Call(now, name, tuple(messages), answer))
            messages += [answer, writer.message("user", 250)]
            now += writer.pause(40.0)
            if len(messages) > 8 and writer.random.random() < 0.3:
                cut = writer.random.randrange(2, len(messages) - 2, 2)
                fork = [*messages[:cut], writer.message("user", 250)]
                calls.append(Call(now, writer.name("fork"), tuple(fork), writer.message("assistant", 120)))
            if len(messages) > 40:
                name, messages = writer.name("trunk"), [writer.message("user", 250)]
    return calls


def one_shots(
    writer: Writer,
    *,
    hours: float,
    every_seconds: float,
    tokens: float = 600.0,
    system_tokens: int = 0,
    begin_seconds: float = 0.0,
) -> list[Call]:
    """Prompts that nobody goes on with, some with one system text."""
    calls: list[Call] = []
    preamble = (Message("system", writer.name("system"), system_tokens),) if system_tokens else ()
    now = begin_seconds
    while now < hours * 3600:
        messages = (*preamble, writer.message("user", tokens))
        calls.append(Call(now, writer.name("single"), messages, writer.message("assistant", 60)))
        now += writer.random.expovariate(1 / every_seconds)
    return calls


def bursts(writer: Writer, *, hours: float, every_seconds: float, calls_each: int) -> list[Call]:
    """Several one-shot prompts at once, now and then."""
    calls: list[Call] = []
    now = writer.random.uniform(0, every_seconds)
    while now < hours * 3600:
        for _ in range(calls_each):
            body = (writer.message("user", 800),)
            calls.append(Call(now, writer.name("burst"), body, writer.message("assistant", 150)))
        now += writer.pause(every_seconds, 0.4)
    return calls


def cycle(
    writer: Writer,
    *,
    hours: float,
    conversations: int,
    every_seconds: float = 6.0,
    turns: int = 15,
    locked: bool = False,
) -> list[Call]:
    """So many conversations, each going on in its turn: what any rule by recency fares worst with. `locked`: all end at
    once, and as many new ones begin."""
    calls: list[Call] = []
    alive: list[tuple[str, list[Message], int]] = [("", [], 0)] * conversations
    now, number = 0.0, 0
    while now < hours * 3600:
        place = number % conversations
        name, messages, ends_at = alive[place]
        if len(messages) >= 2 * ends_at:
            name, messages = writer.name("cycle"), []
            alive[place] = name, messages, turns if locked else writer.random.randint(2, 2 * turns)
        messages.append(writer.message("user", 250))
        answer = writer.message("assistant", 60)
        calls.append(Call(now, name, tuple(messages), answer))
        messages.append(answer)
        now += writer.random.uniform(0.5, 1.5) * every_seconds
        number += 1
    return calls


class Order(StrEnum):
    """Who asks next. Each has a rule of keeping for which it is the worst."""

    ROTATION = "in rotation"
    RANDOM = "at random"
    BY_LENGTH = "the shortest first"
    BURSTS = "several turns at a time"
    LOCKSTEP = "in rotation, all begin anew at once"
    ONE_OF_MANY = "at random, each a client of its own"


def in_order(
    writer: Writer,
    order: Order,
    *,
    people: int,
    requests: int,
    every_seconds: float,
    turns: int,
    system_tokens: int = 0,
    is_system_shared: bool = False,
) -> list[Call]:
    """So many people, one of whom asks at a time; who is done begins anew. A system prompt is each conversation's own
    unless it is shared."""
    rng, calls = writer.random, list[Call]()
    shared = Message("system", writer.name("system"), max(system_tokens, 4))
    alive: list[tuple[str, list[Message], int]] = [("", [], 0)] * people
    queue: list[int] = []
    now = 0.0
    while len(calls) < requests:
        if not queue:
            queue = _next_round(order, people, [sum(each.tokens for each in one[1]) for one in alive], rng)
        one = queue.pop(0)
        name, messages, left = alive[one]
        if left == 0:
            system = shared if is_system_shared else Message("system", writer.name("system"), max(system_tokens, 4))
            name, messages = writer.name("ordered"), [system] if system_tokens else []
            left = turns if order is Order.LOCKSTEP else rng.randint(max(2, turns // 2), turns + turns // 2)
        messages.append(writer.message("user", 250, 0.4))
        answer = writer.message("assistant", 60, 0.4)
        namespace = f"client{one}" if order is Order.ONE_OF_MANY else ""
        calls.append(Call(now, name, tuple(messages), answer, namespace=namespace))
        messages.append(answer)
        alive[one] = name, messages, left - 1
        now += rng.uniform(0.7, 1.3) * every_seconds
    return calls


def _next_round(order: Order, people: int, lengths: list[int], rng: random.Random) -> list[int]:
    everybody = list(range(people))
    match order:
        case Order.ROTATION | Order.LOCKSTEP:
            return everybody
        case Order.BY_LENGTH:
            return sorted(everybody, key=lambda one: lengths[one])
        case Order.BURSTS:
            rng.shuffle(everybody)
            return [one for one in everybody for _ in range(rng.randint(1, 4))]
        case Order.RANDOM | Order.ONE_OF_MANY:
            return rng.choices(everybody, k=people)


def passing(writer: Writer, *, requests: int, every_seconds: float, tokens: int) -> list[Call]:
    """Four short chats, and between their turns six long prompts in turns: several come and go within a second."""
    long = [(Message("user", writer.name("long"), tokens),) for _ in range(6)]
    chats: list[list[Message]] = [[] for _ in range(4)]
    names = [writer.name("short") for _ in chats]
    calls, now = list[Call](), 0.0
    for number in range(requests // 2):
        place = number % len(chats)
        messages = chats[place]
        if len(messages) > 16:
            messages.clear()
            names[place] = writer.name("short")
        messages.append(writer.message("user", 30, 0.3))
        answer = writer.message("assistant", 8, 0.3)
        calls.append(Call(now, names[place], tuple(messages), answer))
        messages.append(answer)
        now += writer.random.uniform(0.5, 1.5) * every_seconds
        calls.append(Call(now, writer.name("passing"), long[number % len(long)], writer.message("assistant", 8, 0.3)))
        now += writer.random.uniform(0.5, 1.5) * every_seconds
    return calls


def repeats(writer: Writer, *, hours: float, prompts: int, every_seconds: float, tokens: float) -> list[Call]:
    """A few prompts, sent over and over."""
    bodies = [writer.message("user", tokens) for _ in range(prompts)]
    calls: list[Call] = []
    now = 0.0
    while now < hours * 3600:
        body = writer.random.choice(bodies)
        calls.append(Call(now, writer.name("again"), (body,), writer.message("assistant", 20)))
        now += writer.random.expovariate(1 / every_seconds)
    return calls


def but_for_a_night(calls: Iterable[Call], begin_seconds: float, end_seconds: float) -> list[Call]:
    """Those that come outside: the time between is a night."""
    return [call for call in calls if not begin_seconds <= call.at_seconds < end_seconds]
