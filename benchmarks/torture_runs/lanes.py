"""One harness several times over, side by side: what waits for a disk, a death or a clock leaves a core to the others.

Owns the children, each a harness of its own with its own seed, folder and part of the count that ends it, and the
adding up of their figures while they run. Never judges. A lane that crashes is the harness's crash, once the others
have ended; its figures so far count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from torture_runs.child_process import start_child
from torture_runs.figures import Assignment, Figures

LOOK_S = 0.2


def in_lanes(module: str, lanes: int, assignment: Assignment, figures: Figures) -> None:
    """Run `torture_runs.MODULE` in so many processes. Raises RuntimeError where one did not end well."""
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
