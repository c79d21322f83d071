"""A prompt that is longer than the context is refused in the words by which clients know that they must shorten it."""

import re

import pytest

from tests.server.conftest import MAX_CONTEXT
from tests.server.test_door import CHAT

pytestmark = pytest.mark.anyio

KNOWN_BY = {
    "OpenAI and vLLM": re.compile(rf"This model's maximum context length is {MAX_CONTEXT} tokens\. However, "),
    "LiteLLM": re.compile(r"(?i)this model's maximum context length is"),
    "pi and OpenCode": re.compile(r"(?i)maximum context length is \d+ tokens"),
    "Groq's clients": re.compile(r"(?i)reduce the length of the messages"),
}
TOO_LONG, ENDLESS = "a" * MAX_CONTEXT, "endless " * 20_000


def said(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": said(TOO_LONG)}, "messages"),
        (CHAT, {"messages": said(TOO_LONG), "stream": True}, "messages"),
        (CHAT, {"messages": said(ENDLESS)}, "messages"),
        ("/v1/completions", {"prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": [1] * MAX_CONTEXT, "stream": True}, "prompt"),
        ("/v1/completions", {"prompt": ["a", TOO_LONG]}, "prompt"),
        ("/v1/completions", {"prompt": ENDLESS}, "prompt"),
        ("/tokenize", {"messages": said(ENDLESS)}, "messages"),
        ("/tokenize", {"prompt": ENDLESS}, "prompt"),
    ],
)
async def test_clients_know_an_overflow_by_its_first_sentence(client, path, body, param):
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["type"] == "invalid_request_error"
    assert [name for name, pattern in KNOWN_BY.items() if not pattern.search(error["message"])] == []
    assert KNOWN_BY["OpenAI and vLLM"].match(error["message"])
    assert not re.search(r"\d,\d", error["message"])
