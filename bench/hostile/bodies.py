"""Requests that are hostile or merely large, and how each has to be answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"

MAX_BODY_MIB = 32
"""What the daemon is to take, so that the largest of these are looked at and not only counted."""

_LARGE = "context_length_exceeded"
_INVALID = "invalid_value"
_SERVED = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A body, and the code of the error that it has to get on each path; empty where it has to be served."""

    name: str
    body: Callable[[], bytes]
    """Made when it is needed: all of them together are large."""
    codes: Mapping[str, str]


def cases() -> Iterator[Case]:
    """Every one, the shapeless ones first."""
    refused, served = {CHAT: _INVALID, TOKENIZE: _INVALID}, {CHAT: _SERVED, TOKENIZE: _SERVED}
    told = {CHAT: _LARGE, TOKENIZE: _SERVED}
    """Of what the context cannot hold, /tokenize says by how much."""
    yield Case("3 MB of ones for messages", lambda: _many(b"1", 1_500_000), refused)
    yield Case("30 MB of ones for messages", lambda: _many(b"1", 15_000_000), refused)
    yield Case("30 MB of brackets", lambda: b'{"messages":' + b"[" * 30_000_000, {CHAT: _INVALID})
    yield Case("30 MB of closing brackets", lambda: b'{"messages":' + b"]" * 30_000_000, {CHAT: _INVALID})
    yield Case("100,000 messages", lambda: _many(_SHORT, 100_000), refused)
    yield Case("1,000,000 messages", lambda: _many(_SHORT, 1_000_000), {CHAT: _INVALID})
    yield Case("4,096 messages, the last wrong", lambda: _many(_SHORT, 4095, b",1"), refused)
    yield Case("20,000 tool calls, results in reverse", lambda: _calls(20_000, 1), {CHAT: _INVALID})
    yield Case("4,000 tool calls, results in reverse", lambda: _calls(40, 100), told)
    yield Case("100,000 entries of logit_bias", lambda: _field("logit_bias", _biases(100_000)), {CHAT: _INVALID})
    yield Case("4,096 entries of logit_bias", lambda: _field("logit_bias", _biases(4096)), {CHAT: _SERVED})
    yield Case("100,000 stop strings", lambda: _field("stop", ["a"] * 100_000), {CHAT: _INVALID})
    yield Case("64 stop strings of 1 kB", lambda: _field("stop", ["a" * 1000] * 64), {CHAT: _SERVED})
    yield Case("120,000 integers of 19 digits", lambda: _field("metadata", [10**18] * 120_000), served)
    yield Case("an integer of 1,000,000 digits", lambda: _long_integer(1_000_000), {CHAT: "invalid_json"})
    yield Case("1,000,000 escapes and a lone surrogate", _surrogate, served)
    yield Case("140,000 token ids", lambda: _json(prompt=[5] * 140_000), {COMPLETIONS: _LARGE})
    yield Case("140,000 token ids", lambda: _json(tokens=[5] * 140_000), {DETOKENIZE: _SERVED})
    yield Case("a prompt of 1 MB of digits", lambda: digits(1_000_000), {COMPLETIONS: _LARGE, TOKENIZE: _SERVED})
    yield Case("25 prompts of 1 MB", lambda: _json(prompt=["a" * 1_000_000] * 25), {COMPLETIONS: _LARGE})
    yield Case("a message of 300 kB", lambda: _json(messages=[_said("word " * 60_000)]), told)
    yield Case("an argument of 1 MB of integers", _large_argument, {CHAT: _LARGE, TOKENIZE: _LARGE})
    yield Case("a session: 500 messages, 200 tools, 600 kB", _session, told)


_SHORT = b'{"role":"user","content":"a"}'


def digits(count: int) -> bytes:
    """A prompt that is one word, so that a tokenizer finds no place to stop in."""
    return _json(prompt="1234567890" * (count // 10))


def _json(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 1, **fields}).encode()


def _said(content: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def _field(name: str, value: Any) -> bytes:
    return _json(messages=[_said("hi")], **{name: value})


def _many(element: bytes, count: int, last: bytes = b"") -> bytes:
    return b'{"messages":[' + b",".join([element] * count) + last + b"]}"


def _biases(count: int) -> dict[str, int]:
    return {str(i): 1 for i in range(count)}


def _long_integer(count: int) -> bytes:
    return _field("metadata", 7).replace(b"7", b"1" * count)


def _surrogate() -> bytes:
    return _field("metadata", "text").replace(b"text", rb"\ud800" + rb"\n" * 1_000_000)


def _call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}


def _calls(turns: int, calls_of_a_turn: int) -> bytes:
    """`turns` messages with so many calls each, and the results of each turn in reverse."""
    messages = [_said("hi")]
    for turn in range(turns):
        names = [f"{turn}-{i}" for i in range(calls_of_a_turn)]
        messages.append({"role": "assistant", "content": None, "tool_calls": [_call(name) for name in names]})
        messages += [_said("1", "tool") | {"tool_call_id": name} for name in reversed(names)]
    return _json(messages=messages)


def _large_argument() -> bytes:
    call = _call("c", json.dumps({"list": list(range(150_000))}))
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return _json(messages=[_said("hi"), asked, _said("1", "tool") | {"tool_call_id": "c"}])


def _session() -> bytes:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(12)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(200)]
    turn = [
        _said('x = ["a", {"b": [1, 2]}]\n' * 100),
        {"role": "assistant", "content": None, "tool_calls": [_call("c", '{"path": "a.py"}')]},
        _said("[1, 2, {}]", "tool") | {"tool_call_id": "c"},
        _said("done " * 100, "assistant"),
    ]
    return _json(messages=turn * 125, tools=tools)
