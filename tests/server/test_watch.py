"""`dalsegno watch`: what it shows of what a daemon tells, in every size and without colour, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys

import httpx
import pytest
from rich.console import Console
from rich.screen import Screen as Window

from server.cli import run
from server.commands.watch import exit_of
from server.daemon_url import base_url
from server.watch.bodies import PoolBody
from server.watch.drawing import ASCII, UNICODE, pool_bar, sparkline
from server.watch.screen import Screen
from server.watch.source import DaemonSource, Keys, UnreachableError
from server.watch.view import Watch
from tests.server import told
from tests.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.usefixtures("quiet_logging"), pytest.mark.anyio]

ADMIN = ("/admin/cache", "/admin/history", "/admin/requests")
COLLAPSED = told.open_daemon(health=told.COLLAPSED, insights=told.insights(told.COLLAPSE, health=told.COLLAPSED))


async def read(answers, keys=Keys(), seen=None):  # noqa: B008  (frozen)
    source = DaemonSource("localhost:8000/v1/", keys, told.transport(answers, seen))
    try:
        reading = await source.read()
    finally:
        await source.close()
    reading.read_unix_ms = told.NOW_MS
    return reading


async def watch_of(*several):
    watch = Watch()
    for answers in several:
        watch.saw(await read(answers))
    return watch


def printed(watch, columns=100, lines=None, trouble="", encoding="utf-8", **options):
    """The page as lines; with `lines`, as it fills a window of that height."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=columns, height=lines or 25, highlight=False, **options)
    screen = Screen(watch, "http://localhost:8000", trouble, fits_window=lines is not None)
    console.print(screen if lines is None else Window(screen))
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("columns", [80, 160])
async def test_a_window_of_24_lines_has_everything_that_matters(columns):
    lines = printed(await watch_of(COLLAPSED), columns, 24)
    assert len(lines) == 24
    assert {len(line) for line in lines} == {columns}
    page = "\n".join(lines)
    for expected in (
        "DEGRADED   serving, reuse has collapsed",
        "demo at http://localhost:8000",
        "2 running, 1 waiting",
        "!! Reuse has collapsed  prefix.reuse_collapsed",
        "What to do: Reset the tier",
        "device state slots",
        "host state slots",
        "71,940",
        "95,000",
        "100,000",
        "evicted_state 28,060, cold 2,000",
        "private_turn_closure 300, root 100",
        "req-running",
        "running 3 s",
        "0/3,903",
        "12 ms",
        "32",
        "stop",
    ):
        assert expected in page
    assert ("no_checkpoint 5" in page) == (columns == 160)
    assert "host units" not in page  # it holds nothing


async def test_a_tall_window_is_filled_with_requests_and_a_low_one_is_not_overfull():
    watch = await watch_of(COLLAPSED)
    assert sum("0/3,903" in line for line in printed(watch, 100, 60)) == 30
    for lines in (1, 5, 12):
        assert len(printed(watch, 60, lines)) == lines


async def test_the_worst_comes_first():
    notice = told.COLLAPSE | {"id": "cache.capacity_small", "severity": "notice", "title": "Memory is small"}
    lines = printed(await watch_of(told.open_daemon(insights=told.insights(notice, told.COLLAPSE))), 80, 24)
    marks = [line.split(" ")[0] for line in lines if line.startswith(("!", "*"))]
    assert marks in (["!!", "*"], ["!!"])
    assert any("lines more" in line for line in lines)


async def test_times_are_those_of_the_daemons_clock():
    transport = httpx.MockTransport(
        lambda _request: httpx.Response(200, json=told.HEALTHY, headers={"date": "Wed, 15 Nov 2023 06:13:20 GMT"})
    )
    source = DaemonSource("http://daemon", Keys(), transport)
    assert (await source.read()).read_unix_ms == 1_700_028_800_000
    await source.close()


async def test_a_daemon_that_does_not_serve_yet_is_not_asked_for_keys():
    answers = dict.fromkeys(told.open_daemon(), 503) | {"/health": {"status": "starting", "reasons": []}}
    assert "answered" not in "\n".join(printed(await watch_of(answers)))


async def test_in_a_file_there_is_only_text():
    page = printed(await watch_of(COLLAPSED), 120)
    assert "\x1b" not in "".join(page)
    assert any(f"req-{0:032x}" in line for line in page)


@pytest.mark.parametrize("variable", ["NO_COLOR"])
async def test_without_colour_nothing_is_told_by_colour_alone(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    page = "\n".join(printed(await watch_of(COLLAPSED), 80, 24, force_terminal=True))
    assert not any(f"\x1b[{code}m" in page for code in (31, 32, 33, 34, 35, 36))
    assert "█ pinned ▓ in flight  ▒ cached  · free" in page.replace("\x1b[2m", "").replace("\x1b[0m", "")


async def test_a_terminal_without_unicode_gets_what_it_can_show():
    page = "\n".join(printed(await watch_of(told.open_daemon()), 80, 24, encoding="ascii"))
    assert "# pinned * in flight  = cached  . free" in page


async def test_what_a_daemon_says_cannot_move_the_cursor_or_style_the_page():
    insight = told.COLLAPSE | {"title": "\x1b[2J[bold]x[/bold]\rgone"}
    lines = printed(await watch_of(told.open_daemon(insights=told.insights(insight))), 120)
    assert any(" [2J[bold]x[/bold] gone" in line for line in lines)
    assert "\x1b" not in "".join(lines)


async def test_doors_that_are_closed_leave_what_the_metrics_tell_and_the_name_of_the_key():
    closed = told.open_daemon() | dict.fromkeys(ADMIN, 403)
    page = "\n".join(printed(await watch_of(closed)))
    assert "HEALTHY" in page
    assert "no insights" in page
    assert "device state slots" in page
    assert "80 % of achievable" in page
    assert "since it started" in page
    assert "--admin-key KEY shows requests and the last minutes" in page
    assert "last requests" not in page


async def test_counters_that_are_read_again_tell_the_course():
    closed = told.open_daemon() | dict.fromkeys(ADMIN, 401)
    watch = await watch_of(closed, closed | {"/metrics": told.metrics(4600)})
    assert [point.achieved_tokens for point in watch.reuse().points] == [600]
    watch.saw(await read(closed | {"/metrics": told.metrics(10)}))  # another life of the daemon
    assert [point.achieved_tokens for point in watch.reuse().points] == [10]


async def test_the_history_is_read_once_and_then_only_what_is_new():
    asked = []
    watch = Watch()
    answers = told.open_daemon()
    for _ in range(2):
        source = DaemonSource("http://daemon", Keys(), told.transport(answers, asked.append))
        reading = await source.read(watch.newest_unix_ms)
        await source.close()
        reading.read_unix_ms = told.NOW_MS
        watch.saw(reading)
        answers["/admin/history"] = {"points": [told.point(-1, 5, 5, 5)]}
    assert watch.newest_unix_ms == told.NOW_MS + 5000
    assert len(watch.reuse().points) == 101
    later = [request.url.params["since"] for request in asked if request.url.path == "/admin/history"][1]
    assert int(later) >= told.NOW_MS


async def test_where_everything_is_closed_the_health_is_left():
    closed = dict.fromkeys(told.open_daemon(), 401) | {"/health": told.COLLAPSED}
    page = "\n".join(printed(await watch_of(closed)))
    assert "DEGRADED" in page
    assert "/insights and /metrics closed: --api-key KEY opens it" in page


async def test_what_is_of_another_version_is_left_out_and_named():
    answers = told.open_daemon() | {"/admin/cache": {"pools": 3}, "/admin/history": 404, "/metrics": "{"}
    page = "\n".join(printed(await watch_of(answers)))
    assert "/admin/cache is of another version: it differs at pools" in page
    assert "/admin/history answered 404" in page
    assert "/metrics is no page for Prometheus" in page
    assert "req-running" in page


@pytest.mark.parametrize(
    ("health", "said", "code"),
    [
        (told.HEALTHY, "HEALTHY   serving, reuse is healthy", 0),
        (told.COLLAPSED, "DEGRADED   serving, reuse has collapsed: prefix.reuse_collapsed: Reuse has", 1),
        ({"status": "starting", "reasons": ["the model is being loaded"]}, "STARTING   the model is being loaded", 2),
        ({"status": "draining", "reasons": []}, "DRAINING   not serving", 2),
        ({"status": "unavailable", "reasons": ["the engine loop has stopped"]}, "UNAVAILABLE   the engine loop", 2),
    ],
)
async def test_each_status_has_its_words_and_its_code(health, said, code):
    watch = await watch_of(told.open_daemon(health=health))
    assert said in printed(watch)[0]
    assert exit_of(watch.reading.health.status) == code


async def test_each_door_gets_the_key_that_opens_it():
    sent = {}

    def seen(request):
        sent[request.url.path] = request.headers.get("authorization")

    await read(told.open_daemon(), Keys("client", "operator"), seen)
    assert sent["/health"] is None
    assert sent["/insights"] == sent["/metrics"] == "Bearer client"
    assert {sent[path] for path in ADMIN} == {"Bearer operator"}
    await read(told.open_daemon(), Keys(admin="operator"), seen)
    assert sent["/insights"] == "Bearer operator"


async def test_what_is_shown_of_a_daemon_that_went_away_is_the_last_that_it_told():
    watch = await watch_of(COLLAPSED)
    lines = printed(watch, 80, 24, trouble="no daemon answers at http://localhost:8000: refused")
    assert lines[0].startswith(" NO ANSWER   no daemon answers at http://localhost:8000: refused; trying again")
    assert any("req-running" in line for line in lines)
    assert "NO ANSWER" in printed(Watch(), 80, 24, trouble="nobody")[0]


@pytest.mark.parametrize("answer", [httpx.ConnectError("refused"), "<html>", [1], 404])
async def test_who_is_no_daemon_is_unreachable(answer):
    with pytest.raises(UnreachableError, match="http://localhost:8000"):
        await read({"/health": answer})


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://host/v1/", "https://host"),
        ("http://127.0.0.1:9/", "http://127.0.0.1:9"),
    ],
)
def test_urls(given, base):
    assert base_url(given) == base


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_a_bar_has_the_width_asked_for_and_a_cell_for_each_state_that_holds_something(glyphs):
    for width in (6, 10, 33):
        for counts in ((0, 0, 0, 0), (1, 1, 1, 1), (10_000, 1, 0, 1), (0, 0, 3, 0), (1, 1, 1, 99_999)):
            pool = PoolBody(
                capacity=sum(counts), free=counts[3], cached=counts[2], in_flight=counts[1], pinned=counts[0]
            )
            bar = pool_bar(pool, width, glyphs).plain
            assert len(bar) == width
            drawn = (glyphs.pinned, glyphs.in_flight, glyphs.cached)
            assert [glyph in bar for glyph in drawn] == [count > 0 for count in counts[:3]]


def test_a_sparkline_shows_what_is_little_as_more_than_nothing():
    assert sparkline([0, 1, 500, 1000], 1000, UNICODE) == " ▁▄█"
    assert sparkline([0, 0], 0, UNICODE) == "  "


WATCH = [sys.executable, "-m", "server", "watch"]
NOBODY = "http://127.0.0.1:1"


def test_a_port_where_nobody_answers_is_told_with_its_code(capsys):
    assert run(["watch", NOBODY, "--once"]) == 2
    assert f"no daemon answers at {NOBODY}" in capsys.readouterr().err
    assert run(["watch", NOBODY, "--once", "--json"]) == 2
    told_json = json.loads(capsys.readouterr().out)
    assert told_json["url"] == NOBODY
    assert "no daemon answers" in told_json["error"]


@pytest.mark.parametrize("arguments", [["--json"], ["--interval-s", "0"], ["--admin-key", "@/no/such/file", "--once"]])
def test_a_wrong_command_line_is_refused(capsys, arguments):
    assert run(["watch", NOBODY, *arguments]) == 2
    assert capsys.readouterr().err


def test_the_settings_say_where_the_daemon_is(monkeypatch, capsys):
    monkeypatch.setenv("DALSEGNO_SERVER_PORT", "1")
    monkeypatch.setenv("DALSEGNO_SERVER_HOST", "0.0.0.0")
    assert run(["watch", "--once"]) == 2
    assert "no daemon answers at http://127.0.0.1:1:" in capsys.readouterr().err


def test_ctrl_c_leaves_the_terminal_as_it_was():
    shown, terminal = pty.openpty()
    with subprocess.Popen([*WATCH, NOBODY], stdin=terminal, stdout=terminal, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        page = b""
        while b"NO ANSWER" not in page:
            page += os.read(shown, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0
        page += os.read(shown, 65536)
        assert process.stderr.read() == b""
    os.close(shown)
    for begun, ended in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert page.rindex(ended) > page.rindex(begun)
