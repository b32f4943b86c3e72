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
from collections.abc import Collection, Sequence
from functools import partial

from kvstored.store.blocks import Residency
from kvstored.store.remote import Absences
from kvstored.store.transfer.admission import TierIntake
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.link import TierLink
from kvstored.store.transfer.moves import BlockMove, Moves, Unmoved
from kvstored.telemetry import Counters

AT_ONCE = 8
MOST_CHAINS = 4096  # that wait
MOST_WALKED = 1024  # blocks of a chain, from its end
DELAY_S = 0.05  # after a use: puts come in runs


class Sharing:
    """A component that copies used blocks from DRAM into the tier of `intake` before they are evicted. `back` is the
    link from that tier to DRAM. `absences` records which blocks a remote tier lacks. `damage` is notified of blocks in
    DRAM that turn out damaged. `copied` is the name of the counter of copies that ended well."""

    def __init__(
        self,
        residency: Residency,
        intake: TierIntake,
        back: TierLink,
        absences: Absences | None,
        damage: Damage,
        counters: Counters,
        copied: str,
    ) -> None:
        self._residency = residency
        self._intake = intake
        self._link, self._room, self._gate = intake.link, intake.room, intake.gate
        self._back = back
        self._absences = absences
        self._damage = damage
        self._counters, self._copied = counters, copied
        self._at_once = 1 if self._link.lane.settings.has_budget else AT_ONCE
        self._chains: OrderedDict[int, None] = OrderedDict()  # tokens of the last blocks used, oldest first
        self._path: deque[int] = deque()  # tokens of blocks of one chain, head first
        self._moves: Moves[BlockMove] = Moves(residency, partial(intake.room.allocate, is_patient=False))
        self._timer: asyncio.TimerHandle | None = None

    def used(self, rows: Sequence[int]) -> None:
        """Note that the blocks `rows`, consecutive in a chain, were used or have just been stored."""
        if not rows or self._residency.has(rows[-1], self._link.destination):
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
        """A measure of the work that is left: the chains whose blocks have not been looked at, plus the blocks that
        wait to be copied to the other tier, plus the copies under way."""
        return len(self._chains) + len(self._path) + len(self._moves)

    def copies_of(self, tokens: Collection[int]) -> list[asyncio.Future[bool]]:
        """Return the ends of copies under way for the blocks that `tokens` name. Copies of these blocks that have not
        begun are dropped: only a later use can begin one."""
        if any(token in tokens for token in self._path):
            self._path.clear()  # the blocks after it could not be found without it
        for token in tokens:
            self._chains.pop(token, None)
        return self._moves.copies_of(tokens)

    def tick(self) -> None:
        """Begin the copies of used blocks that may begin now. At most one chain is walked in a call; a timer continues
        with the others."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        walks = 1
        while len(self._moves) < self._at_once and self._may_begin():
            if self._path:
                self._begin(self._path.popleft())
            elif self._chains and walks:
                walks -= 1
                self._walk(self._chains.popitem(last=False)[0])
            else:
                break
        if (self._path or self._chains) and len(self._moves) < self._at_once and self._link.is_open:
            delay_s = max(DELAY_S if walks and not self._path else 0.001, self._gate.wait_s(), self._link.spare_in_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tick)

    def _may_begin(self) -> bool:
        if not self._link.is_open or self._back.lane.demand_here() or not self._gate.has_budget():
            return False
        if self._link.spare_in_s:
            self._counters.add("device_rate_waits")
            return False
        return True

    def _walk(self, token: int) -> None:
        """Find the blocks of a chain that are wanted, and the blocks before them, without which they could not be
        found.
        """
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
        residency, row = self._residency, self._residency.current(token)
        if row < 0 or token in self._moves or not self._is_lacking(row):
            return  # under way too: it may still wait for room
        nbytes, tenant = residency.slot_bytes(row), residency.tenant_of(row)
        slot = self._room.allocate_now(nbytes, tenant)
        if slot is None and self._intake.frequency is not None:
            victim, blocks = self._room.next_victim(nbytes, tenant), 1 + len(self._path)
            if victim >= 0 and not self._intake.frequency.admits(row, victim, blocks):
                self._counters.add("device_declined_blocks", blocks)
                self._path.clear()
                return
        self._gate.spend(nbytes)
        move = BlockMove(token, nbytes, tenant, self._link, Priority.DEMOTION)
        self._moves.begin_one(move, self._share, slot)

    async def _share(self, move: BlockMove) -> bool:
        try:
            outcome = await self._moves.copied(move)
            is_copied = self._damage.is_copied(move, outcome)
            row = self._residency.current(move.token)
            if is_copied:
                self._counters.add(self._copied)
                if self._absences is not None and row >= 0:
                    self._absences.forget(move.tenant, [self._residency.key(row)])
            elif outcome is not Unmoved.IN_VAIN and outcome is not Unmoved.LANE_FULL:
                self._path.clear()  # the blocks after it could not be found without it
            return is_copied
        finally:  # after a mistake of ours too: nothing else may come that looks at what waits
            self._moves.end(move)
            if self._path or self._chains:
                self.tick()
