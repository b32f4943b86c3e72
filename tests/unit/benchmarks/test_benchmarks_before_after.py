"""benchmarks/before_after.py on trees whose benchmark is a line of Python: what cannot be measured is an error."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.benchmark_scripts import importable

NAME = "daemon_start"
ROWS = [{"name": "start", "value": 2.0, "unit": "s"}, {"name": "stop", "value": 1.0, "unit": "s"}]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def trees(folder: Path, before: str, after: str) -> dict[str, Path]:
    for side, script in (("before", before), ("after", after)):
        (folder / side / ".venv/bin").mkdir(parents=True)
        (folder / side / ".venv/bin/python").symlink_to(sys.executable)
        (folder / side / "benchmarks").mkdir()
        (folder / side / f"benchmarks/{NAME}.py").write_text(script)
    return {side: folder / side for side in ("before", "after")}


def compared(where: dict[str, Path], limit_s: float = 60.0) -> tuple[list[dict[str, Any]], str]:
    script: Any = importlib.import_module("before_after")
    found: tuple[list[dict[str, Any]], str] = script.compared(NAME, where, 2, full=False, limit_s=limit_s)
    return found


def prints(rows: list[dict[str, Any]]) -> str:
    return f"print({json.dumps(rows)!r})"


def test_rows_of_both_trees_are_compared(tmp_path: Path) -> None:
    slower = [{**ROWS[0], "value": 3.0}]
    rows, error = compared(trees(tmp_path, prints(ROWS), prints(slower)))
    assert not error and [(row["row"], row["before"], row["after"]) for row in rows] == [("start", [2, 2], [3, 3])]
    assert (rows[0]["median"], rows[0]["worse"]) == (1.5, True)


def test_a_benchmark_that_is_too_slow_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    rows, error = compared(trees(tmp_path, "import time; time.sleep(60)", prints(ROWS)), limit_s=0.5)
    assert rows == [] and "round 1 of 2" in error and str(tmp_path / "before") in error and "--limit" in error


@pytest.mark.parametrize("script", ["raise SystemExit('no model')", "import sys; print([]); sys.exit('no model')"])
def test_a_benchmark_without_rows_is_an_error_with_its_last_words(tmp_path: Path, script: str) -> None:
    rows, error = compared(trees(tmp_path, prints(ROWS), script))
    assert rows == [] and "exit code 1" in error and error.endswith("no model")
