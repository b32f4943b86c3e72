"""The predictor study: its figures on cases that are known."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("predictor_study")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_predictors_are_judged_on_a_made_up_workload(study: ModuleType) -> None:
    figures = study.judged(study.made_up(2500, 1), study.SessionReturn(), 0.5, 10)
    ten = figures["10 s"]
    assert ten["guesses"] > 100
    assert ten["ece"] < 0.1
    assert ten["log loss"] < ten["of the mean"]
    assert figures["us"]["p50"] > 0 and figures["us"]["possible"] > 0
