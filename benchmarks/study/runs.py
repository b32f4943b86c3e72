"""Replays by the hundred: over several processes, each result a line of a file, so that what was cut off goes on.

The key of a result is the trace's contents, the window or draw, the policy, its knowledge, the capacity, and the code
that made it: another version of a policy or of the simulator finds nothing of an earlier one's. Owns processes and the
file. Never judges.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import kvstored
from kvstore_simulator.hints import NO_HINTS, parse_hints
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Op, Trace
from kvstore_simulator.worth import models, worth
from study import oracle
from study.sources import Case

Record = dict[str, Any]
OURS = "chain-hazard"
HINTS = "hints "  # knowledge that begins so: hints of a stated quality; what follows is --hints of `kvstored simulate`
_PACKAGE = Path(kvstored.__file__).parent
_OURS_ALONE = ("chain_hazard.py", "chains")
_REPLAYING = (
    "engine_reports.py",
    "future.py",
    "hints.py",
    "models.toml",
    "readers.py",
    "recorded_hints.py",
    "replay.py",
    "trace.py",
    "worth.py",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One replay. `capacity` is a share of the trace's distinct blocks; `draw` seeds made-up hints."""

    case: Case
    policy: str
    capacity: float
    knowledge: str = ""
    draw: int = 0

    @property
    def key(self) -> str:
        case = self.case
        facts = (case.digest, case.part, self.policy, self.capacity, self.knowledge, self.draw, code_of(self.policy))
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


@cache
def code_of(policy: str) -> str:
    """A digest of the sources that a result depends on."""
    is_ours = policy == OURS
    paths = [_PACKAGE.parent / "kvstore_simulator" / name for name in _REPLAYING]
    for folder in ("store/policies", "store/blocks"):
        found_there = [path for path in (_PACKAGE / folder).rglob("*.*") if path.suffix in (".py", ".json")]
        assert found_there, f"{_PACKAGE / folder} has moved: results would outlive a change of it"
        paths += found_there
    if is_ours:
        paths.append(Path(oracle.__file__))
    found = hashlib.sha256()
    for path in sorted(paths):
        if is_ours or not set(_OURS_ALONE) & set(path.parts):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def run(job: Job) -> Record:
    """One replay's record."""
    trace = _load(job.case)
    blocks = max(1, round(job.capacity * trace.distinct_blocks))
    hints, name = NO_HINTS, job.policy
    if job.knowledge.startswith(HINTS):
        hints = parse_hints(job.knowledge.removeprefix(HINTS), job.draw)
    elif job.knowledge:
        name = oracle.policy_for(job.knowledge)
    replay = Replay(trace, ReplaySettings(name, blocks, hints=hints))
    if isinstance(replay.policy, oracle.WithForesight):
        replay.policy.know(oracle.foresee(trace, job.draw), job.knowledge)
    result = replay.run()
    values = {name: worth(trace, result.hits, model) for name, model in models().items()}
    value = next(iter(values.values()))
    return {
        "key": job.key, "trace": job.case.trace, "group": job.case.group, "part": job.case.part,
        "policy": job.policy, "knowledge": job.knowledge, "draw": job.draw, "capacity": job.capacity,
        "capacity_blocks": blocks, "distinct_blocks": trace.distinct_blocks, "requests": value.requests,
        "block_accesses": value.block_accesses, "unbounded": _unbounded(job.case),
        "hit_ratio": round(value.hit_ratio, 6),
        "compute_saved": {name: round(each.compute_saved_ratio, 6) for name, each in values.items()},
        "seconds": round(result.seconds, 3),
    }  # fmt: skip


@lru_cache(maxsize=1)
def _unbounded(case: Case) -> float:
    """With room for everything only first uses miss."""
    trace = _load(case)
    if not np.any(trace.ops != Op.REQUEST):
        return round(1 - trace.distinct_blocks / trace.accesses, 6)
    result = Replay(trace, ReplaySettings("lru", trace.distinct_blocks)).run()
    return round(worth(trace, result.hits, next(iter(models().values()))).hit_ratio, 6)


@lru_cache(maxsize=1)
def _load(case: Case) -> Trace:
    return case.load()


def _begin(niceness: int) -> None:
    os.nice(niceness)
    gc.freeze()


class Results:
    """Records by key, in memory and, with a path, in a file of JSON lines that grows."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Record] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                    self._known[record["key"]] = record
                except (ValueError, KeyError, TypeError):
                    continue  # cut off while it was written

    def get(self, job: Job) -> Record | None:
        """The label is the caller's: the same window may be a part of two groups."""
        record = self._known.get(job.key)
        return None if record is None else {**record, "trace": job.case.trace, "group": job.case.group}

    def add(self, record: Record) -> None:
        self._known[record["key"]] = record
        if self._path is not None:
            with self._path.open("a") as out:
                out.write(json.dumps(record) + "\n")


def run_all(
    jobs: Iterable[Job], results: Results, *, processes: int, niceness: int, report: Callable[[int, int, Record], None]
) -> None:
    """Every job that `results` lacks. `report(done, total, record)` after each."""
    missing = list({job.key: job for job in jobs if results.get(job) is None}.values())
    if processes <= 1:
        for number, job in enumerate(missing, 1):
            _note(results, run(job), number, len(missing), report)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (niceness,)) as pool:
        waiting = {pool.submit(run, job) for job in missing}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                _note(results, future.result(), number, len(missing), report)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _note(
    results: Results, record: Record, number: int, total: int, report: Callable[[int, int, Record], None]
) -> None:
    results.add(record)
    report(number, total, record)


def records_of(jobs: Sequence[Job], results: Results) -> list[Record]:
    """Of the jobs, in their order; those that never ran are left out."""
    return [record for job in jobs if (record := results.get(job)) is not None]
