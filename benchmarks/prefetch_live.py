"""What prefetch by prediction does for the time to first token of a running daemon, beside what mode timing says of it.

    benchmarks/prefetch_live.py [--json] [--quick]

Conversations of several turns with pauses between them; each turn reads what is stored of its prompt, sleeps as long as
computing the rest would take, stores what is new, and announces exactly when the next turn comes. One turn at a time,
in the order in which they are due: the time to first token is counted from then. DRAM holds a part of the blocks. Reads
from NVMe are made slow: one at a time, each delayed (failpoint `nvme.read`). The same turns go through the same store
and predictor in virtual time, on a machine whose NVMe is as slow as was measured first. Needs a machine without other
work: about 4 minutes, --quick one. Conversations' first turns are not in the figures: nothing of them is stored.

Wanted: the live median and 95th percentile within 15 % of the simulated ones, with prefetch and without.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from support.blocks import BLOCK_TOKENS, model, payloads, tokens_of
from support.daemon import BenchDaemon, bench_daemon, wait_mapped
from support.report import Row, main, progress, within
from support.timing import median

from kvstore_client import Session
from kvstore_predictor.base import Predictor
from kvstore_proto.arena import slot_bytes
from kvstore_proto.v1 import admin_pb2
from kvstore_simulator.hints import Hints
from kvstore_simulator.machine import Compute, Machine, load_machine
from kvstore_simulator.node import serve_trace
from kvstore_simulator.node_settings import NodeSettings, ServingPlan
from kvstore_simulator.trace import Trace, TraceBuilder
from kvstore_simulator.worth import Model
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.store.prefetch.on_hint import OnHint

MIB = 1 << 20
COMPUTED = Model("made-up", parameters=1e9, layers=32, heads=8, kv_heads=2, head_dim=64)
BLOCK_BYTES = COMPUTED.kv_bytes_per_token * BLOCK_TOKENS
BLOCK_S = 0.05  # of computing one
DELAY_S = 0.02  # of each read from NVMe
STAGING_BYTES, NVME_BYTES, ARENA_BLOCKS = 16 * MIB, 2 << 30, 4
SLOT_BYTES = slot_bytes(BLOCK_BYTES)
PROBE_BYTES, PROBE_BLOCKS = 96 * MIB, 120  # of DRAM, and more blocks than that has room for
PLAN = ServingPlan("live", has_store=True, writes_behind=True)
LIMIT_PERCENT = 15.0


@dataclass(frozen=True)
class Turn:
    """`number`: in its conversation, from 0. `next_s`: when the next one is due, None for the last."""

    due_s: float
    conversation: int
    number: int
    blocks: int
    next_s: float | None


@dataclass(frozen=True)
class Load:
    turns: list[Turn]
    dram_blocks: int

    def trace(self) -> Trace:
        builder = TraceBuilder("made-up", "made-up", BLOCK_TOKENS)
        for turn in self.turns:
            ids = [turn.conversation * 1000 + block for block in range(turn.blocks)]
            builder.add(round(turn.due_s * 1e9), ids, input_tokens=turn.blocks * BLOCK_TOKENS)
        return builder.build()


def made_up(conversations: int, turns: int, first_blocks: int, pause_s: float) -> Load:
    """Pauses of half of `pause_s` and an exponential rest; DRAM for 40 % of all blocks."""
    chance, found, blocks = random.Random(1), list[Turn](), 0
    for conversation in range(1, conversations + 1):
        at_s = 1.0 + chance.random() * pause_s
        length = first_blocks + chance.randint(0, 4)
        for turn in range(turns):
            next_s = at_s + 0.5 * pause_s + chance.expovariate(2 / pause_s)
            found.append(Turn(at_s, conversation, turn, length, next_s if turn + 1 < turns else None))
            at_s, length = next_s, length + chance.randint(1, 3)
        blocks += found[-1].blocks
    return Load(sorted(found, key=lambda turn: turn.due_s), round(0.1 * blocks) * ARENA_BLOCKS)


def measure(quick: bool) -> list[Row]:
    load = made_up(6, 3, 8, 6.0) if quick else made_up(16, 7, 12, 12.0)
    with slowed_daemon(PROBE_BYTES, prefetch=False) as daemon, daemon.connect(model(BLOCK_BYTES)) as session:
        read_s = seconds_of_a_read(daemon, session)
        beside_bytes = PROBE_BYTES - room_blocks(daemon, session) * SLOT_BYTES
    machine = machine_of(read_s)
    progress(
        f"{len(load.turns)} turns in {load.turns[-1].due_s:.0f} s, DRAM for {load.dram_blocks} blocks of "
        f"{BLOCK_BYTES / MIB:g} MiB; a read from NVMe takes {read_s * 1e3:.1f} ms, a block computes {BLOCK_S:g} s"
    )
    rows = []
    for prefetch in (False, True):
        name = "prefetch" if prefetch else "no prefetch"
        with slowed_daemon(beside_bytes + load.dram_blocks * SLOT_BYTES, prefetch=prefetch) as daemon:
            with daemon.connect(model(BLOCK_BYTES)) as session:
                wait_mapped()
                real_s = live(load, machine, session)
            figures = daemon.admin("Predictor", admin_pb2.PredictorRequest()).all
        virtual_s = simulated(load, machine, prefetch=prefetch)
        progress(
            f"{name}: {figures.prefetched_blocks} blocks prefetched, {figures.used_blocks} used, "
            f"{figures.late_blocks} late, {figures.wasted_blocks} wasted; {figures.demanded_blocks} waited for"
        )
        goes_on = [turn.number > 0 for turn in load.turns]
        for share in (50, 95):
            value, baseline = (
                float(np.percentile(np.array(each)[goes_on], share)) * 1e3 for each in (real_s, virtual_s)
            )
            rows.append(Row(f"TTFT p{share}, {name}", value, "ms", baseline, "simulated"))
    rows += [within(f"{row.name}: distance", 100 * abs(row.ratio - 1), "%", LIMIT_PERCENT) for row in rows]
    for share, without, having in ((50, rows[0], rows[2]), (95, rows[1], rows[3])):
        rows.append(Row(f"TTFT p{share}, prefetch against none", having.value, "ms", without.value, "no prefetch"))
        rows.append(Row(f"... simulated, p{share}", having.baseline, "ms", without.baseline, "no prefetch"))
    return rows


@contextmanager
def slowed_daemon(dram_bytes: int, *, prefetch: bool) -> Iterator[BenchDaemon]:
    os.environ["KVSTORED_FAILPOINTS"] = f"nvme.read=delay:{DELAY_S:.6f}"
    try:
        with bench_daemon(
            f"host.capacity={dram_bytes}", f"host.staging={STAGING_BYTES}", f"host.arena={ARENA_BLOCKS * SLOT_BYTES}",
            "host.min_free=0", f"host.policy={CHAIN_HAZARD}", "host.verify_reads=off", f"nvme.capacity={NVME_BYTES}",
            "nvme.slab=64MiB", "movement.in_flight=1", f"prefetch.enabled={str(prefetch).lower()}",
            "prefetch.predictor=on-hint",
        ) as daemon:  # fmt: skip
            yield daemon
    finally:
        del os.environ["KVSTORED_FAILPOINTS"]


def seconds_of_a_read(daemon: BenchDaemon, session: Session) -> float:
    """From NVMe to a readable block, of a run of them."""
    tokens, blocks = tokens_of(900, 24), 24
    session.put(tokens, payloads=payloads(blocks, BLOCK_BYTES), wait="settled", durability="always")
    taken_s: list[float] = []
    while len(taken_s) < 3:
        time.sleep(0.2)  # the lease before is released behind the answer, and leased blocks are not dropped
        daemon.drop_host()
        began_s = time.perf_counter()
        with session.get(tokens) as lease:
            if lease.promoted_bytes >= blocks * BLOCK_BYTES:
                taken_s.append((time.perf_counter() - began_s) / blocks)
    return median(taken_s)


def room_blocks(daemon: BenchDaemon, session: Session) -> int:
    """Of the host tier, beside staging and the ledger."""
    daemon.drop_host()
    images = payloads(10, BLOCK_BYTES)
    for number in range(PROBE_BLOCKS // len(images)):
        session.put(tokens_of(901 + number, len(images)), payloads=images)
    host: admin_pb2.TierStatus = daemon.admin("Tiers", admin_pb2.TiersRequest()).tiers[0]
    return int(host.blocks)


def machine_of(read_s: float) -> Machine:
    """A made-up machine that computes a block in BLOCK_S, whose engine copies in no time. Only reads are slow: the
    whole of `read_s` is bandwidth, since a medium has one latency for both directions.
    """
    machine = load_machine("cpu-only")
    flops = COMPUTED.flops_of(BLOCK_TOKENS) / BLOCK_S
    nvme = replace(
        machine.media["nvme"], latency_s=1e-6, parallel=1, write_bytes_per_s=2e9, read_bytes_per_s=BLOCK_BYTES / read_s,
    )  # fmt: skip
    return replace(
        machine, compute=Compute(flops, 1.0, 0.0, 1 << 20), media={**machine.media, "nvme": nvme},
        link=replace(machine.link, read_bytes_per_s=1e12, write_bytes_per_s=1e12, latency_s=0.0),
    )  # fmt: skip


def live(load: Load, machine: Machine, session: Session) -> list[float]:
    """The time to first token of each turn, in seconds. Another thread stores, as in an engine."""
    images = payloads(max(turn.blocks for turn in load.turns), BLOCK_BYTES)
    found, stores, begin_s = list[float](), list[Future[None]](), time.perf_counter()

    def store(turn: Turn, stored: int) -> None:
        tokens = tokens_of(turn.conversation, turn.blocks)
        if stored < turn.blocks:
            session.put(tokens, first_block=stored, payloads=images[stored : turn.blocks])
        if turn.next_s is not None and (pause_s := begin_s + turn.next_s - time.perf_counter()) > 0:
            session.hint(tokens, due_in_s=pause_s)

    with ThreadPoolExecutor(1) as storing:
        for turn in load.turns:
            time.sleep(max(0.0, begin_s + turn.due_s - time.perf_counter()))
            tokens = tokens_of(turn.conversation, turn.blocks)
            with session.get(tokens) as lease:
                stored = lease.blocks
                first = min(stored * BLOCK_TOKENS, len(tokens) - 1)
                time.sleep(machine.prefill_s(COMPUTED, first, len(tokens)))
            found.append(time.perf_counter() - begin_s - turn.due_s)
            stores.append(storing.submit(store, turn, stored))
    for each in stores:
        each.result()
    return found


def simulated(load: Load, machine: Machine, *, prefetch: bool) -> Sequence[float]:
    """The same in virtual time. The engine's own memory has room for one prompt."""
    most = max(turn.blocks for turn in load.turns)
    settings = NodeSettings(
        machine, COMPUTED, (("dram", load.dram_blocks * SLOT_BYTES), ("nvme", NVME_BYTES)), most * BLOCK_BYTES,
        CHAIN_HAZARD, hints=Hints(pause_noise=0.0), predictor=_on_hint if prefetch else None,
    )  # fmt: skip
    node = serve_trace(load.trace(), settings, PLAN, lambda done, total: None)
    return [visit.ttft_ns / 1e9 for visit in node.served.visits if visit.is_served]


def _on_hint(trace: Trace, speed: float) -> Predictor:
    return OnHint()


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
