"""Demotion into a slower tier that costs no endurance: a block that is evicted from a tier gets a copy in the next one
below.

Owns demotions under way. Every block is worth one, as long as there are not too many at once; where the tier below has
no room, the block is passed to the demoter after it (write-back) as if that tier were not there.
Invariants: a block is demoted once however many callers ask; its row is pinned until the copy is there.
"""

from __future__ import annotations

import asyncio

from kvstore_tiers.base import Outcome, OutcomeKind
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.eviction import Demoter
from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.link import Link
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Flows


class Demotion:
    """Along `link`; `room` is that of its destination, `beyond` the demoter below that. At most `at_once` blocks are
    under way, and a caller waits `wait_s` at most: a tier that is slow must not hold up what fills the one above."""

    def __init__(
        self, residency: Residency, link: Link, room: Room, beyond: Demoter, damage: Damage, flows: Flows,
        *, at_once: int = 1 << 30, wait_s: float | None = None,
    ) -> None:  # fmt: skip
        self._residency = residency
        self._link = link
        self._room = room
        self._beyond = beyond
        self._damage = damage
        self._flow = flows.tiers[link.source]
        self._at_once = at_once
        self._wait_s = wait_s
        self._under_way: dict[int, asyncio.Task[bool]] = {}  # by token

    def wants(self, row: int) -> bool:
        """Whether a copy that is evicted should be kept below: always, unless it is there, or too many are under
        way."""
        if self._residency.state(row, self._link.destination) or not self._link.is_open:
            return False
        return len(self._under_way) < self._at_once or self._residency.token(row) in self._under_way

    async def write_back(self, row: int) -> bool:
        """Resolves to whether the block has a copy below now. A demotion goes on if its caller does not wait for it."""
        token = self._residency.token(row)
        demotion = self._under_way.get(token)
        if demotion is None:
            self._residency.pin(row)
            demotion = self._under_way[token] = asyncio.create_task(self._demote(token))
        ended, _ = await asyncio.wait([demotion], timeout=self._wait_s)
        return bool(ended) and demotion.result()

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
            ended, _ = await asyncio.wait(
                self._under_way.values(), timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            return bool(ended)
        return await self._beyond.progress()

    async def _move(self, token: int) -> bool:
        residency, link = self._residency, self._link
        row = residency.current(token)
        nbytes, tenant = residency.slot_bytes(row), residency.tenant_of(row)
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
