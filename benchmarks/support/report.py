"""The report of a benchmark: rows with a value, the baseline of the same run, and the target it has to meet.

Owns the command line that every benchmark shares (`--json`, `--quick`) and the table for people. Progress goes to
standard error, results to standard output; the JSON list is always the last line. Times are beside it: medians where a
figure is typical, percentiles where it is a promise.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvstore_console.table import render_table

AT_MOST, AT_LEAST = "<=", ">="


@dataclass(frozen=True)
class Row:
    """One figure. `target` bounds its ratio to the baseline; None for a figure that only informs.

    Where it was measured in the same run: `possible` is what the figure would be if nothing were done but what
    `possible_name` says, which no code can leave out; `memcpy`, the speed of one thread's copy of the same bytes.
    """

    name: str
    value: float
    unit: str
    baseline: float
    baseline_name: str
    bound: str = AT_MOST
    target: float | None = None
    possible: float | None = None
    possible_name: str = ""
    memcpy: float | None = None

    @property
    def ratio(self) -> float:
        return self.value / self.baseline

    @property
    def ceiling(self) -> float | None:
        """The ratio that is possible at all; None where that was not measured."""
        return None if self.possible is None else self.possible / self.baseline

    @property
    def baseline_of_memcpy(self) -> float | None:
        return None if self.memcpy is None else self.baseline / self.memcpy

    @property
    def met(self) -> bool | None:
        """Return whether the target is met; None for a figure that only informs."""
        if self.target is None:
            return None
        return self.ratio <= self.target if self.bound == AT_MOST else self.ratio >= self.target

    def as_json(self) -> dict[str, object]:
        numbers = {
            "value": self.value, "baseline": self.baseline, "ratio": self.ratio, "possible": self.possible,
            "ceiling": self.ceiling, "memcpy": self.memcpy, "baseline_of_memcpy": self.baseline_of_memcpy,
        }  # fmt: skip
        given = {name: significant(number) for name, number in numbers.items() if number is not None}
        return {**asdict(self), **given, "met": self.met}


def within(name: str, value: float, unit: str, limit: float) -> Row:
    """A figure that must not be over a fixed limit, which then is its baseline."""
    return Row(name, value, unit, limit, "limit", AT_MOST, 1.0)


Measure = Callable[[bool], Sequence[Row]]
"""A benchmark: takes `quick` (a tenth of the rounds, noisier) and gives its rows."""


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser_of(about: str, quick: str = "fewer rounds: seconds instead of tens of seconds") -> argparse.ArgumentParser:
    """Return a command line with the options that every benchmark has; `quick` is the help of that one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is a JSON list instead of a table")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def printed(rows: Sequence[Row], *, as_json: bool) -> int:
    """Print the rows, and return the exit code: 1 when a target was missed."""
    objects = [row.as_json() for row in rows]
    print(json.dumps(objects) if as_json else table(objects))
    return int(any(row.met is False for row in rows))


def main(measure: Measure, about: str) -> int:
    """Run one benchmark by itself. The exit code is 1 when a target was missed."""
    options = parser_of(about).parse_args()
    return printed(measure(options.quick), as_json=options.json)


def table(objects: Sequence[dict[str, object]]) -> str:
    """Rows as `Row.as_json` gives them, for people."""
    headings = ["", ">measured", "baseline", ">ratio", ">target", ">", "possible"]
    rows = [_cells(fields) for fields in objects]
    width = len(headings) if any(row[-1] for row in rows) else len(headings) - 1
    return render_table(headings[:width], [row[:width] for row in rows])


def significant(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def _cells(fields: dict[str, object]) -> tuple[str, ...]:
    target = fields.get("target")
    verdict = {True: "met", False: "MISSED"}.get(fields.get("met"), "")  # type: ignore[call-overload]
    return (
        str(fields["name"]),
        f"{fields['value']} {fields['unit']}",
        f"{fields['baseline']} {fields.get('baseline_name', '')}",
        f"{fields['ratio']:.2f}x",
        "" if target is None else f"{fields.get('bound', '')} {target}x",
        verdict,
        _possible(fields),
    )


def _possible(fields: dict[str, object]) -> str:
    """The ratio that is possible at all, and how much of memcpy's speed the baseline has already."""
    parts = []
    if fields.get("ceiling") is not None:
        parts.append(f"{fields['ceiling']:.2f}x by {fields['possible_name']}")
    if fields.get("baseline_of_memcpy") is not None:
        parts.append(f"the baseline is {fields['baseline_of_memcpy']:.2f} of memcpy")
    return "; ".join(parts)


def time_once(action: Callable[[], object]) -> float:
    """Seconds that one call took."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def time_each(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of `times` calls, one after the other."""
    return [time_once(action) for _ in range(times)]


def percentile(seconds: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of all samples do not exceed (nearest rank)."""
    ordered = sorted(seconds)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def median(seconds: Sequence[float]) -> float:
    return percentile(seconds, 50)


def warm(once: Callable[[], float], longest_s: float) -> None:
    """Repeat `once`, which says how long it took, for `longest_s`: whatever is compared is as warm."""
    took_s = 0.0
    while took_s < longest_s:
        took_s += once()
