"""One harness in a process of its own, so that what it breaks is its own: even a crash leaves the figures so far.

    python run_harness.py NAME SEED SECONDS DIRECTORY [STOP_AT]

Prints figures as JSON lines, each the sum so far; the last one counts. Never used by hand: `torture.py` starts it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torture_runs.figures import Assignment, Figures


def report(figures: Mapping[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def main() -> None:
    name, seed, seconds, directory, *stop_at = sys.argv[1:]
    harness = importlib.import_module(f"torture_runs.{name}")
    figures = Figures(report=report)
    assignment = Assignment(int(seed), float(seconds), Path(directory), int(stop_at[0]) if stop_at else None)
    try:
        harness.torture(assignment, figures)
    finally:
        figures.heartbeat(now=True)


if __name__ == "__main__":
    main()
