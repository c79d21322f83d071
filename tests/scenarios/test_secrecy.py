"""What clients say, get and are let in with is told nowhere else (S53): words that nobody else uses are put wherever a
request has room for one, every kind of end is driven, and all that the daemon has written and shown is searched."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.catalog import resolve_model
from tests.e2e.conftest import DaemonProcess, run_daemon
from tests.scenarios.telling import Body, eventually, listening, until_judged
from tests.waiting import PATIENCE_SECONDS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SMALL = ("--max-concurrency", "1", "--device-state-slots", "2", "--kv-pages", "256", "--max-context", "2048")
QUEUE = ("--max-pending-requests", "1", "--pending-timeout-s", "1.5", "--throughput-interval-s", "0.5")
_FAULTS = ("refuse_publish", "leak_host_state", "restore_fail", "step_fail")
_LONG: Mapping[str, Any] = {"stream": True, "max_tokens": 1500, "stop": None, "ignore_eos": True}
"""Fields of a request that ends when somebody ends it."""
_LEAST_CHARACTERS = 8


class Secrets:
    """Words that are in no other text, by where they were put."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def __call__(self, place: str) -> str:
        """The word for a place, the same each time."""
        return self._words.setdefault(place, f"zq{len(self._words)}x{uuid.uuid4().hex[:10]}")

    def add(self, place: str, said: str) -> None:
        """Something that was said and can be told from what others say."""
        if len(said.strip()) >= _LEAST_CHARACTERS:
            self._words[f"{place} {len(self._words)}"] = said.strip()

    def found_in(self, text: str) -> list[str]:
        """The places of those that are there, as they are or as JSON writes them."""
        return [
            place
            for place, word in self._words.items()
            if word in text or json.dumps(word)[1:-1] in text or json.dumps(word, ensure_ascii=False)[1:-1] in text
        ]


@dataclass
class Visitor:
    """Does to a daemon what clients and operators do, and keeps what it was answered. `refusals` are errors' bodies."""

    client: httpx.Client
    secret: Secrets
    refusals: list[str] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)

    @property
    def key(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.secret('API key')}"}

    @property
    def admin(self) -> Mapping[str, str]:
        return {"x-api-key": self.secret("admin key")}

    def send(self, path: str, body: Any, status: int, **headers: str) -> httpx.Response:
        """To be answered with this status."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        given = {"content-type": "application/json", **self.key, **headers}
        answer = self.client.post(path, content=content, headers=given)
        assert answer.status_code == status, answer.text
        self.statuses.add(status)
        if status >= 400 or '"error"' in answer.text:
            self.refusals.append(answer.text)
        return answer

    def operate(self, path: str, body: Any = None) -> Body:
        return self.client.post(path, json=body, headers=self.admin).raise_for_status().json()

    def look(self, path: str) -> httpx.Response:
        return self.client.get(path, headers=self.admin if path.startswith("/admin") else self.key)

    def body(self, **fields: Any) -> Body:
        """A conversation with a word wherever it has room for one."""
        secret = self.secret
        schema = {"type": "object", "properties": {secret("parameter"): {"type": "string"}}}
        function = {"name": secret("tool"), "description": secret("what a tool does"), "parameters": schema}
        call = {"name": secret("tool"), "arguments": json.dumps({"where": secret("argument")})}
        return {
            "messages": [
                {"role": "system", "content": f"You know {secret('system text')}."},
                {"role": "user", "content": f"My name is {secret('prompt')}.", "name": secret("speaker")},
                {
                    "role": "assistant",
                    "content": secret("earlier answer"),
                    "reasoning_content": secret("reasoning"),
                    "tool_calls": [{"id": secret("call"), "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": secret("call"), "content": secret("tool result")},
                {"role": "user", "content": "What is my name?"},
            ],
            "tools": [{"type": "function", "function": function}],
            "stop": [secret("stop string")],
            "user": secret("user"),
            "metadata": {secret("name of metadata"): secret("metadata")},
            "cache_salt": secret("salt"),
            "chat_template_kwargs": {"custom": secret("template variable")},
            "safety_identifier": secret("identifier"),
            secret("unknown field"): secret("value of an unknown field"),
            "max_tokens": 24,
            "temperature": 0,
        } | fields

    def ask(self, request_id: str | None = None, **fields: Any) -> str:
        """An answer, whole or streamed, which becomes a secret too."""
        headers = {"x-request-id": request_id} if request_id else {}
        answer = self.send(CHAT, self.body(**fields), 200, **headers)
        bodies = [answer.json()] if not fields.get("stream") else _events(answer.text)
        parts = [choice.get("message") or choice["delta"] for body in bodies for choice in body["choices"]]
        said = "".join(part.get("content") or "" for part in parts)
        self.secret.add("answer", said)
        return said


def _events(text: str) -> list[Body]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


@contextlib.contextmanager
def serving(secret: Secrets, log_format: str, event_log: Path) -> Iterator[tuple[DaemonProcess, Visitor]]:
    flags = (*SMALL, *QUEUE, "--host-cache-mib", "8", "--allow-faults", "--no-self-heal", "--cache-isolation", "key")
    keys = ("--api-key", secret("API key"), "--api-key", secret("other API key"), "--admin-key", secret("admin key"))
    logs = ("--log-level", "debug", "--log-format", log_format, "--event-log", str(event_log))
    with (
        run_daemon(resolve_model("demo"), *flags, *keys, *logs) as daemon,
        httpx.Client(base_url=daemon.url, timeout=PATIENCE_SECONDS) as client,
    ):
        yield daemon, Visitor(client, secret)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_s53_what_clients_say_and_get_is_told_nowhere(tmp_path, monkeypatch, log_format):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    secret, event_log = Secrets(), tmp_path / "events.jsonl"
    told: dict[str, str] = {}
    allowed = f"allowed-{uuid.uuid4().hex}"
    with serving(secret, log_format, event_log) as (daemon, visitor):
        with listening(daemon.url, **visitor.key) as listener:
            answers(visitor, allowed)
            refusals(visitor)
            busy(visitor)
            departures(visitor)
            faults(visitor)
            until_judged(visitor.client, **visitor.admin)
            told |= pages(visitor)
        assert listener.insights >= {"prefix.reuse_collapsed", "cache.ledger_violation", "engine.faults"}
        told["/insights/stream"] = json.dumps(listener.bodies)
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE_SECONDS) == 0
        told["standard output"] = daemon.process.stdout.read()
    told["log"] = "".join(daemon.log)
    told["event log"] = event_log.read_text(encoding="utf-8")
    told["refusals"] = "\n".join(visitor.refusals)

    assert visitor.statuses >= {200, 400, 401, 404, 413, 415, 429, 503}
    kinds = {json.loads(line)["event"] for line in told["event log"].splitlines()}
    assert kinds >= {"server_start", "request_start", "request_done", "request_error", "request_rejected", "audit"}
    assert kinds >= {"insight_opened", "throughput", "server_stop"}
    assert {where: secret.found_in(text) for where, text in told.items() if secret.found_in(text)} == {}
    # The search would have found them: this one may be told, and is.
    secret.add("x-request-id", allowed)
    shown = {where for where, text in told.items() if secret.found_in(text)}
    assert shown == {"log", "event log", "/admin/requests?limit=1000", "/admin/requests/{id}"}


def answers(visitor: Visitor, allowed: str) -> None:
    """Everything that ends well."""
    secret = visitor.secret
    said = [visitor.ask(allowed), visitor.ask(stream=True), visitor.ask(n=2, temperature=1.0)]
    assert any(len(each) >= _LEAST_CHARACTERS for each in said)
    visitor.send(CHAT, visitor.body(), 200, authorization=f"Bearer {secret('other API key')}")
    # An answer that is nothing but one word, over and over.
    word = visitor.send("/tokenize", {"prompt": " lighthouse", "add_special_tokens": False}, 200).json()["tokens"]
    forced = visitor.ask(logit_bias={str(word[0]): 100}, stop=None)
    assert len(forced) >= _LEAST_CHARACTERS
    text = {"prompt": f"Once {secret('text to go on with')}", "echo": True, "max_tokens": 8, "temperature": 1.5}
    for fields in ({}, {"stream": True}, {"echo": False, "logprobs": 3}):
        answer = visitor.send(TEXT, text | fields, 200)
        bodies = _events(answer.text) if "stream" in fields else [answer.json()]
        secret.add("completion", "".join(choice["text"] for body in bodies for choice in body["choices"]))
    ids = [1009, 2011, 1511, 1777, 2503]
    visitor.send(TEXT, {"prompt": ids, "max_tokens": 4}, 200)
    secret.add("token ids", ", ".join(map(str, ids)))
    secret.add("token ids", ",".join(map(str, ids)))
    visitor.send("/tokenize", {"prompt": secret("text to tokenize"), "return_token_strs": True}, 200)
    visitor.send("/tokenize", {"messages": visitor.body()["messages"]}, 200)
    visitor.send("/detokenize", {"tokens": ids}, 200)


def refusals(visitor: Visitor) -> None:
    """Everything that is turned away at the door."""
    secret = visitor.secret
    wrong = [
        visitor.body(temperature=secret("temperature")),
        visitor.body(messages=[{"role": secret("role"), "content": secret("prompt")}]),
        visitor.body(messages=secret("messages")),
        visitor.body(messages=[{"role": "user", "content": [{"type": secret("part"), "text": secret("prompt")}]}]),
        visitor.body(messages=[{"role": "user", "content": f"{secret('long prompt')} " * 600}]),
        visitor.body(response_format={"type": secret("format")}),
        visitor.body(logit_bias={secret("bias"): 1}),
        visitor.body(logit_bias={"7": secret("bias of a token")}),
        visitor.body(tools=[{"type": "function", "function": {"name": 7, secret("in a tool"): secret("tool")}}]),
        visitor.body(chat_template_kwargs={"messages": secret("template variable")}),
        visitor.body(stop=[secret("stop string") * 200]),
        visitor.body(cache_salt=secret("salt") * 100),
        [secret("list")],
    ]
    for body in wrong:
        visitor.send(CHAT, body, 400)
    visitor.send(CHAT, f'{{"messages": [{secret("broken JSON")}'.encode(), 400)
    visitor.send(TEXT, {"prompt": {secret("prompt"): secret("prompt")}}, 400)
    visitor.send(TEXT, {"prompt": [1, secret("token")]}, 400)
    visitor.send("/tokenize", {"prompt": [secret("text to tokenize")]}, 400)
    visitor.send("/detokenize", {"tokens": [secret("token")]}, 400)
    visitor.send(CHAT, visitor.body(model=secret("model")), 404)
    visitor.send(CHAT, visitor.body(), 401, authorization=f"Bearer {secret('wrong key')}")
    visitor.send("/admin/cache/audit", {}, 401)
    visitor.send("/admin/cache/reset", {"tiers": 7, secret("tier"): 1}, 400, **visitor.admin, authorization="")
    visitor.send(CHAT, secret("large body").encode() + b" " * (32 * 2**20), 413)
    visitor.send(CHAT, visitor.body(), 415, **{"content-type": f"text/{secret('content type')}"})
    visitor.send(f"/v1/{secret('path')}", {}, 404)
    odd = {"x-request-id": f"{secret('invalid request id')} !", "user-agent": secret("user agent")}
    odd |= {"cookie": f"session={secret('cookie')}", "x-forwarded-for": secret("forwarded for")}
    for path in (f"/health?{secret('query')}", f"/v1/models/{secret('model')}", f"/admin/requests/{secret('id')}"):
        visitor.client.get(path, headers={**odd, **(visitor.admin if "admin" in path else visitor.key)})
    with socket.create_connection((visitor.client.base_url.host, visitor.client.base_url.port)) as raw:
        raw.sendall(f"{secret('no HTTP')} {secret('no HTTP')}\r\n\r\n".encode())
        raw.recv(4096)


@contextlib.contextmanager
def occupied(visitor: Visitor, name: str) -> Iterator[None]:
    """The daemon answers a request that does not end, and whose client has left at the end."""
    headers = {**visitor.key, "x-request-id": name}
    with visitor.client.stream("POST", CHAT, json=visitor.body(**_LONG), headers=headers) as answer:
        chunks = answer.iter_raw()  # which closes the connection when nobody holds it
        next(chunks)
        eventually(lambda: visitor.look("/admin/cache").json()["requests_running"] == 1)
        yield
    eventually(lambda: visitor.look("/admin/cache").json()["requests_running"] == 0)


def busy(visitor: Visitor) -> None:
    """A queue that is full, and one that takes too long; whole and streamed."""
    for fields in ({}, {"stream": True}):
        with occupied(visitor, f"long-{uuid.uuid4().hex}"):
            status = 200 if fields else 503
            waiting = threading.Thread(target=visitor.send, args=(CHAT, visitor.body(**fields), status))
            waiting.start()
            eventually(lambda: visitor.look("/admin/cache").json()["requests_waiting"] == 1)
            visitor.send(CHAT, visitor.body(**fields), 429)
            waiting.join()


def departures(visitor: Visitor) -> None:
    """Clients that leave: the one while it is answered, the other while it waits."""
    name = f"leaves-{uuid.uuid4().hex}"
    with occupied(visitor, name), pytest.raises(httpx.ReadTimeout):
        visitor.client.post(CHAT, json=visitor.body(), headers=visitor.key, timeout=0.2)
    eventually(lambda: visitor.look(f"/admin/requests/{name}").json()["outcome"] == "cancelled")


def faults(visitor: Visitor) -> None:
    """Fire drills, each with requests that suffer from it, until reuse has collapsed; and what operators do then."""
    for fault in _FAULTS:
        visitor.operate("/admin/faults", {"faults": [fault]})
        if fault == "step_fail":
            visitor.send(CHAT, visitor.body(), 503)
            visitor.send(CHAT, visitor.body(stream=True), 200)
            continue
        for number in range(6):
            salt = "one" if fault == "refuse_publish" else number % 3
            visitor.ask(cache_salt=f"{visitor.secret('salt')} {salt}", max_tokens=2)
    visitor.operate("/admin/faults", {"faults": []})
    visitor.operate("/admin/cache/audit")
    visitor.ask()


def pages(visitor: Visitor) -> dict[str, str]:
    """Everything that can be looked at."""
    paths = ["/", "/health", "/livez", "/readyz?strict=reuse", "/metrics", "/insights", "/v1/models", "/openapi.json"]
    paths += ["/docs", "/dashboard/main.js", "/admin/cache", "/admin/history", "/admin/requests?limit=1000"]
    paths += ["/admin/faults"]
    shown = {path: visitor.look(path) for path in paths}
    assert {path: page.status_code for path, page in shown.items() if page.status_code not in (200, 503)} == {}
    requests = shown["/admin/requests?limit=1000"].json()["requests"]
    assert {request["outcome"] for request in requests} >= {"ok", "cancelled", "error"}
    each = [visitor.look(f"/admin/requests/{request['request_id']}").text for request in requests]
    audit = visitor.operate("/admin/cache/audit")
    assert audit["violations"]
    reset = visitor.operate("/admin/cache/reset", {"tiers": ["device", "host"]})
    told = {path: page.text for path, page in shown.items()}
    return told | {"/admin/requests/{id}": "\n".join(each), "audit": json.dumps(audit), "reset": json.dumps(reset)}
