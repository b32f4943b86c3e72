"""Checks of a request before a verb does anything: limits and form. They raise KVStoreError that names the limit."""

from __future__ import annotations

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES, split_keys
from kvstored.clients.sessions import ClientSession


def check_keys(packed: bytes, max_keys: int) -> None:
    """Check that `packed` has at most `max_keys` keys of 16 bytes each. Raises KVStoreError."""
    if len(packed) % KEY_BYTES:
        raise KVStoreError(ErrorKind.INVALID, f"packed keys are {KEY_BYTES} bytes each, got {len(packed)} bytes in all")
    count = len(packed) // KEY_BYTES
    if count > max_keys:
        raise KVStoreError(ErrorKind.TOO_LARGE, f"{count} keys in one message, the limit is {max_keys}: split it")


def check_parent(parent: bytes) -> None:
    """Check that `parent` is one key of 16 bytes, or empty. Raises KVStoreError."""
    if len(parent) not in (0, KEY_BYTES):
        raise KVStoreError(ErrorKind.INVALID, f"parent is a key of {KEY_BYTES} bytes or empty, got {len(parent)} bytes")


def keys_of(packed: bytes, max_keys: int) -> list[bytes]:
    """Return the keys in `packed`, in order, after `check_keys`. Raises KVStoreError."""
    check_keys(packed, max_keys)
    return split_keys(packed)


def known_group(session: ClientSession, group_id: int) -> None:
    """Check that the session's fingerprint has the layer group `group_id`. Raises KVStoreError."""
    if session.fingerprint.group(group_id) is None:
        known = [group.group_id for group in session.fingerprint.groups]
        raise KVStoreError(
            ErrorKind.INVALID, f"layer group {group_id} is not in this session's fingerprint; known: {known}"
        )


def payload_size(session: ClientSession, group_id: int, payload_bytes: int, max_block_bytes: int) -> None:
    """Check `payload_bytes`, the payload size of a block of the layer group `group_id`: it must be the size in the
    session's fingerprint if that fixes one, and at most `max_block_bytes`. Raises KVStoreError."""
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
