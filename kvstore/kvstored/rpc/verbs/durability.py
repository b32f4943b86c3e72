"""The durability that a put on the wire asks for, and the answer to a put that is to be sent again."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.store.operations.offer import DurabilityMode, Stored, StoreStatus


def durability_asked(session: Session, asked: pb.DurabilityMode.ValueType, default_mode: str) -> DurabilityMode:
    """What is asked for, or what the tenant is configured for, or `default_mode`; also where a newer client asks for a
    mode that this daemon does not know."""
    try:
        return DurabilityMode(asked)
    except ValueError:
        return DurabilityMode[(session.tenant.limits.durability or default_mode).upper()]


async def sent_again(blocks: int) -> AsyncGenerator[Stored, None]:
    """Nothing was stored, of a request that was right once."""
    yield Stored(bytes([StoreStatus.AGAIN] * blocks), bytes(blocks), True)
