"""Measure how much sooner prefixes are readable in a live daemon when engines announce a session's next request.

Sessions with think times are replayed against two daemons in turns: one without prefetch, one with `on-hint`. DRAM
holds a third of the sessions, NVMe all of them. After each answer the client says, as the project's engine and the vLLM
connector do, when the session is expected back; real pauses differ from that by a normal error of 10 %. A request's
time is from its lookup to the lease on its whole prefix; an engine adds the prefill of the new tokens, which is the
same on both sides. Waste is the share of prefetched bytes that left DRAM unused.

    python benchmarks/prefetch_hints.py --quick --json
"""

from __future__ import annotations

import heapq
import math
import random
import sys
import time
from dataclasses import dataclass, field

from support.daemon import MIB, BenchDaemon, bench_daemon, model, payloads, tokens_of
from support.report import AT_MOST, Row, main, percentile, progress, within

from kvstore_client import Session
from kvstore_proto.arena import slot_bytes
from kvstore_proto.v1 import admin_pb2
from kvstored.lifetime.warm.ledger import LEDGER_BYTES

BLOCK_BYTES = 256 << 10
SESSIONS, LEAST_BLOCKS, MOST_BLOCKS, NEW_BLOCKS = 24, 24, 72, 2
MEAN_PAUSE_S, LEAST_PAUSE_S, ERROR = 5.0, 1.0, 0.1
ARENA, STAGING = 16 * MIB, 16 * MIB


@dataclass
class Times:
    """The seconds that requests took, and the blocks that prefetch brought, and brought in vain."""

    waits_s: list[float] = field(default_factory=list)
    brought: int = 0
    wasted: int = 0


def measure(quick: bool) -> list[Row]:
    began = time.monotonic()
    sides = {"none": Times(), "hints": Times()}
    seconds = 30.0 if quick else 60.0
    for seed in range(1 if quick else 4):
        for name in sorted(sides, reverse=seed % 2 == 0):  # in turns: the one that is first, second next time
            chosen = ("prefetch.enabled=true", "prefetch.predictor=on-hint") if name == "hints" else ()
            with bench_daemon(*settings(seconds), *chosen) as daemon:
                _replay(daemon, seed, seconds, sides[name])
    none, hints = sides["none"], sides["hints"]
    minutes = (time.monotonic() - began) / 60
    counts = f"{len(none.waits_s)} and {len(hints.waits_s)} requests; {hints.brought} blocks brought"
    progress(f"{counts}; {minutes:.1f} minutes")
    rows = [
        Row(
            f"ttft_p{percent}_with_hints", percentile(hints.waits_s, percent) * 1e3, "ms",
            percentile(none.waits_s, percent) * 1e3, "no prefetch", AT_MOST, limit,
        )
        for percent, limit in ((50, 0.7), (99, 1.02))
    ]  # fmt: skip
    return [*rows, within("prefetched_and_wasted", hints.wasted / max(hints.brought, 1) * 100, "%", 20.0)]


def settings(seconds: float) -> list[str]:
    """Return the daemon's settings for a replay of `seconds`: room for a third of the sessions, as long as they are in
    the middle of it.
    """
    mean_blocks = (LEAST_BLOCKS + MOST_BLOCKS) / 2 + NEW_BLOCKS * seconds / MEAN_PAUSE_S / 2
    arenas = math.ceil(SESSIONS * mean_blocks / 3 / (ARENA // slot_bytes(BLOCK_BYTES)))
    capacity = arenas * ARENA + STAGING + LEDGER_BYTES
    return [f"host.capacity={capacity}", f"host.arena={ARENA}", f"host.staging={STAGING}", "nvme.capacity=2GiB"]


def _replay(daemon: BenchDaemon, seed: int, seconds: float, times: Times) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(LEAST_BLOCKS, MOST_BLOCKS) for _ in range(SESSIONS)]
    with daemon.connect(model(BLOCK_BYTES), staging_bytes=16 << 20) as session:
        data = payloads(MOST_BLOCKS, BLOCK_BYTES)
        for number, blocks in enumerate(lengths):
            session.put(tokens_of(number, blocks), payloads=data[:blocks], wait="settled")
        if daemon.admin("Flush", admin_pb2.FlushRequest()).pending_blocks:
            raise RuntimeError("blocks did not reach NVMe")
        started = time.monotonic()
        due = [(started + rng.uniform(0, 2 * MEAN_PAUSE_S), number) for number in range(SESSIONS)]
        heapq.heapify(due)
        while due[0][0] < started + seconds:
            at, number = heapq.heappop(due)
            time.sleep(max(0.0, at - time.monotonic()))
            times.waits_s.append(_request(session, number, lengths[number]))
            lengths[number] += NEW_BLOCKS
            tokens = tokens_of(number, lengths[number])
            session.put(tokens, payloads=[*data, *data][: lengths[number]])
            pause_s = max(LEAST_PAUSE_S, rng.expovariate(1 / MEAN_PAUSE_S))
            session.hint(tokens, due_in_s=max(0.1, pause_s * rng.gauss(1, ERROR)), next_step="tool_call")
            heapq.heappush(due, (time.monotonic() + pause_s, number))
    counters = daemon.admin("Status", admin_pb2.StatusRequest()).counters
    times.brought += counters.get("predicted_blocks", 0)
    times.wasted += counters.get("predicted_wasted_blocks", 0)


def _request(session: Session, number: int, blocks: int) -> float:
    began = time.perf_counter()
    with session.get(tokens_of(number, blocks)) as lease:
        if len(lease) != blocks:
            raise RuntimeError(f"{blocks} blocks were stored, the get found {len(lease)}")
        return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
