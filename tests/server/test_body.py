"""What a body may hold, and that nothing is made of one that holds more."""

import json
import threading
from types import SimpleNamespace
from typing import Annotated
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request

from server.body import _pieces, check_structure, load_object, parse, read_body
from server.errors import ApiError
from server.limits import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, MAX_STRINGS, BodyLimits
from server.schema.admin import FaultsRequest, ResetRequest
from server.schema.base import AtMost, RequestModel
from server.schema.chat import MAX_TOOLS, ChatCompletionRequest
from server.schema.completion import MAX_PROMPTS, CompletionRequest
from server.schema.messages import MAX_CALLS, MAX_PARTS
from server.schema.sampling import MAX_BIASES
from server.schema.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from server.settings import ServerSettings

CONTEXT = 4096
LIMITS = BodyLimits.of(ServerSettings(), CONTEXT)
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
PART = {"type": "text", "text": ""}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def many(element, count, before='{"messages":[', after="]}"):
    return f"{before}{','.join([element] * count)}{after}".encode()


def read(raw, schema=ChatCompletionRequest):
    return parse(schema, load_object(raw, LIMITS).value)


def refusal(raw, schema=ChatCompletionRequest):
    with pytest.raises(ApiError) as caught:
        read(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), schema)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (many("1", 200_000), "values"),
        (many("[]", MAX_CONTAINERS), "arrays and objects"),
        (many("{}", MAX_CONTAINERS), "arrays and objects"),
        (many('""', MAX_STRINGS), "strings"),
        (json.dumps(dict.fromkeys(map(str, range(MAX_KEYS + 1)))).encode(), f"{MAX_KEYS} fields"),
        (b'{"messages":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "inside each other"),
        (many("1", 4097), "more than 4,096 messages (--max-messages)"),
        (many('{"role":"user","content":"a"}', 4097), "more than 4,096 messages (--max-messages)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_with_too_much_in_it_is_refused(raw, said):
    error = refusal(raw)
    assert said in error.message
    assert error.code == "invalid_value"


def test_nothing_is_parsed_of_a_body_with_too_many_values(monkeypatch):
    monkeypatch.setattr("server.body.load", None)
    assert "values" in refusal(many("1", 200_000)).message


@pytest.mark.parametrize(
    ("raw", "schema", "param"),
    [
        ({"messages": [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}]}, ChatCompletionRequest, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * (MAX_CALLS + 1)}]}, ChatCompletionRequest, "mess"),
        (HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}] * (MAX_TOOLS + 1)}, None, "tools"),
        (HELLO | {"stop": ["a"] * 1000}, None, "stop"),
        (HELLO | {"stop_token_ids": [1] * 1000}, None, "stop_token_ids"),
        (HELLO | {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1)}, None, "logit_bias"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, CompletionRequest, "prompt"),
        ({"prompt": [[1]] * (MAX_PROMPTS + 1)}, CompletionRequest, "prompt"),
        ({"tiers": ["device"] * 65}, ResetRequest, "tiers"),
        ({"faults": ["step_fail"] * 65}, FaultsRequest, "faults"),
    ],
)
def test_a_list_that_is_too_long_is_named(raw, schema, param):
    error = refusal(raw, schema or ChatCompletionRequest)
    assert error.param.startswith(param)
    assert "at most" in error.message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 4096},
        {"messages": [{}] * 4096},
        {"messages": [{"role": "user", "content": [1] * 4096}]},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 1000}]},
        {"messages": HELLO["messages"], "tools": [1] * 1000},
        {"messages": HELLO["messages"], "stop": [1] * 16},
    ],
)
def test_one_error_is_made_for_a_list_of_wrong_elements(body):
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    # An element may lack several fields.
    assert caught.value.error_count() <= 2


def lists_of(schema):
    """Every list and dict of a core schema, wherever it is."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict", "set", "tuple"):
            yield schema
        for value in schema.values():
            yield from lists_of(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from lists_of(value)


@pytest.mark.parametrize(
    "schema",
    [
        ChatCompletionRequest,
        CompletionRequest,
        TokenizeTextRequest,
        TokenizeChatRequest,
        DetokenizeRequest,
        ResetRequest,
        FaultsRequest,
    ],
)
def test_every_list_of_every_request_is_bounded_and_fails_at_its_first_element(schema):
    found = list(lists_of(TypeAdapter(schema).core_schema))
    unbounded = [
        each for each in found if each["type"] == "list" and not (each.get("max_length") and each["fail_fast"])
    ]
    assert unbounded == []
    # What a dict holds is unchecked, or counted before it is looked at.
    checked = [each for each in found if each["type"] == "dict" and each["values_schema"]["type"] != "any"]
    assert len(checked) == (1 if "logit_bias" in schema.model_fields else 0)


def all_request_models(model=RequestModel):
    for child in model.__subclasses__():
        yield child
        yield from all_request_models(child)


def test_no_request_declares_a_list_without_a_bound():
    for model in all_request_models():
        for name, field in model.model_fields.items():
            if "list[" in repr(field.annotation):
                assert "AtMost" in repr(field) or "FailFast" in repr(field), f"{model.__name__}.{name}"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\[]{},:\n\u00e9', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[,{', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def size_of(value):
    """Elements and fields in all, containers counted apart, and the depth."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inside = [size_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    commas = max(len(value) - 1, 0) + sum(each[0] for each in inside)
    return commas, 1 + sum(each[1] for each in inside), 1 + max((each[2] for each in inside), default=0)


@settings(max_examples=60, deadline=None)
@given(value=ANYTHING, is_ascii=st.booleans(), indent=st.sampled_from((None, 1)), piece=st.sampled_from((1, 2, 7, 999)))
def test_values_are_counted_without_parsing_and_piece_by_piece(value, is_ascii, indent, piece):
    commas, containers, _ = size_of(value)
    raw = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    with patch("server.body.PIECE_BYTES", piece):
        assert check_structure(raw, BodyLimits(1, commas + containers, 1)) is False
        if commas + containers:
            with pytest.raises(ApiError, match="values"):
                check_structure(raw, BodyLimits(1, commas + containers - 1, 1))


@pytest.mark.parametrize("unit", [b"1,", b"[", b"]", b'"",', b'"\\\\",', b"{}"])
def test_nothing_is_looked_at_behind_the_piece_that_has_too_much(unit, monkeypatch):
    looked_at = []

    def pieces(raw):
        for piece in _pieces(raw):
            looked_at.append(len(piece))
            yield piece

    monkeypatch.setattr("server.body._pieces", pieces)
    with pytest.raises(ApiError, match="more than"):
        check_structure(unit * 2**21, LIMITS)
    assert sum(looked_at) <= 2 * 2**20
    assert max(looked_at) <= 2**20 + 1


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[1,{"a":', "},2]")])
def test_depth_is_bounded(opening, closing):
    depth = MAX_DEPTH // (opening.count("[") + opening.count("{"))
    assert check_structure((opening * depth + "1" + closing * depth).encode(), LIMITS) is False
    assert check_structure((opening * (depth + 1) + "1" + closing * (depth + 1)).encode(), LIMITS) is True


def test_a_body_may_hold_what_the_context_holds_and_a_mib():
    assert LIMITS.max_bytes == 2**20 + 16 * CONTEXT
    assert BodyLimits.of(ServerSettings(max_body_mib=3), CONTEXT).max_bytes == 3 * 2**20
    ids = many("1", CONTEXT, '{"prompt":[', "]}")
    assert len(read(ids, CompletionRequest).prompt) == CONTEXT


def test_a_long_session_of_an_agent_is_taken():
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(12)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(200)]
    turn = [
        {"role": "user", "content": 'x = ["a", {"b": [1, 2]}]\\n' * 99},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [PART | {"text": "[1, 2, {}]"}]},
        {"role": "assistant", "content": "done " * 100},
    ]
    raw = json.dumps({"messages": turn * 125, "tools": tools}).encode()
    assert len(raw) > 600_000
    wanted = read(raw)
    assert len(wanted.messages) == 500
    assert len(wanted.tools) == 200


def test_tool_results_come_in_any_order():
    calls = [CALL | {"id": str(i)} for i in range(MAX_CALLS)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in reversed(calls)]
    body = {"messages": [*HELLO["messages"], {"role": "assistant", "tool_calls": calls}, *results]}
    assert len(parse(ChatCompletionRequest, body).messages_for_template()) == 2 + MAX_CALLS


@pytest.mark.anyio
@pytest.mark.parametrize(("characters", "is_elsewhere"), [(10, False), (2**16, True)])
async def test_a_large_body_is_read_in_another_thread(characters, is_elsewhere):
    class Text(BaseModel):
        text: str

    threads = []

    def validate(body):
        threads.append(threading.current_thread())
        return parse(Text, body)

    raw = json.dumps({"text": "a" * characters}).encode()

    async def receive():
        return {"type": "http.request", "body": raw, "more_body": False}

    app = SimpleNamespace(state=SimpleNamespace(daemon=SimpleNamespace(body_limits=LIMITS)))
    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers, "app": app}, receive)
    assert (await read_body(request, validate)).text == "a" * characters
    assert (threads != [threading.current_thread()]) is is_elsewhere


def test_the_bound_of_a_list_is_told_in_its_schema():
    class Names(RequestModel):
        names: Annotated[list[str], AtMost(3)]

    assert Names.model_json_schema()["properties"]["names"]["maxItems"] == 3
