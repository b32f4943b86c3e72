"""Present: how durable the blocks are that a put finds stored already, and those made so that it wants durable.

A put that asks for durability means all of its blocks, whichever client stored them. So a block that only DRAM has is
handed to write-back as a new one would: charged, admitted or insisted on, with its ancestors. Never stores, and never
says more of a block than write-back does. Invariants: a block is called durable only after a sync that began when it
was written; a put that asks for no durability has nothing written, nor synced sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstored.store.blocks import ResidencyView
from kvstored.store.operations.offer import Durability, DurabilityMode, Settling
from kvstored.store.transfer.writeback import WriteBack

Found = Sequence[tuple[int, int]]
"""Blocks that a put found: the place of each in the request, and its row, in chain order."""


class Present:
    """See the module. `writeback` is None without an NVMe tier: everything is volatile then."""

    def __init__(self, residency: ResidencyView, writeback: WriteBack | None) -> None:
        self._residency = residency
        self._writeback = writeback

    def settle(self, found: Found, mode: DurabilityMode, durability: bytearray) -> Settling:
        """Enter into `durability` what is durable; what will say of the others whether they become so. To be called in
        the turn of the loop in which they were found: write-back pins what it takes."""
        writeback = self._writeback
        settling: Settling = {}
        if writeback is None:
            return settling
        synced: asyncio.Future[bool] | None = None  # one sync for all that are written and only lack it
        for (position, row), is_durable in zip(found, writeback.are_durable([row for _, row in found]), strict=True):
            if is_durable:
                durability[position] = Durability.DURABLE
            elif mode == DurabilityMode.ALWAYS and self._residency.has(row, self._residency.durable):
                synced = synced or writeback.write_through(row, at_once=True)
                settling[position] = synced
            else:
                settled = self._settled(writeback, row, mode)
                if settled is not None:
                    settling[position] = settled
        return settling

    def _settled(self, writeback: WriteBack, row: int, mode: DurabilityMode) -> asyncio.Future[bool] | None:
        if mode == DurabilityMode.ALWAYS:
            return writeback.write_through(row, at_once=True)
        settled = writeback.settled(row)
        if settled is not None or self._residency.has(row, self._residency.durable):
            return settled
        if mode == DurabilityMode.BATCH and writeback.admits(row):
            return writeback.write_through(row)
        return None
