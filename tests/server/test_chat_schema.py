import pytest

from server.body import parse
from server.errors import ApiError
from server.schema.chat import ChatCompletionRequest
from server.schema.unsupported import NEUTRAL_VALUES, refuse_unsupported

SECRET = "the secret is 17"
HELLO = [{"role": "user", "content": "Hello"}]


def check(body):
    refuse_unsupported(body)
    return parse(ChatCompletionRequest, body)


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
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Field required"),
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
        ({"messages": [{"role": "tool", "content": SECRET}]}, "messages[0].role", "role tool are not supported yet"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": SECRET}]}]},
            "messages[0].tool_calls",
            "not supported yet",
        ),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
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
    [
        ("n", 2),
        ("n", True),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"1": 5}),
        ("stop", "."),
        ("stop", ["."]),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("web_search_options", {}),
    ],
)
def test_a_field_that_would_change_the_output_is_refused_by_name(field, value):
    error = refusal({"messages": HELLO, field: value})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in NEUTRAL_VALUES.items() for value in values]
)
def test_a_value_that_changes_nothing_is_accepted(field, value):
    check({"messages": HELLO, field: value})


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
        {"role": "assistant", "content": "a", "reasoning_content": "b"},
        {"role": "user", "content": "Hello"},
    ]


def test_the_newer_name_of_the_token_limit_wins():
    request = parse(ChatCompletionRequest, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 7})
    assert request.wanted_tokens == 7


def test_enable_thinking_reaches_the_template_from_either_place():
    for extra in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        request = parse(ChatCompletionRequest, {"messages": HELLO, **extra})
        assert request.template_variables == {"enable_thinking": False}
