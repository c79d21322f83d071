"""`/metrics` of a real engine: only documented names, nothing that promtool objects to, and vLLM's on request."""

import re

import pytest

from server.app import create_app
from tests.ops.test_metrics_page import documented, families, lint
from tests.server.conftest import client_of
from tests.server.test_door import CHAT, HELLO

pytestmark = pytest.mark.anyio

LATER = {"dalsegno_cache_restore_bytes_per_second", "dalsegno_cache_prefill_tokens_per_second"}
"""Absent until measured."""


async def page_under_load(settings, compat):
    ops = settings.ops.model_copy(update={"metrics_compat": compat})
    app = create_app(settings.model_copy(update={"ops": ops}))
    await app.state.daemon.start()
    async with client_of(app) as client:
        for content in ("Hello", "Hello", "Hello there"):
            body = HELLO | {"messages": [{"role": "user", "content": content}]}
            assert (await client.post(CHAT, json=body)).status_code == 200
        page = (await client.get("/metrics")).text
    await app.state.daemon.stop()
    return page


async def test_the_page_of_a_busy_daemon_holds_what_the_document_says_and_is_clean(settings):
    page = await page_under_load(settings, "none")
    found = families(page)
    known = {name: family for name, family in documented().items() if not name.startswith("vllm:")}
    assert found.keys() | LATER == known.keys()
    for name, family in found.items():
        assert family.kind == known[name].kind
        assert family.labels <= known[name].labels
    assert re.search(r'^dalsegno_step_seconds_count\{kind="decode"\} [1-9]', page, re.MULTILINE)
    assert re.search(r"^dalsegno_step_overhead_seconds_count [1-9]", page, re.MULTILINE)
    assert lint(page) == []


async def test_the_names_of_vllm_are_there_when_asked_for(settings):
    page = await page_under_load(settings, "vllm")
    hits, queries = (
        float(re.search(rf'^vllm:prefix_cache_{what}_total{{.*engine="0".*}} (.*)$', page, re.MULTILINE)[1])
        for what in ("hits", "queries")
    )
    assert 0 < hits < queries
    assert re.search(r"^vllm:time_to_first_token_seconds_count\{.*\} 3.0$", page, re.MULTILINE)
