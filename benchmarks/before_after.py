"""Two states of this repository, measured in turns: is any figure worse after than before?

Each named benchmark of `run.py` runs in one tree, then in the other, in the reverse order in the next round, each by
the interpreter of its own tree (`make venv` there first). The result of a row is a ratio above 1 where the state after
is worse: after to before, or before to after where more is better (units a second, or a row bounded from below).
`best` compares the best value of either side, which a busy moment spoils least; `median` compares medians, with an
interval that holds 90 % of the ratios of resampled rounds. A row is `worse` where all of that interval is above 1.05.

    git worktree add /tmp/before c3888db && make -C /tmp/before venv
    python benchmarks/before_after.py /tmp/before --rounds 3 --only daemon_start --only lookup_latency
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run import SUITE
from support.report import progress

HERE = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300
WORSE = 1.05


@dataclass
class Figure:
    """The values of one row in both trees, one a round."""

    more_is_better: bool
    unit: str
    values: dict[str, list[float]] = field(default_factory=lambda: {"before": [], "after": []})

    def worse_by(self, best: bool) -> float:
        """Return the ratio of after to before, above 1 when worse: of the best values, or of the medians."""
        pick = (max if self.more_is_better else min) if best else statistics.median
        before, after = (float(pick(self.values[side])) for side in ("before", "after"))
        if not before or not after:
            return 1.0
        return before / after if self.more_is_better else after / before

    def interval(self) -> tuple[float, float]:
        """Return the 5th and 95th percentile of the ratio of medians, over 2,000 bootstrapped draws of the rounds."""
        draw = random.Random(1)
        ratios = []
        for _ in range(2000):
            rounds = draw.choices(list(zip(self.values["before"], self.values["after"], strict=True)), k=self.rounds)
            before, after = (statistics.median(values) for values in zip(*rounds, strict=True))
            ratios.append((before / after if self.more_is_better else after / before) if before and after else 1.0)
        ratios.sort()
        return round(ratios[100], 3), round(ratios[1899], 3)

    @property
    def rounds(self) -> int:
        return len(self.values["before"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the former state, with its .venv")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each benchmark in each tree (3)")
    parser.add_argument("--only", action="append", choices=SUITE, help="just this one; repeat it")
    parser.add_argument("--full", action="store_true", help="without --quick: minutes for each benchmark")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON list")
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": HERE}
    for tree in trees.values():
        if not (tree / ".venv/bin/python").exists():
            parser.error(f"{tree} has no .venv: run `make venv` there first")
    rows: list[dict[str, Any]] = []
    for name in SUITE:
        if options.only and name not in options.only:
            continue
        if not (trees["before"] / f"benchmarks/{name}.py").exists():
            progress(f"{name}: left out, the state before does not have it")
            continue
        found = _compare(name, trees, options.rounds, options.full)
        rows += found
        if not options.json:
            for row in found:
                print(_line(row), flush=True)
    if options.json:
        print(json.dumps(rows))
    return 0


def _compare(name: str, trees: dict[str, Path], rounds: int, full: bool) -> list[dict[str, Any]]:
    figures: dict[str, Figure] = {}
    for turn in range(rounds):
        order = ("before", "after") if turn % 2 == 0 else ("after", "before")
        for side in order:
            started = time.monotonic()
            for row in _run(name, trees[side], full):
                figure = figures.setdefault(row["name"], Figure(_more_is_better(row), row["unit"]))
                figure.values[side].append(float(row["value"]))
            progress(f"{name}, {side}: {time.monotonic() - started:.0f} s")
    return [
        {
            "benchmark": name, "row": key, "unit": figure.unit, **figure.values,
            "best": round(figure.worse_by(best=True), 3), "median": round(figure.worse_by(best=False), 3),
            "interval": figure.interval(), "worse": figure.interval()[0] > WORSE,
        }
        for key, figure in figures.items()
        if figure.rounds and figure.rounds == len(figure.values["after"])
    ]  # fmt: skip


def _run(name: str, tree: Path, full: bool) -> list[dict[str, Any]]:
    """The rows of one run by the tree's own `run.py`; none when it failed."""
    command = [str(tree / ".venv/bin/python"), "benchmarks/run.py", "--json", "--only", name]
    command += [] if full else ["--quick"]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as failure:
        progress(f"{name} in {tree}: FAILED ({type(failure).__name__})")
        return []
    return rows


def _more_is_better(row: dict[str, Any]) -> bool:
    return bool(row.get("bound") == ">=" or row["unit"].endswith("/s"))


def _line(row: dict[str, Any]) -> str:
    values = [" ".join(f"{value:.4g}" for value in row[side]) for side in ("before", "after")]
    return (
        f"{row['benchmark']:22} {row['row']:40.40} best {row['best']:.2f}x  median {row['median']:.2f}x  "
        f"90 % {row['interval'][0]:.2f}-{row['interval'][1]:.2f}{' WORSE' if row['worse'] else ''}  "
        f"[{values[0]}] -> [{values[1]}] {row['unit']}"
    )


if __name__ == "__main__":
    sys.exit(main())
