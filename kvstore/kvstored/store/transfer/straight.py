"""Promotion past DRAM: a block that NVMe alone has is read straight to a tier of device memory before DRAM, for a
request of a client that reads it there. No slot of DRAM is taken, and nothing is evicted from it.

Owns the reads under way. A block goes this way if the gate of the device wants it, the block before it is there or goes
with it (a tier is left from the end of a chain), and the device has room at once: a free slot, or that of a block that
DRAM has, too, and that was used less often (`contest.py`). Any other block goes to DRAM (`promote.py`), and so does one
whose read fails, but for damage.
Invariants: a block is read once however many ask, and pinned meanwhile; a slot is readable only after its bytes were
verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.intake import Intake
from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.promote import Promoter
from kvstored.telemetry import Counters, Flows


@dataclass(slots=True)
class _Read:
    due_ns: int
    task: asyncio.Task[bool] | None = None
    ticket: int = 0  # while it waits in the lane, or is under way
    waiters: int = 1
    goes_to_dram: bool = False  # it failed here


class StraightPromotion:
    """`intake`: of the tier, from NVMe, with a contest; `promoter` leads to DRAM."""

    def __init__(
        self,
        residency: Residency,
        intake: Intake,
        promoter: Promoter,
        damage: Damage,
        counters: Counters,
        flows: Flows,
    ) -> None:
        self._residency = residency
        self._intake = intake
        self._link, self._room, self._gate = intake.link, intake.room, intake.gate
        self._promoter = promoter
        self._damage = damage
        self._counters = counters
        self._flow = flows.tiers[intake.link.source]
        self._reads: dict[int, _Read] = {}  # by token

    @property
    def destination(self) -> int:
        """The position of the tier that blocks are read to."""
        return self._link.destination

    def choose(self, rows: Iterable[int]) -> set[int]:
        """Those of `rows`, in the order of their chain, that should go this way."""
        residency, chosen = self._residency, set[int]()
        if not self._link.is_open:
            return chosen
        for row in rows:
            parent = residency.parent(row)
            follows = parent < 0 or parent in chosen or residency.is_in(parent, self.destination)
            if residency.token(row) in self._reads or (follows and self._is_wanted(row)):
                chosen.add(row)
        return chosen

    def promote(self, row: int, due_ns: int) -> asyncio.Future[bool] | None:
        """Of a row that was chosen. Resolves to whether the block is readable on the device or in DRAM; None where the
        device has no room. `due_ns`: when the caller stops waiting."""
        token = self._residency.token(row)
        read = self._reads.get(token)
        if read is not None and read.task is not None:
            read.waiters += 1
            return asyncio.shield(read.task)
        nbytes, tenant = self._residency.slot_bytes(row), self._residency.tenant_of(row)
        slot = self._room.allocate_now(nbytes, tenant)
        if slot is None and not self._can_evict(row, nbytes, tenant):
            return None
        self._residency.pin(row)
        read = self._reads[token] = _Read(due_ns)
        read.task = asyncio.get_running_loop().create_task(self._run(token, read, slot))
        return asyncio.shield(read.task)

    def give_up(self, token: int) -> None:
        """A caller no longer waits for a block that `promote` took. When no caller is left and the read has not begun,
        it is cancelled."""
        read = self._reads.get(token)
        if read is None:
            return
        read.waiters -= 1
        if read.waiters:
            return
        if read.goes_to_dram:
            self._promoter.give_up(token)
        elif read.ticket:
            self._link.cancel(read.ticket)

    def fail_waiters(self) -> None:
        """NVMe is shed: reads that wait in the lane end now."""
        if not self._link.is_open:
            for read in list(self._reads.values()):
                if read.ticket:
                    self._link.cancel(read.ticket)

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Task[bool]]:
        """The reads of these blocks that are under way."""
        return [read.task for token, read in self._reads.items() if token in tokens and read.task is not None]

    def _is_wanted(self, row: int) -> bool:
        residency = self._residency
        is_on_nvme_alone = residency.tier_mask(row) == 1 << self._link.source
        if not is_on_nvme_alone or residency.being_filled(row) or self._promoter.is_coming(row):
            return False
        return self._gate.shares(row)

    def _can_evict(self, row: int, nbytes: int, tenant: int) -> bool:
        """Whether the next victim of the device gives way to `row`, and has not to be written anywhere first."""
        victim = self._room.next_victim(nbytes, tenant)
        if victim < 0 or not self._residency.has(victim, self._residency.mapped):
            return False
        if self._intake.wins(row, victim):
            return True
        self._counters.add("device_declined_blocks")
        return False

    async def _run(self, token: int, read: _Read, slot: Slot | None) -> bool:
        residency = self._residency
        try:
            if await self._read(token, read, slot):
                return True
            row = residency.current(token)
            if row < 0 or not read.waiters:
                return False
            read.goes_to_dram = True
            return await asyncio.shield(self._promoter.promote(row, Priority.DEMAND, read.due_ns))
        finally:
            del self._reads[token]
            residency.unpin_run([token])

    async def _read(self, token: int, read: _Read, slot: Slot | None) -> bool:
        residency, link = self._residency, self._link
        row = residency.current(token)
        if slot is None and row >= 0:
            nbytes, tenant = residency.slot_bytes(row), residency.tenant_of(row)
            slot = self._room.allocate_now(nbytes, tenant)
            if slot is None and self._can_evict(
                row, nbytes, tenant
            ):  # asked again: another read may have had that slot
                slot = await self._room.allocate(nbytes, tenant, is_patient=False)
                row = residency.current(token)
        if slot is None:
            return False
        if row < 0 or not read.waiters or residency.is_in(row, link.destination) or not residency.has(row, link.source):
            link.free(slot)
            return False
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._gate.spend(row)
        ticket = link.begin(row, slot, Priority.DEMAND, ended.set_result, due_ns=read.due_ns)
        if ticket is None:
            return False
        read.ticket = ticket
        outcome = await ended
        read.ticket = 0
        if outcome.ok:
            self._counters.add("promoted_blocks")
            self._counters.add("promoted_bytes", slot.nbytes)
            self._counters.add("straight_blocks")
            self._flow.promoted_blocks += 1
        elif outcome.kind is OutcomeKind.CORRUPT:
            self._damage.found_of(link.source, token, outcome.message)
        return outcome.ok
