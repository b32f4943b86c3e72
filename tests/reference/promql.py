"""The metrics that PromQL expressions name, and the files with expressions that ship."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tidy.tree import ROOT

BOARD = ROOT / "deploy/grafana/kvstored.json"
RULES = ROOT / "deploy/prometheus/kvstored.rules.yml"
RULE_TESTS = ROOT / "deploy/prometheus/kvstored.test.yml"
_VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$prefill": "5000"}
_NAME = re.compile(r"\b(kvstored_\w+)(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|ignoring|on) ?\(([^)]*)\)")


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text())
    return found


def rules() -> list[dict[str, Any]]:
    """Return the alert rules; skip the test without PyYAML."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with moto of the dev extra")
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the name of each panel's query and each rule, with its expression, in which the board's variables have a
    value."""
    queries = [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in board()["panels"]
        for target in panel["targets"]
    ]
    for name, text in [*queries, *((rule["alert"], rule["expr"]) for rule in rules())]:
        for variable, value in _VARIABLES.items():
            text = text.replace(variable, value)
        assert "$" not in text, f"{name}: a variable that the board does not have"
        yield name, text


def metrics_in(expression: str) -> dict[str, set[str]]:
    """Return the metrics that `expression` names, each with the labels that it matches."""
    return {
        name: {each.partition("=")[0].strip(" !") for each in matched.split(",") if "=" in each}
        for name, matched in _NAME.findall(expression)
    }


def grouped_by(expression: str) -> set[str]:
    """Return the labels by which `expression` groups."""
    return {label.strip() for labels in _GROUPED.findall(expression) for label in labels.split(",")}
