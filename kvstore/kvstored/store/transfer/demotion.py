"""Demotion into a slower memory tier: a block that leaves a memory tier gets a copy in the next one below.

Owns demotions under way. They cost no endurance and are not durable, so every block is worth one; where the tier below
has no room, the block goes on to the demoter after it (write-back) as if that tier were not there.
Invariants: a block is demoted once however many ask; its row is pinned until the copy is there.
"""

from __future__ import annotations

import asyncio

from kvstore_tiers.base import Outcome, OutcomeKind
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.eviction import Demoter
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.link import Link
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Flows


class Demotion:
    """Along `link`; `room` is that of its destination, `beyond` the demoter below that."""

    def __init__(
        self, residency: Residency, link: Link, room: Room, beyond: Demoter, damage: Damage, flows: Flows
    ) -> None:
        self._residency = residency
        self._link = link
        self._room = room
        self._beyond = beyond
        self._damage = damage
        self._flow = flows.tiers[link.source]
        self._under_way: dict[int, asyncio.Task[bool]] = {}  # by token

    def wants(self, row: int) -> bool:
        """Whether a copy that leaves should be kept below: always, unless it is there."""
        return not self._residency.state(row, self._link.destination)

    async def write_back(self, row: int) -> bool:
        """Resolves to whether the block has a copy below. The demotion goes on if its caller does not wait for it."""
        token = self._residency.token(row)
        demotion = self._under_way.get(token)
        if demotion is None:
            self._residency.pin(row)
            demotion = self._under_way[token] = asyncio.create_task(self._demote(token))
        return await asyncio.shield(demotion)

    async def _demote(self, token: int) -> bool:
        moved = False
        try:
            moved = await self._move(token)
        finally:
            del self._under_way[token]
            self._residency.unpin_run([token])
        row = self._residency.current(token)
        if moved or row < 0:
            return moved
        return self._beyond.wants(row) and await self._beyond.write_back(row)

    async def progress(self) -> bool:
        """Wait until a demotion under way has ended; False when there is none here nor beyond."""
        if self._under_way:
            await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
            return True
        return await self._beyond.progress()

    async def _move(self, token: int) -> bool:
        residency, link = self._residency, self._link
        row = residency.current(token)
        nbytes, tenant = residency.slot(row, link.source).nbytes, residency.tenant_of(row)
        slot = await self._room.allocate(nbytes, tenant, is_patient=False)  # a put waits, and there is a way beyond
        if slot is None:
            return False
        row = residency.current(token)
        if row < 0 or not residency.has(row, link.source) or residency.state(row, link.destination):
            link.free(slot)
            return False
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if link.begin(row, slot, Priority.DEMAND, ended.set_result) is None:
            return False
        outcome = await ended
        if outcome.kind is OutcomeKind.CORRUPT:
            self._damage.found(link.source, row, outcome.message)
        elif outcome.ok:
            self._flow.demoted_blocks += 1
        return outcome.ok
