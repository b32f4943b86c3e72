"""The cases that policies are studied on, and their replays, over several processes.

A case is a window of a trace's file, which starts with an empty tier, or a draw of a trace whose sessions have no start
of their own, anew with each seed. Each replay's result is a line of a file, so that what was cut off goes on. Its key
is the trace's contents, the window or draw, the policy, its knowledge, the capacity, and the code that made it: another
version of a policy or of the simulator finds nothing of an earlier one's. Never judges.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import kvstore_predictor
import kvstore_simulator
import kvstored
from kvstore_simulator.hints import NO_HINTS, parse_hints
from kvstore_simulator.hit_value import hit_value, models
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Op, Trace, TraceError
from study import oracle

Record = dict[str, Any]
OURS = "chain-hazard"
HINTS = "hints "  # knowledge that begins so: hints of a stated quality; what follows is --hints of `kvstored simulate`
_DAEMON, _SIMULATOR, _PREDICTOR = (
    Path(package.__path__[0]) for package in (kvstored, kvstore_simulator, kvstore_predictor)
)
_OURS_ALONE = ("chain_hazard.py", "chains")
_REPLAYING = (
    "engine_reports.py", "hints.py", "models.toml", "readers.py", "replay.py", "trace.py", "simulated_request.py",
    "hit_value.py",
)  # fmt: skip
WHOLE, HALVES, QUARTERS, SEEDS = "whole", "halves", "quarters", "seeds"
_WINDOWS = {
    WHOLE: ((0.0, 1.0),),
    HALVES: ((0.0, 0.5), (0.5, 1.0)),
    QUARTERS: ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)),
}
_ENDINGS = (".jsonl", ".jsonl.gz")


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


def sources_of(policy: str) -> list[Path]:
    """Return the files that a replay of `policy` depends on, in order. Raises AssertionError for a folder without."""
    is_ours = policy == OURS
    paths = [_SIMULATOR / name for name in _REPLAYING]
    folders = [_DAEMON / "store/policies", _DAEMON / "store/blocks", _SIMULATOR / "policies"]
    for folder in [*folders, _PREDICTOR] if is_ours else folders:
        found_there = [path for path in folder.rglob("*.*") if path.suffix in (".py", ".json")]
        assert found_there, f"{folder} has moved: results would outlive a change of it"
        paths += found_there
    if is_ours:
        return sorted([*paths, Path(oracle.__file__)])
    return sorted(path for path in paths if not set(_OURS_ALONE) & set(path.parts))


@cache
def code_of(policy: str) -> str:
    """Return a digest of the sources that a result of `policy` depends on."""
    found = hashlib.sha256()
    for path in sources_of(policy):
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
    values = {name: hit_value(trace, result.hits, model) for name, model in models().items()}
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
    """Return the result with room for everything: only first uses miss."""
    trace = _load(case)
    if not np.any(trace.ops != Op.REQUEST):
        return round(1 - trace.distinct_blocks / trace.accesses, 6)
    result = Replay(trace, ReplaySettings("lru", trace.distinct_blocks)).run()
    return round(hit_value(trace, result.hits, next(iter(models().values()))).hit_ratio, 6)


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
    """Return the records of the jobs, in their order; jobs that never ran are left out."""
    return [record for job in jobs if (record := results.get(job)) is not None]


@dataclass(frozen=True, slots=True)
class Case:
    """One window or one draw of one trace. `group`: the cases that a table takes together."""

    path: Path
    format: str
    digest: str  # of the file
    group: str
    begin: float = 0.0
    end: float = 1.0
    seed: int = 0
    sessions: int | None = None
    window_s: float = 3600.0

    @property
    def trace(self) -> str:
        name = self.path.name
        return next((name.removesuffix(ending) for ending in reversed(_ENDINGS) if name.endswith(ending)), name)

    @property
    def part(self) -> str:
        if self.group == SEEDS:
            drawn = "all" if self.sessions is None else str(self.sessions)
            return f"seed {self.seed}, {drawn} sessions in {self.window_s:g} s"
        return f"{self.begin:g}:{self.end:g}"

    def load(self) -> Trace:
        trace = _read(self.path, self.format, self.seed, self.sessions, self.window_s)
        if (self.begin, self.end) == (0.0, 1.0):
            return trace
        return window(trace, self.begin, self.end)


def window(trace: Trace, begin: float, end: float) -> Trace:
    """The requests of that share of the time, as a trace of their own."""
    since_ns = trace.times_ns - trace.times_ns[0]
    first, last = (int(np.searchsorted(since_ns, round(share * int(since_ns[-1])))) for share in (begin, end))
    return trace.part(first, trace.requests if end == 1.0 else last)


@lru_cache(maxsize=1)
def _read(path: Path, format_name: str, seed: int, sessions: int | None, window_s: float) -> Trace:
    options = ReadOptions(seed=seed, sessions=sessions, window_s=window_s)
    return read_trace(path, format_name, options, lambda done, total: None)


def cases_of(
    paths: Iterable[Path], *, groups: Iterable[str], seeds: int, sessions: int | None, window_s: float
) -> Iterator[Case]:
    """Return the cases of every file: its windows, or its draws. Raises TraceError for what is no trace; OSError."""
    groups = tuple(groups)
    for path in paths:
        format_name, digest = format_of(path), hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        if format_name == "claude-code":
            for seed in range(seeds):
                yield Case(path, format_name, digest, SEEDS, seed=seed, sessions=sessions, window_s=window_s)
            continue
        for group in groups:
            for begin, end in _WINDOWS[group]:
                yield Case(path, format_name, digest, group, begin, end)


def files_in(directory: Path) -> list[Path]:
    """The files of a directory that a trace could be in, by their names' endings."""
    return sorted(path for path in directory.iterdir() if path.name.endswith(_ENDINGS))


def format_of(path: Path) -> str:
    """Return the format by the keys of the first line. Raises TraceError when no format has them."""
    packed = path.open("rb").read(2) == b"\x1f\x8b"
    with gzip.open(path, "rt") if packed else path.open() as lines:
        try:
            first = json.loads(next(iter(lines), ""))
        except (ValueError, EOFError, OSError):
            first = None
    if isinstance(first, dict):
        if "hash_ids" in first:
            return "mooncake"
        if "reqs" in first:
            return "claude-code"
        if first.get("format") == "kvstored":
            return "kvstored"
    raise TraceError(f"{path}: its first line is of no trace format that is known (docs/traces.md)")
