"""What verbs check in a request before they do anything: limits, shapes, the durability of a put. Raises KVStoreError
that names the limit."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES, split_keys
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.store.operations.offer import DurabilityMode, Stored, StoreStatus

_NO_EXTRA_FIELD = bytes(KEY_BYTES)


def keys_of(packed: bytes, max_keys: int) -> list[bytes]:
    """The keys of a packed field, in order."""
    if len(packed) % KEY_BYTES:
        raise KVStoreError(ErrorKind.INVALID, f"packed keys are {KEY_BYTES} bytes each, got {len(packed)} bytes in all")
    count = len(packed) // KEY_BYTES
    if count > max_keys:
        raise KVStoreError(ErrorKind.TOO_LARGE, f"{count} keys in one message, the limit is {max_keys}: split it")
    return split_keys(packed)


def known_group(session: Session, group_id: int) -> None:
    if session.fingerprint.group(group_id) is None:
        known = [group.group_id for group in session.fingerprint.groups]
        raise KVStoreError(
            ErrorKind.INVALID, f"layer group {group_id} is not in this session's fingerprint; known: {known}"
        )


def payload_size(session: Session, group_id: int, payload_bytes: int, max_block_bytes: int) -> None:
    """A group with a fixed size takes no other; every size is within the limit."""
    expected = session.fingerprint.payload_bytes(group_id)
    if payload_bytes <= 0:
        raise KVStoreError(ErrorKind.INVALID, "payload_bytes must be more than 0")
    if expected and payload_bytes != expected:
        raise KVStoreError(
            ErrorKind.INVALID,
            f"a block of layer group {group_id} has {expected} payload bytes by the fingerprint, got {payload_bytes}",
        )
    if payload_bytes > max_block_bytes:
        raise KVStoreError(
            ErrorKind.TOO_LARGE, f"a block of {payload_bytes} bytes is over the limit of {max_block_bytes}"
        )


def claimed_blocks(
    session: Session, request: pb.Store, max_keys: int, max_block_bytes: int
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Key, parent and extra of each block that a client wants to store."""
    keys = keys_of(request.keys, max_keys)
    parents = keys_of(request.parents, max_keys)
    extras = keys_of(request.extras, max_keys) if request.extras else [_NO_EXTRA_FIELD] * len(keys)
    known_group(session, request.group)
    payload_size(session, request.group, request.payload_bytes, max_block_bytes)
    if not len(parents) == len(extras) == len(keys):
        raise KVStoreError(ErrorKind.INVALID, f"{len(keys)} keys with {len(parents)} parents")
    return keys, parents, extras


def may_store(session: Session, inflight_limit: int) -> None:
    """Raise KVStoreError for one put too many: the stream's limit forgets those of a stream that broke."""
    if len(session.copying) >= inflight_limit:
        raise KVStoreError(
            ErrorKind.THROTTLED, f"{len(session.copying)} puts of this client are being stored already", 5
        )


def durability_asked(session: Session, asked: pb.DurabilityMode.ValueType, default_mode: str) -> DurabilityMode:
    """What is asked for; where that is nothing, or a mode of a newer version, the tenant's mode or `default_mode`."""
    try:
        return DurabilityMode(asked)
    except ValueError:
        return DurabilityMode[(session.tenant.limits.durability or default_mode).upper()]


async def sent_again(blocks: int) -> AsyncGenerator[Stored, None]:
    """The answer to a put whose loan or reservation has ended: nothing was stored, the client sends it again."""
    yield Stored(bytes([StoreStatus.AGAIN] * blocks), bytes(blocks), True)
