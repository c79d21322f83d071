"""What a daemon tells about itself, in the shapes of the contract, and a transport that answers with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

NOW_MS = 1_700_000_000_000

HEALTHY: Mapping[str, Any] = {"status": "ok", "reasons": [], "reuse": "healthy", "faults": [], "drained": False}
COLLAPSED: Mapping[str, Any] = {
    "status": "degraded",
    "reasons": ["prefix.reuse_collapsed: Reuse has collapsed"],
    "reuse": "collapsed",
}

COLLAPSE = {
    "id": "prefix.reuse_collapsed",
    "severity": "critical",
    "title": "Reuse has collapsed",
    "statement": "The last 5 requests that could have reused 12,300 tokens reused 492 of them. "
    "23 of 24 state images in host memory belong to nobody.",
    "evidence": {"achieved_tokens": 492, "expected_tokens": 12300},
    "measured_over": {"requests": 5},
    "since_unix_ms": NOW_MS - 30_000,
    "recommendation": 'Reset the tier: dalsegno does not need a restart. POST /admin/cache/reset {"tiers": ["host"]}',
}


def insights(*found: Mapping[str, Any], health: Mapping[str, Any] = HEALTHY) -> dict[str, Any]:
    return {
        "generated_unix_ms": NOW_MS,
        "status": health["status"],
        "reuse": health.get("reuse"),
        "insights": list(found),
    }


def pool(capacity: int, cached: int = 0, pinned: int = 0, in_flight: int = 0) -> dict[str, int]:
    return {
        "capacity": capacity,
        "free": capacity - cached - pinned - in_flight,
        "cached": cached,
        "pinned": pinned,
        "in_flight": in_flight,
    }


CACHE = {
    "pools": {
        "device_kv_pages": pool(13_312, 9_000, 2_211, 64),
        "device_state_slots": pool(24, 12, 2, 1),
        "host_units": pool(0),
        "host_state_slots": pool(24, 24),
    },
    "requests_running": 2,
    "requests_waiting": 1,
}


def point(number: int, reused: int, expected: int, achievable: int) -> dict[str, Any]:
    """One interval of five seconds; number 0 is the last."""
    return {
        "timestamp_unix_ms": NOW_MS - number * 5000,
        "interval_seconds": 5.0,
        "tokens": {"prefill": 400, "decode": 150},
        "scheduler": {"running": 2, "waiting": 1, "prefilling": 1, "decoding": 1},
        "context_cache": {
            "selections": {"private_turn_closure": 3, "root": 1},
            "reused_tokens": reused,
            "expected_tokens": expected,
            "achievable_tokens": achievable,
            "lost_tokens": {"cold": 20, "evicted_state": achievable - reused},
        },
    }


HISTORY = {
    "generated_unix_ms": NOW_MS,
    "interval_seconds": 5,
    "points": [point(number, 900 if number > 20 else 40, 950, 1000) for number in reversed(range(100))],
}


def request(name: str, outcome: str | None = "ok", **changes: Any) -> dict[str, Any]:
    result = {
        "prompt_tokens": 3903,
        "completion_tokens": 65,
        "cached_tokens": 3898,
        "computed_prefill_tokens": 5,
        "achievable_tokens": 3898,
        "reuse": "private_turn_closure",
        "source": {"device": 3898, "host": 0, "disk": 0},
        "lost": {"cold": 2, "no_checkpoint": 5},
        "diverged_at": None,
    }
    timings = {"queue": 0.001, "restore": 0.0, "prefill": 0.01, "ttft": 0.0123, "decode": 2.0, "total": 2.02}
    timings |= {"stalled": 0.0, "preempted": 0.0}
    answer = {
        "id": "chatcmpl-1-1",
        "finish_reason": "stop" if outcome == "ok" else None,
        "result": result | changes if outcome == "ok" else None,
        "timings_seconds": timings if outcome == "ok" else None,
        "explanation": ["all of the prompt that could be reused was"],
        "error": None,
    }
    return {
        "request_id": name,
        "endpoint": "/v1/chat/completions",
        "started_unix_ms": NOW_MS - 3000,
        "outcome": outcome,
        "answers": [answer],
    }


REQUESTS = {
    "requests": [
        request("req-running", None),
        *(request(f"req-{number:032x}", cached_tokens=0, reuse="root") for number in range(30)),
    ]
}

METRICS = """\
# TYPE dalsegno_model_info gauge
dalsegno_model_info{model="demo",architecture="qwen3_5",backend="torch"} 1.0
# TYPE dalsegno_requests_running gauge
dalsegno_requests_running 2.0
# TYPE dalsegno_requests_waiting gauge
dalsegno_requests_waiting 0.0
# TYPE dalsegno_cache_units gauge
dalsegno_cache_units{pool="device_state_slots",state="free"} 9.0
dalsegno_cache_units{pool="device_state_slots",state="cached"} 12.0
dalsegno_cache_units{pool="device_state_slots",state="pinned"} 2.0
dalsegno_cache_units{pool="device_state_slots",state="in_flight"} 1.0
# TYPE dalsegno_cache_capacity gauge
dalsegno_cache_capacity{pool="device_state_slots"} 24.0
# TYPE dalsegno_reuse_achieved_tokens counter
dalsegno_reuse_achieved_tokens_total ACHIEVED
# TYPE dalsegno_reuse_achievable_tokens counter
dalsegno_reuse_achievable_tokens_total 5000.0
# TYPE dalsegno_reuse_lost_tokens counter
dalsegno_reuse_lost_tokens_total{reason="cold"} 77.0
# TYPE dalsegno_reuse_selections counter
dalsegno_reuse_selections_total{path="root"} 5.0
"""


def metrics(achieved: float = 4000.0) -> str:
    return METRICS.replace("ACHIEVED", str(achieved))


Answers = dict[str, Any]
"""By path: a body, or a status."""


def open_daemon(**changes: Any) -> Answers:
    """Everything of a healthy one that is open to all."""
    answers = {
        "/health": HEALTHY,
        "/insights": insights(),
        "/metrics": metrics(),
        "/admin/cache": CACHE,
        "/admin/history": HISTORY,
        "/admin/requests": REQUESTS,
    }
    return answers | {f"/{name.replace('__', '/')}": value for name, value in changes.items()}


def transport(answers: Answers, seen: Callable[[httpx.Request], None] | None = None) -> httpx.MockTransport:
    """Answers from `answers`, which may change meanwhile; a path that is not there gets 404."""

    def answer(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen(request)
        found = answers.get(request.url.path, 404)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, int):
            return httpx.Response(found, json={"error": {"message": "no", "type": "x", "param": None, "code": None}})
        if isinstance(found, str):
            return httpx.Response(200, text=found)
        return httpx.Response(200, content=json.dumps(found))

    return httpx.MockTransport(answer)
