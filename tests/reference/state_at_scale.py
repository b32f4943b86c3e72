"""Small state at the size of a large node: an index of many blocks on NVMe, and a saver over it, without clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore_tiers.recovered import BlockOrigin, RecoveredBlocks
from kvstored.clock import SystemClock
from kvstored.state.process import StateProcess
from kvstored.state.saver import StateSaver
from kvstored.store.blocks import Residency, RowKind
from kvstored.store.blocks.adoption import adopt
from kvstored.store.policies import EvictionPolicy, create, create_empty
from kvstored.telemetry import Counters
from kvstored.unsaved import Unsaved
from tests.reference.learning import no_prefetch

CHAIN, SLOT_BYTES, SLAB_SLOTS, NVME = 64, 8192, 30_000, 1
RATE_BYTES = 8 << 20


def index_of(blocks: int) -> Residency:
    """Return an index with `blocks` blocks on NVMe, as a start finds them."""
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
    adopt(residency, NVME, found, [RowKind(residency.tenant("aa"), 0, 0)], time.monotonic_ns())
    return residency


def saver_of(residency: Residency, directory: Path, counters: Counters, policy: str = "lru") -> StateSaver:
    """Return a saver over this index, with policies and no clients."""
    policies = [create(policy, residency, tier) for tier in range(len(residency.tiers))]
    prefetch = no_prefetch()
    nothing: Any = lambda *_, **__: None  # noqa: E731

    def renew(position: int, *, is_empty: bool) -> EvictionPolicy:
        assert is_empty
        return create_empty(policy, residency, position)

    forgets: list[Any] = []

    def forgotten(tenant: int, keys: object) -> None:
        for forget in forgets:
            forget(tenant, keys)

    residency.forget_with(forgotten)
    store: Any = SimpleNamespace(
        residency=residency, clock=SystemClock(), nvme=None, policies=policies, prefetch_state=prefetch,
        counters=counters, endurance=SimpleNamespace(begin=nothing), renew_policy=renew,
        follow_policy=policies.__setitem__, forgets=forgets,
        boundaries=SimpleNamespace(learn=lambda: ()),
    )  # fmt: skip
    tenants: Any = SimpleNamespace(know=nothing, all=list, named_entries=lambda _: [])
    process = StateProcess(directory, "benchmark", store.clock)

    async def saved() -> bool:
        await process.open()
        return True

    terms: Any = SimpleNamespace(restore=process.open, save=saved)
    return StateSaver(process, store, tenants, Unsaved(), RATE_BYTES, terms)


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


def status_kib(pid: int, name: str) -> int:
    """Return a figure of a process, in KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))
