import pytest

from server.body import parse, parse_request
from server.errors import ApiError
from server.schema.chat import ChatCompletionRequest

SECRET = "the secret is 17"
HELLO = [{"role": "user", "content": "Hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "c2"}]}


def result(call_id, content="3"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def check(body):
    return parse_request(ChatCompletionRequest, body)


def refusal(body):
    with pytest.raises(ApiError) as caught:
        check(body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "messages", "Field required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": SECRET}, "messages", "list"),
        ({"messages": [SECRET]}, "messages[0]", "an object"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a string or an array"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a string or an array"),
        ({"messages": [{"role": "user", "content": {"a": SECRET}}]}, "messages[0].content", "a string or an array"),
        ({"messages": [{"role": "user", "content": [SECRET]}]}, "messages[0].content[0]", "an object"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[1].content[0].text",
            "string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]},
            "messages[0].content[0].type",
            "image_url parts are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": SECRET, "text": "a"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        ({"messages": [{"role": SECRET, "content": "a"}]}, "messages[0].role", "'assistant'"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": SECRET}]}]},
            "messages[0].tool_calls[0].function",
            "Field required",
        ),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function", "Field required"),
        ({"messages": HELLO, "tools": [{"type": SECRET, "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ({"messages": HELLO, "n": 0}, "n", "greater than or equal to 1"),
        ({"messages": HELLO, "n": 129}, "n", "less than or equal to 128"),
        ({"messages": HELLO, "n": True}, "n", "integer"),
        ({"messages": HELLO, "stop": 1}, "stop", "list"),
        ({"messages": HELLO, "stop": ["a", ""]}, "stop[1]", "at least 1 character"),
        ({"messages": HELLO, "stop": ["a"] * 65}, "stop", "at most 64"),
        ({"messages": HELLO, "stop": SECRET * 100}, "stop", "at most 1000 characters"),
        ({"messages": HELLO, "stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({"messages": HELLO, "presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        ({"messages": HELLO, "frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
        ({"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"messages": HELLO, "logit_bias": {SECRET: 1}}, "logit_bias", "a token id"),
        ({"messages": HELLO, "logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"messages": HELLO, "logit_bias": [1]}, "logit_bias", "an object"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs", "boolean"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"messages": HELLO, "top_logprobs": 3}, None, "top_logprobs needs logprobs"),
        ({"messages": HELLO, "min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"messages": HELLO, "ignore_eos": 1}, "ignore_eos", "boolean"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "1 or more, or -1"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "1 or more, or -1"),
        ({"messages": HELLO, "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"messages": HELLO, "max_tokens": True}, "max_tokens", "integer"),
        ({"messages": HELLO, "max_tokens": "9"}, "max_tokens", "integer"),
        ({"messages": HELLO, "temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"messages": HELLO, "temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"messages": HELLO, "temperature": float("nan")}, "temperature", "finite"),
        ({"messages": HELLO, "temperature": SECRET}, "temperature", "number"),
        ({"messages": HELLO, "top_p": 0}, "top_p", "greater than 0"),
        ({"messages": HELLO, "top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"messages": HELLO, "top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"messages": HELLO, "min_p": 2}, "min_p", "less than or equal to 1"),
        ({"messages": HELLO, "seed": 2**63}, "seed", "less than"),
        ({"messages": HELLO, "stream": "yes"}, "stream", "boolean"),
        ({"messages": HELLO, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": SECRET}}, "chat_template_kwargs", "cannot be set"),
        ({"messages": HELLO, "model": 7}, "model", "string"),
    ],
)
def test_a_wrong_field_is_named_and_its_value_is_not_repeated(body, param, said):
    error = refusal(body)
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")
    assert said in error.message
    assert SECRET not in str(error.body())


@pytest.mark.parametrize(
    ("field", "value"),
    [("tool_choice", "required"), ("tool_choice", {"type": "function"})],
)
def test_a_field_that_would_change_the_output_is_refused_by_name(field, value):
    error = refusal({"messages": HELLO, field: value})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert field in error.message


@pytest.mark.parametrize(
    "field", ["user", "metadata", "store", "service_tier", "parallel_tool_calls", "never_heard_of"]
)
def test_neutral_and_unknown_fields_are_ignored(field):
    body = {"messages": HELLO, field: {"a": [1]}}
    assert check(body) == parse(ChatCompletionRequest, {"messages": HELLO})


def test_text_parts_are_joined_and_developer_is_system():
    body = {
        "messages": [
            {"role": "developer", "content": "Be short."},
            {"role": "assistant", "content": "a", "reasoning_content": "b", "refusal": None, "name": "x"},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        ]
    }
    messages = [message.for_template() for message in parse(ChatCompletionRequest, body).messages]
    assert messages == [
        {"role": "system", "content": "Be short."},
        {"role": "assistant", "content": "a", "name": "x", "reasoning_content": "b"},
        {"role": "user", "content": "Hello"},
    ]


def test_the_newer_name_of_the_token_limit_wins():
    request = parse(ChatCompletionRequest, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 7})
    assert request.wanted_tokens == 7


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "none", "enable_thinking": True}, {"enable_thinking": True}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"verbosity": "low", "reasoning_effort": "minimal"}, {"verbosity": "low", "reasoning_effort": "minimal"}),
        ({"verbosity": None, "reasoning_effort": None}, {}),
    ],
)
def test_effort_and_verbosity_reach_the_template(fields, variables):
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    assert request.template_variables == variables


def test_enable_thinking_reaches_the_template_from_either_place():
    for extra in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        request = parse(ChatCompletionRequest, {"messages": HELLO, **extra})
        assert request.template_variables == {"enable_thinking": False}


def test_tool_calls_and_their_results_reach_the_template_with_parsed_arguments():
    parts = [{"type": "text", "text": "thr"}, {"type": "text", "text": "ee"}]
    no_arguments = {"id": "c3", "function": {"name": "now", "arguments": ""}}
    messages = [*HELLO, ASKS, result("c2", parts), result("c1"), {"role": "assistant", "tool_calls": [no_arguments]}]
    request = check({"messages": [*messages, result("c3")]})
    _, asked, second, first, again, _ = request.messages_for_template()
    assert asked["content"] == ""
    assert asked["tool_calls"][0] == CALL | {"function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    assert (second["content"], first["tool_call_id"]) == ("three", "c1")
    assert again["tool_calls"][0]["function"]["arguments"] == {}


def for_template(*messages):
    return check({"messages": list(messages)}).messages_for_template()


@pytest.mark.parametrize(
    "messages",
    [
        [*HELLO, result("c1")],
        [ASKS, result("c1"), result("c1")],
        [ASKS, {"role": "tool", "content": "3"}],
        [ASKS, result("c1"), *HELLO],
        [ASKS],
        [ASKS | {"tool_calls": [CALL, CALL]}],
    ],
)
def test_a_history_that_was_cut_anywhere_is_taken(messages):
    assert [message["role"] for message in for_template(*messages)] == [message["role"] for message in messages]


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ('{"x": ', '{"x": '),
        ("null", "null"),
        ("[1]", "[1]"),
        ([1], "[1]"),
        (3, "3"),
        ("not JSON", "not JSON"),
        ('{"x": NaN}', '{"x": NaN}'),
        ('{"x": 1e999}', '{"x": 1e999}'),
        ('{"x": 1, "x": 2}', '{"x": 1, "x": 2}'),
        ('{"y": {"x": 1, "x": 2}}', '{"y": {"x": 1, "x": 2}}'),
        ('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}),
        ('{"x": -18446744073709551617}', {"x": -18446744073709551617}),
        ("[" * 100_000, "[" * 100_000),
        ('{"x": ' + "1" * 5000 + "}", '{"x": ' + "1" * 5000 + "}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_are_an_object_or_the_text_that_the_model_wrote(arguments, passed):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = for_template({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": passed}


@pytest.mark.parametrize(
    ("message", "passed"),
    [
        ({"role": "assistant", "content": None, "reasoning_content": "r"}, {"content": "", "reasoning_content": "r"}),
        ({"role": "assistant", "reasoning": "r"}, {"content": "", "reasoning_content": "r"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "s"},
            {"content": "a", "reasoning_content": "s"},
        ),
        ({"role": "assistant", "content": "a", "reasoning": None, "tool_calls": []}, {"content": "a"}),
        ({"role": "assistant", "content": "a", "tool_calls": None, "function_call": None}, {"content": "a"}),
        ({"role": "assistant"}, {"content": ""}),
        ({"role": "assistant", "content": []}, {"content": ""}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}, {"content": "a"}),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"content": "a"}),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, {"content": ""}),
        ({"role": "system", "content": [{"type": "text", "text": "a"}]}, {"content": "a"}),
        ({"role": "user", "content": "a", "name": "Ada", "tool_calls": None}, {"content": "a", "name": "Ada"}),
        ({"role": "tool", "content": None, "tool_call_id": None, "name": "f"}, {"content": "", "name": "f"}),
        ({"role": "function", "content": "3", "name": "f"}, {"role": "tool", "content": "3", "name": "f"}),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": None, "type": None, "function": {"name": ""}}]},
            {"content": "", "tool_calls": [{"type": "function", "function": {"name": "", "arguments": {}}}]},
        ),
    ],
    ids=str,
)
def test_a_message_is_taken_in_every_form_and_reaches_the_template_whole(message, passed):
    assert for_template(message) == [{"role": message["role"]} | passed]


def test_tools_reach_the_template_as_they_are_unless_none_is_to_be_called():
    tool = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"b": 1, "a": 2}, "x": 1}}
    body = {"messages": HELLO, "tools": [tool]}
    assert check(body).tools_for_template() == [tool]
    assert list(check(body).tools_for_template()[0]["function"]["parameters"]) == ["b", "a"]
    assert check(body | {"tool_choice": "none"}).tools_for_template() is None
    assert check({"messages": HELLO, "tools": []}).tools_for_template() is None


@pytest.mark.parametrize(("stop", "expected"), [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ("", None), (None, None)])
def test_stop_is_one_string_or_several(stop, expected):
    assert check({"messages": HELLO, "stop": stop}).stop == expected
