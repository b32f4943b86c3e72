"""Measures how much worse than the best classical policy ours is, where it is worse at all.

    benchmarks/policy_regret.py conversation.jsonl.gz agents.jsonl.gz --capacity 0.01,0.05,0.1,0.25,0.5
    benchmarks/policy_regret.py synthetic.jsonl.gz --at-least 0.01:0.038,0.05:0.160,0.1:0.265
    benchmarks/policy_regret.py --generated --seeds 100,101,102
    benchmarks/policy_regret.py --quick

For every trace and capacity (a share of the distinct blocks): hit ratio and share of compute saved of the classical
policies, of `--ours` and of the clairvoyant; then the regret in both, which is what the best classical one has more
than ours. More than `--allowed` fails, and so does a hit ratio below `--at-least`. Every file is also cut into
`--parts` windows in time, each with an empty tier to start from.

`--generated` replays the made-up families of study/families.py, every seed a trace. For each: the hits of the five and
of ours, the mean over the seeds; the lead over LRU, which fails below -`--allowed-generated`; and the lead over the
best of the five within the first 500 requests, which fails where ours is behind it by more than two standard deviations
of chance (the requests' differences, taken to be independent) in the sum over the seeds.

The last line counts what passed. Exit status: 0; 1 when anything failed, but for --quick, whose traces are too short
for a verdict; 2 for a mistake.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from study.families import FAMILIES, trace_of
from study.sources import cases_of
from support.report import progress

from kvstore_simulator.hit_value import DEFAULT_MODEL, hit_value, models
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Trace, TraceError
from kvstored.policy_names import BEST, LRU, resolve

CLASSICAL = (LRU, "lfu-ttl", "gdsf", "s3-fifo", "arc")
CLAIRVOYANT = "clairvoyant"
REQUESTS, REQUESTS_QUICK, REQUESTS_EARLY = 3000, 150, 500
_CHANCE = 2.0  # standard deviations
Line = dict[str, Any]
Hits = npt.NDArray[np.int64]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        capacities = [float(part) for part in options.capacity.split(",")]
        seeds = [int(part) for part in options.seeds.split(",")]
        if not all(0 < capacity <= 1 for capacity in capacities):
            raise ValueError("--capacity: shares of the distinct blocks, above 0, at most 1")
        lines: list[Line] = []
        if options.generated or options.quick:
            lines += _generated(options, seeds, capacities)
        cases = cases_of(
            options.trace, groups=options.parts.split(","), seeds=options.draws, sessions=None, window_s=3600.0
        )
        for case in cases:
            lines += _against_classics(f"{case.trace} {case.part}", case.load(), options, capacities)
    except (TraceError, ValueError, KeyError, OSError) as error:
        print(f"policy_regret: {error}", file=sys.stderr)
        return 2
    failed = sum(not passed for line in lines for passed in line["passed"].values())
    print(f"{sum(len(line['passed']) for line in lines) - failed} passed, {failed} failed")
    if options.json:
        print(json.dumps(lines))
    return 1 if failed and not options.quick else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="*", metavar="TRACE", help="a trace's file")
    parser.add_argument("--ours", default=resolve(BEST), metavar="POLICY")
    parser.add_argument("--capacity", default="0.01,0.05,0.1,0.25,0.5", metavar="LIST")
    parser.add_argument("--parts", default="whole", metavar="LIST", help="of whole, halves, quarters")
    parser.add_argument("--draws", type=int, default=2, help="of session starts, where a trace has none")
    parser.add_argument("--generated", action="store_true", help="the made-up families")
    parser.add_argument("--seeds", default="1,2", metavar="LIST", help="of the made-up families")
    parser.add_argument("--allowed", type=float, default=0.003, help="regret on traces (default 0.003)")
    parser.add_argument("--allowed-generated", type=float, default=0.005, help="behind LRU (default 0.005)")
    parser.add_argument("--at-least", default="", metavar="LIST", help="hit ratios by capacity, 0.01:0.038,...")
    parser.add_argument("--quick", action="store_true", help="short made-up traces at one capacity")
    parser.add_argument("--json", action="store_true", help="all lines as a list, last")
    return parser


def _replayed(trace: Trace, policy: str, capacity: float) -> Hits:
    """Return the results of a replay by request."""
    blocks = max(1, round(capacity * trace.distinct_blocks))
    return Replay(trace, ReplaySettings(policy=policy, capacity_blocks=blocks)).run().hits


def _worth(trace: Trace, hits: Hits) -> tuple[float, float]:
    """Hit ratio and share of compute saved."""
    found = hit_value(trace, hits, models()[DEFAULT_MODEL])
    return found.hit_ratio, found.compute_saved_ratio


def _floors(text: str) -> dict[float, float]:
    """Return the floors by capacity, of `0.01:0.038,...`. Raises ValueError."""
    pairs = [part.split(":") for part in text.split(",") if part]
    return {float(capacity): float(ratio) for capacity, ratio in pairs}


def _verdict(passed: dict[str, bool]) -> str:
    return "  ".join(f"{name} {'PASS' if fine else 'FAIL'}" for name, fine in passed.items())


def _against_classics(
    name: str, trace: Trace, options: argparse.Namespace, capacities: Sequence[float]
) -> Iterator[Line]:
    ours, floors = options.ours, _floors(options.at_least)
    for capacity in capacities:
        policies = (*CLASSICAL, ours, CLAIRVOYANT)
        found = {policy: _worth(trace, _replayed(trace, policy, capacity)) for policy in policies}
        best = [max(found[policy][which] for policy in CLASSICAL) for which in (0, 1)]
        hits, compute = (best[which] - found[ours][which] for which in (0, 1))
        passed = {"hits": hits <= options.allowed, "compute": compute <= options.allowed}
        if capacity in floors:
            passed[f"at least {floors[capacity]:.3f}"] = found[ours][0] >= floors[capacity]
        progress(f"{name} at {capacity:.0%}")
        print(f"{name} at {capacity:.0%}: " + "  ".join(f"{p} {h:.4f}/{c:.4f}" for p, (h, c) in found.items()))
        print(f"    regret: {hits:+.4f} of the hits, {compute:+.4f} of the compute: {_verdict(passed)}", flush=True)
        yield {
            "trace": name, "capacity": capacity, "policies": found, "regret": hits, "regret_compute": compute,
            "passed": passed,
        }  # fmt: skip


def _generated(options: argparse.Namespace, seeds: Sequence[int], capacities: Sequence[float]) -> Iterator[Line]:
    requests = REQUESTS_QUICK if options.quick else REQUESTS
    if options.quick:
        seeds, capacities = seeds[:1], [0.1]
    for family in FAMILIES:
        traces = [trace_of(family, seed, requests) for seed in seeds]
        for capacity in capacities:
            hits = {name: [_replayed(trace, name, capacity) for trace in traces] for name in (*CLASSICAL, options.ours)}
            blocks = sum(len(trace.blocks) for trace in traces)
            ratios = {name: sum(int(each.sum()) for each in runs) / blocks for name, runs in hits.items()}
            lead = ratios[options.ours] - ratios[LRU]
            early, chance, expert = _early(traces, hits, options.ours)
            passed = {"LRU": lead >= -options.allowed_generated, "early": early >= -_CHANCE * chance}
            print(
                f"{family:32} at {capacity:4.0%}: {'  '.join(f'{name} {ratio:.4f}' for name, ratio in ratios.items())}"
                f"  against LRU {lead:+.4f}; early {early:+.4f} (chance {chance:.4f}) against {expert}: "
                f"{_verdict(passed)}",
                flush=True,
            )
            yield {
                "family": family, "capacity": capacity, "ratios": ratios, "regret": -lead, "early": early,
                "chance": chance, "passed": passed,
            }  # fmt: skip


def _early(traces: Sequence[Trace], hits: dict[str, list[Hits]], ours: str) -> tuple[float, float, str]:
    """The lead of `ours` over the best classical policy within the first requests, one standard deviation of chance,
    and which policy that is."""
    blocks = sum(int(trace.starts[min(REQUESTS_EARLY, trace.requests)]) for trace in traces)
    first = {name: np.concatenate([each[:REQUESTS_EARLY] for each in runs]) for name, runs in hits.items()}
    expert = max(CLASSICAL, key=lambda name: int(first[name].sum()))
    lead = (first[ours] - first[expert]).astype(np.float64)
    return float(lead.sum()) / blocks, math.sqrt(float((lead * lead).sum())) / blocks, expert


if __name__ == "__main__":
    sys.exit(main())
