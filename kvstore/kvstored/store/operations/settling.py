"""The answers to a put: when the blocks are published, and again when their durability is decided.

Never stores: it waits for what the intake and the write-back do. Invariant: the last answer has nothing pending.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from kvstored.store.operations.offer import Durability, DurabilityMode, Stored

Settling = dict[int, asyncio.Future[bool]]
"""By a block's place in the request, what will say whether it is durable; nothing where it is not to be written."""


async def answers(
    taking: asyncio.Task[Settling], statuses: bytearray, durability: bytearray, present: Settling, mode: DurabilityMode
) -> AsyncGenerator[Stored, None]:
    """One answer when the blocks are published; a second, final one when pending ones have settled. `durability` and
    `present` say what is known, and what will be, of blocks that were stored before."""
    settling = await asyncio.shield(taking)
    settling |= present
    if mode == DurabilityMode.ALWAYS:
        await all_settled(settling.values())
    for position, settled in settling.items():
        durability[position] = durability_of(settled)
    final = Durability.PENDING not in durability
    yield Stored(bytes(statuses), bytes(durability), final)
    if not final:
        await all_settled(settling.values())
        for position, settled in settling.items():
            durability[position] = durability_of(settled)
        yield Stored(bytes(statuses), bytes(durability), True)


async def all_settled(futures: Iterable[asyncio.Future[bool]]) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting)


def durability_of(settled: asyncio.Future[bool]) -> Durability:
    if not settled.done():
        return Durability.PENDING
    return Durability.DURABLE if settled.result() else Durability.VOLATILE
