"""The drill `collapse` on daemons that do not notice, do not tell or do not heal: it says what did not happen."""

from __future__ import annotations

import json

import httpx
import pytest

import bench.drill.collapse as collapse
from bench.drill.collapse import CollapseDrill, DrillFault
from bench.drill.timeline import Timeline
from bench.drill.traffic import DrillError
from bench.soak.client import SoakClient

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch):
    monkeypatch.setattr(collapse, "_TELL_SECONDS", 0.0)


class Daemon:
    """Reuses everything, and nothing under a fault; collapses after four such requests and heals after a reset."""

    def __init__(self, **flaws):
        self.flaws = flaws
        self.fault = ""
        self.known = {}
        self.missed = 0
        self.is_leaking = False
        self.reuse = flaws.get("begins", "healthy")
        self.seen = []

    def answer(self, request):
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        self.seen.append((path, body))
        match path:
            case "/v1/chat/completions":
                return self.chat(body["messages"])
            case "/admin/faults":
                (self.fault,) = body["faults"] or ("",)
                self.is_leaking |= self.fault == "leak_host_state"
                if not self.fault and not self.is_leaking:
                    self.heal()
                return 200, body
            case "/admin/cache/audit":
                lines = ["26 units belong to nobody"] if self.is_leaking else []
                return 200, {"violations": lines, "reclaimed": {}, "remaining": lines}
            case "/admin/cache/reset":
                self.is_leaking = bool(self.flaws.get("keeps_units"))
                self.heal()
                return 200, {
                    "tiers": {"host": {"checkpoints": 0, "units": {"host_units": 26}, "pinned_checkpoints": 0}}
                }
            case "/health":
                return 200, {
                    "status": "ok" if self.reuse == "healthy" else "degraded",
                    "reasons": [],
                    "reuse": self.reuse,
                }
            case "/readyz":
                refuses = request.url.params.get("strict") and self.reuse == "collapsed"
                return (503 if refuses and not self.flaws.get("is_always_ready") else 200), {}
            case "/insights":
                insight = {"id": "prefix.reuse_collapsed", "title": "t", "statement": "s", "recommendation": "r"}
                is_open = self.reuse == "collapsed" and not self.flaws.get("is_silent")
                return 200, {"insights": [insight] if is_open else []}
            case "/metrics":
                alarm = float(self.reuse == "collapsed" and not self.flaws.get("counts_nothing"))
                states = "".join(
                    f'dalsegno_reuse_state{{state="{state}"}} {float(state == self.reuse)}\n'
                    for state in ("healthy", "degraded", "collapsed", "recovering")
                )
                active = f'dalsegno_insight_active{{id="prefix.reuse_collapsed",severity="critical"}} {alarm}\n'
                return 200, f"{states}dalsegno_reuse_degraded {alarm}\n{active}"
        raise AssertionError(path)

    def chat(self, messages):
        if self.flaws.get("fails") and self.fault:
            return 503, {"error": {"message": "m", "type": "t", "param": None, "code": "engine_unavailable"}}
        conversation = messages[0]["content"]
        achievable = self.known.get(conversation, 0)
        self.known[conversation] = prompt = 50 * len(messages)
        cached = 0 if self.fault or self.is_leaking else achievable
        if cached < achievable:
            self.missed += 1
            if self.missed >= self.flaws.get("notices_after", 4):
                self.reuse = "collapsed"
        elif self.reuse == "recovering":
            self.reuse = "healthy"
        reuse = {"path": "root", "cached_tokens": cached, "achievable_tokens": achievable}
        message = {"role": "assistant", "content": "yes"}
        usage = {"prompt_tokens": prompt}
        return 200, {"choices": [{"message": message}], "usage": usage, "reuse": reuse, "timings": {}}

    def heal(self):
        if not self.flaws.get("stays_ill"):
            self.reuse = "recovering" if self.reuse == "collapsed" else self.reuse


async def drill(daemon, fault=DrillFault.LEAK_HOST_STATE):
    """What was told, and the failures."""

    def respond(request):
        status, body = daemon.answer(request)
        return httpx.Response(status, text=body if isinstance(body, str) else json.dumps(body))

    client = SoakClient("http://daemon", "test", httpx.MockTransport(respond))
    moments = []
    timeline = Timeline(moments.append)
    try:
        await CollapseDrill(client, timeline, lambda _what: None).run(fault)
    finally:
        await client.close()
    return [moment.what for moment in moments], timeline.failures


@pytest.mark.parametrize("fault", DrillFault)
async def test_a_daemon_that_notices_tells_and_heals_has_passed(fault):
    daemon = Daemon()
    told, failures = await drill(daemon, fault)
    assert failures == []
    assert told[-1].startswith("passed: ")
    resets = [body for path, body in daemon.seen if path == "/admin/cache/reset"]
    assert resets == ([{"tiers": ["host"]}] if fault is DrillFault.LEAK_HOST_STATE else [])


@pytest.mark.parametrize(
    ("flaws", "said"),
    [
        ({"begins": "degraded"}, "the daemon is not well before the fault"),
        ({"notices_after": 1000}, "the collapse was not detected"),
        ({"notices_after": collapse.MOST_MISSED + 1}, "that was late: 11 such requests, at most 10 were expected"),
        ({"is_always_ready": True}, "/readyz answered 200, the strict one 200"),
        ({"is_silent": True}, "the insight prefix.reuse_collapsed did not open"),
        ({"counts_nothing": True}, "the metrics do not tell"),
        ({"keeps_units": True}, "the books are still wrong"),
        ({"stays_ill": True}, "reuse did not heal: reuse has collapsed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_what_did_not_happen_is_said(flaws, said):
    told, failures = await drill(Daemon(**flaws))
    assert any(line.startswith(said) for line in failures), failures
    assert set(failures) <= set(told)
    assert not any(line.startswith("passed") for line in told)


async def test_a_fault_is_switched_off_also_where_the_collapse_was_not_noticed():
    daemon = Daemon(notices_after=1000)
    await drill(daemon)
    assert daemon.fault == ""


async def test_a_daemon_that_fails_ends_the_drill():
    with pytest.raises(DrillError, match="engine_unavailable"):
        await drill(Daemon(fails=True))
