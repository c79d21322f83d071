"""The runbook names only what is there: doors of the daemon, series, flags, and its own parts."""

import re

import pytest

from cache import Fault
from server.app import create_app
from server.settings import Settings, all_keys
from tests.deploy.prometheus_files import DEPLOY, alert_rules, all_rules

RUNBOOK = (DEPLOY.parent / "docs" / "runbook.md").read_text(encoding="utf-8")
PARTS = re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]
HIDDEN_FLAGS = {"--allow-faults"}


def anchor(title):
    """As GitHub and others make it of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


ANCHORS = [anchor(title) for title in re.findall(r"^#+ (.+)$", RUNBOOK, re.MULTILINE)]


def test_each_alert_has_a_part_and_its_link_leads_there():
    assert len(set(ANCHORS)) == len(ANCHORS)
    for rule in alert_rules():
        page, _, part = rule["annotations"]["runbook_url"].partition("#")
        assert (page, part) == ("docs/runbook.md", anchor(rule["alert"]))
        assert part in ANCHORS


@pytest.mark.parametrize("part", PARTS[:-1], ids=lambda part: part.split("\n")[0])
def test_each_part_says_what_users_notice_what_to_do_when_it_is_over_and_when_it_is_wrong(part):
    for heading in ("Users notice", "Look at", "Do now", "It is over", "False alarms"):
        assert f"**{heading}" in part


def test_links_inside_the_runbook_lead_somewhere():
    links = re.findall(r"\]\(#([^)]+)\)", RUNBOOK)
    assert links
    assert set(links) <= set(ANCHORS)


def test_every_request_that_it_tells_to_send_is_one_that_the_daemon_answers():
    paths = create_app(Settings()).openapi()["paths"]
    requests = re.findall(r"curl ([^\n`]*?)\"?\$D(/[\w/]+)", RUNBOOK)
    assert len(requests) > 20
    for options, path in requests:
        method = "post" if "-X POST" in options else "get"
        assert method in paths.get(path, {}), (method, path)


def test_every_series_that_it_names_is_there(exported):
    recorded = {rule["record"] for rule in all_rules() if "record" in rule}
    named = set(re.findall(r"`(dalsegno[_:]\w[\w:]*)", RUNBOOK))
    assert named
    assert named <= exported | recorded
    for pattern in re.findall(r"grep -E '([^']+)'", RUNBOOK):
        for each in re.sub(r"(\w+)\((\w+)\|(\w+)\)", r"\1\2|\1\3", pattern).split("|"):
            assert any(each in name for name in exported), each


def test_every_flag_and_fault_that_it_names_is_there():
    flags = {key.flag for key in all_keys()} | HIDDEN_FLAGS
    named = set(re.findall(r"`(--[a-z-]+)", RUNBOOK))
    assert named
    assert {flag for flag in named if flag not in flags} == set()
    assert set(re.findall(r'"faults":\["(\w+)"\]', RUNBOOK)) <= set(Fault)
