"""Store on the wire: the durability that a put asks for, and the answers to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.store.operations.offer import DurabilityMode, Offer, Stored
from kvstored.store.operations.put import Put


class Storing:
    """`default_mode` is the name of the durability of tenants that have none of their own."""

    def __init__(self, put: Put, *, default_mode: str) -> None:
        self._put = put
        self._default_mode = default_mode

    def store(
        self, session: Session, offer: Offer, asked: pb.DurabilityMode.ValueType
    ) -> AsyncGenerator[pb.StoreReply, None]:
        """As `Put.store`: the first blocks have begun when this returns."""
        return _replies(self._put.store(session, offer, self._mode(session, asked)))

    def _mode(self, session: Session, asked: pb.DurabilityMode.ValueType) -> DurabilityMode:
        """What is asked for, or what the tenant is configured for: also where a newer client asks for another one."""
        try:
            return DurabilityMode(asked)
        except ValueError:
            return DurabilityMode[(session.tenant.limits.durability or self._default_mode).upper()]


async def sent_again(blocks: int) -> AsyncGenerator[pb.StoreReply, None]:
    """Nothing was stored, of a request that was right once."""
    yield pb.StoreReply(statuses=bytes([pb.STORE_STATUS_AGAIN] * blocks), durability=bytes(blocks), final=True)


async def _replies(answers: AsyncGenerator[Stored, None]) -> AsyncGenerator[pb.StoreReply, None]:
    async with aclosing(answers):
        async for stored in answers:
            yield pb.StoreReply(statuses=stored.statuses, durability=stored.durability, final=stored.final)
