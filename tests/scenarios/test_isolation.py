"""Who is kept apart learns nothing of others' prompts, neither by counts nor by what is computed: S35, over HTTP."""

from __future__ import annotations

import itertools

import httpx
import pytest

from engine.catalog import resolve_model
from tests.e2e.conftest import run_daemon
from tests.scenarios.talking import system, user
from tests.waiting import PATIENCE_SECONDS

KEYS = ("key-of-ada", "key-of-bob")
SALTS = ("salt-of-ada", "salt-of-bob")
CHAT = [system("You guard the harbour and its secrets. " * 8), user("Which ship carries the gold?")]
BODIES = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2, "temperature": 0},
    "/v1/completions": {"prompt": "The ship that carries the gold is " * 8, "max_tokens": 2, "temperature": 0},
}


@pytest.fixture(scope="module", params=["shared", "key"])
def daemon(request):
    """A daemon with two keys, which share or are kept apart, on pools that hold everything."""
    flags = ["--max-context", "1024", "--cache-isolation", request.param, "--log-level", "debug"]
    flags += itertools.chain.from_iterable(("--api-key", key) for key in KEYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with run_daemon(resolve_model("demo"), *flags) as process:
            process.keeps_keys_apart = request.param == "key"
            yield process


def ask(daemon, path, key, salt=None):
    body = BODIES[path] | ({} if salt is None else {"cache_salt": salt})
    answer = httpx.post(
        f"{daemon.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_SECONDS
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def looks_cold(answer) -> bool:
    """By every number that could tell: what was reused, what could have been, and how much was computed for it."""
    reuse, timings = answer["reuse"], answer["timings"]
    computed = (timings["cache_n"], timings["prompt_n"]) == (0, reuse["prompt_tokens"])
    return computed and reuse["cached_tokens"] == reuse["achievable_tokens"] == 0 and set(reuse["lost"]) == {"cold"}


@pytest.mark.parametrize("path", BODIES)
def test_s35_two_salts_never_share(daemon, path):
    first = ask(daemon, path, KEYS[0], SALTS[0])
    assert looks_cold(first)
    assert looks_cold(ask(daemon, path, KEYS[0], SALTS[1]))
    for salt in SALTS:
        again = ask(daemon, path, KEYS[0], salt)
        assert again["reuse"]["cached_tokens"] > 0
        assert again["choices"] == first["choices"]


@pytest.mark.parametrize("path", BODIES)
def test_s35_two_keys_share_unless_they_are_kept_apart(daemon, path):
    first = ask(daemon, path, KEYS[0])
    assert looks_cold(first)
    assert looks_cold(ask(daemon, path, KEYS[1])) is daemon.keeps_keys_apart
    for key in KEYS:
        again = ask(daemon, path, key)
        assert again["reuse"]["cached_tokens"] > 0
        assert again["choices"] == first["choices"]


def test_s35_keys_and_salts_are_in_no_log(daemon):
    for path, key, salt in itertools.product(BODIES, KEYS, SALTS):
        ask(daemon, path, key, salt)
    assert not [line for line in daemon.log if any(secret in line for secret in (*KEYS, *SALTS))]
