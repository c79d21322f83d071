"""The Prometheus files that are shipped: where they are, and a copy of them whose clock runs faster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))

_SECONDS_OF = {"s": 1, "m": 60, "h": 3600}
_RANGE = re.compile(r"\[(\d+)([smh])\]")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def all_rules() -> list[dict[str, Any]]:
    """Every rule, of every group and file."""
    return [rule for path in RULES for group in load(path)["groups"] for rule in group["rules"]]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for rule in all_rules() if "alert" in rule]


def time_lapse(folder: Path, target: str, factor: int) -> Path:
    """The shipped configuration in `folder`, for a clock that runs `factor` times as fast; the file's path.

    Every duration becomes so much shorter: the intervals, the ranges in the expressions, how long an alert must hold
    (`for`). Nothing else changes, but for the target that is scraped.
    """
    config = load(PROMETHEUS / "prometheus.yml")
    config["global"] = {name: _shorter(value, factor) for name, value in config["global"].items()}
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (folder / "rules").mkdir()
    for path in RULES:
        rules = load(path)
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule["expr"] = _RANGE.sub(lambda found: f"[{_shorter(found[1] + found[2], factor)}]", rule["expr"])
            if "for" in rule:
                rule["for"] = _shorter(rule["for"], factor)
        (folder / "rules" / path.name).write_text(yaml.safe_dump(rules), encoding="utf-8")
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _shorter(duration: str, factor: int) -> str:
    return f"{int(duration[:-1]) * _SECONDS_OF[duration[-1]] * 1000 // factor}ms"
