"""Two states of this repository, measured in turns: is any figure worse after than before?

Each named benchmark of `run.py` runs in one tree, then in the other, in the reverse order in the next round, each by
the interpreter of its own tree (`make venv` there first). One that fails, or is not done in `--limit` seconds, is not
measured further, is named with its reason, and makes the exit code 1. The result of a row is a ratio above 1 where the
state after is worse: after to before, or before to after where more is better (units a second, or a row bounded from
below).
`best` compares the best value of either side, which a busy moment spoils least; `median` compares medians, with an
interval that holds 90 % of the ratios of resampled rounds. A row is `worse` where all of that interval is above 1.05.

    git worktree add /tmp/before c3888db && make -C /tmp/before venv
    python benchmarks/before_after.py /tmp/before --rounds 3 --only daemon_start --only lookup_latency
    python benchmarks/before_after.py /tmp/before --rounds 9 --only ttft_restore --limit 900 --json
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

from run import ALWAYS_QUICK, SUITE
from support.report import progress

HERE = Path(__file__).resolve().parents[1]
WORSE = 1.05


class NotMeasuredError(Exception):
    """The error of a benchmark that failed or was too slow. Its text says what to do."""


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
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds that one run may take (300)")
    parser.add_argument(
        "--json", action="store_true", help="the last line is a JSON list; what failed has benchmark and error"
    )
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": HERE}
    for tree in trees.values():
        if not (tree / ".venv/bin/python").exists():
            parser.error(f"{tree} has no .venv: run `make venv` there first")
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    for name in SUITE:
        if options.only and name not in options.only:
            continue
        if not (trees["before"] / f"benchmarks/{name}.py").exists():
            progress(f"{name}: left out, the state before does not have it")
            continue
        found, error = compared(name, trees, options.rounds, full=options.full, limit_s=options.limit)
        rows += found
        errors += [{"benchmark": name, "error": error}] if error else []
        if not options.json:
            for row in found:
                print(_line(row), flush=True)
    for failed in errors:
        progress(f"{failed['benchmark']}: FAILED, {failed['error']}")
    if options.json:
        print(json.dumps(rows + errors))
    return int(bool(errors))


def compared(
    name: str, trees: dict[str, Path], rounds: int, *, full: bool, limit_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a benchmark over the rounds in which both trees had them, and why there were no more, or "".
    A run may take `limit_s` seconds.
    """
    figures: dict[str, Figure] = {}
    error = ""
    for turn in range(rounds):
        order = ("before", "after") if turn % 2 == 0 else ("after", "before")
        found: dict[str, dict[str, Any]] = {}
        try:
            for side in order:
                started = time.monotonic()
                found[side] = {row["name"]: row for row in _run(name, trees[side], full, limit_s)}
                progress(f"{name}, {side}: {time.monotonic() - started:.0f} s")
        except NotMeasuredError as failure:
            error = f"round {turn + 1} of {rounds}: {failure}"
            break
        for key, row in found["after"].items():
            if key in found["before"]:
                figure = figures.setdefault(key, Figure(_more_is_better(row), row["unit"]))
                for side in order:
                    figure.values[side].append(float(found[side][key]["value"]))
    for key, figure in figures.items():
        if figure.rounds < rounds:
            progress(f"{name}: {key} has {figure.rounds} of {rounds} rounds")
    return [
        {
            "benchmark": name, "row": key, "unit": figure.unit, **figure.values,
            "best": round(figure.worse_by(best=True), 3), "median": round(figure.worse_by(best=False), 3),
            "interval": figure.interval(), "worse": figure.interval()[0] > WORSE,
        }
        for key, figure in figures.items()
    ], error  # fmt: skip


def _run(name: str, tree: Path, full: bool, limit_s: float) -> list[dict[str, Any]]:
    """Return the rows of one run in a tree. Raises NotMeasuredError."""
    command = [str(tree / ".venv/bin/python"), f"benchmarks/{name}.py", "--json"]
    command += [] if full and name not in ALWAYS_QUICK else ["--quick"]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NotMeasuredError(
            f"not done in {limit_s:.0f} s in {tree}: run it where nothing else works, or give it more by --limit"
        ) from None
    try:
        rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        rows = []
    if not rows:
        said = (done.stderr.splitlines() or ["nothing was said"])[-1]
        raise NotMeasuredError(f"no rows and exit code {done.returncode} in {tree}: {said}")
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
