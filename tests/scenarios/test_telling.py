"""What a daemon says of itself, and what it keeps silent about (S27, S54, S55, S57 to S59), as a process over HTTP."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.catalog import resolve_model
from tests.e2e.conftest import DaemonProcess, run_daemon
from tests.scenarios.telling import (
    Body,
    Conversation,
    Listener,
    chat,
    eventually,
    ids_of,
    insight_of,
    listening,
    logged,
    pools_of,
    until_judged,
)
from tests.waiting import PATIENCE_SECONDS

COLLAPSED, DEGRADED = "prefix.reuse_collapsed", "prefix.reuse_degraded"
SMALL = ("--max-concurrency", "2", "--device-state-slots", "2", "--kv-pages", "256", "--max-context", "2048")
SYSTEM = {"role": "system", "content": "You keep the harbour's book and answer in one word. " * 3}

WELL = {"status": "ok", "reasons": [], "reuse": "healthy", "faults": [], "drained": False}

_CHANGES = ("opened", "cleared")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def serving(*flags: str | Path) -> Iterator[tuple[DaemonProcess, httpx.Client, Listener]]:
    given = ("--throughput-interval-s", "0.5", *map(str, flags))
    with (
        run_daemon(resolve_model("demo"), *given) as daemon,
        httpx.Client(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client,
        listening(daemon.url) as listener,
    ):
        yield daemon, client, listener


def reuse_of(client: httpx.Client) -> str:
    return client.get("/health").json()["reuse"]


def test_s54_a_thousand_cold_prompts_raise_no_insight(tmp_path):
    choice, log = random.Random(54), tmp_path / "events.jsonl"
    flags = ("--max-concurrency", "8", "--device-state-slots", "2", "--host-cache-mib", "8", "--max-context", "2048")
    with serving(*flags, "--event-log", log) as (_, client, listener):
        for number in range(125):
            prompts = [[300 + number, 300 + place, *choice.choices(range(300, 4000), k=6)] for place in range(8)]
            answer = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1})
            assert answer.status_code == 200
            assert answer.json()["reuse"]["achievable_tokens"] == 0
        until_judged(client)
        assert client.get("/insights").json()["insights"] == []
        assert client.get("/health").json() == WELL
        # The pools were full all the time.
        assert client.get("/admin/cache").json()["checkpoints_dropped"] > 900
    assert (listener.insights, listener.reuse) == (set(), {"healthy"})
    assert len(logged(log, "request_done")) == 1000
    assert logged(log, "insight_opened") == []


def test_s55_a_working_set_of_twice_the_pools_is_a_lack_of_memory_and_no_collapse():
    with serving(*SMALL, "--host-cache-mib", "8") as (_, client, listener):
        pools = pools_of(client)
        fits = max(pools["device_state_slots"]["capacity"] - 2, pools["host_state_slots"]["capacity"])
        people = [Conversation(f"{number}") for number in range(2 * fits)]
        for _ in range(6):
            for each in people:
                each.ask(client)
                assert reuse_of(client) == "healthy"
        found = listener.until_open("cache.capacity_small")
        assert found["severity"] == "notice"
        assert found["evidence"]["conversations_that_fit"] == fits
        assert f"About {fits} conversations" in found["statement"]
        assert "--host-cache-mib" in found["recommendation"]
        assert client.get("/health").json()["status"] == "ok"
    assert listener.reuse == {"healthy"}
    assert listener.insights == {"cache.capacity_small"}


def test_s57_a_message_that_is_never_sent_again_is_told_with_its_position():
    with serving("--max-concurrency", "1", "--max-context", "2048") as (_, client, listener):
        person, before, place = Conversation("57", SYSTEM), [], 0
        for turn in range(8):
            person.messages.append({"role": "user", "content": person.words(12)})
            sent = [*person.messages, {"role": "system", "content": f"It is {turn} minutes past nine."}]
            answer = chat(client, sent)
            person.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            now = client.post("/tokenize", json={"messages": sent}).json()["tokens"]
            place = next((at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), 0)
            record = client.get(f"/admin/requests/{answer['id']}").json()["answers"][0]
            assert record["result"]["diverged_at"] == (place if turn else None)
            before = now
        until_judged(client)
        found = insight_of(client.get("/insights").json(), "client.history_rewritten")
        assert found["evidence"]["diverged_at_latest"] == place
        assert f"token {place}" in found["statement"]
        assert client.get("/health").json()["status"] == "ok"
    assert listener.reuse == {"healthy"}


def test_s58_s59_a_refusal_to_publish_is_a_collapse_within_five_requests_and_clears_when_it_is_gone(tmp_path):
    log = tmp_path / "events.jsonl"
    with serving(*SMALL, "--host-cache-mib", "32", "--allow-faults", "--event-log", log) as (_, client, listener):
        people = _collapse(client)
        _is_told(client, listener)
        # An audit comes first of all; it can mend nothing here.
        eventually(lambda: "An audit found nothing amiss" in client.get("/insights").text)

        client.post("/admin/faults", json={"faults": []}).raise_for_status()
        states = [reuse_of(client)]
        while states[-1] != "healthy":
            people[len(states) % len(people)].ask(client)
            states.append(reuse_of(client))
            assert len(states) < 60
        assert [*dict.fromkeys(states)] == ["collapsed", "recovering", "healthy"]
        listener.until(lambda body: body["status"] == "ok" and not ids_of(body), after=len(listener.bodies) - 1)
        assert client.get("/readyz?strict=reuse").status_code == 200
    opened, cleared = ([event["insight"]["id"] for event in logged(log, f"insight_{how}")] for how in _CHANGES)
    assert COLLAPSED in opened
    assert sorted(opened) == sorted(cleared)
    assert len({event["server_instance_id"] for event in logged(log)}) == 1


def test_s58_s59_hits_of_a_system_prompt_hide_no_collapse_and_a_new_daemon_inherits_none(tmp_path):
    flags = (*SMALL, "--host-cache-mib", "32", "--allow-faults", "--event-log", tmp_path / "events.jsonl")
    with serving(*flags) as (_, client, listener):
        _collapse(client, SYSTEM)
        _is_told(client, listener)
    with serving(*flags) as (_, client, listener):
        until_judged(client)
        assert client.get("/health").json() == WELL
        assert (listener.insights, listener.reuse) == (set(), {"healthy"})
    first, second = dict.fromkeys(event["server_instance_id"] for event in logged(tmp_path / "events.jsonl"))
    opened = [event["server_instance_id"] for event in logged(tmp_path / "events.jsonl", "insight_opened")]
    assert first in opened
    assert second not in opened


def _collapse(client: httpx.Client, *shared: Body) -> list[Conversation]:
    """Warm up, switch on a fault and go on until reuse has collapsed; the conversations that are under way then."""
    people = [Conversation(f"{number}", *shared) for number in range(4)]
    for _ in range(3):
        for each in people:
            each.ask(client)
    assert reuse_of(client) == "healthy"
    client.post("/admin/faults", json={"faults": ["refuse_publish"]}).raise_for_status()
    missed = hits = 0
    people = [Conversation(f"new {number}", *shared) for number in range(4)]
    while reuse_of(client) != "collapsed":
        answer = people[0].ask(client)["reuse"]
        missed += len(people[0].messages) > 2 + len(shared) and answer["cached_tokens"] < answer["achievable_tokens"]
        hits += answer["path"] == "shared_stable_prefix"
        people.append(people.pop(0))
        assert missed <= 5
    assert missed > 0
    assert hits >= missed or not shared
    return people


def _is_told(client: httpx.Client, listener: Listener) -> Body:
    """A collapse is, wherever somebody could look."""
    found = listener.until_open(COLLAPSED)
    assert found["severity"] == "critical"
    assert "/admin/faults" in found["recommendation"], "while a drill is on, to end it is all that is advised"
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert any(reason.startswith(COLLAPSED) for reason in health.json()["reasons"])
    ready = [client.get(f"/readyz{how}").status_code for how in ("", "?strict=reuse")]
    assert ready == [200, 503]
    metrics = client.get("/metrics").text
    assert 'dalsegno_reuse_state{state="collapsed"} 1.0' in metrics
    assert f'dalsegno_insight_active{{id="{COLLAPSED}",severity="critical"}} 1.0' in metrics
    return found


def test_s27_without_self_heal_a_leak_is_told_before_the_pool_is_empty_and_a_reset_cures():
    flags = (*SMALL, "--host-cache-mib", "32", "--no-self-heal", "--allow-faults", "--fault", "leak_host_state")
    with serving(*flags) as (daemon, client, listener):
        everything = pools_of(client)["host_state_slots"]["capacity"]
        asked = 0
        while client.get("/health").json()["status"] == "ok":
            Conversation(f"{asked}").ask(client)
            asked += 1
            # Whoever has leaked so much once is told of it when the daemon next has a moment.
            if _left_host(client) >= 2:
                listener.until(lambda body: body["status"] == "degraded")
        assert _left_host(client) < everything - 1
        person = Conversation("still there")
        assert [person.ask(client)["reuse"]["cached_tokens"] > 0 for _ in range(2)] == [False, True]
        said = client.get("/health").json()
        assert (said["status"], said["reuse"]) == ("degraded", "degraded")
        listener.until_open(DEGRADED)
        assert "cache.ledger_violation" in listener.insights
        assert client.get("/readyz?strict=reuse").status_code == 503

        client.post("/admin/faults", json={"faults": []}).raise_for_status()
        advised = r"/admin/cache/reset.* -d '(.*?)'"
        listener.until(lambda body: re.search(advised, _advice(body, DEGRADED)), after=len(listener.bodies) - 1)
        [command] = re.findall(advised, _advice(listener.bodies[-1], DEGRADED))
        answer = client.post(
            "/admin/cache/reset", content=command, headers={"content-type": "application/json"}
        ).raise_for_status()
        assert "host" in answer.json()["tiers"]
        listener.until(lambda body: body["reuse"] == "healthy", after=len(listener.bodies) - 1)
        assert client.get("/health").json() == WELL
        assert client.post("/admin/cache/audit").json() == {"violations": [], "reclaimed": {}, "remaining": []}
        # Host memory is of use again.
        person = Conversation("comes back")
        person.ask(client)
        for number in range(8):
            Conversation(f"other {number}").ask(client)
        assert person.ask(client)["reuse"]["source"]["host"] > 0
        assert daemon.process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "most_missed"), [("restore_fail", 5), ("leak_host_state", 8)])
def test_s58_other_faults_on_busy_traffic_are_a_collapse_within_a_handful_of_requests(fault, most_missed):
    """More conversations than the device holds take turns; the leak lets some of them hit in between."""
    with serving(*SMALL, "--host-cache-mib", "32", "--no-self-heal", "--allow-faults") as (_, client, listener):
        people = [Conversation(f"{number}") for number in range(8)]
        for _ in range(3):
            for each in people:
                each.ask(client)
        client.post("/admin/faults", json={"faults": [fault]}).raise_for_status()
        asked = missed = 0
        while reuse_of(client) != "collapsed":
            answer = people[asked % len(people)].ask(client)["reuse"]
            missed += answer["cached_tokens"] < answer["achievable_tokens"]
            asked += 1
            assert missed <= most_missed
            assert asked <= 5 * len(people)
        _is_told(client, listener)


def _advice(body: Body, insight_id: str) -> str:
    return insight_of(body, insight_id)["recommendation"]


def _left_host(client: httpx.Client) -> int:
    """Checkpoints that were to leave host memory since the start."""
    return sum(client.get("/admin/cache").json()["evictions"].get("host_units", {}).values())
