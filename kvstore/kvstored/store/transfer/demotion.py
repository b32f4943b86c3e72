"""Demotion into a slower tier that costs no endurance: a block that is evicted from a tier gets a copy in the next one
below. Demotion to NVMe is `writeback.py`'s.

Owns demotions under way. Every block is worth one, within `Bounds`; where the tier below has
no room, the block is passed to the demoter after it (write-back) as if that tier were not there.
Invariants: a block is demoted once however many callers ask; its row is pinned until the copy is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from kvstore_tiers.base import Outcome, OutcomeKind
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.eviction import Demoter
from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.link import Link
from kvstored.store.transfer.remote_gate import RemoteGate
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Flows


@dataclass(frozen=True, slots=True)
class Bounds:
    """At most `at_once` blocks are under way, and a caller waits until one of them has been so for `wait_s`: a tier
    that hangs holds up what fills the one above once, not for each block. `gate` says what is worth it. `direct`: the
    link from DRAM, for blocks that DRAM has. `priority` is DEMAND where a put waits for the room."""

    at_once: int = 1 << 30
    wait_s: float | None = None
    gate: RemoteGate | None = None
    direct: Link | None = None
    priority: Priority = Priority.DEMAND


class Demotion:
    """Along `link`; `room` is that of its destination, `beyond` the demoter below that."""

    def __init__(
        self, residency: Residency, link: Link, room: Room, beyond: Demoter, damage: Damage, flows: Flows,
        bounds: Bounds | None = None,
    ) -> None:  # fmt: skip
        self._residency = residency
        self._link = link
        self._room = room
        self._beyond = beyond
        self._damage = damage
        self._flow = flows.tiers[link.source]
        self._bounds = bounds or Bounds()
        self._under_way: dict[int, asyncio.Task[bool]] = {}  # by token, oldest first
        self._began_s: dict[int, float] = {}  # the same, by the loop's time

    def wants(self, row: int) -> bool:
        """Whether a copy that is evicted should be kept below: unless it is there, too many are under way, or the gate
        does not want it."""
        if self._residency.is_in(row, self._link.destination) or not self._link.is_open:
            return False
        if self._residency.token(row) in self._under_way:
            return True
        bounds = self._bounds
        return len(self._under_way) < bounds.at_once and (bounds.gate is None or bounds.gate.admits(row))

    async def write_back(self, row: int) -> bool:
        """Resolves to whether the block has a copy below now. A demotion goes on if its caller does not wait for it."""
        token = self._residency.token(row)
        demotion = self._under_way.get(token)
        if demotion is None:
            self._residency.pin(row)
            self._began_s[token] = asyncio.get_running_loop().time()
            demotion = self._under_way[token] = asyncio.create_task(self._demote(token))
        ended, _ = await asyncio.wait([demotion], timeout=self._patience_s())
        return bool(ended) and demotion.result()

    def _patience_s(self) -> float | None:
        """How long a caller waits: until the oldest demotion has taken too long."""
        wait_s = self._bounds.wait_s
        if wait_s is None:
            return None
        now_s = asyncio.get_running_loop().time()
        return max(0.0, next(iter(self._began_s.values()), now_s) + wait_s - now_s)

    async def _demote(self, token: int) -> bool:
        moved = False
        try:
            moved = await self._move(token)
        finally:
            del self._under_way[token], self._began_s[token]
            self._residency.unpin_run([token])
        row = self._residency.current(token)
        if moved or row < 0:
            return moved
        return self._beyond.wants(row) and await self._beyond.write_back(row)

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Task[bool]]:
        """The demotions of these blocks that are under way."""
        return [task for token, task in self._under_way.items() if token in tokens]

    async def progress(self) -> bool:
        """Wait until a demotion under way has ended; False when there is none here nor beyond."""
        if self._under_way:
            ended, _ = await asyncio.wait(
                self._under_way.values(), timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED
            )
            return bool(ended)
        return await self._beyond.progress()

    def _link_of(self, row: int) -> Link:
        direct = self._bounds.direct
        return direct if direct is not None and self._residency.has(row, direct.source) else self._link

    async def _move(self, token: int) -> bool:
        residency = self._residency
        row = residency.current(token)
        link = self._link_of(row)
        nbytes, tenant = residency.slot_bytes(row), residency.tenant_of(row)
        slot = await self._room.allocate(nbytes, tenant, is_patient=False)  # a put waits, and there is a way beyond
        if slot is None:
            return False
        row = residency.current(token)
        if row < 0 or not residency.has(row, link.source) or residency.is_in(row, link.destination):
            link.free(slot)
            return False
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if self._bounds.gate is not None:
            self._bounds.gate.spend(row)
        if link.begin(row, slot, self._bounds.priority, ended.set_result) is None:
            return False
        outcome = await ended
        if outcome.kind is OutcomeKind.CORRUPT:
            self._damage.found_of(link.source, token, outcome.message)
        elif outcome.ok:
            self._flow.demoted_blocks += 1
        return outcome.ok
