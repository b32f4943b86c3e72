"""Measures what a daemon that does not answer costs an engine that is configured to use it.

Time to first token of a prompt of some 500 tokens, each request in an engine process of its own: without a cache, with
a daemon that is stopped (SIGSTOP: its sockets accept, nothing answers), and with a socket directory in which there is
no daemon. The three take turns. The baseline is the engine without a cache, and 5 % is what may be lost to it.

The whole process is timed too, from start to exit: a client that waited at the end would not show in the first token.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from support.daemon import bench_daemon, stopped
from support.engine import generate
from support.report import AT_MOST, Row, main, median, progress

TARGET = 1.05
WORDS = "the keeper counted seven lamps before winter and wrote to her brother about rope oil bread and the broken gate"
PREFIX = " ".join([WORDS] * 24)
QUESTION = "What did the keeper count?"


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kvdegraded-") as name, bench_daemon("nvme.enabled=false") as daemon:
        prompt = Path(name) / "system.txt"
        prompt.write_text(PREFIX)
        absent = Path(name) / "no-daemon"
        absent.mkdir()
        cases: dict[str, list[str]] = {
            "none": [], "stopped": ["--kvstore", str(daemon.socket_dir)], "absent": ["--kvstore", str(absent)]
        }  # fmt: skip
        first: dict[str, list[float]] = {case: [] for case in cases}
        whole: dict[str, list[float]] = {case: [] for case in cases}
        with stopped(daemon.pid):
            for number in range(-1, 3 if quick else 9):
                for case in list(cases)[number % 3 :] + list(cases)[: number % 3]:
                    started = time.perf_counter()
                    answer = generate(prompt, QUESTION, 4, *cases[case])
                    elapsed_s = time.perf_counter() - started
                    if answer.get("tokens_restored"):
                        raise RuntimeError("a stopped daemon cannot have restored anything")
                    if number >= 0:
                        first[case].append(float(answer["timings"]["ttft_s"]))
                        whole[case].append(elapsed_s)
                summary = ", ".join(f"{case} {times[-1] * 1e3:.0f} ms" for case, times in first.items() if times)
                progress(f"round {number}: {summary or 'warm-up'}")
    rows: list[Row] = []
    for case in ("stopped", "absent"):
        rows += [
            _row(f"ttft_daemon_{case}", first[case], first["none"], TARGET),
            _row(f"whole_process_daemon_{case}", whole[case], whole["none"], None),
        ]
    return rows


def _row(name: str, seconds: list[float], without: list[float], target: float | None) -> Row:
    return Row(name, median(seconds) * 1e3, "ms", median(without) * 1e3, "no cache", AT_MOST, target)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
