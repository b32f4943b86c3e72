"""Verification of copies in memory that clients read: those in DRAM before a lease is given on them, and those on
devices in passes (`health/scrub`) and ahead of any lease after a restart. What is damaged is dealt with by `Damage`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.host import HostTier
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.telemetry import Counters
from kvstored.tier_set import TIER_SETS

if TYPE_CHECKING:
    from kvstore_tiers.gpu import GpuTier

AT_ONCE = 32  # one launch of the kernel has many, and engines have their turn between two
AGAIN_S = 1.0  # after a worker that died, and where what is damaged stays until another copy of it has ended
_NOWHERE = 0xFFFFFFFFFFFFFFFF


class _Verified:
    """The copy of each row that was verified: its place and the generation there. Takes 12 bytes for each row up to the
    highest verified row.
    """

    def __init__(self) -> None:
        self._place = array("Q")
        self._generation = array("I")

    def note(self, row: int, slot: Slot) -> None:
        missing = row + 1 - len(self._place)
        if missing > 0:
            missing = max(missing, len(self._place) // 8)
            self._place.extend(array("Q", [_NOWHERE]) * missing)
            self._generation.extend(array("I", [0]) * missing)
        self._place[row], self._generation[row] = _place(slot), slot.generation & 0xFFFFFFFF

    def has(self, row: int, slot: Slot) -> bool:
        if row >= len(self._place) or self._place[row] != _place(slot):
            return False
        return self._generation[row] == slot.generation & 0xFFFFFFFF


def _place(slot: Slot) -> int:
    return slot.container << 32 | slot.offset // ALIGNMENT_BYTES


def _is_at(residency: Residency, slot: Slot, position: int, token: int) -> bool:
    """Return whether the block of `token` has its copy in this slot."""
    row = residency.current(token)
    return row >= 0 and residency.has(row, position) and residency.slot(row, position) == slot


class DramCheck:
    """A component that verifies blocks in DRAM before they are leased: never, the first time a copy is leased, or each
    time (`mode` "off", "first", "always"). Copies in memory that clients can write are verified each time in any mode.

    The checksums are computed on the host tier's copy threads, without the GIL. This finds changes of a block in memory
    since it was stored, also by stray writes, which ECC does not find. The caller pins the rows while they are
    verified."""

    def __init__(
        self,
        mode: str,
        residency: Residency,
        host: HostTier,
        completions: CompletionQueue,
        damage: Damage,
        counters: Counters,
    ) -> None:
        self._mode = mode
        self._residency = residency
        self._host = host
        self._completions = completions
        self._damage = damage
        self._counters = counters
        self._verified = _Verified()

    def wanted(self, rows: Sequence[int]) -> list[int]:
        """Return the rows among `rows` with a copy in DRAM that must be verified before it is leased."""
        writable, residency = self._host.writable, self._residency
        if self._mode == "off" and not writable:
            return []
        mapped = [row for row in rows if residency.has(row, residency.mapped)]
        if self._mode == "always":
            return mapped
        container = residency.copies[residency.mapped].container
        return [row for row in mapped if container[row] in writable or not self._is_trusted(row)]

    def _is_trusted(self, row: int) -> bool:
        return self._mode == "off" or self._verified.has(row, self._residency.slot(row, self._residency.mapped))

    async def verify(self, rows: Sequence[int]) -> set[int]:
        """Verify the copies in DRAM of `rows` that need it. Return the tokens of the blocks whose copy was damaged;
        each such copy is out of service already.
        """
        residency, bad = self._residency, set[int]()
        verified = [self._verify(row, residency.slot(row, residency.mapped), bad) for row in self.wanted(rows)]
        if verified:
            await asyncio.shield(asyncio.gather(*verified))
        return bad

    def _verify(self, row: int, slot: Slot, bad: set[int]) -> asyncio.Future[Outcome]:
        token, key = self._residency.token(row), self._residency.key(row)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def judge(outcome: Outcome) -> None:
            self._counters.add("verified_reads")
            is_there = _is_at(self._residency, slot, self._residency.mapped, token)
            if outcome.ok and self._mode == "first" and is_there:
                self._verified.note(row, slot)
            elif outcome.kind is OutcomeKind.CORRUPT:
                bad.add(token)
                if is_there:
                    self._damage.found(self._residency.mapped, row, outcome.message)
            if not ended.done():
                ended.set_result(outcome)

        self._host.verify(slot, key, self._completions.to_loop(judge))
        return ended


class DeviceCheck:
    """A component that verifies copies in device memory that clients import, by checksums computed on the device.
    `tiers` maps positions to tiers.

    After a restart, copies that were taken over are not trusted: an engine could have written there while no daemon
    ran. A tier with such copies is closed: no lease contains a copy in it until each was verified or is gone, or its
    device turns out to compute no checksums. A check pins nothing, so no delete and no eviction waits for the device;
    its answer counts only if the block still has the slot that was checked, in the same generation."""

    def __init__(
        self, residency: Residency, tiers: Mapping[int, GpuTier], completions: CompletionQueue, damage: Damage
    ) -> None:
        self._residency = residency
        self.tiers = tiers
        self._completions = completions
        self._damage = damage
        self._owed: defaultdict[int, list[int]] = defaultdict(list)  # tokens, by position

    async def check(self, position: int, row: int) -> tuple[OutcomeKind, bool]:
        """Verify the copy of the block at `row` in the device tier at `position`. Return the kind of the outcome
        (FAILED when the device gave no answer), and True if the copy was damaged and has been dropped.
        """
        residency = self._residency
        slot, key, token = residency.slot(row, position), residency.key(row), residency.token(row)
        verify = partial(self.tiers[position].verify, slot, key)
        outcome: Outcome = await asyncio.shield(self._completions.outcome_of(verify))
        if outcome.kind is not OutcomeKind.CORRUPT or not _is_at(residency, slot, position, token):
            return outcome.kind, False
        self._damage.found(position, row, outcome.message)
        return outcome.kind, not _is_at(residency, slot, position, token)

    def owe(self, position: int, row: int) -> None:
        """Note that the copy of the block at `row` in the tier at `position` was taken over from an earlier process and
        must be verified; `settle` does that."""
        if position in self.tiers and self.tiers[position].verifies:
            self._owed[position].append(self._residency.token(row))
            self._residency.closed = TIER_SETS[self._residency.closed].with_tier(position)

    async def settle(self) -> None:
        """Verify all copies that were noted by `owe`, and open each tier for leases afterwards."""
        for position in list(self._owed):
            owed = self._owed.pop(position)
            while owed and self.tiers[position].verifies:
                part, owed = owed[:AT_ONCE], owed[AT_ONCE:]
                settled = await asyncio.gather(*(self._is_settled(position, token) for token in part))
                if not all(settled):
                    owed += [token for token, is_settled in zip(part, settled, strict=True) if not is_settled]
                    await asyncio.sleep(AGAIN_S)
            self._residency.closed = TIER_SETS[self._residency.closed].without(position)

    async def _is_settled(self, position: int, token: int) -> bool:
        row = self._residency.current(token)
        if row < 0 or not self._residency.has(row, position):
            return True
        slot = self._residency.slot(row, position)
        kind, _ = await self.check(position, row)
        return kind is OutcomeKind.DONE or not _is_at(self._residency, slot, position, token)
