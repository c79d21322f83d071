"""The bench of hostile requests: what it sends, what it takes for a wait, and what it says of both."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.hostile import bodies, command
from bench.hostile.acts import Act, Answer, acts
from bench.hostile.watch import Notice, longest
from bench.private_daemon import PrivateDaemon
from server.app import create_app
from server.listener import listen, url_of
from server.runner import _Server, http_config
from server.settings import Settings
from tests.server.tiny_model import write_tiny_model

QUIET = Notice(0.02, 0.01, 1.0, 2**20)


def test_a_session_is_as_large_as_it_is_said_to_be():
    case = next(case for case in bodies.cases() if case.name == "a session: 500 messages, 200 tools, 600 kB")
    raw = case.body()
    session = json.loads(raw)
    assert (len(session["messages"]), len(session["tools"])) == (500, 200)
    assert 600_000 <= len(raw) < 700_000


@pytest.mark.parametrize(
    ("moments", "seconds"),
    [
        ([1.0, 2.0, 5.0, 6.0, None], 3.0),
        ([0.0, 1.0, 9.0], 8.0),  # it began in the window
        ([1.0, 2.0, None, 8.0, 8.5], 1.5),  # a stream ended; the last piece is 1.5 s ago
        ([0.0, 9.0], 9.0),
        ([1.0, 1.5, None], 0.5),
        ([], 0.0),
    ],
)
def test_the_longest_wait_is_within_one_stream_and_reaches_into_the_window(moments, seconds):
    assert longest(moments, 1.0, 10.0) == seconds


def test_what_is_over_the_limit_is_tried_again_and_the_least_counts(monkeypatch):
    notices = iter([Notice(0.9, 0.01, 2.0, 1), Notice(0.03, 0.5, 3.0, 2), Notice(0.5, 0.02, 4.0, 3)])

    def done(act, deed, _address, _watch):
        return command.Result(act.name, act.path, str(deed(None)), True, 1.0, next(notices))

    monkeypatch.setattr(command, "_do", done)
    act = Act("late", "/tokenize", lambda: lambda _address: Answer(200), Answer(200))
    result = command._least(act, ("localhost", 1), None, QUIET)
    assert result.notice == Notice(0.03, 0.01, 2.0, 2)
    assert not command.is_late(result.notice, QUIET)
    assert next(notices).resident_bytes == 3


@contextmanager
def daemon_in_this_process(config_toml):
    """As quick as a daemon starts: without a process of its own."""
    settings = Settings.model_validate(tomllib.loads(config_toml))
    app, listener, is_over = create_app(settings), listen("127.0.0.1", 0), threading.Event()

    async def serve():
        server = _Server(http_config(app, settings))
        await app.state.daemon.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.to_thread(is_over.wait)
        await app.state.daemon.stop()
        server.should_exit = True
        await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield PrivateDaemon(url_of(listener), os.getpid(), Path(os.devnull))
    finally:
        is_over.set()
        thread.join()


def test_each_request_is_answered_as_it_has_to_be_and_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_BASELINE_SECONDS", 0.1)
    monkeypatch.setattr(command, "_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(command, "_TRIES", 1)
    monkeypatch.setattr(command, "private_daemon", daemon_in_this_process)
    chosen = {"100,000 stop strings", "a body that drips"}
    monkeypatch.setattr(command, "acts", lambda: [act for act in acts() if act.name in chosen])
    monkeypatch.setitem(command._SETTINGS, "server.body_timeout_s", "0.2")
    model = str(write_tiny_model(tmp_path / "tiny"))
    assert command.main([model, "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {each["name"] for each in results} == chosen
    assert all(each["is_right"] for each in results)
    assert "2 requests, 0 with a wrong answer" in capsys.readouterr().out
