"""The life of the daemon in this process."""

import asyncio
import gc
import os
import queue
import signal
import subprocess
import sys
import threading

import pytest
from pydantic import SecretStr

from engine.errors import EngineUnavailableError
from engine.request import GenerationRequest, SamplingParams
from server.cli import run
from server.daemon import Daemon
from server.process_end import EndLimit
from server.runner import warn_of_open_door
from server.settings import CacheSettings, ServerSettings, Settings
from server.stdio import announce
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("quiet_logging")


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """Is set with the exit code where the process would have been ended by its limit."""
    codes = queue.SimpleQueue()
    monkeypatch.setattr("server.process_end.end_process", codes.put)
    return codes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loading_ends_the_daemon_at_once(monkeypatch, capsys, number):
    is_over = threading.Event()

    def load_for_ever(_settings):
        os.kill(os.getpid(), number)
        is_over.wait()

    monkeypatch.setattr("server.daemon.load_engine", load_for_ever)
    assert run(["serve", "--port", "0"]) == 0
    is_over.set()
    assert capsys.readouterr().out == ""


def test_the_start_up_line_says_where_what_and_how_much(monkeypatch, capsys, tiny_model):
    async def attached(daemon, engine):
        await attach(daemon, engine)
        os.kill(os.getpid(), signal.SIGTERM)

    def announced(line):
        out_of_sight.append(gc.get_freeze_count())
        announce(line)

    attach, out_of_sight = Daemon.attach, []
    monkeypatch.setattr(Daemon, "attach", attached)
    monkeypatch.setattr("server.runner.announce", announced)
    flags = ["--max-context", "512", "--kv-cache-mib", "1", "--max-concurrency", "3", "--device-state-slots", "2"]
    flags += ["--host-cache-mib", "8", "--host-state-slots", "9"]
    assert run(["serve", str(tiny_model), "--port", "0", *flags]) == 0
    printed = capsys.readouterr().out
    assert "serves tiny (qwen3_5) at http://127.0.0.1:" in printed
    # 1 MiB of pages of 4 KiB; a conversation takes 32 of them and one of the 3 + 2 slots.
    assert "backend torch, 256 KV pages of 16 tokens, 5 state slots, 8 MiB of host memory;" in printed
    assert "; 5 conversations of 512 tokens fit on the device, 9 in host memory; ready after" in printed
    # A collection of garbage stops every stream, so it looks at nothing of what was loaded.
    assert out_of_sight[0] > 100_000
    assert gc.get_freeze_count() == 0


def test_what_runs_longer_than_it_may_ends_with_an_error_and_the_daemon_in_order(monkeypatch, caplog, tiny_model):
    told = []

    async def attached(daemon, engine):
        await attach(daemon, engine)
        params = SamplingParams(max_tokens=1_000_000, ignore_eos=True)
        running = engine.submit(GenerationRequest("endless", (5, 6), params))
        await anext(running)
        told.append(asyncio.create_task(last_error(running)))
        os.kill(os.getpid(), signal.SIGTERM)

    async def last_error(running):
        with pytest.raises(EngineUnavailableError):
            async for _ in running:
                pass
        return "stopped"

    attach = Daemon.attach
    monkeypatch.setattr(Daemon, "attach", attached)
    flags = ["--max-context", "60000", "--kv-cache-mib", "64", "--host-cache-mib", "0", "--drain-timeout-s", "0.1"]
    assert run(["serve", str(tiny_model), "--port", "0", *flags]) == 0
    assert told[0].result() == "stopped"


def test_a_process_that_something_holds_ends_by_its_limit(ended, caplog):
    limit = EndLimit(0.01)
    with limit.lifted_behind():
        for _ in range(2):
            limit.begin()
        assert ended.get(timeout=PATIENCE_SECONDS) == 1
    assert "something still holds the process" in caplog.text


def test_a_process_that_ended_in_order_is_left_alone(ended):
    limit = EndLimit(0.2)
    with limit.lifted_behind():
        limit.begin()
    limit._timer.join()
    assert ended.empty()


def test_the_process_ends_without_taking_torch_apart():
    program = (
        "import atexit, sys; sys.modules['torch'] = sys; atexit.register(print, 'taken apart');"
        "from server.cli import main; sys.argv[1:] = ['--version']; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("dalsegno ")
    assert "taken apart" not in result.stdout


def test_a_hangup_without_a_log_file_is_told_and_changes_nothing(caplog):
    with caplog.at_level("INFO", "dalsegno.server"):
        Daemon(Settings()).reopen_logs()
    assert "SIGHUP: there is no log file to reopen" in caplog.text


def test_output_that_nobody_reads_is_told_in_the_log(monkeypatch, caplog):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        announce("dalsegno serves")
        print("and goes on", flush=True)
    assert "standard output cannot be written (Broken pipe)" in caplog.text


@pytest.mark.parametrize(
    ("keys", "address", "is_told"),
    [
        ((), ("0.0.0.0", 8000), True),
        ((), ("::", 8000, 0, 0), True),
        ((), ("192.168.1.5", 8000), True),
        ((), ("127.0.0.1", 8000), False),
        ((), ("::1", 8000, 0, 0), False),
        ((SecretStr("key"),), ("0.0.0.0", 8000), False),
    ],
)
def test_a_network_that_is_let_in_without_a_key_is_told_of(caplog, keys, address, is_told):
    warn_of_open_door(Settings(server=ServerSettings(api_keys=keys)), address)
    assert ("--api-key" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("keys", "isolation", "is_told"),
    [("ab", "shared", True), ("ab", "auto", False), ("ab", "key", False), ("a", "shared", False)],
)
def test_keys_that_learn_of_each_other_are_told_of(caplog, keys, isolation, is_told):
    server = ServerSettings(api_keys=tuple(map(SecretStr, keys)))
    warn_of_open_door(Settings(server=server, cache=CacheSettings(cache_isolation=isolation)), ("127.0.0.1", 8000))
    assert ("--cache-isolation" in caplog.text) is is_told
