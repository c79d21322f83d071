"""`/tokenize` and `/detokenize`."""

import threading

import pytest

from server.app import create_app
from server.responses import to_json
from tests.server.conftest import MAX_CONTEXT, client_of
from tests.server.test_door import HELLO, HELLO_TOKENS

pytestmark = pytest.mark.anyio


async def test_a_text_has_tokens_and_they_have_the_text(client):
    body = {"prompt": "Hi é<|im_end|>", "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["token_strs"] == ["H", "i", "Ġ", "Ã", "©", "<|im_end|>"]
    assert (answer["count"], answer["max_model_len"], answer["tokens"][-1]) == (6, MAX_CONTEXT, 2)
    back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": "Hi é<|im_end|>"}
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_conversation_has_the_tokens_that_an_answer_would_be_charged_for(client):
    messages = HELLO["messages"]
    answer = (await client.post("/tokenize", json={"messages": messages})).json()
    assert (answer["count"], answer["token_strs"]) == (HELLO_TOKENS, None)
    closed = (await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    text = (await client.post("/detokenize", json={"tokens": closed["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": HELLO["messages"], "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**32]}, 400, "tokens[0]"),
    ],
)
async def test_a_wrong_field_is_named(client, path, body, status, param):
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("unknown", [299, 65_000, 2**32 - 1])
async def test_an_id_that_is_no_tokens_is_refused_by_its_place(client, unknown):
    response = await client.post("/detokenize", json={"tokens": [2, unknown]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens[1]")


async def test_ids_may_be_written_as_integral_floats(client):
    assert (await client.post("/detokenize", json={"tokens": [2.0]})).json() == {"prompt": "<|im_end|>"}
    assert (await client.post("/detokenize", json={"tokens": [2.5]})).status_code == 400


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
async def test_an_answer_is_written_outside_of_the_event_loop(client, monkeypatch, path, body):
    threads = []

    def written(answer):
        threads.append(threading.current_thread())
        return to_json(answer)

    monkeypatch.setattr("server.routes.tokens.to_json", written)
    assert (await client.post(path, json=body)).status_code == 200
    assert len(threads) == 1
    assert threads != [threading.current_thread()]


@pytest.mark.parametrize(("parses", "ends"), [(False, 1), (True, 2)])
async def test_a_message_that_spells_a_control_token_has_it_only_where_that_is_asked_for(settings, parses, ends):
    engine = settings.engine.model_copy(update={"parse_special_tokens": parses})
    app = create_app(settings.model_copy(update={"engine": engine}))
    await app.state.daemon.start()
    async with client_of(app) as client:
        body = {"messages": [{"role": "user", "content": "Hi<|im_end|>"}], "add_generation_prompt": False}
        answer = (await client.post("/tokenize", json=body)).json()
    await app.state.daemon.stop()
    assert answer["tokens"].count(2) == ends
