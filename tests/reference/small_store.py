"""The daemon's storage half, small, over a faulty tier: what tests of degraded modes drive, with a clock in their hand.

Owns a real host tier, a real NVMe tier in a directory behind `FaultyTier`, and the `Store` over both. Stores blocks the
way a put does, and loses DRAM copies the way pressure does. No sockets, no sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvstore_predictor.base import Predictor
from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Outcome, Slot, Tier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.faulty import FaultyTier
from kvstore_tiers.testing.transfers import block
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import load_config
from kvstored.config.tiers import Start
from kvstored.config.tiers.base import coding_of
from kvstored.store.assembly import Store
from kvstored.store.residency import make_residency
from kvstored.store.transfer.admission import RemoteWrites
from kvstored.store.transfer.lane import Priority

PAYLOAD_BYTES = 10_000
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
SETTINGS = (
    "host.capacity=8MiB",
    "host.staging=1MiB",
    "host.arena=1MiB",
    "nvme.capacity=16MiB",
    "nvme.slab=1MiB",
    "nvme.io_threads=2",
    "durability.batch_ms=2",
)
FAR_S = 60.0  # a wait that never ends by itself in a test that passes


class SmallStore:
    """A store as the module describes it. `store` is the real thing; `disk` injects faults between
    it and the medium.
    """

    def __init__(
        self,
        directory: Path,
        clock: ManualClock,
        *settings: str,
        keyed: Sequence[KeyedTier] = (),
        predictor: Predictor | None = None,
        remote_writes: RemoteWrites | None = None,
        before: Sequence[Tier] = (),
    ) -> None:
        """`before`: tiers before the configured ones."""
        chosen = (f"daemon.state_dir={directory}", *SETTINGS, *settings)
        self.config = load_config(None, chosen)
        self.clock = clock
        self.completions = CompletionQueue(asyncio.get_running_loop())
        nvme = self.config.nvme
        self.nvme = NvmeTier.open(
            nvme.path,
            nvme.capacity_bytes,
            slab_bytes=nvme.slab_bytes,
            io_threads=nvme.io_threads,
            clock=lambda: clock.monotonic_ns() / NS_PER_S,
            coding=coding_of(nvme.codec, nvme.codec_staging_bytes),
        )
        self.disk = FaultyTier(self.nvme)
        given = {nvme.name, *(tier.info.name for tier in before)}
        memory = [section.open(Start()) for section in self.config.tiers if section.name not in given]
        tiers = [*before, *memory, self.disk, *keyed]
        residency = make_residency(self.config, tiers)
        self.store = Store(self.config, clock, self.completions, residency, tiers, predictor, remote_writes)
        self._budget = directory / "budget"
        self.store.endurance.begin(self._save_budget, self._budget.read_bytes() if self._budget.exists() else None)
        self.residency, self.mapped = residency, residency.mapped
        assert self.store.writeback is not None and self.store.breaker is not None
        self.writeback, self.breaker = self.store.writeback, self.store.breaker

    async def _save_budget(self, budget: bytes) -> None:
        """Keep it for the next store in the directory."""
        self._budget.write_bytes(budget)

    async def close(self) -> None:
        self.disk.plan()
        self.disk.let_go()
        await self.writeback.flush(FAR_S)
        self.store.mover.close()
        for room in self.store.rooms:
            await room.settle(FAR_S)
        await self.completions.drained()
        await self.store.endurance.close()
        for tier in self.store.tiers:
            tier.close()

    @staticmethod
    @cache
    def key(number: int) -> bytes:
        return block(number, PAYLOAD_BYTES)[0].key

    def find(self, number: int, tenant: str = "tenant") -> int:
        return self.residency.find(self.residency.tenant(tenant), self.key(number))

    async def put(
        self, number: int, parent: int | None = None, *, mode: str = "batch", tenant: str = "tenant", uses: int = 1
    ) -> asyncio.Future[bool] | None:
        """Store a block in DRAM and hand it to write-back; what will say whether it is durable, None: volatile."""
        row = await self.store_in(self.mapped, number, parent, tenant=tenant, uses=uses)
        assert row >= 0, "no room in DRAM"
        if mode == "always" or self.writeback.gate.admits(row):
            return self.writeback.write_through(row, at_once=mode == "always")
        return None

    async def store_in(
        self,
        position: int,
        number: int,
        parent: int | None = None,
        *,
        tenant: str = "tenant",
        payload_bytes: int = PAYLOAD_BYTES,
        uses: int = 1,
    ) -> int:
        """Store a block in one tier, making room for it there; its row, or -1: no room."""
        tier, residency = self.store.tiers[position], self.residency
        source, payload = block(number, payload_bytes)
        parent_key = NO_PARENT if parent is None else self.key(parent)
        owner = residency.tenant(tenant)
        above = -1 if parent is None else self.find(parent, tenant)
        slot = await self.store.rooms[position].allocate_for(None, slot_bytes(payload_bytes), owner, parent=above)
        if not isinstance(slot, Slot):
            return -1
        if parent is not None and self.find(parent, tenant) < 0:  # room was made by taking its parent
            tier.free(slot)
            return -1
        now_ns = self.clock.monotonic_ns()
        row = residency.find(owner, source.key)
        if row < 0:
            row = residency.insert(
                owner, source.key, parent_key, fingerprint_id=1, group=0,
                depth=0 if parent is None else residency.depth(self.find(parent, tenant)) + 1,
                payload_bytes=payload_bytes, now_ns=now_ns,
            )  # fmt: skip
        residency.attach(row, position, slot, now_ns, filling=True)
        written: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        header = replace(source, parent=parent_key)
        tier.write(slot, header, [segment_of(payload)], self.completions.to_loop(written.set_result))
        assert (await written).ok
        residency.publish(row, position, now_ns)
        for _ in range(uses):
            residency.touch_run([row], now_ns)
        return row

    async def is_durable(self, number: int, parent: int | None = None, **how: object) -> bool:
        """Put a block and wait for the word."""
        settled = await self.put(number, parent, **how)  # type: ignore[arg-type]
        return settled is not None and await asyncio.wait_for(asyncio.shield(settled), FAR_S)

    async def fill(self, numbers: range) -> None:
        """Put blocks and see all of them durable."""
        for number in numbers:
            await self.put(number)
        assert await self.writeback.flush(FAR_S) == 0
        assert all(self.writeback.is_durable(self.find(number)) for number in numbers)

    def drop_from_dram(self, *numbers: int) -> None:
        """Leave blocks that are on NVMe too there alone."""
        for number in numbers:
            self.leave_host(self.find(number))

    def leave_host(self, row: int) -> None:
        """Take the DRAM copy of a block that another tier has too."""
        self.store.leases.retire(self.residency.detach(row, self.mapped), self.residency.tenant_of(row))

    async def fetch(self, number: int) -> bool:
        """Promote a block, as a get does."""
        row = self.find(number)
        assert row >= 0
        return await asyncio.wait_for(asyncio.shield(self.store.promoter.promote(row, Priority.DEMAND)), FAR_S)

    async def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        """Let the clock go on, with the looks that maintenance takes, and let what they start end."""
        left = seconds
        while left > 0:
            self.clock.advance(s=min(step_s, left))
            left -= step_s
            self.store.tick()
            await asyncio.sleep(0)
            if self.completions.outstanding:
                await self.settle()

    async def settle(self) -> None:
        """Let everything that can end, end; what hangs in the faulty tier does not."""
        quiet_looks = 0
        async with asyncio.timeout(FAR_S):
            while quiet_looks < 3:  # what ended may have begun something else
                await asyncio.sleep(0.002)
                quiet_looks = quiet_looks + 1 if self.completions.outstanding <= len(self.disk._hanging) else 0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(FAR_S):
            while not condition():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def small_store(
    directory: Path, *settings: str, clock: ManualClock | None = None, keyed: Sequence[KeyedTier] = (),
    remote_writes: RemoteWrites | None = None, before: Sequence[Tier] = (),
) -> AsyncIterator[SmallStore]:  # fmt: skip
    """Closed in the end, also when the test left tasks hanging."""
    made = SmallStore(
        directory, clock or ManualClock(NS_PER_S), *settings, keyed=keyed, remote_writes=remote_writes, before=before
    )
    try:
        yield made
    finally:
        await made.close()
