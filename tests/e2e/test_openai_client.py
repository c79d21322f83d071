"""The real openai client against the real daemon."""

import concurrent.futures

import httpx
import openai
import pytest

from tests.e2e.conftest import LONG
from tests.waiting import PATIENCE_SECONDS

HELLO = [{"role": "user", "content": "Hello"}]
SECRET = "the secret is 17"


@pytest.fixture(scope="module")
def client(daemon):
    return daemon.client()


def ask(client, **options):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0} | options
    )


def test_a_whole_answer_and_a_streamed_one_are_the_same(client):
    ask(client)  # what is asked for the first time has reused less
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_text_completions_whole_and_streamed(client):
    options = {"model": "tiny", "prompt": ["Hello", "Bye"], "max_tokens": 8, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**options)
    texts = {choice.index: choice.text for choice in whole.choices}
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert whole.choices[0].logprobs.tokens == list(texts[0])


def test_several_choices_with_log_probabilities_are_typed(client):
    answer = ask(client, n=2, logprobs=True, top_logprobs=3, stop=["never"])
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [len(entry.top_logprobs) for entry in answer.choices[1].logprobs.content] == [3] * 8
    assert "".join(entry.token for entry in answer.choices[0].logprobs.content) == answer.choices[0].message.content


def test_cost_beyond_openais_is_there(client):
    answer = ask(client, messages=[{"role": "user", "content": "What does it cost?"}])
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.reuse["path"] == "root"
    assert answer.timings["predicted_n"] == 8


def test_models(client):
    [card] = client.models.list().data
    assert client.models.retrieve(card.id).max_model_len == card.max_model_len == 60000


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"messages": [{"role": "user", "content": "a" * 60001}]}, openai.BadRequestError, None),
        ({"extra_headers": {"content-type": "text/plain"}}, openai.APIStatusError, None),
    ],
)
def test_errors_have_the_types_of_the_client(client, options, error, param):
    with pytest.raises(error) as caught:
        ask(client, **options)
    if param is not None:
        assert caught.value.param == param
    assert caught.value.request_id


def test_several_at_once_each_get_their_own_answer(client):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        prompts = [[{"role": "user", "content": letter * 9}] for letter in "abcd"]
        together = list(pool.map(lambda messages: ask(client, messages=messages), prompts))
    alone = [ask(client, messages=messages) for messages in prompts]
    contents = [[answer.choices[0].message.content for answer in answers] for answers in (together, alone)]
    assert contents[0] == contents[1]


def test_leaving_a_stream_ends_it(daemon, client):
    with ask(client, stream=True, max_tokens=LONG, extra_headers={"x-request-id": "leaver"}) as stream:
        next(iter(stream))
    daemon.wait_for_log('"leaver"')
    assert any('"cancelled"' in line and '"leaver"' in line for line in daemon.log)
    # There is one seat: it would be minutes until it is free.
    assert ask(client).choices[0].finish_reason == "length"


def test_leaving_before_a_whole_answer_ends_it(client):
    with pytest.raises(openai.APITimeoutError):
        ask(client, max_tokens=LONG, timeout=0.5)
    assert ask(client).choices[0].finish_reason == "length"


def test_leaving_while_waiting_for_a_seat_ends_it(client):
    with ask(client, stream=True, max_tokens=LONG) as stream:
        next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            ask(client, max_tokens=LONG, timeout=0.2)
    assert ask(client).choices[0].finish_reason == "length"


def test_a_huge_body_is_refused_and_the_daemon_goes_on(daemon, client):
    body = b'{"messages": "' + b"a" * (100 * 2**20)
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{daemon.url}/v1/chat/completions", content=body, headers=headers, timeout=PATIENCE_SECONDS)
    assert response.status_code == 413
    assert ask(client).choices


def test_nothing_of_prompts_and_answers_is_in_the_log(daemon, client):
    messages = [{"role": "user", "content": SECRET}]
    answer = ask(client, messages=messages).choices[0].message.content
    for wrong in ({"temperature": SECRET}, {"stop": [SECRET, ""]}, {"messages": [{"role": SECRET, "content": SECRET}]}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **({"messages": messages} | wrong))
        assert SECRET not in str(caught.value)
    client.with_options(default_headers={"x-request-id": "the-last"}).models.list()
    daemon.wait_for_log("the-last")
    log = "".join(daemon.log)
    assert SECRET not in log
    assert answer not in log
