"""The input and output of a harness: it receives an assignment and reports figures that can be added up.

Owns the two records every harness shares. Never judges: whether a figure is good is the reader's business, but a sum
named in `MUST_BE_ZERO` that is not zero makes a run a failure.
Invariants: every number counts events since the start of the harness, so two runs are added field by field, but for
those whose names begin with `most_` or `over_`: of these the larger one stands. `None` with a reason means that
something was not measured, and is never turned into 0.

The ledger is a file of JSON lines, one a run, under the user's state directory unless another is named: the runs of one
state of the source are added up. Lines are only ever appended; one that is not JSON is passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_FAILURES = 20
REPORT_EVERY_S = 1.0
MUST_BE_ZERO = (
    "served_wrong", "served_other_tenants", "corruption_store_failures", "durable_lost", "resurrected",
    "wrong_bytes_after_kill", "over_capacity_bytes", "over_host_capacity_bytes", "restart_failures",
    "daemon_tracebacks", "visibility_misses", "visibility_wrong", "visibility_probes_absent", "dram_wrong",
    "power_loss_wrong", "power_loss_lost", "hostile_successes", "hostile_crashes", "over_hostile_memory_bytes",
    "over_hostile_descriptors", "soak_wrong", "over_soak_memory_bytes", "over_soak_descriptors", "over_soak_threads",
    "over_soak_disk_bytes",
)  # fmt: skip
MAXIMA = ("most_", "over_")
WHY_NULL = "_why_null"
ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("proto", "tiers", "kvstore", "client")
ABOUT_A_RUN = ("commit", "at", "seed", "seconds_asked", "interrupted", "seconds_by_harness")


@dataclass(frozen=True)
class Assignment:
    """One harness's share of a run. `stop_at` ends it early, once the given number of its own events happened."""

    seed: int
    seconds: float
    directory: Path
    stop_at: int | None = None


@dataclass
class Figures:
    """Counts by name, counts of kinds by name, largest values, and the first failures in words."""

    report: Callable[[Mapping[str, Any]], None] = lambda figures: None
    counts: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # figures that could not be taken, and why
    failures: list[str] = field(default_factory=list)
    beside: Sequence[Mapping[str, Any]] = ()  # figures of other processes, reported with these
    _reported_at: float = 0.0

    def add(self, name: str, count: int = 1) -> None:
        self.counts[name] += count

    def add_kind(self, name: str, kind: str, count: int = 1) -> None:
        self.kinds.setdefault(name, Counter())[kind] += count

    def at_least(self, name: str, value: float) -> None:
        """The largest value seen."""
        assert name.startswith(MAXIMA), f"{name} would be added up"
        self.largest[name] = max(value, self.largest.get(name, 0))

    def leave_out(self, name: str, why: str) -> None:
        self.absent[name] = why

    def fail(self, name: str, what: str, count: int = 1) -> None:
        """Something that must not happen did; the first few are kept in words."""
        self.counts[name] += count
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(f"{name}: {what}")

    def as_json(self) -> dict[str, Any]:
        total = self._own()
        for figures in self.beside:
            add_up(total, figures)
        return total

    def _own(self) -> dict[str, Any]:
        return {
            **self.counts,
            **{name: dict(sorted(counter.items())) for name, counter in self.kinds.items()},
            **{name: round(value, 3) for name, value in self.largest.items()},
            **dict.fromkeys(self.absent),
            **{name + WHY_NULL: why for name, why in self.absent.items()},
            **({"failures": self.failures} if self.failures else {}),
        }

    def heartbeat(self, *, now: bool = False) -> None:
        """Report the figures so far, about once a second: reported figures survive a crash of the harness."""
        if now or time.monotonic() - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = time.monotonic()
            self.report(self.as_json())


class Clock:
    """Says whether a harness may go on: its time is not over and its count not reached."""

    def __init__(self, assignment: Assignment) -> None:
        self._end = time.monotonic() + assignment.seconds
        self._stop_at = assignment.stop_at

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def goes_on(self, done: int) -> bool:
        return self.left_s > 0 and (self._stop_at is None or done < self._stop_at)


def add_up(total: dict[str, Any], figures: Mapping[str, Any]) -> None:
    """Add the figures of one harness or run to a sum of others."""
    for name, value in figures.items():
        before = total.get(name)
        if value is None:
            total.setdefault(name, None)
        elif isinstance(value, Mapping):
            kinds = total.setdefault(name, {})
            for kind, count in value.items():
                kinds[kind] = kinds.get(kind, 0) + count
        elif isinstance(value, list):
            total[name] = [*(before or []), *value][:MAX_FAILURES]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            total[name] = max(before or 0, value) if name.startswith(MAXIMA) else (before or 0) + value
        else:
            total[name] = value
    for name in [
        name for name in total if name.endswith(WHY_NULL) and total.get(name.removesuffix(WHY_NULL)) is not None
    ]:
        del total[name]


def default_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvstored" / "torture.jsonl"


def source_state() -> str:
    """The commit, with a digest of what differs from it in the product's own folders; else the version."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD").strip()
        changed = _git("diff", "HEAD", "--", *PRODUCT) + _untracked()
    except (OSError, subprocess.CalledProcessError):
        from kvstored import __version__

        return f"version {__version__}"
    return f"{commit}+{hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else commit


def _untracked() -> str:
    names = _git("ls-files", "--others", "--exclude-standard", "--", *PRODUCT).split("\n")
    return "".join((ROOT / name).read_text(errors="replace") for name in names if name.endswith(".py"))


def append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(line) + "\n")


def sums(path: Path) -> dict[str, dict[str, Any]]:
    """Return by state of the source, in the order of their first runs: how many runs, and their figures added up."""
    total: dict[str, dict[str, Any]] = {}
    for line in _lines(path):
        of_commit = total.setdefault(str(line.get("commit")), {"runs": 0})
        of_commit["runs"] += 1
        add_up(of_commit, {name: value for name, value in line.items() if name not in ABOUT_A_RUN})
    return total


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except ValueError:
                continue


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout
