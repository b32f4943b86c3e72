"""One harness in a process of its own, so that what it breaks is its own: even a crash leaves the figures so far. As a
harness itself, the kills several times over, side by side: one that waits for a disk, a death or a clock leaves a core
to the others.

    python run_harness.py NAME SEED SECONDS DIRECTORY [STOP_AT]

Prints figures as JSON lines, each the sum so far; the last one counts. Never used by hand: `torture.py` starts it. A
lane is a process of the harness with its own seed, folder and part of the count that ends it; one that crashes is the
harness's crash, once the others have ended, and its figures so far count.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torture_runs.child_process import start_child
from torture_runs.figures import Assignment, Figures

MOST_LANES = 4
LOOK_S = 0.2


def main() -> None:
    name, seed, seconds, directory, *stop_at = sys.argv[1:]
    harness = importlib.import_module(f"torture_runs.{name}")
    figures = Figures(report=lambda found: print(json.dumps(found), flush=True))
    assignment = Assignment(int(seed), float(seconds), Path(directory), int(stop_at[0]) if stop_at else None)
    try:
        harness.torture(assignment, figures)
    finally:
        figures.heartbeat(now=True)


def torture(assignment: Assignment, figures: Figures) -> None:
    """Run `kills` in one lane for each core, and report its figures."""
    lanes = min(MOST_LANES, len(os.sched_getaffinity(0)))
    figures.at_least("most_lanes", lanes)
    in_lanes("kills", lanes, assignment, figures)


def in_lanes(module: str, lanes: int, assignment: Assignment, figures: Figures) -> None:
    """Run `torture_runs.MODULE` in `lanes` processes. Raises RuntimeError where one did not end well."""
    running = [_Lane(module, assignment, number, lanes) for number in range(lanes)]
    while any(lane.listener.is_alive() for lane in running):
        for lane in running:
            lane.listener.join(LOOK_S)
        figures.beside = [lane.figures for lane in running]
        figures.heartbeat()
    figures.beside = [lane.figures for lane in running]
    wrong = [f"lane {number} ended with status {lane.child.wait()}" for number, lane in enumerate(running)]
    if any(lane.child.returncode for lane in running):
        raise RuntimeError("; ".join(wrong))


class _Lane:
    def __init__(self, module: str, assignment: Assignment, number: int, lanes: int) -> None:
        self.figures: dict[str, Any] = {}
        directory = assignment.directory / str(number)
        directory.mkdir(parents=True)
        seed = int(np.random.default_rng([assignment.seed, number]).integers(1 << 62))
        command: list[str | Path] = [sys.executable, Path(__file__).with_name("run_harness.py"), module, str(seed)]
        command += [str(assignment.seconds), directory]
        if assignment.stop_at is not None:
            command.append(str((assignment.stop_at + lanes - 1 - number) // lanes))
        self.child: subprocess.Popen[Any] = start_child(command, stdout=-1, text=True)  # its errors go where ours go
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            with suppress(ValueError):
                self.figures = json.loads(line)


if __name__ == "__main__":
    main()
