"""Promotion past DRAM: a block that NVMe alone has is read straight to a tier of device memory before DRAM, for a
request of a client that reads it there. No slot of DRAM is taken, and nothing is evicted from it.

Owns the reads under way. A block goes this way if the gate of the device wants it, the block before it is there or goes
with it (a tier is left from the end of a chain), and the device has room at once: a free slot, or the slot of a block
that DRAM has, too, and that was used less often (`FrequencyAdmission`). Any other block goes to DRAM (`promote.py`),
and so does one whose read fails, but for damage. Invariant: a slot is readable only after its bytes were verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from functools import partial

from kvstored.store.blocks import Residency
from kvstored.store.degraded.modes import DegradedModes
from kvstored.store.transfer.admission import TierIntake
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.moves import BlockMove, Moves
from kvstored.store.transfer.promote import Promoter
from kvstored.telemetry import Counters, Flows
from kvstored.tier_set import TierSet


class DevicePromotion:
    """A component that reads blocks from NVMe straight into the device memory of the tier of `intake`, without a slot
    in DRAM. `promoter` promotes to DRAM the blocks that cannot go this way."""

    def __init__(
        self,
        residency: Residency,
        intake: TierIntake,
        promoter: Promoter,
        damage: Damage,
        counters: Counters,
        flows: Flows,
        modes: DegradedModes,
    ) -> None:
        self._residency = residency
        self._intake = intake
        self._link, self._room, self._gate = intake.link, intake.room, intake.gate
        self._promoter = promoter
        self._damage = damage
        self._counters = counters
        self._flow = flows.tiers[intake.link.source]
        self._moves: Moves[BlockMove] = Moves(residency, partial(intake.room.allocate, is_patient=False))
        self._to_dram: set[int] = set()  # tokens of blocks that failed here
        modes.on_change.append(self._follow_mode)

    @property
    def destination(self) -> int:
        """The position of the device tier that blocks are read into."""
        return self._link.destination

    def choose(self, rows: Iterable[int]) -> set[int]:
        """Return the rows among `rows`, given in chain order, whose blocks should be read straight into the device
        tier.
        """
        residency, chosen = self._residency, set[int]()
        if not self._link.is_open:
            return chosen
        for row in rows:
            parent = residency.parent(row)
            follows = parent < 0 or parent in chosen or residency.is_in(parent, self.destination)
            if residency.token(row) in self._moves or (follows and self._is_wanted(row)):
                chosen.add(row)
        return chosen

    def promote(self, row: int, due_ns: int) -> asyncio.Future[bool] | None:
        """Read the block at `row`, which `choose` returned, into the device tier. Return a future that resolves to True
        when the block is readable there or in DRAM, or None when the device has no free slot for it. The caller stops
        waiting at `due_ns` (monotonic)."""
        token = self._residency.token(row)
        move = self._moves.find(token)
        if move is not None:
            move.waiters += 1
        else:
            nbytes, tenant = self._residency.slot_bytes(row), self._residency.tenant_of(row)
            slot = self._room.allocate_now(nbytes, tenant)
            if slot is None and not self._can_evict(row, nbytes, tenant):
                return None
            move = BlockMove(token, nbytes, tenant, self._link, Priority.DEMAND, due_ns)
            self._moves.begin_one(move, self._read, slot)
        assert move.ended is not None
        return asyncio.shield(move.ended)

    def give_up(self, token: int) -> None:
        """Note that one caller of `promote` no longer waits for the block that `token` names. When no caller is left
        and the read has not begun, it is cancelled.
        """
        move = self._moves.find(token)
        if move is not None:
            move.give_up()
            if not move.waiters and token in self._to_dram:
                self._promoter.give_up(token)

    def _follow_mode(self, _part: str) -> None:
        """End reads that wait in the lane when NVMe is shed."""
        if not self._link.is_open:
            for move in list(self._moves.under_way.values()):
                move.cancel()

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Future[bool]]:
        """Return the ends of reads under way for the blocks that `tokens` name."""
        return self._moves.copies_of(tokens)

    def _is_wanted(self, row: int) -> bool:
        residency = self._residency
        is_on_nvme_alone = residency.tier_mask(row) == TierSet.of(self._link.source)
        if not is_on_nvme_alone or residency.being_filled(row) or self._promoter.is_coming(row):
            return False
        return self._gate.shares(row)

    def _can_evict(self, row: int, nbytes: int, tenant: int) -> bool:
        """Return whether the next victim of the device gives way to `row` and need not be written anywhere first."""
        victim = self._room.next_victim(nbytes, tenant)
        if victim < 0 or not self._residency.has(victim, self._residency.mapped):
            return False
        if self._intake.frequency is None or self._intake.frequency.admits(row, victim):
            return True
        self._counters.add("device_declined_blocks")
        return False

    async def _read(self, move: BlockMove) -> bool:
        row = self._residency.current(move.token)
        if move.outcome is None and row >= 0:  # asked again: another read may have had that slot
            slot = self._room.allocate_now(move.nbytes, move.tenant)
            if slot is not None:
                self._moves.queue([move], [slot])
            elif not self._can_evict(row, move.nbytes, move.tenant):
                return await self._by_dram(move)
        outcome = await self._moves.copied(move)
        if self._damage.is_copied(move, outcome):
            self._counters.add("promoted_blocks")
            self._counters.add("promoted_bytes", move.nbytes)
            self._counters.add("straight_blocks")
            self._flow.promoted_blocks += 1
            return True
        return await self._by_dram(move)

    async def _by_dram(self, move: BlockMove) -> bool:
        """Promote a block that does not go straight, if it is still wanted."""
        row = self._residency.current(move.token)
        if row < 0 or not move.waiters:
            return False
        self._to_dram.add(move.token)
        try:
            return await asyncio.shield(self._promoter.promote(row, Priority.DEMAND, move.due_ns))
        finally:
            self._to_dram.discard(move.token)
