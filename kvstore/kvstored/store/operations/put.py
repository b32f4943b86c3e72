"""Put: store the blocks of a chain, wherever they are: in a client's staging memory, or in a message.

Sorts them: a block that is stored gets the durability that is asked for, one that another put is writing is to be sent
again, the others are taken in. Owns which keys are being written. Invariants: one writer a key; a key is free again
when its put has ended, however it ended, and whether or not its client is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from kvstore_proto.identity import NO_PARENT
from kvstored.store.blocks import Residency
from kvstored.store.operations.client import Client
from kvstored.store.operations.intake import Intake
from kvstored.store.operations.offer import (
    NOWHERE,
    Durability,
    DurabilityMode,
    Offer,
    Settling,
    StagedBlock,
    Stored,
    StoreStatus,
)
from kvstored.store.operations.present import Present
from kvstored.store.transfer.writeback import WriteBack
from kvstored.telemetry import Counters


class Put:
    """See the module. `writeback` is None without a durable tier."""

    def __init__(self, intake: Intake, residency: Residency, writeback: WriteBack | None, counters: Counters) -> None:
        self._intake = intake
        self._residency = residency
        self._present = Present(residency, writeback)
        self._counters = counters
        self.being_written: set[tuple[int, bytes]] = set()  # (tenant, key)

    async def finish(self) -> None:
        """Wait for what is under way, whether or not the clients are still there."""
        await self._intake.finish()

    def store(self, client: Client, offer: Offer, mode: DurabilityMode) -> AsyncGenerator[Stored, None]:
        """One answer when the blocks are published; a second, final one when pending ones have settled. The first
        blocks have begun when this returns."""
        intake, tenant = self._intake, client.tenant_id
        statuses, durability = bytearray([StoreStatus.FAILED] * len(offer.keys)), bytearray(len(offer.keys))
        taken: list[tuple[int, StagedBlock]] = []
        present: list[tuple[int, int]] = []
        rows = self._residency.find_each(tenant, offer.packed)
        for position, (key, row) in enumerate(zip(offer.keys, rows, strict=True)):
            if row >= 0 and not intake.may_come_again(row):
                statuses[position] = StoreStatus.PRESENT
                present.append((position, row))
            elif key in (offer.parents[position], NO_PARENT):
                continue
            elif (tenant, key) in self.being_written:
                statuses[position] = StoreStatus.AGAIN
            elif offer.offsets[position] == NOWHERE:
                statuses[position] = StoreStatus.WANTED
            else:
                self.being_written.add((tenant, key))
                taken.append((position, offer.block(position)))
        settling = Settling()
        if present:
            self._counters.add("present_blocks", len(present))
            settling = self._present.settle(present, mode, durability)

        def end(task: asyncio.Task[Settling]) -> None:
            self.being_written.difference_update((tenant, block.key) for _, block in taken)
            if offer.reserved is not None:
                offer.reserved.end()
            client.copying.discard(task)
            client.put_ended()

        taking = intake.take_in(client, taken, statuses, mode, end)
        client.copying.add(taking)
        return _answers(taking, statuses, durability, settling, mode)


async def _answers(
    taking: asyncio.Task[Settling], statuses: bytearray, durability: bytearray, present: Settling, mode: DurabilityMode
) -> AsyncGenerator[Stored, None]:
    """One answer when the blocks are published; a second, final one when pending ones have settled. Of blocks that were
    stored before, `durability` holds the answers that are known and `present` the futures of those still pending."""
    settling = await asyncio.shield(taking)
    settling |= present
    if mode == DurabilityMode.ALWAYS:
        await _all_settled(settling.values())
    for position, settled in settling.items():
        durability[position] = _durability_of(settled)
    final = Durability.PENDING not in durability
    yield Stored(bytes(statuses), bytes(durability), final)
    if not final:
        await _all_settled(settling.values())
        for position, settled in settling.items():
            durability[position] = _durability_of(settled)
        yield Stored(bytes(statuses), bytes(durability), True)


async def _all_settled(futures: Iterable[asyncio.Future[bool]]) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting)


def _durability_of(settled: asyncio.Future[bool]) -> Durability:
    if not settled.done():
        return Durability.PENDING
    return Durability.DURABLE if settled.result() else Durability.VOLATILE
