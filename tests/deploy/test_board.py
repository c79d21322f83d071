"""The Grafana board, and that board and rules ask only for what the daemon exports."""

import functools
import itertools
import json
import re
import subprocess

import pytest
import yaml

from tests.deploy.prometheus_files import DEPLOY, RULE_TESTS, all_rules, load
from tests.programs import needs_program

GRAFANA = DEPLOY / "grafana"
[BOARD_FILE] = (GRAFANA / "dashboards").glob("*.json")
BOARD = json.loads(BOARD_FILE.read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
OTHERS = {"ALERTS"}
"""Series that Prometheus itself makes."""


def filled_in(expression, rate_interval="1m"):
    """With the board's variables as Grafana would fill them in."""
    values = {"$__rate_interval": rate_interval, "$instance": ".+", "$pool": "host_units"}
    return functools.reduce(lambda text, name: text.replace(name, values[name]), values, expression)


def panel_expressions(rate_interval="1m"):
    return [filled_in(target["expr"], rate_interval) for panel in PANELS for target in panel["targets"]]


def board_expressions():
    """Everything that the board asks Prometheus."""
    notes = [note["expr"] for note in BOARD["annotations"]["list"] if "expr" in note]
    return panel_expressions() + [filled_in(each) for each in notes]


def names_in(expression):
    """The series that it reads."""
    without = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]', "", expression)
    without = re.sub(r"\b(by|without|on|ignoring|group_left)\s*\([^)]*\)", "", without)
    words = re.findall(r"[A-Za-z_:][\w:]*(?!\w*\s*\()", without)
    return {word for word in words if word not in {"and", "or", "unless"} and not re.fullmatch(r"by|without|on", word)}


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum without (a, b) (rate(x_total{k="v_total"}[5m])) > 0', {"x_total"}),
        ("histogram_quantile(0.5, sum by (le) (rate(x_bucket[5m]))) and ignoring (pool) y:z", {"x_bucket", "y:z"}),
    ],
)
def test_the_names_in_an_expression_are_found(expression, names):
    assert names_in(expression) == names


def test_board_and_rules_ask_only_for_what_the_daemon_exports_or_the_rules_record(exported):
    recorded = {rule["record"] for rule in all_rules() if "record" in rule}
    asked = {rule["expr"]: names_in(rule["expr"]) for rule in all_rules()}
    asked |= {expression: names_in(expression) for expression in board_expressions()}
    unknown = {expression: names - exported - recorded - OTHERS for expression, names in asked.items()}
    assert {expression: names for expression, names in unknown.items() if names} == {}


def selectors(expression):
    """Each `name{label="value", ...}` in it: the name, and label, operator, value of each matcher."""
    for name, matchers in re.findall(r"([A-Za-z_:][\w:]*)\{([^}]*)\}", expression):
        yield name, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers)


def matches(labels, label, operator, value):
    pattern = value if "~" in operator else re.escape(value)
    return (re.fullmatch(pattern, labels.get(label, "")) is not None) is (operator[0] == "=")


def test_every_label_and_value_that_is_asked_for_is_one_that_the_daemon_exports(series):
    for expression in [rule["expr"] for rule in all_rules()] + board_expressions():
        for name, matchers in selectors(expression):
            own = [each for each in matchers if each[0] != "instance"]
            if name in OTHERS or name.startswith("dalsegno:"):
                continue
            found = [labels for other, labels in series if other == name]
            assert all(label in found[0] for label, *_ in own), expression
            assert any(all(matches(labels, *each) for each in own) for labels in found), expression


def test_the_board_needs_no_recording_rule():
    assert [each for each in board_expressions() if "dalsegno:" in each] == []


def test_the_tests_of_the_rules_give_only_what_the_daemon_exports(exported):
    given = {
        series["series"].split("{")[0]
        for path in RULE_TESTS
        for test in load(path)["tests"]
        for series in test["input_series"]
    }
    assert given - exported == set()


def test_every_expression_of_the_board_parses(tmp_path):
    promtool = needs_program("promtool", package="prometheus")
    rules = [{"record": f"board:{number}", "expr": each} for number, each in enumerate(board_expressions())]
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    result = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(rules)} rules found" in result.stdout


def test_every_label_of_a_legend_survives_its_expression():
    """A sum keeps only what it says: a label that it drops would leave a hole in the legend."""
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.search(r"\bby \(([^)]*)\)", target["expr"])
            if kept is not None:
                assert wanted <= set(kept[1].split(", ")), panel["title"]
            elif re.search(r"\b(sum|max)\(", target["expr"]):
                assert wanted == set(), panel["title"]


def test_panels_have_a_place_a_name_and_a_word_of_explanation():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["description"]
        assert panel["targets"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in itertools.combinations(BOARD["panels"], 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def overlap(one, other):
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_the_board_asks_the_prometheus_that_was_chosen():
    assert VARIABLES["datasource"]["type"] == "datasource"
    asked = [panel["datasource"] for panel in PANELS]
    asked += [target["datasource"] for panel in PANELS for target in panel["targets"]]
    asked += [VARIABLES[name]["datasource"] for name in ("instance", "pool")]
    assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in asked)


def test_grafana_finds_what_is_provisioned():
    [source] = load(GRAFANA / "provisioning/datasources/dalsegno.yml")["datasources"]
    assert (source["type"], source["uid"]) == ("prometheus", "dalsegno-prometheus")
    [provider] = load(GRAFANA / "provisioning/dashboards/dalsegno.yml")["providers"]
    assert provider["options"]["path"] in (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert (BOARD["uid"], BOARD["title"]) == ("dalsegno", "dalsegno")
