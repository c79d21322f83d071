"""What people read of each event, and what a collector of JSON logs gets."""

import io
import json
import logging
from dataclasses import replace

import pytest
import structlog

from engine.request import FinishReason, Timings
from ops.console import Console
from ops.event_json import as_json
from ops.events import RequestRejected, RequestStart
from ops.insights.types import Severity
from ops.log import configure_logging
from tests.ops.event_samples import (
    CHAT,
    MARKER,
    SAMPLES,
    InsightCleared,
    InsightOpened,
    audit,
    done,
    ended,
    insight,
    left_in_the_queue,
    record,
    snapshot,
    terminal_event,
    throughput,
    timed_out,
)


@pytest.fixture(autouse=True)
def _restored_logging():
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", "dalsegno", "uvicorn")}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    structlog.reset_defaults()


def said(*events, level="info", log_format="console"):
    stream = io.StringIO()
    configure_logging(level, log_format, stream)
    console = Console()
    for event in events:
        console.write(record(event))
    return stream.getvalue().splitlines()


def failed_midway():
    cut = Timings(0.01, None, 0.1, 0.212, 1.0, 1.3)
    return terminal_event(ended(FinishReason.ERROR, timings=cut), "req-1", CHAT)


@pytest.mark.parametrize(
    ("event", "severity", "line"),
    [
        (
            done(),
            "info",
            "stop, private_turn_closure 3,898/3,903 cached, TTFT 212 ms, 40 tokens at 40.0 tok/s, "
            "stalled 70 ms, preempted 100 ms, total 1.30 s, /v1/chat/completions (req-1)",
        ),
        (
            left_in_the_queue(),
            "info",
            "cancelled, prompt 3,903, 0 tokens, total 3.00 s, /v1/chat/completions (req-1)",
        ),
        (
            timed_out(),
            "warning",
            "failed: queue_timeout, prompt 3,903, queued 60.0 s, 0 tokens, total 60.0 s, /v1/chat/completions (req-1)",
        ),
        (failed_midway(), "warning", "failed: internal_error, prompt 3,903, TTFT 212 ms, 40 tokens at 40.0 tok/s,"),
        (
            RequestRejected("req-2", CHAT, 429, "server_overloaded"),
            "info",
            "refused /v1/chat/completions: 429 server_overloaded (req-2)",
        ),
        (RequestRejected("req-2", CHAT, 503), "warning", "refused /v1/chat/completions: 503 (req-2)"),
        (
            throughput(),
            "info",
            "prefill 200 tok/s, decode 50 tok/s; 3 running, 2 waiting; reused 100 of 300 achievable tokens; "
            "KV pages 6/10, state slots 0/5, host memory 0/0 MiB; 8 evictions",
        ),
        (
            InsightOpened(insight(Severity.WARNING)),
            "warning",
            "warning: prefix.reuse_collapsed: The last 5 requests reused 0 of 9,000 achievable tokens. Reset the tier:",
        ),
        (InsightOpened(insight(Severity.CRITICAL)), "error", "critical: prefix.reuse_collapsed: The last"),
        (InsightOpened(insight(Severity.NOTICE)), "info", "notice: prefix.reuse_collapsed: The last"),
        (
            InsightCleared(insight(), 150.0),
            "info",
            "cleared after 2 min 30 s: prefix.reuse_collapsed: Reuse has collapsed",
        ),
        (audit(3), "warning", "an audit found 3 violations, 0 of them not mended; given back: 2 units of host_units"),
        (audit(1, 0), "warning", "an audit found 1 violation, 0 of them not mended; given back: nothing"),
        (SAMPLES[0], "info", "serving demo (qwen3_5) on torch after 2.5 s"),
        (SAMPLES[-1], "info", "stopped by signal after 2 h 0 min; every request came to its end"),
    ],
)
def test_people_get_one_line_with_what_matters(event, severity, line):
    [found] = said(event)
    assert line in found
    assert f"[{severity}" in found
    assert "record" not in found


@pytest.mark.parametrize("event", [throughput(snapshot), audit(0, 0), RequestStart("req-1", "chatcmpl-1", CHAT)])
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_nothing_is_said_of_what_did_or_found_nothing(event, log_format):
    assert said(event, log_format=log_format) == []


def test_a_request_that_begins_is_said_at_debug_only():
    [line] = said(RequestStart("req-1", "chatcmpl-1", CHAT), level="debug")
    assert "queued /v1/chat/completions (req-1)" in line


def test_evictions_alone_or_an_admission_alone_are_something():
    busy = throughput().context_cache
    idle = throughput(snapshot)
    for part in ("selections", "pressure"):
        cache = replace(idle.context_cache, **{part: getattr(busy, part)})
        event = replace(idle, context_cache=cache)
        assert len(said(event)) == 1


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.KIND)
def test_a_json_log_has_the_event_itself(event):
    lines = [json.loads(line) for line in said(event, level="debug", log_format="json")]
    for line in lines:
        event_itself = as_json(record(event))
        assert {name: line[name] for name in event_itself} == event_itself
        assert set(line) - set(event_itself) == {"level", "logger", "timestamp"}
    assert len(lines) == (0 if event in (throughput(snapshot), audit(0, 0)) else 1)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_nothing_that_a_client_may_have_written_is_said(log_format):
    lines = said(*SAMPLES, level="debug", log_format=log_format)
    assert len(lines) == len(SAMPLES) - 2
    assert MARKER not in "\n".join(lines)
