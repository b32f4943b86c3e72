"""What prefetch by prediction does for the time to first token, predictor by predictor, in mode timing's virtual time.

    benchmarks/prefetch_study.py agents.jsonl.gz conversation.jsonl.gz --sessions 30 --window-s 40000 --json
    benchmarks/prefetch_study.py --quick

DRAM holds 5 % of the distinct blocks, NVMe (2 GB/s) all of them, on one H100 with llama-3.1-8b. `none` is mode timing's
`orchestrated` without prefetch, and so is the plan under every predictor; `on-arrival` prefetches when a request enters
the engine's queue. With "+pause" the engine says, when a request ends, when its session will come back. `gain` is the
share of the oracle's gain in mean TTFT over `none`; then the same of `exposed`, what loading or computing again added
to a request, without the queue, in which one long prompt can outweigh everything; `wasted` the share of the bytes
brought that no request used; `p99` that of TTFT without the queue, against `none`; `s/GB` loading time that was saved.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from study.sources import format_of
from study.standins import write_standins
from support.report import progress

from kvstore_console.table import render_table
from kvstore_predictor.base import Predictor
from kvstore_proto.arena import slot_bytes
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.predictor_names import NONE, ON_HINT, PREDICTORS
from kvstored.simulator.hints import NO_HINTS, Hints
from kvstored.simulator.machine import Machine, load_machine
from kvstored.simulator.node import serve_trace
from kvstored.simulator.node_store import MakePredictor, NodeSettings
from kvstored.simulator.plan import ABLATIONS, ORCHESTRATED
from kvstored.simulator.predictors import Oracle, fixed_lead, moving_average
from kvstored.simulator.readers import ReadOptions, read_trace
from kvstored.simulator.trace import Trace, TraceError
from kvstored.simulator.worth import models
from kvstored.store.prefetch.guarded import create_predictor

MODEL, PROFILE = "llama-3.1-8b", "h100"
DRAM_SHARE, NVME_BYTES_PER_S = 0.05, 2e9
ON_ARRIVAL, ORACLE, PAUSE = "on-arrival", "oracle", "+pause"
_BASELINES: dict[str, MakePredictor] = {
    ORACLE: Oracle,
    "fixed-lead": lambda trace, speed: fixed_lead(),
    "moving-average": lambda trace, speed: moving_average(),
}
NAMES = (
    NONE, ORACLE, ON_ARRIVAL, "fixed-lead", "moving-average",
    *(name for name in PREDICTORS if name not in (NONE, ON_HINT)), ON_HINT + PAUSE, "ensemble" + PAUSE,
)  # fmt: skip
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="prefetch-study-") as scratch:
        try:
            paths = options.trace or write_standins(Path(scratch), requests=300, sessions=8)
            rows = [row for path in paths for row in _rows(options, path)]
        except (TraceError, ValueError) as error:
            print(f"prefetch_study: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"prefetch_study: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
    if options.json:
        print(json.dumps({"rows": rows}))
    else:
        headings = (
            "TRACE",
            "PREDICTOR",
            ">MEAN S",
            ">P50",
            ">P95",
            ">P99",
            ">GAIN",
            ">EXPOSED",
            ">GAIN",
            ">WASTED",
            ">S/GB",
        )
        print(render_table(headings, [_line(row) for row in rows]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="*", metavar="TRACE", help="a trace's file (default: made-up ones)")
    parser.add_argument("--predictors", default=",".join(NAMES), metavar="LIST", help="none and oracle run always")
    parser.add_argument("--sessions", type=int, help="so many, drawn (claude-code; default all)")
    parser.add_argument("--window-s", type=float, default=3600.0, help="sessions start within it (claude-code)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", type=float, default=1.0, help="requests arrive so many times as fast")
    parser.add_argument("--devices", type=int, default=1, help="H100 side by side, over the same NVMe")
    parser.add_argument("--pause-noise", type=float, default=0.0, help="of pause hints; 0: they are exact")
    parser.add_argument("--quick", action="store_true", help="with made-up traces a minute or two")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    return parser


def _rows(options: argparse.Namespace, path: Path) -> Iterator[Row]:
    reading = ReadOptions(seed=options.seed, sessions=options.sessions, window_s=options.window_s)
    trace = read_trace(path, format_of(path), reading, lambda done, total: None)
    asked = [name.strip() for name in options.predictors.split(",")]
    for name in asked:
        if name not in NAMES:
            raise ValueError(f"--predictors {name!r}: known are {', '.join(NAMES)}")
    rows: dict[str, Row] = {}
    for name in dict.fromkeys((NONE, ORACLE, *asked)):
        progress(f"{trace.name}: {name}")
        row = rows[name] = _run(trace, name, options)
        base, best = rows[NONE], rows.get(ORACLE, row)
        for gain, measure in (("gain", "ttft_mean_s"), ("exposed_gain", "exposed_mean_s")):
            could_s = base[measure] - best[measure]
            row[gain] = (base[measure] - row[measure]) / could_s if could_s > 0 else 0.0
        row["p99_ratio"] = row["demand_p99_s"] / base["demand_p99_s"]
        yield row


def _run(trace: Trace, name: str, options: argparse.Namespace) -> Row:
    model, machine = models()[MODEL], _machine(options.devices)
    slot = slot_bytes(model.kv_bytes_per_token * trace.block_tokens)
    blocks = trace.distinct_blocks
    tiers = (("dram", max(1, round(blocks * DRAM_SHARE)) * slot), ("nvme", blocks * slot))
    hints = Hints(seed=options.seed, pause_noise=options.pause_noise) if name.endswith(PAUSE) else NO_HINTS
    settings = NodeSettings(
        machine, model, tiers, machine.pool_bytes(model), CHAIN_HAZARD, speed=options.speed, hints=hints,
        predictor=None if name in (NONE, ON_ARRIVAL) else _maker(name.removesuffix(PAUSE)),
    )  # fmt: skip
    plan = ORCHESTRATED if name == ON_ARRIVAL else ABLATIONS["prefetch"]
    node = serve_trace(trace, settings, plan, lambda done, total: None)
    visits = [visit for visit in node.served.visits if visit.is_served]
    if not visits or node.store is None:
        raise ValueError(f"{trace.name}: no request fits the engine's memory")
    ttft_s = np.array([visit.ttft_ns for visit in visits]) / 1e9
    served_s = ttft_s - np.array([visit.queued_ns for visit in visits]) / 1e9
    status = node.store.store.prefetcher.statistics()
    figures = status.all
    return {
        "trace": trace.name, "predictor": name, "requests": len(visits), "failure": status.failure,
        "ttft_mean_s": float(ttft_s.mean()), "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "exposed_mean_s": float(np.mean([visit.exposed_ns for visit in visits])) / 1e9,
        "ttft_p95_s": float(np.percentile(ttft_s, 95)), "demand_p99_s": float(np.percentile(served_s, 99)),
        "prefetched_bytes": figures.prefetched_bytes, "wasted_share": figures.wasted_share,
        "precision": figures.precision, "recall": figures.recall, "spared_s_per_gb": figures.spared_s_per_gb,
        "standing": figures.standing.name.lower(),
    }  # fmt: skip


def _maker(name: str) -> MakePredictor:
    return _BASELINES[name] if name in _BASELINES else partial(_shipped, name)


def _shipped(name: str, trace: Trace, speed: float) -> Predictor:
    predictor = create_predictor(name)
    assert predictor is not None
    return predictor


def _machine(devices: int) -> Machine:
    """`devices` of the profile over one NVMe of 2 GB/s."""
    machine = load_machine(PROFILE)
    nvme = replace(machine.media["nvme"], read_bytes_per_s=NVME_BYTES_PER_S, write_bytes_per_s=NVME_BYTES_PER_S)
    many = machine.times(devices)
    return replace(many, media={**many.media, "nvme": nvme})


def _line(row: Row) -> list[str]:
    return [
        row["trace"], row["predictor"], f"{row['ttft_mean_s']:.4f}", f"{row['ttft_p50_s']:.4f}",
        f"{row['ttft_p95_s']:.4f}", f"{row['p99_ratio']:.3f}", f"{row['gain']:.0%}",
        f"{row['exposed_mean_s']:.4f}", f"{row['exposed_gain']:.0%}", f"{row['wasted_share']:.0%}",
        f"{row['spared_s_per_gb']:.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
