"""Whatever the API page allows and much that it does not: never a failure of the daemon, always a documented answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from server.app import create_app
from server.settings import Settings
from tests.e2e.conftest import run_daemon
from tests.waiting import PATIENCE_SECONDS

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
# Small, so that no answer takes long: the page allows a million tokens.
SMALL = ("--kv-cache-mib", "16", "--host-cache-mib", "4", "--max-context", "128")
FLAGS = (*SMALL, "--max-pending-requests", "4", "--default-max-tokens", "4")
REFUSED_AT_RANDOM = ("model", "n", "tools", "tool_choice", "logit_bias", "stop_token_ids", "min_tokens", "top_logprobs")


def quick(examples: int) -> settings:
    phases = (Phase.explicit, Phase.generate)
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), phases=phases, database=None
    )


@pytest.fixture(scope="module")
def url(tiny_model: Path) -> Iterator[str]:
    with run_daemon(tiny_model, *FLAGS) as daemon:
        yield daemon.url


HAVE_NO_END = ["/insights/stream", "/admin/drain"]
"""A stream that goes on as long as the daemon, and what makes the daemon refuse everything else."""

PAGE = create_app(Settings()).openapi()
anything = schemathesis.openapi.from_dict(PAGE).exclude(path=HAVE_NO_END)
allowed = schemathesis.openapi.from_dict(
    PAGE, config=schemathesis.Config.from_dict({"generation": {"mode": "positive"}})
).exclude(path=HAVE_NO_END)


def tame(case):
    """Drop what is refused nearly always when it is random, and say something, so that bodies reach the engine."""
    if not isinstance(case.body, dict):
        return
    for name in REFUSED_AT_RANDOM:
        case.body.pop(name, None)
    if case.body.get("prompt") in ("", []):
        case.body["prompt"] = "Hello"
    for message in case.body.get("messages", ()):
        message.pop("tool_calls", None)
        message["content"] = message.get("content") or "Hello"
        message["role"] = "user" if message["role"] == "tool" else message["role"]


@anything.parametrize()
@quick(20)
def test_no_request_makes_the_daemon_fail(case, url):
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=PATIENCE_SECONDS)


@allowed.include(method="POST").parametrize()
@quick(20)
def test_no_request_that_the_page_allows_makes_the_daemon_fail(case, url):
    tame(case)
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=PATIENCE_SECONDS)


@pytest.mark.slow
@anything.parametrize()
@quick(200)
def test_no_request_of_many_makes_the_daemon_fail(case, url):
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=PATIENCE_SECONDS)


@pytest.mark.slow
@allowed.include(method="POST").parametrize()
@quick(300)
def test_no_request_of_many_that_the_page_allows_makes_the_daemon_fail(case, url):
    tame(case)
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=PATIENCE_SECONDS)
