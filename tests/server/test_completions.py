"""Text completions, several answers to one request, and what a request may ask about tokens, over HTTP."""

import asyncio

import pytest

from engine.request import SamplingParams
from server.app import create_app
from server.chat import submit
from server.choices import sampling_of_choice
from tests.server.conftest import MAX_CONTEXT, client_of
from tests.server.test_door import CHAT, HELLO, events
from tests.waiting import PATIENCE_SECONDS, let_it_work

pytestmark = pytest.mark.anyio

TEXT = "/v1/completions"
GO_ON = {"prompt": "Hello", "temperature": 0, "max_tokens": 6}


async def post(client, path, body, status=200):
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def stream(client, path, body):
    return events((await client.post(path, json=body | {"stream": True})).text)


async def error_of(client, path, body, status=400):
    return (await post(client, path, body, status))["error"]


async def test_a_completion_has_openais_shape(client):
    body = await post(client, TEXT, GO_ON)
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    [choice] = body["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], len(choice["text"]), choice["finish_reason"]) == (0, 6, "length")
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 6)
    assert body["reuse"]["path"] == "root"
    assert body["timings"]["predicted_n"] == 6


async def test_the_same_prompt_as_text_or_tokens_alone_or_in_a_list(client):
    token_ids = (await post(client, "/tokenize", {"prompt": "Hello"}))["tokens"]
    texts = [
        [choice["text"] for choice in (await post(client, TEXT, GO_ON | {"prompt": prompt}))["choices"]]
        for prompt in ("Hello", ["Hello"], token_ids, [token_ids, token_ids])
    ]
    assert texts == [[texts[0][0]]] * 3 + [[texts[0][0]] * 2]


async def test_several_prompts_and_choices_come_in_the_order_of_the_prompts(client):
    body = GO_ON | {"prompt": ["Hello", "Bye, bye"], "n": 2}
    whole = await post(client, TEXT, body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert whole["usage"]["prompt_tokens"] == 5 + 8
    assert whole["usage"]["completion_tokens"] == 4 * 6
    reuse = whole["reuse"]
    assert reuse["prompt_tokens"] == 5 + 8
    # Each prompt but its last token is either reused or cold.
    assert reuse["cached_tokens"] + reuse["lost"]["cold"] == 4 + 7
    chunks = await stream(client, TEXT, body)
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(p["text"] for p in pieces if p["index"] == index) for index in range(4)] == texts
    ends = [piece["index"] for piece in pieces if piece["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]
    assert [chunk.get("usage") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


async def test_streams_of_several_choices_are_interleaved(client):
    chunks = await stream(client, CHAT, HELLO | {"n": 3, "max_tokens": 40})
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert ["role" in chunks[order.index(index)]["choices"][0]["delta"] for index in range(3)] == [True] * 3
    last_of_first = len(order) - 1 - order[::-1].index(0)
    assert set(order[:last_of_first]) == {0, 1, 2}


async def test_each_choice_has_a_seed_of_its_own_and_the_first_the_requests(client):
    body = HELLO | {"temperature": 2, "seed": 5, "max_tokens": 40}
    alone = (await post(client, CHAT, body))["choices"][0]["message"]["content"]
    first, second = [(await post(client, CHAT, body | {"n": 3}))["choices"] for _ in range(2)]
    assert first == second
    contents = [choice["message"]["content"] for choice in first]
    assert contents[0] == alone
    assert len(set(contents)) > 1


def test_derived_seeds_are_computed_from_the_requests():
    seeds = [sampling_of_choice(SamplingParams(seed=5), index).seed for index in range(3)]
    assert seeds == [5, (5 + 0x9E3779B97F4A7C15) % 2**63, (5 + 2 * 0x9E3779B97F4A7C15) % 2**63]
    assert sampling_of_choice(SamplingParams(), 1).seed is None


async def test_more_choices_than_can_ever_wait_are_refused_and_a_full_queue_takes_none_of_them(settings):
    engine_settings = settings.engine.model_copy(update={"max_concurrency": 1, "max_pending_requests": 2})
    app = create_app(settings.model_copy(update={"engine": engine_settings}))
    engine = await app.state.daemon.start()
    async with client_of(app) as client:
        error = await error_of(client, CHAT, HELLO | {"n": 3})
        assert (error["param"], error["code"]) == ("n", "invalid_value")
        assert "at most 2" in error["message"]
        assert (await error_of(client, TEXT, GO_ON | {"prompt": ["a"] * 4}))["param"] == "prompt"
        waiting = asyncio.create_task(client.post(CHAT, json=HELLO | {"max_tokens": 300}))
        while not engine.snapshot().running:
            await let_it_work()
        refused = await error_of(client, CHAT, HELLO | {"n": 2}, 429)
        assert refused["code"] == "server_overloaded"
        assert (await waiting).status_code == 200
    assert await engine.drain()
    snapshot = engine.snapshot()
    assert snapshot.waiting == snapshot.running == 0
    await app.state.daemon.stop()


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_leaving_several_choices_ends_them_all(settings, path):
    app = create_app(settings)
    engine = await app.state.daemon.start()
    async with client_of(app) as client:
        body = (HELLO if path == CHAT else GO_ON) | {"n": 4, "max_tokens": 400}
        for streams in (False, True):
            task = asyncio.create_task(client.post(path, json=body | {"stream": streams}))
            while engine.snapshot().running < 4:
                await let_it_work()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await engine.drain()
    assert engine.check() == []
    await app.state.daemon.stop()


async def test_echo_begins_with_the_prompt(client):
    plain = (await post(client, TEXT, GO_ON))["choices"][0]["text"]
    body = GO_ON | {"echo": True}
    assert (await post(client, TEXT, body))["choices"][0]["text"] == "Hello" + plain
    chunks = await stream(client, TEXT, body)
    assert chunks[0]["choices"][0]["text"] == "Hello"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello" + plain
    token_ids = (await post(client, "/tokenize", {"prompt": "Hello"}))["tokens"]
    assert (await post(client, TEXT, body | {"prompt": token_ids}))["choices"][0]["text"] == "Hello" + plain


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_string_is_cut_off_and_nothing_comes_after_it(client, streams):
    plain = (await post(client, CHAT, HELLO | {"max_tokens": 40}))["choices"][0]["message"]["content"]
    stop = plain[10:13]
    before = plain[: plain.index(stop)]
    body = HELLO | {"max_tokens": 40, "stop": ["\n\n", stop], "logprobs": True}
    if streams:
        chunks = await stream(client, CHAT, body)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        records = [record for chunk in chunks for record in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        answer = await post(client, CHAT, body)
        text, records = answer["choices"][0]["message"]["content"], answer["choices"][0]["logprobs"]["content"]
        reason, usage = answer["choices"][0]["finish_reason"], answer["usage"]
    assert (text, reason) == (before, "stop")
    assert "".join(record["token"] for record in records) == before
    assert usage["completion_tokens"] == len(before) + len(stop)
    included = await post(client, CHAT, body | {"include_stop_str_in_output": True})
    assert included["choices"][0]["message"]["content"] == before + stop


async def test_log_probabilities_have_openais_shapes(client):
    answer = (await post(client, CHAT, HELLO | {"logprobs": True, "top_logprobs": 2}))["choices"][0]
    content = answer["message"]["content"]
    records = answer["logprobs"]["content"]
    assert [record["token"] for record in records] == list(content)
    assert [bytes(record["bytes"]).decode() for record in records] == list(content)
    assert all(record["top_logprobs"][0]["token"] == record["token"] for record in records)
    assert all(record["top_logprobs"][0]["logprob"] == record["logprob"] <= 0 for record in records)
    assert {len(record["top_logprobs"]) for record in records} == {2}
    legacy = (await post(client, TEXT, GO_ON | {"logprobs": 1}))["choices"][0]
    assert legacy["logprobs"]["tokens"] == list(legacy["text"])
    assert legacy["logprobs"]["text_offset"] == list(range(6))
    tops = [{token: value} for token, value in zip(legacy["text"], legacy["logprobs"]["token_logprobs"], strict=True)]
    assert legacy["logprobs"]["top_logprobs"] == tops
    chunks = await stream(client, TEXT, GO_ON | {"logprobs": 1})
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [offset for each in streamed for offset in each["text_offset"]] == list(range(6))
    assert (await post(client, CHAT, HELLO))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, GO_ON)])
async def test_options_about_tokens_reach_the_engine(client, monkeypatch, path, body):
    asked = []

    def submit_and_note(engine, prompt, sampling, *rest):
        asked.append(sampling)
        return submit(engine, prompt, sampling, *rest)

    monkeypatch.setattr("server.choices.submit", submit_and_note)
    options = {
        "max_tokens": 3,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "seed": 7,
        "stop_token_ids": [9],
        "ignore_eos": True,
    }
    special = {
        "stop": ["a", "b"],
        "logit_bias": {"5": 1, "6": -2.5},
        "include_stop_str_in_output": True,
        "logprobs": True if path == CHAT else 2,
    } | ({"top_logprobs": 2} if path == CHAT else {})
    await post(client, path, body | options | special)
    expected = options | {
        "stop_token_ids": (9,),
        "stop": ("a", "b"),
        "logit_bias": ((5, 1.0), (6, -2.5)),
        "includes_stop": True,
        "logprobs": 2,
    }
    assert asked == [SamplingParams(**expected)]


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"prompt": None}, "prompt", "a string, token ids"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1"),
        ({"prompt": [1, "a"]}, "prompt[1]", "integer"),
        ({"prompt": ["a", 1]}, "prompt[1]", "string"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": ""}, "prompt", "at least one"),
        ({"prompt": [10**9]}, "prompt", "1000000000"),
        ({"prompt": "a" * MAX_CONTEXT}, "prompt", str(MAX_CONTEXT)),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"echo": True, "logprobs": 1}, None, "echo cannot be combined"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"min_tokens": 7}, "min_tokens", "more than the 6"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"stop_token_ids": [999999]}, "stop_token_ids", "999999"),
    ],
)
async def test_a_wrong_completion_names_the_field(client, change, param, said):
    error = await error_of(client, TEXT, GO_ON | change)
    assert error["param"] == param
    assert said in error["message"]


async def test_tool_messages_reach_the_template(client):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]}
    answer = await post(client, CHAT, HELLO | {"messages": [*HELLO["messages"], asks, result]})
    # Three turns and the opening of the fourth, as bytes and special tokens.
    turns = ("user\nHello", "assistant\n", "tool\n3")
    assert answer["usage"]["prompt_tokens"] == sum(len(turn) + 3 for turn in turns) + 1 + len("assistant\n")
