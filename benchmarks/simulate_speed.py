"""How fast does a replay go through the production residency and policies, and what does a decision cost?

A limit, not a rival, is the baseline: 250,000 block accesses a second for LRU, 100,000 for the policy that ships, on
each of two made-up traces at a capacity of 5 % of their blocks. On the chat most accesses are a store and an eviction,
on the agents requests are long. `--trace FILE --format NAME` measures a real trace instead. Processor time, not wall
time: other processes on the machine are not what is asked about.

A decision: all calls of one request into the policy (inserted, accessed, next victims, removed), for each block of it,
in the order of a replay, where blocks come and go in runs; `decision_cost.py` has the daemon's. The 99th percentile is
over requests of at least 8 blocks; shorter ones measure the clock.

Expected: a stored and evicted block passes some thirty columns and four dictionaries at 30 to 60 ns each, 3 to 4 us; a
hit block six, 0.5 us.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.report import AT_LEAST, Row, progress, table, within
from support.timing import percentile
from support.traces import write_agents, write_chat

from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Trace
from kvstored.store.policies import resolve

CAPACITY = 0.05
WANTED = {"lru": 250_000.0, "best": 100_000.0}
DECISION_LIMIT_US = 5.0
BLOCKS_MIN = 8
_CALLS = (
    "expect", "answered", "inserted", "accessed", "requested", "next_victim", "next_victims", "removed",
    "released",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="shorter traces, one round")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--format", default="mooncake")
    options = parser.parse_args()
    gc.freeze()  # as the daemon does
    rows: list[Row] = []
    for name, trace in _traces(options).items():
        rows += _measure(name, trace, rounds=1 if options.quick else 3)
    objects = [row.as_json() for row in rows]
    print(json.dumps(objects) if options.json else table(objects))
    return 0 if all(fields["met"] is not False for fields in objects) else 1


def _traces(options: argparse.Namespace) -> dict[str, Trace]:
    silent: Callable[[int, int], None] = lambda done, total: None  # noqa: E731
    if options.trace is not None:
        return {options.trace.name: read_trace(options.trace, options.format, ReadOptions(), silent)}
    made = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, write, requests in (("chat", write_chat, 6000), ("agents", write_agents, 3000)):
            path = Path(directory) / name
            write(path, requests // 4 if options.quick else requests)
            made[name] = read_trace(path, "mooncake", ReadOptions(), silent)
    return made


def _measure(name: str, trace: Trace, rounds: int) -> list[Row]:
    capacity = round(CAPACITY * trace.distinct_blocks)
    rows = []
    for policy, wanted in WANTED.items():
        settings = ReplaySettings(resolve(policy), capacity)
        best_s = min(_processor_s(Replay(trace, settings)) for _ in range(rounds))
        rate = trace.accesses / best_s
        decision_us = _decision_us(trace, settings)
        progress(f"{name}, {policy}: {rate:,.0f} accesses/s, a decision {decision_us:.2f} us a block (p99)")
        rows.append(Row(f"simulate_{name}_{policy}", rate, "accesses/s", wanted, "wanted", AT_LEAST, 1.0))
        rows.append(within(f"decision_{name}_{policy}_p99", decision_us, "us", DECISION_LIMIT_US))
    return rows


def _processor_s(replay: Replay) -> float:
    began = time.process_time()
    replay.run()
    return time.process_time() - began


def _decision_us(trace: Trace, settings: ReplaySettings) -> float:
    """The 99th percentile over requests of what the policy took for each block; of three equal replays, each request's
    best, since an interruption is no decision.
    """
    rounds = [_policy_us(Replay(trace, settings)) for _ in range(3)]
    return percentile([min(same) for same in zip(*rounds, strict=True)], 99)


def _policy_us(replay: Replay) -> list[float]:
    policy: Any = replay.policy
    spent_ns = depth = 0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal spent_ns, depth
            if depth:  # a part of a call that is timed
                return call(*arguments, **named)
            depth = 1
            began_ns = time.perf_counter_ns()
            answer = call(*arguments, **named)
            spent_ns += time.perf_counter_ns() - began_ns
            depth = 0
            return answer

        return run

    for method in (name for name in _CALLS if hasattr(policy, name)):
        setattr(policy, method, timed(getattr(policy, method)))
    request, each_us = replay.request, []

    def watched(keys: list[bytes], *rest: Any) -> int:
        nonlocal spent_ns
        spent_ns = 0
        hits = request(keys, *rest)
        if len(keys) >= BLOCKS_MIN:
            each_us.append(spent_ns / 1000 / len(keys))
        return hits

    setattr(replay, "request", watched)  # noqa: B010
    replay.run()
    return each_us


if __name__ == "__main__":
    sys.exit(main())
