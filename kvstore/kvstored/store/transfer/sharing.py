"""Sharing: blocks that are used get a copy in another tier before they are evicted here: in a key-addressed tier, where
other nodes may want them, or in a tier before DRAM, nearer to an engine.

Owns which chains were used lately, and the copies under way. After a use the chain is walked from the end of what was
used to its root; what the gate wants is copied from DRAM, head first, so that a prefix can be found whole. Invariants:
nothing waits for it; a block that is being copied is pinned, at most `AT_ONCE` are, or one where the lane has a budget,
since no block waits for that with a slot; it begins nothing while a request waits for a read from that tier, or the
lane's budget is spent; queues are bounded and forget what is oldest.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.store.blocks import Residency
from kvstored.store.remote.absences import Absences
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.intake import Intake
from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.link import Link

AT_ONCE = 8
MOST_CHAINS = 4096  # that wait
MOST_WALKED = 1024  # blocks of a chain, from its end
DELAY_S = 0.05  # after a use: puts come in runs


class SharingCounts(NamedTuple):
    """Called for each copy that ended well, each time that the lane's budget was spent, and with the number of blocks
    that were not worth the place of another one."""

    copied: Callable[[], None]
    waited: Callable[[], None]
    declined: Callable[[int], None]


class Sharing:
    """`intake`: of the tier, from DRAM; `back` leads from it to DRAM. `absences`: what is known of a key-addressed one.
    `damage` hears of blocks in DRAM that the tier found damaged."""

    def __init__(
        self,
        residency: Residency,
        intake: Intake,
        back: Link,
        absences: Absences | None,
        damage: Damage,
        counts: SharingCounts,
    ) -> None:
        self._residency = residency
        self._intake = intake
        self._link, self._room, self._gate = intake.link, intake.room, intake.gate
        self._back = back
        self._absences = absences
        self._damage = damage
        self._counts = counts
        self._at_once = 1 if self._link.lane.settings.has_budget else AT_ONCE
        self._chains: OrderedDict[int, None] = OrderedDict()  # tokens of the last blocks used, oldest first
        self._path: deque[int] = deque()  # tokens of blocks of one chain, head first
        self._under_way: dict[int, asyncio.Task[None]] = {}  # by token
        self._timer: asyncio.TimerHandle | None = None

    def used(self, rows: Sequence[int]) -> None:
        """`rows`, a piece of a chain, were used or have just been stored."""
        if not rows or self._residency.rows.mask[rows[-1]] >> self._link.destination & 1:
            return
        self._chains[self._residency.token(rows[-1])] = None
        if len(self._chains) > MOST_CHAINS:
            self._chains.popitem(last=False)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self.tick)

    @property
    def destination(self) -> int:
        """The position of the tier that blocks are copied to."""
        return self._link.destination

    @property
    def waiting(self) -> int:
        """Chains and blocks that wait, and copies under way."""
        return len(self._chains) + len(self._path) + len(self._under_way)

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Task[None]]:
        """The copies of these blocks that are under way. None of them is begun by what was used before this call."""
        if any(token in tokens for token in self._path):
            self._path.clear()  # the blocks after it could not be found without it
        for token in tokens:
            self._chains.pop(token, None)
        return [task for token, task in self._under_way.items() if token in tokens]

    def tick(self) -> None:
        """Begin what may begin now. At most one chain is walked; another one a little later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        walks = 1
        while len(self._under_way) < self._at_once and self._may_begin():
            if self._path:
                self._begin(self._path.popleft())
            elif self._chains and walks:
                walks -= 1
                self._walk(self._chains.popitem(last=False)[0])
            else:
                break
        if (self._path or self._chains) and len(self._under_way) < self._at_once and self._link.is_open:
            delay_s = max(DELAY_S if walks and not self._path else 0.001, self._gate.wait_s(), self._link.spare_in_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tick)

    def _may_begin(self) -> bool:
        if not self._link.is_open or self._back.lane.demand_here() or not self._gate.has_budget():
            return False
        if self._link.spare_in_s:
            self._counts.waited()
            return False
        return True

    def _walk(self, token: int) -> None:
        """Find what of a chain is wanted, and the blocks before it, without which it could not be found."""
        residency, row = self._residency, self._residency.current(token)
        is_wanted = False
        for _ in range(MOST_WALKED):
            if row < 0 or residency.is_in(row, self._link.destination):
                break  # the blocks before it are there too: a tier is left from the end of a chain
            is_wanted = is_wanted or self._gate.shares(row)
            if is_wanted and self._is_lacking(row):
                self._path.appendleft(residency.token(row))
            row = residency.parent(row)

    def _is_lacking(self, row: int) -> bool:
        residency = self._residency
        return residency.has(row, residency.mapped) and not residency.is_in(row, self._link.destination)

    def _begin(self, token: int) -> None:
        row = self._residency.current(token)
        if row < 0 or token in self._under_way or not self._is_lacking(row):
            return  # under way too: it may still wait for room
        self._residency.pin(row)
        self._gate.spend(row)
        task = asyncio.get_running_loop().create_task(self._share(token))
        self._under_way[token] = task
        task.add_done_callback(partial(self._ended, token))

    async def _share(self, token: int) -> None:
        residency, link = self._residency, self._link
        row = residency.current(token)
        try:
            slot = await self._allocate(row)
            if slot is None:
                self._path.clear()
                return
            row = residency.current(token)
            if row < 0 or not self._is_lacking(row):
                link.free(slot)
                return
            tenant, key = residency.tenant_of(row), residency.key(row)
            ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            if link.begin(row, slot, Priority.DEMOTION, ended.set_result) is None:
                return
            outcome = await ended
            if outcome.ok:
                self._counts.copied()
                if self._absences is not None:
                    self._absences.forget(tenant, [key])
            else:
                self._path.clear()  # the blocks after it could not be found without it
                if outcome.kind is OutcomeKind.CORRUPT:
                    self._damage.found_of(link.source, token, outcome.message)
        finally:
            residency.unpin_run([token])

    async def _allocate(self, row: int) -> Slot | None:
        room, nbytes, tenant = self._room, self._residency.slot_bytes(row), self._residency.tenant_of(row)
        if self._intake.contest is not None:
            slot = room.allocate_now(nbytes, tenant)
            if slot is not None:
                return slot
            victim, blocks = room.next_victim(nbytes, tenant), 1 + len(self._path)
            if victim >= 0 and not self._intake.wins(row, victim, blocks):
                self._counts.declined(blocks)
                return None
        return await room.allocate(nbytes, tenant, is_patient=False)

    def _ended(self, token: int, task: asyncio.Task[None]) -> None:
        del self._under_way[token]
        if not task.cancelled() and (self._path or self._chains):
            self.tick()
