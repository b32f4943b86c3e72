"""What policies are studied on: traces from files, cut into windows or drawn with seeds.

A window starts with an empty tier: nothing before it is known. A trace whose sessions have no start of their own is
drawn anew with each seed. Owns which cases there are, and loads them. Never replays.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.trace import Trace, TraceError

WHOLE, HALVES, QUARTERS, SEEDS = "whole", "halves", "quarters", "seeds"
_WINDOWS = {
    WHOLE: ((0.0, 1.0),),
    HALVES: ((0.0, 0.5), (0.5, 1.0)),
    QUARTERS: ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)),
}
_ENDINGS = (".jsonl", ".jsonl.gz")


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
    """Of every file: its windows, or its draws. Raises TraceError for what is no trace; OSError."""
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
    """By the keys of the first line. Raises TraceError when no format has them."""
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
