"""The soak finds what it is there to find, and a sound daemon passes it."""

import json
from dataclasses import asdict

import pytest

from bench.soak.checks import (
    Account,
    Retries,
    breaches_of_pause,
    breaches_of_reply,
    difference_from_cold,
    growth,
    missed_again,
)
from bench.soak.client import Reply
from bench.soak.command import main, memory_breaches, occupancy_ranges
from bench.soak.observer import Page, Sample
from bench.soak.plot import draw
from bench.soak.sessions import new_session


def reply(cached=40, prompt=50, lost=None, **changes):
    source = {"device": cached, "host": 0, "disk": 0}
    reuse = {"path": "private_endpoint", "prompt_tokens": prompt, "cached_tokens": cached, "achievable_tokens": 40}
    return Reply(
        "soak-1",
        status=200,
        usage={"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}},
        reuse=reuse | {"source": source, "lost": lost or {}} | changes,
        timings={"cache_n": cached},
    )


def test_a_sound_answer_breaches_nothing():
    assert breaches_of_reply(reply(), must_be_refused=False) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cached_tokens": 41}, "agree about the cached tokens"),
        ({"source": {"device": 1, "host": 0, "disk": 0}}, "agree about the cached tokens"),
        ({"prompt_tokens": 51}, "agree about the prompt"),
        ({"achievable_tokens": 39}, "cached <= achievable"),
        ({"achievable_tokens": 50}, "cached <= achievable"),
        ({"lost": {"cold": 10}}, "cached and lost stay below"),
        ({"lost": {"cold": 0}}, "no loss is 0"),
        ({"path": "root"}, "a path other than root"),
    ],
)
def test_an_answer_whose_account_does_not_add_up_is_a_breach(change, said):
    [line] = breaches_of_reply(reply(**change), must_be_refused=False)
    assert said in line


@pytest.mark.parametrize(
    ("answer", "must_be_refused", "breaches"),
    [
        (Reply("a", 429, error="server_overloaded"), False, 0),
        (Reply("a", 200, error="queue_timeout"), False, 0),
        (Reply("a", 500, error="internal_error"), False, 1),
        (Reply("a", 200, error="cut_off"), False, 1),
        (Reply("a", 400, error="invalid_value"), True, 0),
        (reply(), True, 1),
    ],
)
def test_a_refusal_is_right_only_where_it_belongs(answer, must_be_refused, breaches):
    assert len(breaches_of_reply(answer, must_be_refused=must_be_refused)) == breaches


@pytest.mark.parametrize(
    ("again", "is_missed"),
    [(reply(), False), (reply(lost={"evicted_state": 3}), True), (reply(0, path="root"), True)],
)
def test_a_body_that_is_sent_again_must_reuse_all_that_it_left(again, is_missed):
    assert bool(missed_again(reply(0), again)) is is_missed


def test_under_load_some_may_miss_when_they_are_sent_again_but_not_many():
    assert Retries(100, ["x"] * 50).breaches() == []
    assert len(Retries(100, ["x"] * 51).breaches()) == 1
    assert Retries(10, ["x"] * 10).breaches() == []


def pool(**units):
    return {"pools": {"p": {"capacity": 4, "free": 4, "cached": 0, "pinned": 0, "in_flight": 0} | units}}


@pytest.mark.parametrize(
    ("cache", "violations", "said"),
    [
        (pool(free=3, pinned=1), [], "1 units of p are pinned"),
        (pool(free=3, in_flight=1), [], "1 units of p are in_flight"),
        (pool(free=3), [], "do not add up"),
        (pool(), ["unit 3 is lost"], "unit 3 is lost"),
    ],
)
def test_a_pause_in_which_something_is_held_or_lost_is_a_breach(cache, violations, said):
    [line] = breaches_of_pause(cache, violations)
    assert said in line
    assert breaches_of_pause(pool(free=1, cached=3), []) == []


def test_answers_and_counters_must_say_the_same():
    said, counted = Account(), Account(1, 50, 40, 2)
    assert len(said.differences(counted)) == 4
    said.add(50, 40, 2)
    assert said.differences(counted) == []


def token(text, logprob, *others):
    top = [{"token": t, "logprob": p} for t, p in ((text, logprob), *others)]
    return {"token": text, "logprob": logprob, "top_logprobs": sorted(top, key=lambda each: -each["logprob"])}


@pytest.mark.parametrize(
    ("warm", "cold", "is_wrong"),
    [
        ([token("a", -0.1)], [token("a", -0.1001)], False),
        ([token("a", -0.1)], [token("a", -0.2)], True),
        ([token("b", -0.7)], [token("a", -0.6999, ("b", -0.7))], False),
        ([token("b", -0.7)], [token("a", -0.6, ("b", -0.7))], True),
        ([token("a", -0.1)], [token("a", -0.1), token("b", -0.1)], True),
        ([token("b", -0.7)], [token("a", -0.6999, ("b", -0.7)), token("c", -0.1)], False),
    ],
)
def test_a_hit_may_change_nothing_but_a_tie(warm, cold, is_wrong):
    difference = difference_from_cold(Reply("w", 200, logprobs=warm), Reply("c", 200, logprobs=cold))
    assert bool(difference) is is_wrong


def test_memory_may_not_grow_after_the_first_tenth():
    assert growth(1000, 1029) == ""
    assert "4.0%" in growth(1000, 1040)
    pauses = [(500 * (step + 1), 1000 if step > 1 else 500) for step in range(10)]
    grown = [*pauses[:-3], *((sent, 1040) for sent, _ in pauses[-3:])]
    assert memory_breaches(pauses, 5000) == []
    assert len(memory_breaches(grown, 5000)) == 1
    assert memory_breaches(grown[:6], 3000) == []


def test_occupancy_is_told_from_the_first_time_that_a_pool_was_full():
    samples = [Sample(0.0, 0, {"p": share}, {"p": 0.0}, None, None, 1) for share in (0.1, 0.5, 0.97, 0.4, 1.0)]
    assert occupancy_ranges(samples) == {"p": (0.4, 1.0)}
    assert occupancy_ranges([]) == {}


def test_a_page_of_metrics_becomes_an_account():
    page = Page.parse(
        'dalsegno_reuse_selections_total{path="root"} 2.0\n'
        'dalsegno_reuse_selections_total{path="private_endpoint"} 1.0\n'
        "dalsegno_prompt_tokens_total 90.0\n"
        'dalsegno_prompt_tokens_by_source_total{source="computed"} 60.0\n'
        'dalsegno_prompt_tokens_by_source_total{source="device"} 20.0\n'
        'dalsegno_prompt_tokens_by_source_total{source="host"} 10.0\n'
    )
    assert page.account() == Account(3, 90, 30, 10)


def asked(seed, number):
    session, asks, text = new_session(seed, number), [], None
    while True:
        try:
            ask = next(session) if text is None else session.send(text)
        except StopIteration:
            return asks
        asks.append(asdict(ask))
        text = "yes"


def test_the_same_seed_asks_the_same_and_every_session_ends():
    for number in range(40):
        asks = asked(3, number)
        assert asks == asked(3, number)
        assert 1 <= len(asks) <= 20
    assert [asked(3, number) for number in range(20)] != [asked(4, number) for number in range(20)]


def test_a_plot_is_drawn(tmp_path):
    samples = [Sample(float(step), step, {"p": 0.5}, {"p": 0.1}, None, 0.5, 2**28) for step in range(3)]
    draw(samples, tmp_path / "soak.png", "title")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_a_short_soak_of_the_real_daemon_finds_nothing_wrong(tmp_path, capsys):
    assert main(["--requests", "60", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["requests"] >= 60
    assert figures["answers"]["cached_tokens"] > 0
