"""Replaying a log: make crash states of it, judge each, sum up.

    figures = replay(log, seed=1, states=5000)
    assert figures.is_sound, figures.failures

Owns the worker processes: a state that kills its judge (a SIGBUS in a mapped file) is a failure of that state,
not of the replay. Never decides what a crash may leave (medium.py, crashes.py) nor what is right (a judge).
Invariants: states are judged in a scratch directory of their own, in memory where /dev/shm can be written; a failure
carries what is needed to make its state again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from kvstore_tiers.testing.powerloss.crashes import CrashState, crash_states, crash_ticks, the_state
from kvstore_tiers.testing.powerloss.judge import Judge, Verdict
from kvstore_tiers.testing.powerloss.log import Kind, Operation, read_log
from kvstore_tiers.testing.powerloss.promises import Promises, promises_at
from kvstore_tiers.testing.powerloss.record import put_tree

TIER_JUDGE = "kvstore_tiers.testing.powerloss.judge:judge_tier"
SCRATCH_ENVIRONMENT = "KVSTORED_POWERLOSS_SCRATCH"  # a directory for the states instead of /dev/shm
STATES_A_TICK = 20  # at most; a round that skips ticks then reaches the end of the log
FAILURES_OF_A_SHAPE = 5


def _shape(report: dict[str, Any]) -> tuple[bool, bool, frozenset[str]]:
    broken = frozenset(what.split("/")[0][:40] for what in report.get("broken", ()))
    return bool(report.get("lost")), bool(report.get("wrong")), broken


@dataclass
class Figures:
    """The counts of a replay of power losses: how many crash states were judged, and which faults they had. `lost` and
    `wrong` count blocks, `broken` counts broken rules, `died` counts states that killed the judge's process. `failures`
    has reports of some faulty states.
    """

    states: int = 0
    lost: int = 0
    wrong: int = 0
    broken: int = 0
    died: int = 0
    over_capacity_bytes: int = 0
    corrupt_reads: int = 0
    promised: int = 0  # promises checked, summed over the states
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.wrong or self.broken or self.died or self.over_capacity_bytes)

    def add(self, other: Figures) -> None:
        """Add the counts of `other`, the result of another replay, to these."""
        for name in ("states", "lost", "wrong", "broken", "died", "corrupt_reads", "promised", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.over_capacity_bytes = max(self.over_capacity_bytes, other.over_capacity_bytes)
        for failure in other.failures:
            self._fail(failure)

    def take(self, report: dict[str, Any]) -> None:
        """Count the judged state that `report` describes."""
        self.states += 1
        self.promised += report["promised"]
        self.corrupt_reads += report["corrupt_reads"]
        self.over_capacity_bytes = max(self.over_capacity_bytes, report["over_capacity_bytes"])
        for name in ("lost", "wrong", "broken"):
            setattr(self, name, getattr(self, name) + len(report[name]))
        if not report["sound"]:
            self._fail(report)

    def take_death(self, report: dict[str, Any], status: int) -> None:
        """Count a state whose judge's process died with the exit `status`. `report` describes the state; all promises
        made before it count as lost.
        """
        self.states += 1
        self.died += 1
        self.promised += report["promised"]
        self.lost += report["promised"]
        self._fail({**report, "broken": [f"the process that recovered it died with status {status}"]})

    def _fail(self, report: dict[str, Any]) -> None:
        """Keep some failures of each kind, so that one defect does not hide another."""
        if sum(_shape(failure) == _shape(report) for failure in self.failures) < FAILURES_OF_A_SHAPE:
            self.failures.append(report)


def replay(
    log: Path,
    *,
    seed: int = 1,
    states: int = 5000,
    seconds: float | None = None,
    workers: int = 1,
    judge: str = TIER_JUDGE,
    random_states: int = 4,
) -> Figures:
    """Judge up to `states` distinct states that a power loss could have left during the recorded `log`, and return the
    counts of faults. It ends earlier if the log has fewer states or `seconds` are over.

    `workers` processes judge. `judge` names the function that judges, "module:function". At most `random_states` states
    at a moment of the log are drawn at random, as `seed` determines. Raises ReplayFailed, also for a log with changes
    that the recorder did not follow.
    """
    started = time.monotonic()
    figures = Figures()
    reports: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    share = -(-states // workers)
    common = [str(log), "--judge", judge, "--seed", str(seed), "--states", str(share), "--random", str(random_states)]
    if seconds is not None:
        common += ["--seconds", str(seconds)]
    threads = [
        Thread(target=_drive, args=([*common, "--part", f"{part}/{workers}"], reports)) for part in range(workers)
    ]
    for thread in threads:
        thread.start()
    running, error = workers, ""
    while running:
        report = reports.get()
        if report is None:
            running -= 1
        elif "error" in report:
            error = report["error"]
        elif "status" in report:
            figures.take_death(report, report["status"])
        else:
            figures.take(report)
    if error:
        raise ReplayFailed(error)
    figures.seconds = time.monotonic() - started
    return figures


class ReplayFailed(Exception):
    """An error: the replay could not be done, because of a fault in the log, in the name of its judge or in its scratch
    directory.
    """


def _drive(arguments: list[str], reports: SimpleQueue[dict[str, Any] | None]) -> None:
    """Run one worker, and start it again after a state that killed it. The scratch directory belongs to this function,
    so that it is removed when the replay ends.
    """
    with scratch_directory() as scratch:
        _drive_in([*arguments, "--scratch", scratch], reports)


def _drive_in(arguments: list[str], reports: SimpleQueue[dict[str, Any] | None]) -> None:
    skip = 0
    while True:
        command = [sys.executable, "-m", "kvstore_tiers.testing.powerloss.replay", *arguments, "--skip", str(skip)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        assert child.stdout is not None and child.stderr is not None
        begun: dict[str, Any] | None = None
        for line in child.stdout:
            said = json.loads(line)
            if "begin" in said:
                begun, skip = said, said["begin"] + 1
            else:
                begun = None
                reports.put(said)
        complaint = child.stderr.read()
        status = child.wait()
        child.stdout.close()
        child.stderr.close()
        if status and begun is None:
            reports.put({"error": complaint[-2000:] or f"a replay worker ended with status {status}"})
        elif status and begun is not None:
            reports.put({**begun, "status": status})
            continue
        reports.put(None)
        return


# -- in a worker -------------------------------------------------------------------------------------------------------


def judge_state(state: CrashState, promises: Promises, judge: Judge, scratch: Path) -> dict[str, Any]:
    """Write the files of the crash `state` into the directory `scratch` and let `judge` check that `promises` are kept
    there. Return the report: the faults, the state's tick and its description.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    put_tree(state.tree, scratch)
    try:
        verdict = judge(scratch, promises)
    except Exception as error:  # an error of any kind means that it did not recover
        verdict = Verdict(broken=[f"recovery ended with {type(error).__name__}: {error}"])
        verdict.lost = sorted(promises.durable, key=str)
    return {
        **asdict(verdict),
        "sound": verdict.is_sound,
        "promised": len(promises.durable) + len(promises.gone),
        "tick": state.tick,
        "how": state.how,
    }


def states_of(
    operations: Sequence[Operation],
    *,
    seed: int,
    states: int,
    part: int = 0,
    parts: int = 1,
    random_states: int = 4,
) -> Iterator[tuple[CrashState, Promises]]:
    """Yield at most `states` distinct states that a power loss during the log `operations` could leave, each with the
    promises that were made before it. Of the moments at which to cut the power, number `part` and every `parts`-th
    after it are used. At most `random_states` states at a moment are drawn at random, as `seed` determines.
    """
    ticks = crash_ticks(operations)[part::parts]
    strides = min(len(ticks), 1 + len(ticks) * STATES_A_TICK // states)
    marks = [one for one in operations if one.kind is Kind.MARK]
    promises, taken, last = Promises(), 0, -1
    stream = crash_states(operations, ticks, seed=seed, strides=strides, random_states=random_states)
    for state in islice(stream, states):
        if state.tick < last:  # another round
            promises, taken = Promises(), 0
        last = state.tick
        while taken < len(marks) and marks[taken].start < state.tick:
            promises.take(marks[taken].mark())
            taken += 1
        yield state, promises


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary directory for the files of crash states, and return it. An environment variable names the parent
    directory; otherwise the files are in RAM if possible.
    """
    memory = os.environ.get(SCRATCH_ENVIRONMENT) or "/dev/shm"
    return tempfile.TemporaryDirectory(prefix="powerloss-", dir=memory if os.access(memory, os.W_OK) else None)


def main() -> None:
    parser = argparse.ArgumentParser(description="judge crash states of a log; one JSON object a state")
    parser.add_argument("log", type=Path)
    parser.add_argument("--judge", default=TIER_JUDGE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--states", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--random", type=int, default=4)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--scratch", help="where states are put; the caller removes it")
    parser.add_argument("--tick", type=int, help="one state only: its tick, and --how")
    parser.add_argument("--how", help="one state only: how it was chosen, as a failure says it")
    parser.add_argument("--keep", type=Path, help="with --tick: leave the state in this directory, judge nothing")
    arguments = parser.parse_args()
    module, _, name = arguments.judge.partition(":")
    judge: Judge = getattr(import_module(module), name)
    operations = read_log(arguments.log)
    if arguments.tick is not None:
        state = the_state(operations, arguments.tick, arguments.how)
        if arguments.keep is not None:
            arguments.keep.mkdir()
            put_tree(state.tree, arguments.keep)
            return
        with scratch_directory() as scratch:
            _say(judge_state(state, promises_at(operations, state.tick), judge, Path(scratch) / "state"))
        return
    part, parts = map(int, arguments.part.split("/"))
    deadline = time.monotonic() + arguments.seconds
    stream = states_of(
        operations, seed=arguments.seed, states=arguments.states, part=part, parts=parts, random_states=arguments.random
    )
    with nullcontext(arguments.scratch) if arguments.scratch else scratch_directory() as scratch:
        for number, (state, promises) in enumerate(stream):
            if time.monotonic() > deadline:
                break
            if number >= arguments.skip:
                promised = len(promises.durable) + len(promises.gone)
                _say({"begin": number, "tick": state.tick, "how": state.how, "promised": promised})
                _say(judge_state(state, promises, judge, Path(scratch) / "state"))


def _say(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
