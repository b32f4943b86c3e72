"""What does a decision of a policy cost for each block, when it is driven as the daemon drives it?

All calls of a request into the policy are timed (inserted, accessed, next victim, removed, released). A block's cost is
its share of the calls that are about the whole request, and what was asked and told of the victim that left for it. The
limit is on the 99th percentile over blocks; the longest single call shows what an event loop would wait for. Of three
equal replays each block's best counts, since an interruption is no decision.

Cases: a made-up chat and made-up agents (`--trace FILE --format NAME`: a real trace) in a tier of 5 % of their blocks;
the same with all requests of a minute at one instant (a burst); and chats in a tier that holds a million blocks.

Expected: some ten columns at 30 to 60 ns a block, and a look at all chains shared by a dozen requests or more.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.report import Row, progress, table, within
from support.timing import percentile
from support.traces import write_agents, write_chat

from kvstored.policies import resolve
from kvstored.simulator.readers import ReadOptions, read_trace
from kvstored.simulator.replay import Replay, ReplaySettings
from kvstored.simulator.trace import Trace, TraceBuilder

CAPACITY = 0.05
LIMIT_US = 5.0
MANY, MANY_QUICK = 1_000_000, 100_000
_CHAIN_BLOCKS = 16
_MEASURED = 3000  # requests, once the large tier is full
_BURST_NS = 60_000_000_000
_OF_THE_REQUEST = ("inserted", "inserted_run", "accessed", "requested", "expect", "answered")
_OF_A_VICTIM = ("next_victim", "removed", "released")


@dataclass
class Spent:
    """Nanoseconds: of the request's own calls so far, of each victim so far; and of every block that is through."""

    request: int = 0
    victims: list[int] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    longest: int = 0

    def close(self, accesses: int) -> None:
        """A request of so many block accesses is through."""
        share = self.request / accesses
        others = max(0, accesses - len(self.victims))
        self.blocks += [share + victim for victim in self.victims]
        self.blocks += [share] * others
        self.request, self.victims = 0, []


def measure(replay: Replay, *, after: int = 0) -> Spent:
    """Run the whole replay; what was spent on the blocks of the requests from number `after` on."""
    policy: Any = replay.policy
    spent, depth = Spent(), 0

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        is_victims = name in _OF_A_VICTIM

        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal depth
            if depth:  # a part of a call that is timed
                return call(*arguments, **named)
            depth = 1
            began_ns = time.perf_counter_ns()
            answer = call(*arguments, **named)
            took_ns = time.perf_counter_ns() - began_ns
            depth = 0
            spent.longest = max(spent.longest, took_ns)
            if name == "next_victim":
                spent.victims.append(took_ns)
            elif is_victims and spent.victims:
                spent.victims[-1] += took_ns
            else:
                spent.request += took_ns
            return answer

        return run

    def watch() -> None:
        for name in (*_OF_THE_REQUEST, *_OF_A_VICTIM):
            if hasattr(policy, name):
                setattr(policy, name, timed(name, getattr(policy, name)))

    request, done = replay.request, 0

    def watched(keys: list[bytes], *rest: Any) -> int:
        nonlocal done
        if done == after:
            watch()
        done += 1
        hits = request(keys, *rest)
        if done > after and keys:
            spent.close(len(keys))
        return hits

    setattr(replay, "request", watched)  # noqa: B010
    replay.run()
    return spent


def many_chats(blocks: int) -> Trace:
    """New chats until so many blocks are there, then new ones among turns of recent ones."""
    chance, fresh = random.Random(1), iter(range(10**9))
    builder = TraceBuilder("many", "made", 512)
    chats: list[list[int]] = []
    filling = blocks // _CHAIN_BLOCKS
    for at in range(filling + _MEASURED):
        if at < filling or chance.random() < 0.65:
            chat = [next(fresh) for _ in range(_CHAIN_BLOCKS)]
            chats.append(chat)
        else:
            chat = chats[-chance.randrange(1, len(chats) // 4)]
            chat += [next(fresh) for _ in range(chance.randrange(1, 8))]
        builder.add(at * 5_000_000, chat, input_tokens=len(chat) * 512, output_tokens=200)
    return builder.build()


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Trace, int, int]]:
    """Name, trace, capacity in blocks, requests that only fill the tier."""

    def silent(done: int, total: int) -> None:
        return None

    traces: dict[str, Trace] = {}
    if options.trace is not None:
        traces[options.trace.name] = read_trace(options.trace, options.format, ReadOptions(), silent)
    else:
        with tempfile.TemporaryDirectory() as directory:
            for name, write, requests in (("chat", write_chat, 6000), ("agents", write_agents, 3000)):
                path = Path(directory) / name
                write(path, requests // 4 if options.quick else requests)
                traces[name] = read_trace(path, "mooncake", ReadOptions(), silent)
    for name, trace in traces.items():
        capacity = round(CAPACITY * trace.distinct_blocks)
        yield name, trace, capacity, 0
        yield f"{name}_burst", replace(trace, times_ns=trace.times_ns // _BURST_NS * _BURST_NS), capacity, 0
    many = MANY_QUICK if options.quick else MANY
    yield f"resident_{many}", many_chats(many), many, many // _CHAIN_BLOCKS


def rows_of(name: str, rounds: list[Spent]) -> list[Row]:
    us = [min(same) / 1000 for same in zip(*(spent.blocks for spent in rounds), strict=True)]
    longest_ns = min(spent.longest for spent in rounds)
    half, almost, most = percentile(us, 50), percentile(us, 99), max(us)
    progress(
        f"{name}: p50 {half:.2f} us a block, p99 {almost:.2f}, max {most:.0f}; longest call {longest_ns / 1e6:.1f} ms"
    )
    return [
        within(f"decision_{name}_p99", almost, "us", LIMIT_US),
        Row(f"decision_{name}_p50", half, "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_max", most, "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_longest_call", longest_ns / 1000, "us", LIMIT_US, "limit"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="shorter traces, a tenth of the blocks")
    parser.add_argument("--policy", default="chain-hazard")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--format", default="mooncake")
    options = parser.parse_args()
    gc.freeze()  # as the daemon does
    rows: list[Row] = []
    for name, trace, capacity, after in cases(options):
        settings = ReplaySettings(resolve(options.policy), capacity)
        rows += rows_of(name, [measure(Replay(trace, settings), after=after) for _ in range(1 if options.quick else 3)])
    objects = [row.as_json() for row in rows]
    print(json.dumps(objects) if options.json else table(objects))
    return 0 if all(fields["met"] is not False for fields in objects) else 1


if __name__ == "__main__":
    sys.exit(main())
