"""Which blocks a unary call names: by token ids, by names of opaque objects, or by keys of stored blocks.

The keys of token ids start from the root of the caller's tenant, so they are those that clients with shared memory
compute for themselves. Names are bound to the same root: a caller can choose a name but never a key, so no two tenants
ever have the same one, and no object takes the place of a block of tokens. Hashes in slices: a long prefix must not
hold up the control thread. Raises KVStoreError.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, FingerprintError, LayerGroup, parse_fingerprint
from kvstore_proto.identity import KEY_BYTES, NO_EXTRA, NO_PARENT, chain, pack_tokens, split_keys
from kvstore_proto.v1 import unary_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs.validate import keys_of, known_group

OPAQUE = Fingerprint(
    "opaque objects", "opaque", kv_dtype="opaque", layout="opaque", block_tokens=1, engine_block_tokens=1,
    groups=(LayerGroup(0),),
)  # fmt: skip
HASHES_A_SLICE = 128
_ZEROS = bytes(KEY_BYTES)


@dataclass(frozen=True)
class NamedBlocks:
    """`tokens` has the packed token ids of each block, none where the caller gave keys or names; `extras` 16 bytes
    each. `are_given`: the caller named the keys themselves, which is no way to make blocks."""

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
        return OPAQUE
    try:
        return parse_fingerprint(named.fingerprint)
    except FingerprintError as error:
        raise KVStoreError(ErrorKind.INVALID, str(error)) from None


async def blocks_of(session: Session, named: pb.Chain, max_keys: int) -> NamedBlocks:
    known_group(session, named.group)
    if bool(named.keys) + bool(named.names) + bool(named.token_ids) > 1:
        raise KVStoreError(ErrorKind.INVALID, "name blocks by token_ids, by names or by keys: one of them")
    if (named.keys or named.names) and (named.extras or named.first_block):
        raise KVStoreError(ErrorKind.INVALID, "extras and first_block go with token_ids")
    if named.names:
        return _by_names(session, named, max_keys)
    if named.parent:
        raise KVStoreError(ErrorKind.INVALID, "parent goes with names; with token_ids give the whole prefix")
    if named.keys:
        keys = keys_of(named.keys, max_keys)
        nothing = [b""] * len(keys)
        return NamedBlocks(named.group, keys, [NO_PARENT, *keys[:-1]], nothing, nothing, are_given=True)
    return await _by_tokens(session, named, max_keys)


def _by_names(session: Session, named: pb.Chain, max_keys: int) -> NamedBlocks:
    if len(named.parent) not in (0, KEY_BYTES):
        raise KVStoreError(ErrorKind.INVALID, f"parent is {KEY_BYTES} bytes or empty, got {len(named.parent)}")
    root = session.roots[named.group]
    keys = [_key_of_name(root, name) for name in keys_of(named.names, max_keys)]
    parents = [_key_of_name(root, named.parent) if named.parent else NO_PARENT, *keys[:-1]]
    return NamedBlocks(named.group, keys, parents, [b""] * len(keys), [_ZEROS] * len(keys))


def _key_of_name(root: bytes, name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=KEY_BYTES, key=root, person=b"kvstore.v1 name").digest()


async def _by_tokens(session: Session, named: pb.Chain, max_keys: int) -> NamedBlocks:
    fingerprint = session.fingerprint
    size = fingerprint.block_tokens
    count = len(named.token_ids) // size
    if count > max_keys:
        raise KVStoreError(
            ErrorKind.TOO_LARGE, f"token_ids of {count} blocks in one message, the limit is {max_keys} blocks"
        )
    if len(named.extras) not in (0, count * KEY_BYTES):
        raise KVStoreError(
            ErrorKind.INVALID, f"extras are {KEY_BYTES} bytes for each of {count} blocks, got {len(named.extras)} bytes"
        )
    extras = split_keys(named.extras) or [_ZEROS] * count
    keys: list[bytes] = []
    tokens: list[bytes] = []
    key = session.roots[named.group]
    hashes_a_block, hashed = size // fingerprint.engine_block_tokens, 0
    for block in range(count):
        tokens.append(pack_tokens(named.token_ids[block * size : (block + 1) * size]))
        extra = NO_EXTRA if extras[block] == _ZEROS else extras[block]
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
