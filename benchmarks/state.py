"""What does small state cost at a million blocks, and what does a crash take of it?

    forgotten       from a use to its row on the medium, at most: a turn's pause, collecting and the commit, for three
                    loads: chains of 64 blocks, 20,000 blocks at random every 5 s, and all blocks in every turn
    longest wait    of another task on the control loop meanwhile, and while all is read and policies are made anew
    first 1,000     hits after kill -9 under load against the same daemon without a restart

The first two drive the daemon's own keeper and process over an index of a million rows, without clients.

    python benchmarks/state.py [--blocks 1000000] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.daemon import bench_daemon, model, payloads, tokens_of
from support.report import AT_LEAST, Row, parser_of, printed, progress, within

from kvstore_tiers.recovered import BlockOrigin, RecoveredBlocks
from kvstored.clock import SystemClock
from kvstored.state.keeper import INTERVAL_S, StateKeeper
from kvstored.state.process import StateProcess
from kvstored.store.blocks import Kind, Residency
from kvstored.store.blocks.adoption import adopt
from kvstored.store.policies import Policy, create
from kvstored.store.prefetch.credit import PrefetchCredit
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor, PrefetchState
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.telemetry import Counters
from kvstored.unsaved import Unsaved

CHAIN, SLOT_BYTES, SLAB_SLOTS, NVME = 64, 8192, 30_000, 1
RATE_BYTES = 8 << 20
BLOCK = 64 << 10
LOADS = ("chains", "random", "all")


def index_of(blocks: int) -> Residency:
    """Return an index with so many blocks on NVMe, as a start finds them."""
    residency, each = Residency(["host", "nvme"], durable=NVME, in_memory=1), np.arange(blocks)
    chance = np.random.default_rng(1)
    keys = chance.integers(0, 2**63, (blocks, 2), dtype=np.int64).astype(np.uint64)
    parents = np.zeros_like(keys)
    parents.reshape(-1, CHAIN, 2)[:, 1:] = keys.reshape(-1, CHAIN, 2)[:, :-1]
    found = RecoveredBlocks(
        [BlockOrigin(bytes(16), bytes(32), 0)], keys, parents, np.zeros(blocks, np.uint32),
        (each % CHAIN).astype(np.uint32), np.full(blocks, 4096, np.uint32), (each // SLAB_SLOTS).astype(np.uint32),
        (each % SLAB_SLOTS * SLOT_BYTES + 4096).astype(np.uint64), np.full(blocks, SLOT_BYTES, np.uint32),
        np.ones(blocks, np.uint64),
    )  # fmt: skip
    adopt(residency, NVME, found, [Kind(residency.tenant("aa"), 0, 0)], time.monotonic_ns())
    return residency


def keeper_of(residency: Residency, directory: Path, counters: Counters) -> StateKeeper:
    """Return a keeper over this index, with policies and no clients."""
    policies = [create("lru", residency, tier) for tier in range(len(residency.tiers))]
    prefetch = PrefetchState(GuardedPredictor(None), RecentRequests(), PrefetchCredit(0.2, 0.5, 1, Counters()))
    nothing: Any = lambda *_, **__: None  # noqa: E731

    def renew(position: int) -> Policy:
        return create("lru", residency, position)

    store: Any = SimpleNamespace(
        residency=residency, clock=SystemClock(), nvme=None, policies=policies, prefetch_state=prefetch,
        counters=counters, endurance=SimpleNamespace(begin=nothing), renew_policy=renew,
        follow_policy=policies.__setitem__, forget_again=nothing,
    )  # fmt: skip
    tenants: Any = SimpleNamespace(know=nothing, all=list, named_entries=lambda _: [])
    process = StateProcess(directory, "benchmark", store.clock)
    return StateKeeper(process, store, tenants, Unsaved(), RATE_BYTES)


def shown(name: str, value: float, unit: str) -> Row:
    return Row(name, value, unit, value or 1.0, "itself")


async def timed(work: Awaitable[object]) -> tuple[float, float]:
    """Return the seconds that `work` takes, and the longest that another task waited meanwhile."""
    longest_s, is_over = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        while not is_over:
            began = time.perf_counter()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - began)

    watching, began = asyncio.create_task(watch()), time.perf_counter()
    await work
    took_s, is_over = time.perf_counter() - began, True
    await watching
    return took_s, longest_s


def use(residency: Residency, load: str, chance: np.random.Generator) -> None:
    """Use blocks as five seconds of a load do."""
    blocks = residency.rows.live
    rows = np.arange(blocks)
    if load == "random":
        rows = chance.integers(0, blocks, 20_000)
    elif load == "chains":
        rows = (chance.integers(0, blocks // CHAIN, 20_000 // CHAIN)[:, None] * CHAIN + np.arange(CHAIN)).ravel()
    np.frombuffer(residency.rows.last_access_ns, np.uint64)[rows] = time.monotonic_ns()
    np.frombuffer(residency.rows.accesses, np.uint16)[rows] += 1


async def at_scale(blocks: int, directory: Path, turns: int) -> list[Row]:
    residency, chance = index_of(blocks), np.random.default_rng(2)
    counters, rows = Counters(), []
    keeper = keeper_of(residency, directory, counters)
    await keeper.restore()
    await keeper.save()
    for load in LOADS:
        forgotten, longest, written = 0.0, 0.0, 0
        for _ in range(turns):
            use(residency, load, chance)
            counters.add("acquires")
            took_s, longest_s = await timed(keeper.save())
            forgotten, longest = max(forgotten, keeper.pause_s + took_s), max(longest, longest_s)
            written = max(written, keeper.written_bytes)
        rows.append(within(f"forgotten_{load}", forgotten, "s", INTERVAL_S + 1.5))
        rows.append(shown(f"longest_wait_{load}", longest * 1e3, "ms"))
        rows.append(shown(f"written_{load}", written / 2**20, "MiB"))
    pid = keeper.process.pid
    for name in ("RssAnon", "RssFile"):
        rows.append(shown(f"process_{name}", _status(pid, name) / 1024, "MiB"))
    os.kill(pid, signal.SIGKILL)
    after = keeper_of(residency, directory, counters)
    took_s, longest_s = await timed(after.restore())
    known = int((np.frombuffer(residency.rows.accesses, np.uint16) > 1).sum())
    rows += [
        shown("read_after_kill", took_s, "s"), shown("longest_wait_read", longest_s * 1e3, "ms"),
        Row("known_again", known / blocks, "", 1.0, "all"),
    ]  # fmt: skip
    await after.process.close()
    return rows


def _status(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))


def hits(requests: int, *, kill: bool) -> int:
    """Return the blocks found by the last thousand requests of many, before which the daemon is killed or is not."""
    settings = ("host.capacity=48MiB", "host.staging=8MiB", "host.arena=2MiB", "nvme.capacity=96MiB", "nvme.slab=8MiB")
    fingerprint, stored, chance, found = model(BLOCK), payloads(4, BLOCK), random.Random(3), 0
    popular = [min(int(chance.paretovariate(0.7)), 1200) for _ in range(requests + 1000)]
    with tempfile.TemporaryDirectory(prefix="kvbench-state-") as name:
        part, parts = popular[:requests], [popular[requests:]]
        if not kill:
            part, parts = popular, []
        for number, wanted in enumerate([part, *parts]):
            with bench_daemon(*settings, state_dir=Path(name) / "state") as daemon:
                with daemon.connect(fingerprint, staging_bytes=4 << 20) as session:
                    for at, conversation in enumerate(wanted):
                        tokens = tokens_of(conversation, 4)
                        with session.get(tokens) as lease:
                            is_last = number == 1 or at >= requests
                            found += lease.blocks if is_last else 0
                            left = 4 - lease.blocks
                        if left:
                            session.put(tokens, payloads=stored, durability="always")
                os.kill(daemon.pid, signal.SIGKILL)
    return found


def main() -> int:
    parser = parser_of(__doc__, "fewer blocks and turns")
    parser.add_argument("--blocks", type=int, help="how many (default 1,000,000; quick 64,000)")
    options = parser.parse_args()
    blocks = options.blocks or (64_000 if options.quick else 1_000_000)
    with tempfile.TemporaryDirectory(prefix="kvbench-state-") as name:
        rows = asyncio.run(at_scale(blocks - blocks % CHAIN, Path(name), 2 if options.quick else 5))
    progress("the first requests after a kill")
    without, with_kill = hits(3000, kill=False), hits(3000, kill=True)
    rows.append(Row("hits_first_1000", float(with_kill), "blocks", float(without), "no restart", AT_LEAST, 0.98))
    return printed(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
