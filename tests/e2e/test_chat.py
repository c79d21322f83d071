"""`dalsegno chat` and the other verbs that ask a running daemon, as people and scripts use them."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from server.cli import run
from tests.e2e.conftest import LONG, SMALL, run_daemon
from tests.waiting import PATIENCE_SECONDS

KEY = "sk-very-secret"
PROMPT = "you> "


class Terminal:
    """A `dalsegno chat` that is talked to through a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, mark: str) -> str:
        """What came before `mark`, with what was typed in it; after the end, everything."""
        while mark not in self._unread:
            try:
                self._unread += os.read(self._fd, 4096).decode().replace("\r", "")
            except OSError:  # how a terminal says that its program has ended
                break
        before, _, self._unread = self._unread.partition(mark)
        return before

    def wait_for_text(self) -> None:
        while not self._unread:
            self._unread = os.read(self._fd, 4096).decode()

    def say(self, line: str) -> str:
        """Type a line and wait until the next one may come; what was printed meanwhile."""
        self.type(f"{line}\n")
        return self.read_until(PROMPT).partition("\n")[2]


@contextlib.contextmanager
def terminal(*flags: str, **variables: str):
    """Ends with the block, whatever happens in it."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "chat", *flags],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_shows_who_answers_what_it_cost_and_takes_commands(daemon):
    flags = ("--url", daemon.url.removeprefix("http://"), "--max-tokens", "5", "--temperature", "0")
    with terminal(*flags, NO_COLOR="1", TERM="dumb") as chat:
        banner = chat.read_until(PROMPT)
        assert f"tiny at {daemon.url}" in banner
        assert "/help" in banner
        assert "/system TEXT" in chat.say("/help")
        text, cost, *_ = chat.say("Hello" * 40).splitlines()
        assert len(text) == 5
        found = re.fullmatch(
            r"reused \d+ of (\d+) prompt tokens, first token after [\d,]+ ms, 5 tokens at [\d,.]+ per second, cut .*",
            cost,
        )
        assert found, cost
        again = chat.say("Again").splitlines()[1]
        longer = re.match(r"reused (\d+) of (\d+) prompt tokens", again)
        assert 0 < int(longer[1]) < int(longer[2])
        assert int(longer[2]) > int(found[1])
        assert "forgotten" in chat.say("/clear")
        assert chat.say("/system Be brief.") == "The system prompt is set.\n"
        assert chat.say("/system") == "Be brief.\n"
        assert "There is no /sytem" in chat.say("/sytem Be long.")
        assert re.match(r"reused 0 of \d\d prompt", chat.say(" /Hi").splitlines()[1])
        chat.type("/exit\n")
        assert chat.process.wait(PATIENCE_SECONDS) == 0


def test_ctrl_c_stops_an_answer_and_a_second_one_ends(daemon):
    with terminal("--url", daemon.url, "--max-tokens", str(LONG), "--temperature", "0") as chat:
        chat.read_until(PROMPT)
        chat.type("Hello\n")
        chat.read_until("Hello\n")
        chat.wait_for_text()
        chat.process.send_signal(signal.SIGINT)
        assert chat.read_until(PROMPT).rstrip().splitlines()[-1].startswith("\x1b[2mfirst token after")
        chat.process.send_signal(signal.SIGINT)
        assert chat.process.wait(PATIENCE_SECONDS) == 0


def test_a_model_can_be_talked_to_through_the_daemon(daemon):
    command = [sys.executable, "-m", "server", "chat", "--url", daemon.url, "--max-tokens", "5", "--temperature", "0"]
    result = subprocess.run(
        command, input="Hello\n\nAgain\n", capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    first, second = result.stdout.splitlines()
    assert len(first) == len(second) == 5


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(daemon):
    flags = ["--url", daemon.url, "--max-tokens", str(LONG), "--temperature", "0"]
    command = [sys.executable, "-u", "-m", "server", "chat", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write("Hello\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert any(line.endswith("(stopped)\n") for line in iter(process.stdout.readline, ""))
        process.stdin.close()
        assert process.wait(PATIENCE_SECONDS) == 0


def test_a_line_that_is_not_utf_8_is_refused_and_the_conversation_goes_on(daemon):
    command = [sys.executable, "-m", "server", "chat", "--url", daemon.url, "--max-tokens", "5", "--temperature", "0"]
    result = subprocess.run(
        command, input=b"\xff\xfe\nHello\n", capture_output=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert len(result.stdout.splitlines()) == 1
    assert b"not valid UTF-8" in result.stderr


@pytest.mark.usefixtures("quiet_logging")
def test_a_key_opens_a_daemon_and_is_never_shown(tiny_model, tmp_path, monkeypatch, capsys):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    with run_daemon(tiny_model, *SMALL, "--api-key", f"@{keys}") as daemon:
        verbs = {
            "chat": ["chat", "--max-tokens", "2", "--url", daemon.url],
            "generate": ["generate", "Hello", "--max-tokens", "2", "--url", daemon.url],
            "bench": ["bench", "--requests", "1", "--prompt-tokens", "9", "--max-tokens", "2", "--url", daemon.url],
        }

        def ask(verb: str, *flags: str) -> int:
            monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
            return run([*verbs[verb], *flags])

        for verb in verbs:
            assert ask(verb) == 1
            assert ask(verb, "--api-key", KEY) == 0
        assert ask("generate", "--api-key", "wrong") == 1
        assert ask("generate", "--api-key", f"@{keys}") == 0
        monkeypatch.setenv("DALSEGNO_SERVER_API_KEYS", KEY)
        assert ask("chat") == 0
        printed = capsys.readouterr()
        assert "--api-key" in printed.err
        assert KEY not in printed.out + printed.err + "".join(daemon.log)
