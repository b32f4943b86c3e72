"""Benchmarks are run as scripts, from their folder: a test imports them so, and leaves nothing of theirs behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.tidy.tree import ROOT

BENCHMARKS = ROOT / "benchmarks"


def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body of a fixture: modules of the folder can be imported by name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
