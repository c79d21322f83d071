"""`dalsegno replay` as a newcomer types it: tables, a picture, figures as JSON, and one line for what is wrong."""

from __future__ import annotations

import importlib.util
import json

import pytest

from bench.replay.server import SimServer
from server.cli import run

SHORT = ["replay", "--hours", "0.3", "--sessions", "8", "--seed", "1"]
PNG = b"\x89PNG\r\n\x1a\n"


def test_without_a_trace_it_prints_a_table_draws_a_picture_and_writes_figures(tmp_path, capsys):
    picture, figures = tmp_path / "replay.png", tmp_path / "replay.json"
    assert run([*SHORT, "--plot", str(picture), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    for part in ("token hit rate", "achieved of achievable", "time to first token", "0 violations, 0 orphans"):
        assert part in printed
    assert picture.read_bytes().startswith(PNG)
    summary = json.loads(figures.read_text())["summary"]
    assert summary["reuse"]["requests"] > 0
    assert summary["violations"] == []


def test_a_trace_that_was_written_gives_the_same_figures(tmp_path, capsys):
    trace = str(tmp_path / "trace.jsonl")
    summaries = []
    for arguments in ([*SHORT, "--write-trace", trace], ["replay", trace]):
        assert run([*arguments, "--json", "-"]) == 0
        summaries.append(json.loads(capsys.readouterr().out)["summary"])
    # Times are written in milliseconds.
    assert summaries[0]["reuse"] == summaries[1]["reuse"]


def test_policies_are_compared_on_the_slots_asked_for(capsys):
    assert run([*SHORT, "--compare", "--slots", "2,1+3", "--json", "-"]) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert {(each["slots"]["device"], each["slots"]["host"]) for each in outcomes} == {(2, 0), (1, 3)}
    assert {"LRU", "dalsegno", "clairvoyant (bound)"} <= {each["policy"] for each in outcomes}


def test_ctrl_c_tells_what_was_served_so_far(monkeypatch, capsys):
    turns = iter(range(60))
    advance = SimServer.advance

    def interrupted(self, until):
        if next(turns, None) is None:
            raise KeyboardInterrupt
        advance(self, until)

    monkeypatch.setattr(SimServer, "advance", interrupted)
    assert run(SHORT) == 130
    assert "token hit rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["replay", "no-such-trace.jsonl"], "no-such-trace.jsonl cannot be read"),
        ([*SHORT, "--preset", "70b"], "neither a file nor one of 27b-hybrid"),
        ([*SHORT, "--slots", "4"], "--slots was given without --compare"),
        ([*SHORT, "--compare", "--slots", "four"], "--slots 'four'"),
        ([*SHORT, "--compare", "--plot", "x.png"], "a comparison is a table only"),
        ([*SHORT, "--page-size", "24"], "--page-size 24"),
        (["replay", "--hours", "0.001", "--sessions", "1"], "nobody asks anything in 0.001 hours"),
        (["replay", "trace.jsonl", "--write-trace", "out.jsonl"], "--write-trace and a trace were both given"),
    ],
)
def test_wrong_usage_is_told_in_one_line(arguments, told, capsys):
    assert run(arguments) == 2
    assert told in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run([*SHORT, "--plot", "x.png"]) == 2
    assert "pip install 'dalsegno[bench]'" in capsys.readouterr().err
