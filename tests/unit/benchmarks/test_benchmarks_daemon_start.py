"""benchmarks/daemon_start.py with stand-ins for the processes: which starts count, and what they are held against."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reference.benchmark_scripts import importable

COMPILES_S, READY_S, BARE_S = 9.0, 0.5, 0.25
RESIDENT, BARE_RESIDENT = 64_000_000, 48_000_000


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


@pytest.mark.parametrize("quick", [False, True])
def test_a_start_that_compiles_is_not_counted(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    script: Any = importlib.import_module("daemon_start")
    starts: list[float] = []

    @contextmanager
    def started() -> Iterator[Any]:
        starts.append(READY_S if starts else COMPILES_S)
        yield SimpleNamespace(ready_s=starts[-1], rss_bytes=lambda: RESIDENT)

    monkeypatch.setattr(script, "bench_daemon", started)
    monkeypatch.setattr(script, "bare_start", lambda: (BARE_S, BARE_RESIDENT), raising=False)
    monkeypatch.setattr(script, "IDLE_S", 0.0)
    rows = {row.name: row for row in script.measure(quick)}
    assert len(starts) > 2
    assert rows["daemon_ready"].value == rows["daemon_ready_vs_imports"].value == READY_S
    assert (rows["daemon_ready"].possible, rows["daemon_ready_vs_imports"].baseline) == (BARE_S, BARE_S)
    assert (rows["daemon_idle_rss"].value, rows["daemon_idle_rss"].possible) == (64.0, 48.0)
