"""Break a real store for some time, in every way there is a harness for, and say what came of it.

    python benchmarks/torture.py --seed 7 --seconds 300 --json
    python benchmarks/torture.py --seconds 60 --only corruption,kills
    python benchmarks/torture.py --seconds 600 --only kills --stop-at kills=200
    python benchmarks/torture.py --show-ledger

The last line of standard output is the result: with --json one object, else a table. Progress goes to standard error.
docs/torture.md says what each figure means. Exit status: 0 nothing wrong was found; 1 something was; 2 a harness could
not do its work, or the command line is wrong; 130 interrupted, with the figures so far.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.report import progress
from torture_runs.figures import MUST_BE_ZERO, WHY_NULL, add_up, append, default_path, source_state, sums
from torture_runs.harnesses import HARNESSES, Harness, run_to_the_end, temporary_root
from torture_runs.mortal_daemon import SETTINGS_ENVIRONMENT

from kvstore_tiers.testing.made_up_codec import allow_made_up_codec
from kvstore_tiers.testing.powerloss.replay import SCRATCH_ENVIRONMENT

NAMES = [harness.name for harness in HARNESSES]
SMALLEST_SHARE_S = 2.0
PROGRESS_EVERY_S = 10.0
IN_MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    path = options.ledger or default_path()
    if options.show_ledger:
        return _show_ledger(path, options.json)
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job has it ignored
        signal.signal(number, signal.default_int_handler)
    result: dict[str, Any] = {
        "commit": source_state(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": options.seed,
        **({"settings": options.settings} if options.settings else {}),
        "seconds_asked": options.seconds,
        "seconds": 0.0,
        "seconds_by_harness": {},
    }
    broken = _torture(options, result)
    _fill_in(result, options.only)
    if not options.no_ledger:
        append(path, result)
    print(json.dumps(result) if options.json else table(result))
    if result.get("interrupted"):
        return 130
    return 2 if broken else int(any(result.get(name) for name in MUST_BE_ZERO))


def _torture(options: argparse.Namespace, result: dict[str, Any]) -> bool:
    """Run the chosen harnesses one after the other; whether one could not do its work."""
    chosen = [harness for harness in HARNESSES if harness.name in options.only]
    started = time.monotonic()
    broken = False
    try:
        with temporary_root(options.dir) as root, temporary_root(IN_MEMORY) as scratch:
            os.environ[SCRATCH_ENVIRONMENT] = str(scratch)
            allow_made_up_codec()  # for --set tier.nvme.codec=made-up
            os.environ[SETTINGS_ENVIRONMENT] = " ".join(options.settings)
            for position, harness in enumerate(chosen):
                left_s = options.seconds - (time.monotonic() - started)
                seconds = _share(harness, chosen[position:], left_s)
                progress(f"{harness.name}: {harness.about}, for {seconds:.0f} s")
                stop_at, on_the_way = options.stop_at.get(harness.name), OnTheWay(harness)
                began = time.monotonic()
                try:
                    ended = run_to_the_end(harness, options.seed, seconds, root, stop_at, on_the_way)
                finally:
                    result["seconds_by_harness"][harness.name] = round(time.monotonic() - began, 1)
                add_up(result, ended.figures)
                if ended.failure:
                    broken = True
                    add_up(result, {"harness_failures": [f"{harness.name} {ended.failure}"]})
                _report(harness, ended.figures, ended.seconds, ended.failure)
    except KeyboardInterrupt as interrupt:
        add_up(result, interrupt.args[0] if interrupt.args else {})
        result["interrupted"] = True
        progress("interrupted; these are the figures so far")
    result["seconds"] = round(time.monotonic() - started, 1)
    return broken


def _share(harness: Harness, rest: Sequence[Harness], left_s: float) -> float:
    """Return the harness's part of what is left for it and those after it: one that ended early leaves more to the
    others.
    """
    return max(SMALLEST_SHARE_S, left_s * harness.share / sum(other.share for other in rest))


class OnTheWay:
    """Says now and then how far a harness is."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._started = self._reported_at = time.monotonic()
        self._failures: set[str] = set()

    def __call__(self, figures: dict[str, Any]) -> None:
        new = [failure for failure in figures.get("failures", ()) if failure not in self._failures]
        for failure in new:  # at once: a run may be ended because of it
            progress(f"  {failure}")
        self._failures.update(new)
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = now
            progress(f"{self._harness.name}: {_in_words(self._harness, figures)} after {now - self._started:.0f} s")


def _in_words(harness: Harness, figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {figures.get(name, 0)}" for name in dict.fromkeys((harness.counts, *harness.figure_names))
    )


def _report(harness: Harness, figures: dict[str, Any], seconds: float, failure: str) -> None:
    progress(f"{harness.name}: {_in_words(harness, figures)} in {seconds:.1f} s")
    if failure:  # OnTheWay has already printed the failures among the figures
        progress(f"  {failure}")


def _fill_in(result: dict[str, Any], only: Sequence[str]) -> None:
    """Set every promised figure: 0 where nothing of the kind happened, null where no harness measured it."""
    for harness in sorted(HARNESSES, key=lambda each: each.name not in only):  # one that ran has measured it
        for name in harness.figure_names:
            if harness.name in only and name + WHY_NULL not in result:
                result[name] = result.get(name) or 0
            elif harness.name not in only and name not in result:
                result[name] = None
                result[name + WHY_NULL] = f"the harness {harness.name} was not asked for"
            if result.get(name) is not None:
                result.pop(name + WHY_NULL, None)


def table(result: dict[str, Any]) -> str:
    """The figures that count, for people."""
    lines = [f"source {result.get('commit', '')}  seed {result.get('seed', '')}".rstrip()]
    names = dict.fromkeys(name for harness in HARNESSES for name in harness.figure_names)
    for name in (*names, *(name for name in MUST_BE_ZERO if result.get(name) and name not in names)):
        value = result.get(name)
        shown = f"- ({result.get(name + WHY_NULL, 'not measured')})" if value is None else f"{value:,}"
        verdict = "WRONG" if name in MUST_BE_ZERO and value else ""
        lines.append(f"  {name:28} {shown:>14}  {verdict}".rstrip())
    return "\n".join([*lines, *result.get("failures", ()), *result.get("harness_failures", ())])


def _show_ledger(path: Path, as_json: bool) -> int:
    found = sums(path)
    if as_json:
        print(json.dumps(found))
    elif not found:
        print(f"{path} has no runs yet")
    else:
        for commit, total in found.items():
            print(f"{total['runs']} runs, {total.get('seconds', 0):.0f} s")
            print(table({"commit": commit, **total}))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random (default 1)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all harnesses together (default 60; from 20)")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--only", type=_names, default=NAMES, metavar="NAMES", help=f"of {', '.join(NAMES)}")
    parser.add_argument(
        "--stop-at",
        type=_limit,
        action="append",
        default=[],
        metavar="NAME=N",
        help="end a harness after N events",
    )
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="SECTION.KEY=VALUE",
        help="a further setting of every daemon, such as tier.far.capacity=16MiB: a third tier",
    )  # fmt: skip
    parser.add_argument("--dir", type=Path, help="where files are made and removed (default: the temporary folder)")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help=f"default {default_path()}")
    parser.add_argument("--no-ledger", action="store_true", help="write no line to the ledger")
    parser.add_argument("--show-ledger", action="store_true", help="add up the ledger by commit, and run nothing")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 1 << 63:
        parser.error(f"--seed {options.seed}: must be from 0 to 2^63 - 1")
    if options.seconds <= 0:
        parser.error(f"--seconds {options.seconds}: must be positive")
    if options.dir is not None and not options.dir.is_dir():
        parser.error(f"--dir {options.dir}: no such directory")
    options.stop_at = dict(options.stop_at)
    return options


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(NAMES))
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"no such harness: {', '.join(unknown) or 'empty'}; known: {', '.join(NAMES)}")
    return names


def _limit(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in NAMES or not count.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N with a name of {', '.join(NAMES)}")
    return name, int(count)


if __name__ == "__main__":
    sys.exit(main())
