"""Demotion into a slower tier that costs no endurance: a block that is evicted from a tier gets a copy in the next one
below. Demotion to NVMe is `writeback.py`'s.

Owns demotions under way. Every block is worth one, within `Bounds`; where the tier below has no room, the block is
passed to the demoter after it (write-back) as if that tier were not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import NamedTuple

from kvstore_tiers.base import Slot
from kvstored.store.blocks import Residency
from kvstored.store.transfer.admission import TierGate
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.eviction import Demoter
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.link import TierLink
from kvstored.store.transfer.moves import BlockMove, Moves
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Flows


class Bounds(NamedTuple):
    """The limits of demotions (copies of evicted blocks) into one tier. At most `at_once` blocks are under way. A
    caller waits until the oldest demotion has taken `wait_s` seconds (None: to the end), so a tier that hangs delays
    the tier above once and not for each block. `gate` says which blocks get a copy. `direct` is the link from DRAM, for
    blocks that DRAM has. `priority` is DEMAND if a put waits for the freed slot."""

    at_once: int = 1 << 30
    wait_s: float | None = None
    gate: TierGate | None = None
    direct: TierLink | None = None
    priority: Priority = Priority.DEMAND


class Demotion:
    """A component that copies evicted blocks into the tier below, along `link` and into slots of `room`. `beyond` does
    it for the tier below that one, for blocks that find no slot here."""

    def __init__(
        self, residency: Residency, link: TierLink, room: Room, beyond: Demoter, damage: Damage, flows: Flows,
        bounds: Bounds | None = None,
    ) -> None:  # fmt: skip
        self._residency = residency
        self._link = link
        self._room = room
        self._beyond = beyond
        self._damage = damage
        self._flow = flows.tiers[link.source]
        self._bounds = bounds or Bounds()
        self._moves: Moves[BlockMove] = Moves(residency, self._make_room)

    def wants(self, row: int) -> bool:
        """Return whether the evicted block at `row` should get a copy in the tier below. It is False when that tier has
        a copy, too many demotions are under way, or the gate declines the block.
        """
        if self._residency.is_in(row, self._link.destination) or not self._link.is_open:
            return False
        if self._residency.token(row) in self._moves:
            return True
        bounds = self._bounds
        return len(self._moves) < bounds.at_once and (bounds.gate is None or bounds.gate.admits(row))

    async def write_back(self, row: int) -> bool:
        """Copy the evicted block at `row` to the tier below. Return whether it has a copy there, or in a slower tier,
        now. If the bound on the wait is reached first, return False; the copy goes on."""
        residency, bounds = self._residency, self._bounds
        move = self._moves.find(residency.token(row))
        if move is None:
            direct = bounds.direct
            link = direct if direct is not None and residency.has(row, direct.source) else self._link
            nbytes, tenant = residency.slot_bytes(row), residency.tenant_of(row)
            move = BlockMove(residency.token(row), nbytes, tenant, link, bounds.priority)
            slot = self._charged(self._room.allocate_now(nbytes, tenant) if link.staging is None else None)
            self._moves.begin_one(move, self._demote, slot)
        assert move.ended is not None
        ended, _ = await asyncio.wait([move.ended], timeout=self._patience_s())
        return bool(ended) and move.ended.result()

    async def _make_room(self, nbytes: int, tenant: int) -> Slot | None:
        # A put waits for it, and there is a way beyond: nothing here waits for copies in flight.
        return self._charged(await self._room.allocate(nbytes, tenant, is_patient=False))

    def _charged(self, slot: Slot | None) -> Slot | None:
        """Take a slot, which will be written, from the rate of the tier below."""
        if slot is not None and self._bounds.gate is not None:
            self._bounds.gate.spend(slot.nbytes)
        return slot

    async def _demote(self, move: BlockMove) -> bool:
        outcome = await self._moves.copied(move)
        is_copied = self._damage.is_copied(move, outcome)
        self._moves.end(move)
        if is_copied:
            self._flow.demoted_blocks += 1
            return True
        row = self._residency.current(move.token)
        return row >= 0 and self._beyond.wants(row) and await self._beyond.write_back(row)

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Future[bool]]:
        """Return the ends of demotions under way for the blocks that `tokens` name."""
        return self._moves.copies_of(tokens)

    async def progress(self) -> bool:
        """Wait until a demotion under way has ended. Return False when none is under way, neither here nor in
        `beyond`."""
        ends = [move.ended for move in self._moves.under_way.values() if move.ended is not None]
        if ends:
            ended, _ = await asyncio.wait(ends, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED)
            return bool(ended)
        return await self._beyond.progress()

    def _patience_s(self) -> float | None:
        """Return the seconds for which a caller waits: until the oldest demotion has taken too long."""
        wait_s = self._bounds.wait_s
        if wait_s is None:
            return None
        now_s = asyncio.get_running_loop().time()
        oldest = next(iter(self._moves.under_way.values()), None)
        return max(0.0, (oldest.began_s if oldest is not None else now_s) + wait_s - now_s)
