"""The report that started all this, over HTTP against the real daemon: one long body, three times (S01)."""

from __future__ import annotations

import random

import httpx
import pytest

from engine.catalog import resolve_model
from engine.text.chat_template import ChatTemplate
from engine.text.slices import in_one_go
from engine.text.tokenizer import Tokenizer
from server.frontiers import marked_places
from tests.e2e.conftest import run_daemon
from tests.waiting import PATIENCE_SECONDS

PROMPT_TOKENS = 3900
SLOTS = 3
FLAGS = ("--max-concurrency", "1", "--device-state-slots", str(SLOTS - 1), "--max-context", "8192")


@pytest.fixture(scope="module")
def body() -> dict[str, object]:
    """About 3,900 tokens: a system prompt and one long question."""
    tokenizer = Tokenizer.load(resolve_model("demo"))
    words = [" lighthouse", " keeper", " ship", " harbour", " counted", " every", " the", " year"]
    at_random, text = random.Random(7), "Read this."
    while len(tokenizer.encode(text)) < PROMPT_TOKENS:
        text += "".join(at_random.choices(words, k=20))
    messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def closure(body) -> int:
    """Every token but those of the generation prompt."""
    folder = resolve_model("demo")
    template, tokenizer = ChatTemplate.load(folder), Tokenizer.load(folder)
    text = template.render(body["messages"])
    place, _ = in_one_go(marked_places(template, text, body["messages"], {}))
    return len(tokenizer.encode(text[:place]))


def test_s01_one_long_body_three_times_is_computed_once_also_on_a_saturated_daemon(body, closure, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with (
        run_daemon(resolve_model("demo"), *FLAGS) as daemon,
        httpx.Client(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client,
    ):

        def ask(request: dict[str, object]) -> dict:
            response = client.post("/v1/chat/completions", json=request)
            assert response.status_code == 200, response.text
            return response.json()

        for round_ in range(2):
            first, *others = [ask(body) for _ in range(3)]
            prompt_tokens = first["usage"]["prompt_tokens"]
            assert prompt_tokens > closure > PROMPT_TOKENS
            # The daemon may still know it the second time: in host memory, if not on the device.
            assert first["reuse"]["path"] == "root" or round_ == 1
            tier = "device" if first["reuse"]["source"]["host"] == 0 else "host"
            for answer in others:
                assert answer["reuse"] == {
                    "path": "private_turn_closure",
                    "prompt_tokens": prompt_tokens,
                    "cached_tokens": closure,
                    "achievable_tokens": closure,
                    "source": {"device": 0, "host": 0, "disk": 0} | {tier: closure},
                    "lost": {},
                }
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == closure
                assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (
                    closure,
                    prompt_tokens - closure,
                )
                assert answer["choices"] == first["choices"]
            for index in range(0 if round_ else 10 * SLOTS):
                ask({"messages": [{"role": "user", "content": f"Number {index}?"}], "max_tokens": 1})
