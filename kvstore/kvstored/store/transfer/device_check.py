"""Copies on devices, checked there: in passes (`health/scrub`), and those of the process before ahead of any lease.

Owns which copies were taken over and are not checked yet: an engine could have written there while no daemon looked. A
tier that has such copies is closed: leases name other copies, and where there is none the block is read from the
device, which verifies it. What is damaged is dropped by `Damage`. No payload is moved.
Invariants: a check pins nothing, so that no delete and no eviction waits for the device; its answer counts only where
the block still has the slot that was checked, in the same generation; a closed tier opens once each copy that was taken
over is found good or is gone, or its device computes no checksums.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage

if TYPE_CHECKING:
    from kvstore_tiers.gpu import GpuTier

AT_ONCE = 32  # one launch of the kernel has many, and engines have their turn between two
AGAIN_S = 1.0  # after a worker that died, and where what is damaged stays until another copy of it has ended


class DeviceCheck:
    """`tiers`: those whose memory clients import, by position."""

    def __init__(
        self, residency: Residency, tiers: Mapping[int, GpuTier], completions: CompletionQueue, damage: Damage
    ) -> None:
        self._residency = residency
        self.tiers = tiers
        self._completions = completions
        self._damage = damage
        self._owed: defaultdict[int, list[int]] = defaultdict(list)  # tokens, by position

    async def check(self, position: int, row: int) -> tuple[OutcomeKind, bool]:
        """What the device says of a copy, FAILED where it says nothing; and whether the copy was there until then,
        damaged, and is dropped now."""
        residency = self._residency
        slot, key, token = residency.slot(row, position), residency.key(row), residency.token(row)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.tiers[position].verify(slot, key, self._completions.to_loop(ended.set_result))
        outcome = await asyncio.shield(ended)
        if outcome.kind is not OutcomeKind.CORRUPT or not self._is_at(slot, position, token):
            return outcome.kind, False
        self._damage.found(position, row, outcome.message)
        return outcome.kind, not self._is_at(slot, position, token)

    def owe(self, position: int, row: int) -> None:
        """This copy was taken over from the process before. `settle` checks it."""
        if position in self.tiers and self.tiers[position].verifies:
            self._owed[position].append(self._residency.token(row))
            self._residency.closed = self._residency.closed.with_tier(position)

    async def settle(self) -> None:
        """Check what is owed, as fast as the device does, and open the tiers."""
        for position in list(self._owed):
            owed = self._owed.pop(position)
            while owed and self.tiers[position].verifies:
                part, owed = owed[:AT_ONCE], owed[AT_ONCE:]
                settled = await asyncio.gather(*(self._is_settled(position, token) for token in part))
                if not all(settled):
                    owed += [token for token, is_settled in zip(part, settled, strict=True) if not is_settled]
                    await asyncio.sleep(AGAIN_S)
            self._residency.closed = self._residency.closed.without(position)

    async def _is_settled(self, position: int, token: int) -> bool:
        row = self._residency.current(token)
        if row < 0 or not self._residency.has(row, position):
            return True
        slot = self._residency.slot(row, position)
        kind, _ = await self.check(position, row)
        return kind is OutcomeKind.DONE or not self._is_at(slot, position, token)

    def _is_at(self, slot: Slot, position: int, token: int) -> bool:
        """The block of `token` has its copy there."""
        row = self._residency.current(token)
        return row >= 0 and self._residency.has(row, position) and self._residency.slot(row, position) == slot
