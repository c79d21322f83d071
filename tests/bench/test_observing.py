"""The bench of what it costs to be observed: it really observes, and tells a cost above the limit."""

import json
from pathlib import Path

import pytest

from bench import observing
from bench.observing import Pair


@pytest.mark.parametrize(("on", "code"), [((100.0, 99.0, 98.5), 0), ((100.0, 97.0, 90.0), 1)])
def test_more_than_the_limit_fails(on, code, capsys):
    assert observing._tell("demo", [Pair(100.0, each) for each in on]) == code
    assert "3 pairs" in capsys.readouterr().out


def test_everything_is_on_in_one_half_and_off_in_the_other(monkeypatch, capsys):
    written = []
    close = observing.EventLog.close

    def keep(log):
        close(log)
        written.extend(json.loads(line) for line in Path(log._path).read_text().splitlines())

    monkeypatch.setattr(observing.EventLog, "close", keep)
    code = observing.main(["demo", "--rounds", "1", "--tokens", "4", "--turns", "1"])
    assert code in (0, 1), "whatever the machine makes of four tokens"
    kinds = [each["event"] for each in written]
    halves = {each["answer_id"].split("-")[1] for each in written if each["event"] == "request_done"}
    assert halves == {"True"}
    assert kinds.count("request_start") == kinds.count("request_done") == 2 * observing.STREAMS
    assert "tokens/s unobserved" in capsys.readouterr().out
