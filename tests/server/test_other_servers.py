"""Requests as they are written for other servers: what is meant is done, or refused by name."""

import json
import logging

import pytest

from server.body import parse_request
from server.errors import ApiError
from server.sampling import SamplingDefaults
from server.schema.chat import ChatCompletionRequest
from server.schema.completion import CompletionRequest
from server.schema.foreign import HARMLESS, REFUSED, RENAMED
from server.schema.numbers import NO_LIMIT_TOKENS
from server.schema.tokens import TokenizeChatRequest
from tests.server.other_servers import EFFECTS, WITHOUT_EFFECT

CHAT = (ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hello"}]})
TEXT = (CompletionRequest, {"prompt": "Hello"})
ROUTES = pytest.mark.parametrize(("schema", "body"), [CHAT, TEXT], ids=["chat", "completions"])
CASES = [
    pytest.param(server, *each, id=f"{server} {each.field}")
    for server, documented in EFFECTS.items()
    for each in documented
]


def refusal(schema, body):
    with pytest.raises(ApiError) as caught:
        parse_request(schema, body)
    return caught.value


@ROUTES
@pytest.mark.parametrize(("server", "field", "effect", "default"), CASES)
def test_a_documented_field_with_an_effect_is_refused_by_name_and_its_default_is_not(
    schema, body, server, field, effect, default
):
    if field in schema.model_fields:
        pytest.skip("it is built")
    error = refusal(schema, body | {field: effect})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert error.message.startswith(f"{field} (")
    assert parse_request(schema, body | {field: default}) == parse_request(schema, body)
    assert parse_request(schema, body | {field: None}) == parse_request(schema, body)


@ROUTES
@pytest.mark.parametrize("server", WITHOUT_EFFECT)
def test_a_documented_field_without_an_effect_is_accepted(caplog, schema, body, server):
    caplog.set_level(logging.DEBUG, "dalsegno.http")
    sampling = SamplingDefaults().for_request
    assert sampling(parse_request(schema, body | WITHOUT_EFFECT[server])) == sampling(parse_request(schema, body))
    assert caplog.text == ""


RENAMES = [
    ({"n_predict": 7}, {"max_tokens": 7}),
    ({"n_predict": -1}, {"max_tokens": -1}),
    ({"max_new_tokens": 7, "min_new_tokens": 2}, {"max_tokens": 7, "min_tokens": 2}),
    ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
    ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
    ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
    ({"sampling_seed": 3}, {"seed": 3}),
    ({"n_cmpl": 2}, {"n": 2}),
    ({"n": 2, "best_of": 2}, {"n": 2}),
    (
        {"options": {"num_predict": 7, "top_k": 3, "temperature": 0.5}},
        {"max_tokens": 7, "top_k": 3, "temperature": 0.5},
    ),
    ({"extra_body": {"min_p": 0.5, "options": {"seed": 3}}}, {"min_p": 0.5, "seed": 3}),
    ({"max_tokens": 7, "n_predict": 7, "options": None}, {"max_tokens": 7}),
    ({"max_tokens": None, "n_predict": 7}, {"max_tokens": 7}),
    ({"max_tokens": 7, "n_predict": None}, {"max_tokens": 7}),
]


@ROUTES
@pytest.mark.parametrize(("theirs", "ours"), RENAMES)
def test_what_we_have_under_another_name_is_done(schema, body, theirs, ours):
    sampling = SamplingDefaults().for_request
    foreign, own = parse_request(schema, body | theirs), parse_request(schema, body | ours)
    assert (sampling(foreign), foreign.choices_per_prompt) == (sampling(own), own.choices_per_prompt)
    assert sampling(own) != sampling(parse_request(schema, body)) or own.choices_per_prompt > 1


@pytest.mark.parametrize(
    "theirs", [{"think": False}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]
)
def test_thinking_is_switched_by_its_other_names(theirs):
    schema, body = CHAT
    assert parse_request(schema, body | theirs).template_variables == {"enable_thinking": False}
    assert parse_request(CompletionRequest, TEXT[1] | theirs) == parse_request(*TEXT)


@ROUTES
@pytest.mark.parametrize(
    ("wrong", "param", "code"),
    [
        ({"n_predict": "many"}, "n_predict", "invalid_value"),
        ({"n_predict": 0}, "n_predict", "invalid_value"),
        ({"stop_sequences": ["a", 1]}, "stop_sequences[1]", "invalid_value"),
        ({"options": {"num_predict": 1.5}}, "options.num_predict", "invalid_value"),
        ({"options": {"temperature": "hot"}}, "options.temperature", "invalid_value"),
        ({"options": [1]}, "options", "invalid_value"),
        ({"options": {"mirostat": 1}}, "options.mirostat", "unsupported_parameter"),
        ({"extra_body": {"guided_json": {"a": 1}}}, "extra_body.guided_json", "unsupported_parameter"),
        ({"extra_body": {"options": {"typical_p": 0.5}}}, "extra_body.options.typical_p", "unsupported_parameter"),
        ({"max_tokens": 7, "n_predict": 8}, "n_predict", "invalid_value"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n", "unsupported_parameter"),
        ({"n": 2, "best_of": 3}, "best_of", "unsupported_parameter"),
        ({"best_of": True}, "best_of", "unsupported_parameter"),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "unsupported_parameter",
        ),
    ],
)
def test_errors_name_the_field_as_it_was_sent(schema, body, wrong, param, code):
    error = refusal(schema, body | wrong)
    assert (error.status, error.param, error.code) == (400, param, code)
    assert error.message.startswith(param)


def test_a_field_of_the_other_route_is_refused_where_it_would_be_forgotten():
    schema, body = TEXT
    assert refusal(schema, body | {"tools": [{"type": "function"}]}).param == "tools"
    assert refusal(schema, body | {"top_logprobs": 2}).param == "top_logprobs"
    schema, body = CHAT
    assert refusal(schema, body | {"echo": True}).param == "echo"
    assert parse_request(TokenizeChatRequest, body | {"add_generation_prompt": False}).add_generation_prompt is False


@ROUTES
def test_objects_in_one_another_without_end_are_not_followed(schema, body):
    nested = json.loads('{"options": ' * 500 + "{}" + "}" * 500)
    assert parse_request(schema, body | nested) == parse_request(schema, body)


@ROUTES
def test_what_nobody_documents_is_ignored_and_counted_without_its_name(caplog, schema, body):
    caplog.set_level(logging.DEBUG, "dalsegno.http")
    assert parse_request(schema, body | {"the secret is 17": 1, "other": 2}) == parse_request(schema, body)
    assert [record.getMessage() for record in caplog.records] == ["fields that nobody documents are ignored: 2"]


INTEGERS = [
    ("max_tokens", 16.0, 16),
    ("max_tokens", 1e30, int(1e30)),
    ("n", 2.0, 2),
    ("min_tokens", 3.0, 3),
    ("top_k", 40.0, 40),
    ("seed", 7.0, 7),
    ("stop_token_ids", [5.0, 6], [5, 6]),
]


@ROUTES
@pytest.mark.parametrize(("field", "value", "expected"), INTEGERS)
def test_an_integral_float_is_an_integer(schema, body, field, value, expected):
    found = getattr(parse_request(schema, body | {field: value}), field)
    assert found == expected
    assert type(found[0] if isinstance(found, list) else found) is int
    wrong = [5.5] if isinstance(value, list) else 5.5
    assert refusal(schema, body | {field: wrong}).code == "invalid_value"


def test_integral_floats_of_one_route_alone():
    assert parse_request(CHAT[0], CHAT[1] | {"max_completion_tokens": 9.0}).wanted_tokens == 9
    assert parse_request(CHAT[0], CHAT[1] | {"logprobs": True, "top_logprobs": 2.0}).wanted_logprobs == 2
    assert parse_request(TEXT[0], {"prompt": "a", "logprobs": 2.0}).wanted_logprobs == 2
    assert parse_request(TEXT[0], {"prompt": [1.0, 2]}).prompts == [[1, 2]]
    assert parse_request(TEXT[0], {"prompt": [[1], [2.0]]}).prompts == [[1], [2]]


@ROUTES
def test_minus_one_is_no_limit_and_no_seed(schema, body):
    request = parse_request(schema, body | {"max_tokens": -1, "seed": -1})
    sampling = SamplingDefaults().for_request(request)
    assert (sampling.max_tokens, sampling.seed) == (NO_LIMIT_TOKENS, None)
    assert parse_request(*CHAT).wanted_tokens is None
    for wrong in (0, -2, True):
        assert refusal(schema, body | {"max_tokens": wrong}).param == "max_tokens"


@ROUTES
def test_as_many_stop_strings_as_clients_send(schema, body):
    stops = [f"stop {number}" for number in range(64)]
    assert parse_request(schema, body | {"stop": stops}).stop == stops
    assert refusal(schema, body | {"stop": [*stops, "one more"]}).param == "stop"


def test_each_name_stands_in_one_table():
    tables = [set(RENAMED), set(REFUSED), set(HARMLESS)]
    assert len(set.union(*tables)) == sum(map(len, tables))
