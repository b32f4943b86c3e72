"""The blocks that a unary call names: by token ids, by the name of an object, or by keys of stored blocks.

The keys of token ids start from the root of the caller's tenant, as in clients with shared memory. An object is its
token ids (`kvstore_proto.objects`): a caller can choose a name but never a key, no two tenants ever share one, and no
object takes the place of a block of tokens. Hashing is done in slices: a long prefix must not hold up the control
thread. Raises KVStoreError.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, FingerprintError, parse_fingerprint
from kvstore_proto.identity import KEY_BYTES, NO_EXTRA, NO_PARENT, chain, pack_tokens, split_keys
from kvstore_proto.objects import MAX_NAME_BYTES, OBJECTS, object_tokens
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1 import unary_pb2 as pb
from kvstored.clients.sessions import ClientSession
from kvstored.rpc.verbs.validate import keys_of, known_group
from kvstored.store.operations.records import NO_EXTRA_FIELD

HASHES_A_SLICE = 128
NAMES_A_SLICE = 64  # 0.6 ms where the name has 4096 bytes


@dataclass(frozen=True)
class NamedBlocks:
    """The blocks that a unary request names. `tokens` has the packed token ids of each block, empty if the caller gave
    keys. `extras` has 16 bytes for each block that distinguish blocks of equal tokens. `are_given` is true if the
    caller gave the keys themselves; then it can read the blocks but not put them."""

    group: int
    keys: list[bytes]
    parents: list[bytes]
    tokens: list[bytes]
    extras: list[bytes]
    are_given: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def packed(self) -> bytes:
        return b"".join(self.keys)


def fingerprint_of(named: pb.Chain) -> Fingerprint:
    if not named.fingerprint:
        if named.token_ids:
            raise KVStoreError(ErrorKind.INVALID, "token_ids need the fingerprint of their model: keys depend on it")
        return OBJECTS
    if named.object:
        raise KVStoreError(ErrorKind.INVALID, "objects have a fingerprint of their own: give none")
    try:
        return parse_fingerprint(named.fingerprint)
    except FingerprintError as error:
        raise KVStoreError(ErrorKind.INVALID, str(error)) from None


async def blocks_of(session: ClientSession, named: pb.Chain, max_keys: int) -> NamedBlocks:
    known_group(session, named.group)
    if bool(named.keys) + bool(named.object) + bool(named.token_ids) > 1:
        raise KVStoreError(ErrorKind.INVALID, "name blocks by token_ids, by object or by keys: one of them")
    if named.keys and (named.extras or named.first_block):
        raise KVStoreError(ErrorKind.INVALID, "extras and first_block do not go with keys")
    if bool(named.object) < bool(named.object_blocks) or (named.object and named.extras):
        raise KVStoreError(ErrorKind.INVALID, "object_blocks go with an object, and extras with token_ids")
    if named.keys:
        keys = keys_of(named.keys, max_keys)
        nothing = [b""] * len(keys)
        return NamedBlocks(named.group, keys, [NO_PARENT, *keys[:-1]], nothing, nothing, are_given=True)
    if named.object:
        count = max(named.object_blocks, 1)
        _check_count("object_blocks", count, max_keys)
        if len(named.object.encode()) > MAX_NAME_BYTES:
            raise KVStoreError(ErrorKind.INVALID, f"the name of an object has 1 to {MAX_NAME_BYTES} bytes")
        slices = []
        for start in range(0, count, NAMES_A_SLICE):
            slices.append(object_tokens(named.object, min(NAMES_A_SLICE, count - start), start))
            await asyncio.sleep(0)
        return await _by_tokens(session, named, np.concatenate(slices))
    count = len(named.token_ids) // session.fingerprint.block_tokens
    _check_count(f"token_ids of {count} blocks", count, max_keys)
    return await _by_tokens(session, named, named.token_ids)


def _check_count(what: str, count: int, max_keys: int) -> None:
    if count > max_keys:
        raise KVStoreError(ErrorKind.TOO_LARGE, f"{what} in one message, the limit is {max_keys} blocks")


async def _by_tokens(session: ClientSession, named: pb.Chain, token_ids: TokenIds) -> NamedBlocks:
    fingerprint = session.fingerprint
    size = fingerprint.block_tokens
    count = len(token_ids) // size
    if len(named.extras) not in (0, count * KEY_BYTES):
        raise KVStoreError(
            ErrorKind.INVALID, f"extras are {KEY_BYTES} bytes for each of {count} blocks, got {len(named.extras)} bytes"
        )
    extras = split_keys(named.extras) or [NO_EXTRA_FIELD] * count
    keys: list[bytes] = []
    tokens: list[bytes] = []
    key = session.roots[named.group]
    hashes_a_block, hashed = size // fingerprint.engine_block_tokens, 0
    for block in range(count):
        tokens.append(pack_tokens(token_ids[block * size : (block + 1) * size]))
        extra = NO_EXTRA if extras[block] == NO_EXTRA_FIELD else extras[block]
        key = chain(
            key, tokens[block], engine_block_tokens=fingerprint.engine_block_tokens, extra=extra,
            hash_name=fingerprint.key_hash,
        )  # fmt: skip
        keys.append(key)
        hashed += hashes_a_block
        if hashed >= HASHES_A_SLICE:
            hashed = 0
            await asyncio.sleep(0)
    first = min(named.first_block, count)
    parents = [NO_PARENT, *keys[:-1]]
    return NamedBlocks(named.group, keys[first:], parents[first:count], tokens[first:], extras[first:])
