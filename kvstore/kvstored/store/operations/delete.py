"""Delete: remove blocks of a chain for good, by order of their owner.

Deletion goes from the deepest block up, so that the rest is a prefix without a hole: a block is kept if it is leased or
being moved, or if stored blocks outside the request continue it. Invariant: once it is answered, no crash brings a
deleted block back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_tiers.base import Outcome, OutcomeKind
from kvstored.lifecycle import Cause
from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client
from kvstored.telemetry import DeletionLog

SLICE_BLOCKS = 64
SETTLE_TIMEOUT_S = 2.0  # for blocks that are being copied to another tier just now


class Fate(Enum):
    """The result of a deletion for one of its keys."""

    DELETED = "deleted"
    MISSING = "missing"  # was not stored
    IN_USE = "in use"  # kept: under a lease, or being moved
    CONTINUED = "continued"  # kept: stored blocks continue it


_GONE = (Fate.DELETED, Fate.MISSING)


class DeletionResult(NamedTuple):
    """The result of a deletion. `fates` has one entry for each requested key, in their order; `nbytes` is the sum of
    the payload bytes of the deleted blocks.
    """

    fates: list[Fate]
    nbytes: int


class Delete:
    """The operation that deletes blocks for clients and notes each deletion in the log `deletions`. It waits for copies
    under way. Since another process could find the blocks again in remote tiers, it removes them there as well."""

    def __init__(self, store: Store, deletions: DeletionLog) -> None:
        self._residency, self._writeback = store.residency, store.writeback
        self._retire, self._copiers, self._keyed = store.discard, store.copiers, list(store.keyed.values())
        self._completions, self._clock = store.completions, store.clock
        self._log = deletions
        self._removals = 0  # blocks removed so far, and how many of them a sync is known to have made final
        self._final_removals = 0

    async def delete(self, client: Client, keys: Sequence[bytes]) -> DeletionResult:
        """Delete the blocks `keys` of the client's tenant; `keys` are in chain order. Raises KVStoreError (UNAVAILABLE)
        when the deletion could not be made durable; then call it again with the same keys, even if none of them is
        stored any more.
        """
        tenant = client.tenant_id
        residency, writeback = self._residency, self._writeback
        if any(row >= 0 and residency.pin_count(row) for row in (residency.find(tenant, key) for key in keys)):
            if writeback is not None:
                await writeback.flush(SETTLE_TIMEOUT_S)  # a block that was just put is pinned until it is written
            await self._settle(tenant, keys)
        fates = [Fate.MISSING] * len(keys)
        nbytes = 0
        for position in range(len(keys) - 1, -1, -1):
            row = residency.find(tenant, keys[position])
            if row >= 0:
                payload_bytes = residency.payload_bytes(row)
                fates[position] = self._delete_row(row, tenant)
                nbytes += payload_bytes if fates[position] is Fate.DELETED else 0
            else:
                residency.forget(tenant, (keys[position],))
            if position % SLICE_BLOCKS == 0:
                await asyncio.sleep(0)
        self._remove_from_keyed(client, [key for key, fate in zip(keys, fates, strict=True) if fate in _GONE])
        if Fate.DELETED in fates:
            self._log.note(client, fates.count(Fate.DELETED), nbytes)
        await self._make_final()
        return DeletionResult(fates, nbytes)

    async def _settle(self, tenant: int, keys: Sequence[bytes]) -> None:
        """Wait for copies of the blocks that are being made, and let no more begin."""
        residency = self._residency
        tokens = {residency.token(row) for key in keys if (row := residency.find(tenant, key)) >= 0}
        copies = [copy for copier in self._copiers for copy in copier.copies_of(tokens)]
        if copies:
            await asyncio.wait(copies, timeout=SETTLE_TIMEOUT_S)

    async def _make_final(self) -> None:
        """Sync the removals, of this call and of cancelled earlier ones."""
        removals = self._removals
        if removals == self._final_removals:
            return
        synced = [await removed for removed in [self._completions.outcome_of(tier.sync) for tier in self._keyed]]
        if self._writeback is not None and not await self._writeback.sync():
            synced.append(Outcome(OutcomeKind.FAILED))
        if not all(outcome.ok for outcome in synced):
            raise KVStoreError(
                ErrorKind.UNAVAILABLE,
                "the blocks are deleted, but may come back: a tier refused to remove them for good; delete again",
            )
        self._final_removals = max(self._final_removals, removals)

    def _remove_from_keyed(self, client: Client, keys: Sequence[bytes]) -> None:
        """Remove also blocks that are not in the index: another process may have stored them."""
        if keys:
            for tier in self._keyed:
                tier.remove(client.tenant.digest, keys)
                self._removals += 1

    def _delete_row(self, row: int, tenant: int) -> Fate:
        residency = self._residency
        if residency.pin_count(row) or residency.being_filled(row):
            return Fate.IN_USE
        if residency.children(row):
            return Fate.CONTINUED
        self._removals += 1
        for taken in residency.remove(row, Cause.DROPPED, self._clock.monotonic_ns()):
            self._retire[taken.tier](taken.slot, tenant)
        return Fate.DELETED
