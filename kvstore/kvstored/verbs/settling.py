"""The answers to a store: when the blocks are published, and again when their durability is decided.

Never stores: it waits for what the intake and the write-back do. Invariant: the last answer has nothing pending.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from kvstore_proto.v1 import kvstore_pb2 as pb

Settling = dict[int, asyncio.Future[bool]]
"""By a block's place in the request, what will say whether it is durable; nothing where it is not to be written."""


async def answers(
    taking: asyncio.Task[Settling], statuses: bytearray, durability: bytearray, present: Settling, mode: int
) -> AsyncGenerator[pb.StoreReply, None]:
    """One reply when the blocks are published; a second, final one when pending ones have settled. `durability` and
    `present` say what is known, and what will be, of blocks that were stored before."""
    settling = await asyncio.shield(taking)
    settling |= present
    if mode == pb.DURABILITY_MODE_ALWAYS:
        await all_settled(settling.values())
    for position, settled in settling.items():
        durability[position] = durability_of(settled)
    final = pb.DURABILITY_PENDING not in durability
    yield pb.StoreReply(statuses=bytes(statuses), durability=bytes(durability), final=final)
    if not final:
        await all_settled(settling.values())
        for position, settled in settling.items():
            durability[position] = durability_of(settled)
        yield pb.StoreReply(statuses=bytes(statuses), durability=bytes(durability), final=True)


async def all_settled(futures: Iterable[asyncio.Future[bool]]) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting)


def durability_of(settled: asyncio.Future[bool]) -> pb.Durability.ValueType:
    if not settled.done():
        return pb.DURABILITY_PENDING
    return pb.DURABILITY_DURABLE if settled.result() else pb.DURABILITY_VOLATILE
