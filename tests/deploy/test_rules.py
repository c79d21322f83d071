"""The Prometheus files that are shipped, as promtool judges them, and what each alert must bring with it."""

import subprocess

import pytest

from tests.deploy.prometheus_files import PROMETHEUS, RULE_TESTS, RULES, alert_rules, load
from tests.programs import needs_program

ALERTS = {
    "ReuseCollapsed",
    "StateSlotLeak",
    "HostStateStarved",
    "TierInert",
    "EvictionCliff",
    "QueueStuck",
    "EngineFaults",
    "RequestsFail",
    "RequestsRefused",
    "FirstTokenSlow",
    "QueueSaturated",
    "ConnectionsRefused",
    "EventLogLosesLines",
    "FireDrillLeftOn",
}


@pytest.fixture
def promtool():
    program = needs_program("promtool", package="prometheus")

    def run(*arguments):
        result = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


def test_the_configuration_is_valid(promtool):
    said = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert f"{len(RULES)} rule files found" in said


def test_the_rules_are_valid_and_no_one_is_there_twice(promtool):
    said = promtool("check", "rules", *RULES)
    assert "duplicate" not in said


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_the_rules_do_what_their_tests_say(promtool, path):
    promtool("test", "rules", path)


def test_the_alerts_have_the_names_that_were_promised():
    assert {rule["alert"] for rule in alert_rules()} == ALERTS


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['evidence']}")
def test_an_alert_says_how_bad_it_is_what_happened_and_where_to_read_on(rule):
    assert rule["labels"]["severity"] in {"warning", "critical"}
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert "$labels.instance" in notes["summary"]


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['evidence']}")
def test_each_alert_is_tested_to_fire_with_its_words_and_to_resolve(rule):
    """`fires`: expected with its labels; `resolves`: the same test expects nothing of that name later."""
    for test in (test for path in RULE_TESTS for test in load(path)["tests"]):
        cases = [case for case in test.get("alert_rule_test", ()) if case["alertname"] == rule["alert"]]
        fired = [
            case["eval_time"]
            for case in cases
            for alert in case["exp_alerts"]
            if rule["labels"].items() <= alert["exp_labels"].items() and "description" in alert["exp_annotations"]
        ]
        if fired:
            assert minutes(cases[-1]["eval_time"]) > minutes(fired[-1])
            assert cases[-1]["exp_alerts"] == []
            return
    pytest.fail("no test of the rules expects it")


def minutes(duration):
    assert duration.endswith("m")
    return int(duration[:-1])
