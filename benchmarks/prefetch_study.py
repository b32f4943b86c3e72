"""What prefetch by prediction does for the time to first token, predictor by predictor, in mode timing's virtual time.

    benchmarks/prefetch_study.py agents.jsonl.gz conversation.jsonl.gz --seeds 3 --loads 1,0.5 --results study.jsonl
    benchmarks/prefetch_study.py --quick

One H100 with llama-3.1-8b; DRAM holds 5 % of the distinct blocks, NVMe (2 GB/s) all of them. A seed is a draw of the
sessions (Claude Code: 28 in 6,000 s, which is all that is served) or a window (Mooncake: 15 % of the trace, at 0.3
times its speed), at load 1; both of the half of the trace that nothing was fitted to, or with --fitted of the other
one. The engine must not be overloaded (`engine`: its busy share), else the time to first token is queue and nothing
else.

`none` is mode timing's `orchestrated` without prefetch, and so is the plan under every predictor; `on-arrival`
prefetches when a request enters the engine's queue. "+pause": engines say when a session will come back, exactly, or
"+pause20" with an error of 20 % (lognormal); the policy hears that too. `oracle` is the same machinery (queue, budget,
room) with perfect guesses: the times at which requests arrive, and the keys. It is what a predictor could do at best,
and no bound: it goes by the times of arrival, while requests are served later, and it does not choose what is evicted.

`gain`: share of the oracle's gain over `none` in the mean time that loading, or computing again what is stored, added
to a request (`exposed`); then of that in mean TTFT, where that is at least 0.5 %; both over all seeds, with 95 % of
bootstrapped draws of them. With pauses the oracle, too, has a policy that hears them. `prefetch`: the same over `none`
with those pauses: what prefetch adds to what the policy makes of them. `wasted`: share of the bytes brought that no
request used, and the worst seed's. `worst`: of any seed, mean TTFT and the p99 of TTFT and of TTFT without the queue,
as multiples of those of `none` (with those pauses).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from study.prefetch_table import gains, table
from study.sources import format_of, window
from study.standins import write_standins
from support.report import progress

import kvstored
from kvstore_proto.arena import slot_bytes
from kvstore_simulator.hints import NO_HINTS, Hints
from kvstore_simulator.machine import Machine, load_machine
from kvstore_simulator.node import Node, serve_trace
from kvstore_simulator.node_settings import ABLATIONS, ORCHESTRATED, MakePredictor, NodeSettings
from kvstore_simulator.predictors import FOR_STUDIES, shipped
from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.trace import Trace, TraceError
from kvstore_simulator.worth import models
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.predictor_names import LEARNED, NONE, PREDICTORS

MODEL, PROFILE = "llama-3.1-8b", "h100"
DRAM_SHARE, NVME_BYTES_PER_S = 0.05, 2e9
ENGINE_BLOCKS = 480  # of 512 tokens: the longest prompt, and a little more
ON_ARRIVAL, ORACLE = "on-arrival", "oracle"
PAUSES = {"+pause": 0.0, "+pause20": 0.2}
_WITHOUT_MODEL = tuple(name for name in PREDICTORS if name != LEARNED)
_ALONE = (NONE, ORACLE, ON_ARRIVAL, *_WITHOUT_MODEL)
NAMES = tuple(dict.fromkeys((*_ALONE, *(name + pause for name in (NONE, ORACLE, *_WITHOUT_MODEL) for pause in PAUSES))))
USUAL = (
    NONE, ORACLE, ON_ARRIVAL, "session-return", "none+pause", "oracle+pause",
    "on-hint+pause", "none+pause20", "on-hint+pause20",
)  # fmt: skip
SESSIONS, WINDOW_S = 28, 6000.0
WINDOW_SHARE, WINDOW_SPEED = 0.15, 0.3
HALF = 0.55  # of a trace in windows: what is before it may be fitted to
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One draw or window of one trace under one load."""

    path: Path
    seed: int
    load: float
    is_fitted: bool
    sessions: int

    def load_trace(self) -> tuple[Trace, float]:
        """The trace, and its speed."""
        if format_of(self.path) == "claude-code":
            with gzip.open(self.path, "rt") as lines:
                half = lines.readlines()[0 if self.is_fitted else 1 :: 2]
            with tempfile.NamedTemporaryFile("wt", suffix=f"-{self.path.name.removesuffix('.gz')}") as kept:
                kept.writelines(half)
                kept.flush()
                options = ReadOptions(
                    seed=self.seed, sessions=min(self.sessions, len(half)), window_s=WINDOW_S / self.load
                )
                trace = read_trace(Path(kept.name), "claude-code", options, lambda done, total: None)
                last = np.searchsorted(trace.times_ns - trace.times_ns[0], options.window_s * 1e9)
                return trace.part(0, int(last)), 1.0
        trace = read_trace(self.path, format_of(self.path), ReadOptions(), lambda done, total: None)
        begin = self.seed * WINDOW_SHARE + (0.0 if self.is_fitted else HALF)
        if begin + WINDOW_SHARE > 1 + 1e-9:
            raise ValueError(f"{self.path.name} has no window {self.seed}: fewer --seeds")
        return window(trace, begin, begin + WINDOW_SHARE), WINDOW_SPEED * self.load

    def key(self, name: str) -> list[Any]:
        return [self.path.name, self.seed, self.load, self.is_fitted, self.sessions, name, _code()]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="prefetch-study-") as scratch:
        try:
            paths = options.trace or write_standins(Path(scratch), requests=300, sessions=8)
            rows = list(_rows(options, paths))
        except (TraceError, ValueError) as error:
            print(f"prefetch_study: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"prefetch_study: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
    if options.json:
        print(json.dumps({"rows": rows, "gains": gains(rows)}))
    else:
        print(table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="*", metavar="TRACE", help="a trace's file (default: made-up ones)")
    parser.add_argument("--predictors", default=",".join(USUAL), metavar="LIST", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="draws, or windows, 3 at most (default 3)")
    parser.add_argument("--loads", default="1,0.5", metavar="LIST", help="multiples (default 1,0.5)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"of a draw (claude-code; default {SESSIONS})")
    parser.add_argument("--fitted", action="store_true", help="the half that constants may have been chosen on")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep rows there, and make none that it has")
    parser.add_argument("--quick", action="store_true", help="with made-up traces a minute or two")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    return parser


def _rows(options: argparse.Namespace, paths: Sequence[Path]) -> Iterator[Row]:
    asked = [name.strip() for name in options.predictors.split(",")]
    for name in asked:
        if name not in NAMES:
            raise ValueError(f"--predictors {name!r}: known are {', '.join(NAMES)}")
    loads, seeds = [float(load) for load in options.loads.split(",")], options.seeds
    if options.quick:
        asked, loads, seeds = [NONE, ORACLE, "none+pause", "oracle+pause", "on-hint+pause"], loads[:1], 1
    known = _known(options.results)
    for path in paths:
        for seed in range(seeds):
            for load in loads:
                case = Case(path, seed, load, options.fitted, options.sessions)
                for name in asked:
                    key = json.dumps(case.key(name))
                    if key not in known:
                        progress(f"{path.name}, seed {seed}, load {load:g}: {name}")
                        known[key] = _run(case, name)
                        if options.results is not None:
                            with options.results.open("a") as results:
                                results.write(json.dumps({"key": key, "row": known[key]}) + "\n")
                    yield known[key]


def _known(results: Path | None) -> dict[str, Row]:
    if results is None or not results.exists():
        return {}
    return {line["key"]: line["row"] for line in map(json.loads, results.read_text().splitlines())}


@cache
def _code() -> str:
    """A digest of the sources that a row depends on."""
    package, found = Path(kvstored.__file__).parent, hashlib.sha256()
    folders = (
        package.parent / "kvstore_simulator",
        package / "store",
        package.parents[1] / "predictor" / "kvstore_predictor",
    )
    for path in sorted(each for folder in folders for each in folder.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _run(case: Case, name: str) -> Row:
    trace, speed = case.load_trace()
    model, machine = models()[MODEL], _machine()
    block_bytes = model.kv_bytes_per_token * trace.block_tokens
    slot, blocks = slot_bytes(block_bytes), trace.distinct_blocks
    tiers = (("dram", max(1, round(blocks * DRAM_SHARE)) * slot), ("nvme", blocks * slot))
    bare, plus, pause = name.partition("+")
    settings = NodeSettings(
        machine, model, tiers, ENGINE_BLOCKS * block_bytes * 512 // trace.block_tokens, CHAIN_HAZARD, speed=speed,
        hints=Hints(seed=case.seed, pause_noise=PAUSES[plus + pause]) if plus else NO_HINTS,
        predictor=None if bare in (NONE, ON_ARRIVAL) else _maker(bare),
    )  # fmt: skip
    plan = ORCHESTRATED if bare == ON_ARRIVAL else ABLATIONS["prefetch"]
    node = serve_trace(trace, settings, plan, lambda done, total: None)
    return {"trace": case.path.name, "seed": case.seed, "load": case.load, "predictor": name} | _measured(node)


def _measured(node: Node) -> Row:
    visits = [visit for visit in node.served.visits if visit.is_served]
    if not visits or node.store is None:
        raise ValueError(f"{node.trace.name}: no request fits the engine's memory")
    ttft_s = np.array([visit.ttft_ns for visit in visits]) / 1e9
    served_s = ttft_s - np.array([visit.queued_ns for visit in visits]) / 1e9
    status = node.store.store.prefetcher.statistics()
    figures, lasted_s = status.all, node.served.lasted_s
    return {
        "requests": len(visits), "engine": node.served.compute_busy_s / lasted_s,
        "nvme": node.media[-1].busy_ns / 1e9 / lasted_s, "failure": status.failure,
        "ttft_mean_s": float(ttft_s.mean()), "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "exposed_mean_s": float(np.mean([visit.exposed_ns for visit in visits])) / 1e9,
        "queue_mean_s": float((ttft_s - served_s).mean()), "ttft_p95_s": float(np.percentile(ttft_s, 95)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)), "demand_p99_s": float(np.percentile(served_s, 99)),
        "prefetched_bytes": figures.prefetched_bytes, "used_bytes": figures.used_bytes,
        "wasted_bytes": figures.wasted_bytes, "late_blocks": figures.late_blocks, "spared_s": figures.spared_s,
        "standing": figures.standing.name.lower(),
    }  # fmt: skip


def _maker(name: str) -> MakePredictor:
    return FOR_STUDIES[name] if name in FOR_STUDIES else shipped(name)


def _machine() -> Machine:
    """The profile with one NVMe of 2 GB/s."""
    machine = load_machine(PROFILE)
    nvme = replace(machine.media["nvme"], read_bytes_per_s=NVME_BYTES_PER_S, write_bytes_per_s=NVME_BYTES_PER_S)
    return replace(machine, media={**machine.media, "nvme": nvme})


if __name__ == "__main__":
    sys.exit(main())
