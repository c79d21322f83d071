"""A real Prometheus with the shipped rules scrapes the real daemon under load, and sees a collapse come and go."""

import subprocess

import httpx
import pytest

from tests.deploy.prometheus_files import all_rules, time_lapse
from tests.deploy.prometheus_process import run_prometheus, until
from tests.deploy.test_board import panel_expressions
from tests.deploy.traffic import conversations
from tests.e2e.conftest import run_daemon
from tests.programs import needs_program
from tests.waiting import PATIENCE_SECONDS

FASTER = 40
"""Of the clock of scrapes, ranges and alerts: a scrape takes place each 375 ms instead of each 15 s."""
POOLS = ("--kv-cache-mib", "24", "--host-cache-mib", "16", "--device-state-slots", "8", "--max-context", "2048")


@pytest.fixture(scope="module")
def daemon():
    needs_program("prometheus", package="prometheus")
    with run_daemon("demo", *POOLS, "--max-concurrency", "2", "--allow-faults") as daemon, conversations(daemon.url):
        yield daemon


@pytest.fixture(scope="module")
def prometheus(daemon, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    config = time_lapse(folder, daemon.url.removeprefix("http://"), FASTER)
    with run_prometheus(config, folder / "data") as prometheus:
        yield prometheus


def post(daemon, path, body=None):
    return httpx.post(f"{daemon.url}{path}", json=body, timeout=PATIENCE_SECONDS).raise_for_status().json()


@pytest.fixture
def drill(daemon):
    """Switches faults on; the end of the test switches them off."""

    def switch(*faults):
        post(daemon, "/admin/faults", {"faults": faults})

    yield switch
    switch()


def evidence(prometheus, alertname, state):
    """Which of the rules of that name say so."""
    return {
        alert["labels"]["evidence"]
        for alert in prometheus.alerts()
        if (alert["labels"]["alertname"], alert["state"]) == (alertname, state)
    }


def test_the_daemon_is_scraped_under_load(daemon, prometheus):
    until(lambda: [each["health"] for each in prometheus.ask("targets")["activeTargets"]] == ["up"])
    until(lambda: prometheus.query("rate(dalsegno_generation_tokens_total[5s]) > 0"))


def test_promtool_finds_nothing_to_say_about_the_page(daemon):
    promtool = needs_program("promtool", package="prometheus")
    page = httpx.get(f"{daemon.url}/metrics", timeout=PATIENCE_SECONDS).text
    said = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_every_recording_rule_has_a_value(prometheus):
    wanted = {rule["record"] for rule in all_rules() if "record" in rule}
    until(lambda: wanted <= {series["metric"]["__name__"] for series in prometheus.query('{__name__=~"dalsegno:.+"}')})


def test_every_panel_of_the_board_has_something_to_show(prometheus):
    empty = panel_expressions(rate_interval="5s")

    def is_filled():
        empty[:] = [each for each in empty if not prometheus.query(each)]
        return not empty

    until(is_filled)


def test_a_collapse_fires_by_the_daemon_s_word_and_by_the_tokens_and_resolves(daemon, prometheus, drill):
    def health():
        return httpx.get(f"{daemon.url}/health", timeout=PATIENCE_SECONDS).json()

    def collapsed(state):
        return evidence(prometheus, "ReuseCollapsed", state)

    until(lambda: prometheus.query("dalsegno:reuse_achieved_of_expected_ratio:5m > 0.8"))
    assert health()["status"] == "ok"
    assert [alert for alert in prometheus.alerts() if alert["state"] == "firing"] == []
    drill("refuse_publish")
    until(lambda: health()["reuse"] == "collapsed")
    assert health()["status"] == "degraded"
    until(lambda: collapsed("firing") == {"daemon", "tokens"})
    assert prometheus.query('count_over_time(ALERTS{alertname="ReuseCollapsed", alertstate="pending"}[10m]) > 0')
    drill()
    until(lambda: collapsed("firing") | collapsed("pending") == set())
    until(lambda: health() == {"status": "ok", "reasons": [], "reuse": "healthy", "faults": [], "drained": False})


def test_steps_that_fail_fire(prometheus, drill):
    drill("step_fail")
    until(lambda: "steps" in evidence(prometheus, "EngineFaults", "firing"))


def test_a_leak_fires_when_an_audit_has_found_it(daemon, prometheus, drill):
    drill("leak_host_state")
    until(lambda: post(daemon, "/admin/cache/audit")["violations"])
    until(lambda: "audit" in evidence(prometheus, "StateSlotLeak", "firing"))
