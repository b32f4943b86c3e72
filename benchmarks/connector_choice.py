"""Is a connector that chooses between loading and computing ever slower than the better of the two alone?

SmolLM2-135M, a real daemon, one prompt of which all whole blocks are on NVMe. Reads are made slow: one at a time, each
delayed (failpoint `nvme.read`), so that loading all takes 0.1 to 10 times as long as computing all. For each ratio
four ways take turns, DRAM dropped before each: as the connector chooses, computing alone (no cache), loading alone
(`always_load`), and computing alone once more, as a control. The figure is the time to the first token of the better
single path by that of the choice, medians; a figure is no better known than the control's, which compares equal work.
The spread is (highest - lowest) / median. What the choice knows it learns in the first turns of each ratio, which do
not count, and keeps for the next. The first token must be the same all four ways.

Needs idle cores. Transformers and llama-cpp-python must be in the Python that runs this; vLLM runs in the environment
that `make test-vllm` makes (.venv-vllm, or KVSTORED_VLLM_PYTHON). Without --connector those that are there run, about 6
minutes each on two cores, vLLM, whose engines start anew for each ratio, 20.

examples:
  .venv/bin/python benchmarks/connector_choice.py --connector transformers
  .venv/bin/python benchmarks/connector_choice.py --connector vllm --rounds 3
  .venv-llama-cpp/bin/python benchmarks/connector_choice.py --connector llama-cpp --json
  .venv/bin/python benchmarks/connector_choice.py --quick --threads 1 --ratios 0.25 4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support.connectors import CHOICE, COMPUTE, CONNECTORS, LOAD, Engine, installed
from support.daemon import BenchDaemon, slowed_daemon
from support.report import AT_LEAST, Row, progress, table, within
from support.timing import median

from kvstore_proto.v1 import admin_pb2

RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
CONTROL = "control"
WAYS = (CHOICE, COMPUTE, LOAD, CONTROL)
LEARNING = (CHOICE, LOAD, CHOICE, CHOICE)  # the daemon learns what its reads take from both
TOKENS, TAIL_TOKENS, ROUNDS = 512, 33, 5
STORING_TURNS = 10
WORST = 0.97


@dataclass
class Cell:
    """One ratio, for which each read is delayed: times to the first token and restored tokens, by way."""

    ratio: float
    delay_s: float
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    restored: dict[str, list[int]] = field(default_factory=lambda: {way: [] for way in WAYS})

    @property
    def gain(self) -> float:
        """Of the choice over the better single path."""
        return min(median(self.ttft_s[COMPUTE]), median(self.ttft_s[LOAD])) / median(self.ttft_s[CHOICE])

    @property
    def control(self) -> float:
        """What two ways that do the same come to on this machine."""
        return median(self.ttft_s[COMPUTE]) / median(self.ttft_s[CONTROL])

    def line(self) -> str:
        shown = ", ".join(
            f"{way} {median(times) * 1e3:.0f} ms ±{spread(times):.0%} ({median(self.restored[way]):.0f} restored)"
            for way, times in self.ttft_s.items()
        )
        measured = median(self.ttft_s[LOAD]) / median(self.ttft_s[COMPUTE])
        figures = f"{self.gain:.2f} of the better, control {self.control:.2f}"
        return f"ratio {self.ratio:g} (measured {measured:.2f}): {shown}; {figures}"


def measure(name: str, ratios: Sequence[float], rounds: int, tokens: int, threads: int) -> list[Row]:
    engine = CONNECTORS[name](threads)
    prompt = [int(token) for token in np.random.default_rng(tokens).integers(100, 40_000, tokens + TAIL_TOKENS)]
    cells = []
    with tempfile.TemporaryDirectory(prefix="kvchoice-") as directory, _own_costs(Path(directory)):
        state = Path(directory) / "state"
        with _connected(engine, state, 0.0) as daemon:
            _store(engine, prompt)
            daemon.admin("Flush", admin_pb2.FlushRequest())
            alone_s = median([engine.ask(COMPUTE, prompt).ttft_s for _ in range(3)])
        block_s = alone_s / (len(prompt) // engine.block_tokens)
        progress(f"{name}: {len(prompt)} tokens take {alone_s * 1e3:.0f} ms to compute")
        for ratio in ratios:
            with _connected(engine, state, ratio * block_s) as daemon:
                cells.append(_run(engine, daemon, Cell(ratio, ratio * block_s), prompt, rounds))
            progress(f"{name}: {cells[-1].line()}")
    return _rows(name.replace("-", "_"), cells)


def _store(engine: Engine, prompt: list[int]) -> None:
    """All whole blocks, by computing them once. Some engines store after the answer."""
    whole = len(prompt) // engine.block_tokens * engine.block_tokens
    for _ in range(STORING_TURNS):
        if engine.ask(LOAD, prompt).restored == whole:
            return
    raise SystemExit(f"of {whole} tokens in whole blocks not all are stored after {STORING_TURNS} requests")


@contextmanager
def _own_costs(directory: Path) -> Iterator[None]:
    """What a choice learns is kept below `directory`: nothing is known at the start, and the user's files stay."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(directory)
    try:
        yield
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


@contextmanager
def _connected(engine: Engine, state: Path, delay_s: float) -> Iterator[BenchDaemon]:
    with slowed_daemon(state, delay_s) as daemon:
        engine.connect(daemon.socket_dir)
        try:
            yield daemon
        finally:
            engine.disconnect()


def _run(engine: Engine, daemon: BenchDaemon, cell: Cell, prompt: list[int], rounds: int) -> Cell:
    tokens = set()
    for way in LEARNING:
        _empty_host(daemon, cell.delay_s)
        tokens.add(engine.ask(way, prompt).token)
    for turn in range(rounds):
        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
            _empty_host(daemon, cell.delay_s)
            answer = engine.ask(way, prompt)
            cell.ttft_s[way].append(answer.ttft_s)
            cell.restored[way].append(answer.restored)
            tokens.add(answer.token)
    if len(tokens) > 1:
        raise SystemExit(f"ratio {cell.ratio:g}: the first token is not the same all four ways: {sorted(tokens)}")
    return cell


def _empty_host(daemon: BenchDaemon, delay_s: float) -> None:
    """Returns when DRAM is empty and stays so: a load that was given up leaves reads in the queue."""
    quiet = 0
    while quiet < 2:
        reply = daemon.admin("Drop", admin_pb2.DropRequest(tier="host"))
        quiet = 0 if reply.dropped_blocks or reply.kept_blocks else quiet + 1
        time.sleep(2 * delay_s + 0.01)


def _rows(name: str, cells: list[Cell]) -> list[Row]:
    gains = [cell.gain for cell in cells]
    control = min(min(cell.control, 1 / cell.control) for cell in cells)
    spreads = [spread(times) for cell in cells for times in cell.ttft_s.values()]
    rows = [Row(f"{name}_ratio_{cell.ratio:g}", cell.gain, "x", 1.0, "better single path") for cell in cells]
    return [
        *rows,
        Row(f"{name}_worst", min(gains), "x", 1.0, "better single path", AT_LEAST, WORST),
        Row(f"{name}_median", median(gains), "x", 1.0, "better single path"),
        Row(f"{name}_worst_control", control, "x", 1.0, "equal work"),
        within(f"{name}_spread_median", median(spreads), "of the median", 1.0),
    ]


def spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / median(values)


def main() -> int:
    about, _, examples = (__doc__ or "").partition("examples:")
    parser = argparse.ArgumentParser(
        description=about, epilog=f"examples:{examples}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connector", choices=sorted(CONNECTORS), help="only this one (default: all that are here)")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, metavar="N", help="of loading to computing")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns that count (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of the prompt that are stored (default: {TOKENS})")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the engine (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    options = parser.parse_args()
    here = installed()
    names = [options.connector] if options.connector else here
    if not names or names[0] not in here:
        parser.error(f"no engine for it here; there are: {', '.join(here) or 'none'}")
    objects = []
    for name in names:
        rounds = 2 if options.quick else options.rounds
        rows = measure(name, options.ratios, rounds, options.tokens, options.threads)
        objects += [row.as_json() for row in rows]
    print(json.dumps(objects) if options.json else table(objects))
    return 0 if all(fields["met"] is not False for fields in objects) else 1


if __name__ == "__main__":
    sys.exit(main())
