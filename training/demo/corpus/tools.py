"""Chats with tools: a call with the right arguments, the tool's answer, and a reply that uses it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from training.demo.corpus.grammar import Context, capital
from training.demo.corpus.intents import tidy

Message = dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """Patterns around one call. `arguments` and `result` are expanded value by value."""

    name: str
    description: str
    parameters: dict[str, str]
    question: str
    arguments: dict[str, str]
    result: dict[str, str]
    reply: str


USES: tuple[ToolUse, ...] = (
    ToolUse(
        "get_weather",
        "Get the weather of a city",
        {"city": "string"},
        "[what is the weather in|how is the weather in|how warm is it in|what is the weather like in|weather in|is "
        "it cold in|tell me the weather in|will it rain in] {town} [|today|now]",
        {"city": "{town}"},
        {"temperature": "{degrees}", "sky": "{sky}"},
        "[It is {degrees} degrees in {town}, and the sky is {sky}|In {town} it is {degrees} degrees and {sky}|The "
        "weather in {town}: {degrees} degrees, {sky}].",
    ),
    ToolUse(
        "get_time",
        "Get the current time in a city",
        {"city": "string"},
        "[what time is it in|tell me the time in|how late is it in|what is the time in] {town} [|now]",
        {"city": "{town}"},
        {"time": "{clock}"},
        "[It is {clock} in {town}|In {town} it is {clock} now].",
    ),
    ToolUse(
        "add",
        "Add two numbers",
        {"a": "number", "b": "number"},
        "[what is|how much is|add|compute|please add] {age} [plus|and|+] {age2}",
        {"a": "{age}", "b": "{age2}"},
        {"sum": "{sum}"},
        "[{age} plus {age2} is {sum}|The sum is {sum}|That is {sum}].",
    ),
    ToolUse(
        "find_book",
        "Find a book about a subject",
        {"subject": "string"},
        "[find me a book about|is there a book about|i need a book about|search for a book about|look for a book "
        "about] {animal.plural}",
        {"subject": "{animal.plural}"},
        {"title": "The {adjective} {hero_animal}", "author": "{name}"},
        '[I found "The {adjective} {hero_animal}" by {name}|There is a book by {name}: "The {adjective} '
        '{hero_animal}"].',
    ),
    ToolUse(
        "get_health",
        "Read the health of the daemon",
        {},
        "[is the daemon healthy|how is the daemon|check the health|what does the health endpoint say|is everything "
        "all right with the server]",
        {},
        {"status": "{status}", "reuse": "{reuse}"},
        '[The daemon says "{status}", and its reuse is {reuse}|The status is {status}; reuse is {reuse}].',
    ),
    ToolUse(
        "set_timer",
        "Set a timer",
        {"minutes": "number"},
        "[set a timer for|wake me in|start a timer of|remind me in|please set a timer for] {age} minutes",
        {"minutes": "{age}"},
        {"ok": "true"},
        "[The timer is set for {age} minutes|Done: {age} minutes|I have set a timer for {age} minutes].",
    ),
    ToolUse(
        "send_message",
        "Send a message to a person",
        {"to": "string", "text": "string"},
        "[send a message to|write to|tell|text] {name}: [i am late|come at noon|see you on {weekday}|the {object} "
        "is here|good luck]",
        {"to": "{name}", "text": "{text}"},
        {"sent": "true"},
        "[I have sent your message to {name}|Done. {name} will read it soon].",
    ),
)


def specification(use: ToolUse) -> Message:
    properties = {key: {"type": kind} for key, kind in use.parameters.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": use.name, "description": use.description, "parameters": parameters},
    }


def tool_chat(ctx: Context) -> tuple[list[Message], list[Message]]:
    """Tools, and messages of one use of one of them."""
    rng = ctx.rng
    use = rng.choice(USES)
    others = rng.sample([other for other in USES if other is not use], rng.choice((0, 0, 1, 2)))
    tools = [specification(tool) for tool in (use, *others)]
    rng.shuffle(tools)
    ctx.bind("degrees", str(rng.randint(-9, 35)))
    ctx.bind("sky", rng.choice(("clear", "cloudy", "grey", "sunny", "rainy", "windy")))
    ctx.bind("clock", f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}")
    ctx.bind("status", rng.choice(("ok", "ok", "degraded")))
    ctx.bind("reuse", rng.choice(("healthy", "degraded", "collapsed", "recovering")))
    question = tidy(ctx.expand(use.question))
    if use.name == "add":
        ctx.bind("sum", str(int(ctx.draw("age").text) + int(ctx.draw("age", "2").text)))
    if use.name == "send_message":
        ctx.bind("text", question.split(": ", 1)[1])
    arguments: dict[str, Any] = {key: ctx.expand(value) for key, value in use.arguments.items()}
    for key, kind in use.parameters.items():
        if kind == "number":
            arguments[key] = int(arguments[key])
    result = {key: ctx.expand(value) for key, value in use.result.items()}
    if len(result) == 1 and rng.random() < 0.3:
        response = next(iter(result.values()))
    elif rng.random() < 0.3:
        response = ", ".join(f"{key}: {value}" for key, value in result.items())
    else:
        response = json.dumps(result)
    return tools, [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": use.name, "arguments": arguments}}]},
        {"role": "tool", "content": response},
        {"role": "assistant", "content": capital(tidy(ctx.expand(use.reply)))},
    ]
