"""The predictor study: its figures on cases that are known."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvstored.simulator.trace import TraceBuilder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("predictor_study")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_ece_and_log_loss(study: ModuleType) -> None:
    came = np.array([1.0] * 3 + [0.0] * 7)
    assert study.ece(np.full(10, 0.3), came) == pytest.approx(0.0)
    assert study.ece(np.full(10, 0.8), came) == pytest.approx(0.5)
    assert study.log_loss(np.full(10, 0.5), came) == pytest.approx(np.log(2))


def test_a_guess_comes_true_by_its_block_or_the_one_before(study: ModuleType) -> None:
    builder = TraceBuilder("t", "t", 512)
    for at_s, ids in ((0, [1, 2, 3]), (10, [1, 2, 4]), (20, [9, 10]), (30, [9, 11]), (40, [9, 12]), (50, [9, 13])):
        builder.add(at_s * 10**9, ids)
    trace = builder.build()
    uses = study.Uses(trace)
    assert uses.is_within(trace.key(2), 0.0, 10.0)  # block 3: the one before it, 2, was used at 10 s
    assert not uses.is_within(trace.key(2), 0.0, 9.0)
    assert not uses.is_within(trace.key(2), 10.0, 100.0)
    assert not uses.is_within(trace.key(5), 20.0, 100.0)  # four different blocks follow block 9


def test_predictors_are_judged_on_a_made_up_workload(study: ModuleType) -> None:
    figures = study.judged(study.made_up(2500, 1), study.SessionReturn(), 0.5, 10)
    ten = figures["10 s"]
    assert ten["guesses"] > 100
    assert ten["ece"] < 0.1
    assert ten["log loss"] < ten["of the mean"]
    assert figures["us"]["p50"] > 0
