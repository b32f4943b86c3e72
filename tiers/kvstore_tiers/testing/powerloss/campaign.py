"""A campaign: record workloads and recoveries, replay them, until there are enough states or the time is over.

    figures = power_loss(seed=1, states=5000, seconds=60.0)

Owns the order: a workload in three phases (the process dies, then its successor dies in recovery, then orderly ends),
replayed; then recoveries of some of its crash states, each recorded and replayed in turn (power lost again while
recovering); then the next workload. Invariant: the same seed records the same actions, though threads may order their
calls differently.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from kvstore_tiers import failpoints
from kvstore_tiers.testing.powerloss.crashes import CrashState, crash_states, crash_ticks
from kvstore_tiers.testing.powerloss.log import Operation, read_log
from kvstore_tiers.testing.powerloss.promises import Promises, promises_at
from kvstore_tiers.testing.powerloss.record import Recording
from kvstore_tiers.testing.powerloss.replay import Figures, replay

WORKLOAD = "kvstore_tiers.testing.powerloss.workload"
STEPS = 60
RECOVERIES = 8  # crash states of a workload whose recovery is recorded
RECOVERY_SHARE = 0.25  # of the states, those of recoveries
STATES_A_WORKLOAD = 2500  # then a new workload finds more than more states of this one


def record_workload(directory: Path, *, seed: int, steps: int = STEPS) -> Path:
    """Run a random workload of an NVMe tier in the new `directory` and record its file operations. `seed` determines
    the workload, of `steps` steps in each of four processes, two of which die. Return the path of the log. Raises
    CompilerMissing.
    """
    recording = _recording(directory)
    common = ["--seed", str(seed), "--steps", str(steps)]
    _run(recording, [*common, "--phase", "0", "--end", "crash"])
    die = "nvme.recover-after-repair=kill" if seed % 2 else "nvme.recover-before-repair=kill"
    _run(recording, [*common, "--phase", "1"], die)
    _run(recording, [*common, "--phase", "2", "--end", "close"])
    _run(recording, [*common, "--phase", "3", "--end", "close"])
    return recording.log


def record_seal(directory: Path, *, seed: int, steps: int = STEPS) -> Path:
    """Record a workload in which one process closes the tier in order, the next one dies before its first changes are
    synced, and two more follow. `seed`, `steps` and the result are as in `record_workload`, which records another
    order.
    """
    recording = _recording(directory)
    common = ["--seed", str(seed), "--steps", str(steps)]
    _run(recording, [*common, "--phase", "0", "--end", "close"])
    _run(recording, [*common, "--phase", "1", "--steps", "1", "--end", "unsynced"], status=-9)
    _run(recording, [*common, "--phase", "2", "--end", "crash"])
    _run(recording, [*common, "--phase", "3", "--end", "close"])
    return recording.log


def record_recovery(directory: Path, state: CrashState, promises: Promises) -> Path:
    """Record how a tier changes the files of the crash `state` when it is opened on them. Return the path of the log in
    the new `directory`. The log begins with that state and `promises`, which were made before it.
    """
    directory.mkdir(parents=True)
    root = directory / "root"
    root.mkdir()
    marks = [{"durable": sorted(promises.durable, key=str), "gone": sorted(promises.gone, key=str)}]
    recording = Recording(root, directory / "log", tree=state.tree, marks=marks)
    _run(recording, ["--only-recover"])
    return recording.log


def power_loss(
    *, seed: int, states: int, seconds: float | None = None, workers: int = 1, steps: int = STEPS
) -> Figures:
    """Record workloads, judge `states` states that a power loss could have left, or as many as fit into `seconds`, and
    return the counts of faults. `seed` determines the workloads, of `steps` steps each; `workers` processes judge.
    Raises CompilerMissing.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="powerloss-") as scratch:
        for number in count():
            one = _one_workload(
                Path(scratch) / str(number), seed * 1000 + number, states - figures.states, deadline, workers, steps
            )
            figures.add(one)
            if figures.states >= states or (deadline is not None and time.monotonic() >= deadline):
                return figures
    raise AssertionError("never comes here")


def _one_workload(directory: Path, seed: int, states: int, deadline: float | None, workers: int, steps: int) -> Figures:
    log = record_workload(directory / "workload", seed=seed, steps=steps)
    wanted = min(states, STATES_A_WORKLOAD)
    of_recoveries = int(wanted * RECOVERY_SHARE)
    left = _left(deadline, 1 - RECOVERY_SHARE)
    figures = replay(log, seed=seed, states=wanted - of_recoveries, seconds=left, workers=workers)
    if not of_recoveries:
        return figures
    operations = read_log(log)
    sampled = [*_sampled(operations, seed)]
    for number, (state, promises) in enumerate(sampled):
        left = _left(deadline, 1 / (len(sampled) - number))
        if left is not None and left <= 0:
            break
        recovery = record_recovery(directory / f"recovery-{number}", state, promises)
        each = -(-of_recoveries // len(sampled))
        figures.add(replay(recovery, seed=seed, states=each, seconds=left, workers=workers))
    return figures


def _sampled(operations: list[Operation], seed: int) -> Iterator[tuple[CrashState, Promises]]:
    """Yield crash states at ticks all over the log, with their promises."""
    chosen = random.Random(seed)
    ticks = crash_ticks(operations)
    for tick in sorted(chosen.sample(ticks, min(RECOVERIES, len(ticks)))):
        states = [*crash_states(operations, [tick], seed=seed, rounds=1, random_states=4)]
        yield chosen.choice(states), promises_at(operations, tick)


def _left(deadline: float | None, share: float) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic()) * share


def _recording(directory: Path) -> Recording:
    root = directory / "root"
    root.mkdir(parents=True)
    return Recording(root, directory / "log")


def _run(recording: Recording, arguments: list[str], die: str = "", *, status: int | None = None) -> None:
    environment = {**recording.environment(), failpoints.ENVIRONMENT: die}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", WORKLOAD, str(recording.root), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == (status or (-9 if die else 0)), done.stderr
