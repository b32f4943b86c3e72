"""The durability of a put's blocks: the requested one, the effective one, and the time when it is known.

A put that asks for durability means all of its blocks, whichever client stored them. So a block that only DRAM has is
handed to write-back as a new one would be: charged, admitted or insisted on, with its ancestors. The module does not
store, and claims no more of a block than write-back does. Invariants: a block is called durable only after a sync that
began when it was written; a put that asks for no durability has nothing written, nor synced sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from enum import IntEnum

from kvstored.store.blocks import ResidencyView
from kvstored.store.operations.records import PutAnswer
from kvstored.store.retention import Retention
from kvstored.store.transfer.writeback import WriteBack

Settling = dict[int, asyncio.Future[bool]]
"""By a block's place in its put, the future that says whether it becomes durable; none where it is not written."""


class Durability(IntEnum):
    VOLATILE = 0  # may be gone after a crash
    PENDING = 1  # being written
    DURABLE = 2  # survives a crash of process and machine


class DurabilityMode(IntEnum):
    """The durability that a client requests for the blocks of a put."""

    NONE = 1  # memory only; reaches the durable tier when it is demoted, if that admits it
    BATCH = 2  # written through in the background, what is admitted
    ALWAYS = 3  # written and synced before the answer


def settle_present(
    residency: ResidencyView,
    writeback: WriteBack | None,
    found: Sequence[tuple[int, int]],
    mode: DurabilityMode,
    durability: bytearray,
) -> Settling:
    """Find out which blocks of a put that were stored before it are durable.

    `found` has, for each such block in chain order, its position in the request and its row in the block table. The
    entries of `durability` at the positions of durable blocks are set. For the other blocks that `mode` wants durable,
    return by position a future that says whether the block becomes durable. Call it before the event loop's next turn
    after the blocks were found, since only write-back pins them."""
    settling: Settling = {}
    if writeback is None:
        return settling
    synced: asyncio.Future[bool] | None = None  # one sync for all that are written and only lack it
    for (position, row), is_durable in zip(found, writeback.are_durable([row for _, row in found]), strict=True):
        is_written = residency.has(row, residency.durable)
        if is_durable:
            durability[position] = Durability.DURABLE
        elif mode == DurabilityMode.ALWAYS and is_written:
            settling[position] = synced = synced or writeback.write_through(row, at_once=True)
        elif mode == DurabilityMode.ALWAYS:
            settling[position] = writeback.write_through(row, at_once=True)
        elif (settled := writeback.settled(row)) is not None:
            settling[position] = settled
        elif mode == DurabilityMode.BATCH and not is_written and writeback.gate.admits(row):
            settling[position] = writeback.write_through(row)
    return settling


def with_terms(
    retention: Retention, found: Iterable[tuple[int, int]], settling: Settling, durability: bytearray | None = None
) -> Settling:
    """Return a copy of `settling` that also waits for the terms (expiry, priority) of the blocks to be saved.

    A block whose terms are not in its header is durable only when the saved state has them. `found` has the position in
    the request and the row of each block; `durability` holds the known answers by position, None when there are none.
    """
    late = [position for position, row in found if retention.later.is_unsaved(row)]
    known = durability if durability is not None else b""
    wanted = [at for at in late if at in settling or (known and known[at] == Durability.DURABLE)]
    if not wanted:
        return settling
    saved = retention.later.when_saved()
    waits = {at: asyncio.ensure_future(_both(settling[at], saved)) if at in settling else saved for at in wanted}
    return settling | waits


async def _both(first: asyncio.Future[bool], second: asyncio.Future[bool]) -> bool:
    return await asyncio.shield(first) and await asyncio.shield(second)


async def answers_of(
    storing: asyncio.Task[Settling], statuses: bytearray, durability: bytearray, present: Settling, mode: DurabilityMode
) -> AsyncGenerator[PutAnswer, None]:
    """Yield the answers of `Puts.store`. For blocks that were stored before, `durability` holds the known answers and
    `present` the futures of the pending ones.
    """
    settling, waits = await asyncio.shield(storing) | present, mode == DurabilityMode.ALWAYS
    while True:
        pending = [settled for settled in settling.values() if not settled.done()]
        if waits and pending:
            await asyncio.wait(pending)
        for position, settled in settling.items():
            known = Durability.DURABLE if settled.done() and settled.result() else Durability.VOLATILE
            durability[position] = known if settled.done() else Durability.PENDING
        final = Durability.PENDING not in durability
        yield PutAnswer(bytes(statuses), bytes(durability), final)
        if final:
            return
        waits = True
