"""Measures what a decision of a policy costs for each block, when it is driven in the daemon's order of events.

A request is a get of all its blocks, which leases what is there, and a put of what it missed, for which room is made,
neighbours of a chain together. Every call into the policy on its way is timed: requested, arriving, inserted, accessed,
next victims, declines, removed, released; in processor time, since what else runs on the machine is no decision, and at
most the time that went by, since the clock of processor time is coarse. What a timed call of nothing takes is taken
off, and of three equal replays each request's best counts.

A block's cost is the policy's whole time for its request, over the request's blocks; the limit is on the 99th
percentile over blocks. Beside it, the same over requests, where one of a single block counts as much as one of a
thousand; and by victim, where the calls about victims count for the blocks that took their places; and of
the choice alone: who goes, and whether the newcomer is declined. The longest call shows what an event loop would wait
for. What a policy leaves for the loop's next turn is shown apart, as its mean over all blocks. Two rows bound what can
be wanted: the p99 of as many timed calls of nothing in the same places, and the p99 of LRU.

Cases: a made-up chat and made-up agents (`--trace FILE --format NAME`: a real trace) in a tier of 5 % of their blocks;
the same with all requests of a minute at one instant (a burst); and chats in a tier that holds a million blocks.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.report import Row, parser_of, percentile, printed, progress, within
from support.traces import write_agents, write_chat

from kvstore_simulator.readers import ReadOptions, read_trace
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Op, Trace, TraceBuilder
from kvstored.store.policies import resolve

CAPACITY = 0.05
LIMIT_US = 5.0
MANY, MANY_QUICK = 1_000_000, 100_000
_CHAIN_BLOCKS = 16
_MEASURED = 3000  # requests, once the large tier is full
_BURST_NS = 60_000_000_000
_OF_THE_REQUEST = ("inserted", "accessed", "requested", "arriving", "expect", "answered")
_NAMING = ("next_victim", "next_victims")
_OF_A_VICTIM = (*_NAMING, "declines", "removed", "released")
_ROUNDS = 3  # equal replays; one alone shows what else the machine does
_CALIBRATION = 20_000  # timed calls of nothing


@dataclass
class Spent:
    """Nanoseconds. Arrays, not lists: a collection that walks what a benchmark keeps is no decision either."""

    request: float = 0.0
    nothing: float = 0.0  # what timed calls of nothing took beside
    victims: list[list[float]] = field(default_factory=list)  # of those named together: for all, to choose; how many
    accesses: array[int] = field(default_factory=lambda: array("q"))  # of each request that is through,
    whole: array[float] = field(default_factory=lambda: array("d"))  # and all that it took
    clock: array[float] = field(default_factory=lambda: array("d"))  # and what as many calls of nothing took
    blocks: array[float] = field(default_factory=lambda: array("d"))  # of each block, by victim
    choices: array[float] = field(default_factory=lambda: array("d"))  # of each victim: to name it, and to decline
    longest: float = 0.0
    afterwards: float = 0.0  # for what no request waits

    def close(self, accesses: int) -> None:
        """Note the end of a request of `accesses` block accesses."""
        share, took_place = self.request / accesses, 0
        for took, choice, named in self.victims:
            here = min(int(named), accesses - took_place)
            self.blocks.extend([share + took / max(here, 1)] * here)
            self.choices.extend([choice / max(here, 1)] * here)
            took_place += here
        self.blocks.extend([share] * (accesses - took_place))
        self.accesses.append(accesses)
        self.whole.append(self.request + sum([took for took, _, _ in self.victims]))
        self.clock.append(self.nothing)
        self.request, self.nothing, self.victims = 0.0, 0.0, []


def clock_ns() -> float:
    """Return the nanoseconds that a timed call of nothing seems to take."""
    return percentile([_timed(_nothing)[1] for _ in range(_CALIBRATION)], 50)


def _nothing() -> None:
    return None


def _timed(call: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, float]:
    """Return what `call` returns, and the nanoseconds of processor time that it took; of time, if less went by."""
    began_ns = time.thread_time_ns()
    first_ns = time.perf_counter_ns()
    answer = call(*arguments, **named)
    last_ns = time.perf_counter_ns()
    return answer, min(time.thread_time_ns() - began_ns, last_ns - first_ns)


def measure(replay: Replay, *, after: int = 0) -> Spent:
    """Run the whole replay, in the daemon's order; what the requests from number `after` on took."""
    policy: Any = replay.policy
    spent, depth, nothing_ns = Spent(), 0, clock_ns()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal depth
            if depth:  # a part of a call that is timed
                return call(*arguments, **named)
            depth = 1
            answer, took_ns = _timed(call, *arguments, **named)
            took_ns = max(0.0, took_ns - nothing_ns)
            spent.nothing += max(0.0, _timed(_nothing)[1] - nothing_ns)
            depth = 0
            spent.longest = max(spent.longest, took_ns)
            if name in _NAMING:
                spent.victims.append([took_ns, took_ns, len(answer) if name == "next_victims" else 1])
            elif name in _OF_A_VICTIM and spent.victims:
                spent.victims[-1][0] += took_ns
                if name == "declines":
                    spent.victims[-1][1] += took_ns
                elif name == "removed":
                    spent.victims[-1][2] = len(arguments[0])  # of those named, as many as were taken
            else:
                spent.request += took_ns
            return answer

        return run

    def watch() -> None:
        for name in (*_OF_THE_REQUEST, *_OF_A_VICTIM):
            if hasattr(policy, name):
                setattr(policy, name, timed(name, getattr(policy, name)))

    request, catch_up, done = replay.request, replay.catch_up, 0

    def caught_up() -> None:
        took_ns = _timed(catch_up)[1]
        if done > 2 * after:
            spent.afterwards += max(0.0, took_ns - nothing_ns)

    def watched(keys: list[bytes], op: Op, *rest: Any) -> int:
        nonlocal done
        if done == 2 * after:
            watch()
        done += 1
        hits = request(keys, op, *rest)
        if done > 2 * after and keys and op is Op.PUT:
            spent.close(len(keys))
        return hits

    setattr(replay, "request", watched)  # noqa: B010
    setattr(replay, "catch_up", caught_up)  # noqa: B010
    replay.run()
    return spent


def many_chats(blocks: int) -> Trace:
    """New chats until `blocks` blocks are stored, then new ones among turns of recent ones."""
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


def _by_block(rounds: list[Spent], column: str = "whole") -> npt.NDArray[np.float64]:
    """Return the microseconds a block of each request, by the best of `rounds`."""
    best = np.min([np.array(getattr(spent, column)) for spent in rounds], axis=0)
    found: npt.NDArray[np.float64] = best / np.array(rounds[0].accesses) / 1000
    return found


def rows_of(name: str, rounds: list[Spent], lru: list[Spent]) -> list[Row]:
    accesses, each = np.array(rounds[0].accesses), _by_block(rounds)
    by_block = np.repeat(each, accesses).tolist()
    clock, least = (
        percentile(np.repeat(bound, accesses).tolist(), 99) for bound in (_by_block(rounds, "clock"), _by_block(lru))
    )
    by_request, longest_us = each.tolist(), min(spent.longest for spent in rounds) / 1000
    by_victim = (np.min([np.array(spent.blocks) for spent in rounds], axis=0) / 1000).tolist()
    choice = (np.min([np.array(spent.choices) for spent in rounds], axis=0) / 1000).tolist()
    afterwards_us = min(spent.afterwards for spent in rounds) / sum(accesses) / 1000
    half, almost, most = percentile(by_block, 50), percentile(by_block, 99), max(by_block)
    progress(
        f"{name}: p50 {half:.2f} us a block, p99 {almost:.2f}, max {most:.0f}; over requests p99 "
        f"{percentile(by_request, 99):.2f}, by victim {percentile(by_victim, 99):.2f}; to choose one "
        f"p99 {percentile(choice, 99):.2f}; longest call {longest_us:.0f} us; p99 of LRU {least:.2f}, of calls of "
        f"nothing {clock:.2f}"
    )
    return [
        within(f"decision_{name}_p99", almost, "us", LIMIT_US),
        Row(f"decision_{name}_lru_p99", least, "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_nothing_p99", clock, "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_p50", half, "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_max", most, "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_by_request_p99", percentile(by_request, 99), "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_by_victim_p99", percentile(by_victim, 99), "us", LIMIT_US, "limit"),
        within(f"decision_{name}_choice_p99", percentile(choice, 99), "us", LIMIT_US),
        Row(f"decision_{name}_longest_call", longest_us, "us", LIMIT_US, "limit"),
        Row(f"decision_{name}_afterwards", afterwards_us, "us", LIMIT_US, "limit"),
    ]


def main() -> int:
    parser = parser_of(__doc__, "shorter traces, a tenth of the blocks")
    parser.add_argument("--policy", default="chain-hazard")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--format", default="mooncake")
    options = parser.parse_args()
    gc.freeze()  # as the daemon does
    rows: list[Row] = []
    for name, trace, capacity, after in cases(options):
        ordered, measured = _in_daemons_order(trace), dict[str, list[Spent]]()
        measured[resolve(options.policy)], measured["lru"] = [], []
        gc.collect()
        gc.freeze()
        for policy in [*measured] * _ROUNDS:  # in turns: the machine is not equally fast all the time
            measured[policy].append(measure(Replay(ordered, ReplaySettings(policy, capacity)), after=after))
        rows += rows_of(name, measured[resolve(options.policy)], measured["lru"])
    return printed(rows, as_json=options.json)


def _in_daemons_order(trace: Trace) -> Trace:
    """Return `trace` with each request as a get of its blocks and a put of the missing ones."""
    twice = np.repeat(np.arange(trace.requests), 2)
    starts = np.concatenate([[0], np.cumsum(np.diff(trace.starts)[twice])])
    blocks = np.concatenate([trace.blocks[trace.starts[at] : trace.starts[at + 1]] for at in twice.tolist()])
    columns = ("times_ns", "tenants", "kinds", "continued", "input_tokens", "output_tokens")
    return replace(
        trace, **{name: getattr(trace, name)[twice] for name in columns}, starts=starts, blocks=blocks,
        ops=np.tile(np.array([Op.GET, Op.PUT], np.uint8), trace.requests),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
