"""Scenarios of the API and of what must not be told (S50, S51, S53), over HTTP against the real daemon."""

from __future__ import annotations

import json
import shutil

import httpx
import openai
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from engine.catalog import resolve_model
from engine.text.tokenizer import Tokenizer
from tests.e2e.conftest import run_daemon
from tests.waiting import PATIENCE_SECONDS

QUESTION = [{"role": "user", "content": "Tell me a short story about a fox."}]
MARKER = "zanzibarquokka"
KEY = "sk-never-tell-anyone"


@pytest.fixture(scope="module")
def daemon():
    with run_daemon(
        resolve_model("demo"), "--max-context", "2048", "--api-key", KEY, "--log-level", "debug"
    ) as process:
        yield process


@pytest.fixture(scope="module")
def babbling_daemon(tmp_path_factory):
    """The real tokenizer over weights so small that every token is about as likely: it babbles in random bytes."""
    folder = tmp_path_factory.mktemp("scenarios") / "babble"
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_key_value_heads=2, **shape)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(resolve_model("demo") / name, folder)
    with run_daemon(folder, "--kv-cache-mib", "16", "--host-cache-mib", "4") as process:
        yield process


def ask(daemon, messages=QUESTION, **fields):
    client = daemon.client(api_key=KEY)
    extra = {name: fields.pop(name) for name in ("top_k", "min_p") if name in fields}
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, max_tokens=24, extra_body=extra, **fields
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-6},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 1e-6},
    ],
    ids=str,
)
def test_s50_whatever_leaves_one_token_to_choose_from_is_greedy(daemon, fields):
    assert ask(daemon, seed=5, **fields) == ask(daemon, temperature=0)


def test_s50_a_seed_fixes_the_answer_and_another_changes_it(daemon):
    first, again, other = (ask(daemon, temperature=2.0, top_p=1.0, seed=seed) for seed in (11, 11, 12))
    assert first == again != other


@pytest.mark.parametrize("seed", range(4))
def test_s51_streamed_pieces_are_whole_characters_and_add_up(babbling_daemon, seed):
    client = babbling_daemon.client()
    fields = {"model": client.models.list().data[0].id, "messages": QUESTION, "max_tokens": 200, "temperature": 2.0}
    whole = client.chat.completions.create(seed=seed, **fields).choices[0].message.content
    chunks = client.chat.completions.create(seed=seed, stream=True, **fields)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole
    assert not whole.isascii(), "nothing here was more than one byte long"


@pytest.mark.parametrize("written", ["☕ tea", "e\u0301a\u0308", "日本語", "👩\u200d👩\u200d👧!", "naïve"], ids=ascii)
def test_s51_text_comes_back_from_tokens_in_whole_characters(written):
    tokenizer = Tokenizer.load(resolve_model("demo"))
    detokenizer = tokenizer.new_detokenizer()
    pieces = [detokenizer.push(token) for token in tokenizer.encode(written)]
    assert "".join([*pieces, detokenizer.flush()]) == written
    assert not any("\ufffd" in piece for piece in pieces)


def test_s53_prompts_outputs_and_keys_are_told_nowhere(daemon):
    said = ask(daemon, [{"role": "user", "content": f"My name is {MARKER}. What is my name?"}], temperature=0)
    bad = [
        {"messages": [{"role": MARKER, "content": MARKER}]},
        {"messages": [{"role": "user", "content": MARKER}], "temperature": MARKER},
        {"messages": [{"role": "user", "content": f"{MARKER} " * 3000}]},
        {"messages": [{"role": "user", "content": MARKER}], "model": MARKER},
        {"messages": MARKER},
    ]
    told = []
    for body in bad:
        reply = httpx.post(
            f"{daemon.url}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=PATIENCE_SECONDS,
        )
        assert reply.status_code in (400, 404)
        told.append(reply.text)
    with pytest.raises(openai.AuthenticationError) as refused:
        daemon.client(api_key=f"{KEY}-but-wrong").models.list()
    told.append(json.dumps(refused.value.body))
    told += [
        httpx.get(f"{daemon.url}{path}", timeout=PATIENCE_SECONDS).text
        for path in ("/health", "/readyz", "/openapi.json")
    ]
    told += daemon.log
    everything = "\n".join(told)
    assert said
    assert len(daemon.log) > 5
    for secret in (MARKER, KEY, said):
        assert secret not in everything
