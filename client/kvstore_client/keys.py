"""Block keys from token ids, with a cache of recent chains.

The module owns the roots of one daemon session and the cache: turns of one conversation, and conversations under one
system prompt, share their leading blocks, so only the new blocks are hashed. It never talks to the daemon. Invariant:
cached or not, the keys equal the results of `kvstore_proto.identity.block_keys`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kvstore_client.errors import invalid
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.identity import KEY_BYTES, NO_PARENT, BlockKeys, block_keys, chain, pack_tokens
from kvstore_proto.token_ids import TokenIds

REMEMBERED_CHAINS = 64
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Chain:
    """The keys of the full blocks of a prefix or of a part of one, in order, each block with `block_tokens` tokens.
    `packed_tokens` are their token ids as int32, or None if the caller gave only keys. `prompt_tokens` is the length
    of the whole prompt, or 0 if it is not known. `before` is the key of the block before the first one. With `apart`
    the blocks are items, which continue no block.
    """

    keys: BlockKeys
    packed_tokens: bytes | None
    block_tokens: int
    prompt_tokens: int = 0  # of the whole prompt, with those that fill no block; 0: not known
    before: bytes = NO_PARENT  # key of the block before the first one, in a part of a longer chain
    apart: bool = False

    def tokens_of(self, block: int) -> bytes | None:
        """Return the token ids of block number `block`, packed as int32. Return None if the caller gave only keys."""
        if self.packed_tokens is None:
            return None
        step = self.block_tokens * TOKEN_BYTES
        return self.packed_tokens[block * step : (block + 1) * step]

    def tokens_of_run(self, first_block: int, blocks: int) -> bytes | None:
        """Return the token ids of `blocks` blocks from number `first_block` on, packed as int32 and joined. Return None
        if the caller gave only keys.
        """
        if self.packed_tokens is None:
            return None
        step = self.block_tokens * TOKEN_BYTES
        return self.packed_tokens[first_block * step : (first_block + blocks) * step]

    def part(self, first_block: int, blocks: int) -> Chain:
        """Return the part of the chain that has `blocks` blocks from number `first_block` on."""
        return Chain(
            self.keys[first_block : first_block + blocks],
            self.tokens_of_run(first_block, blocks),
            self.block_tokens,
            before=self.parent_of(first_block),
            apart=self.apart,
        )

    def parent_of(self, block: int) -> bytes:
        """Return the key of the block that number `block` continues, or NO_PARENT for the first block of a prompt and
        for an item.
        """
        return NO_PARENT if self.apart else self.keys[block - 1] if block else self.before

    def parents_of(self, first_block: int, blocks: int) -> bytes:
        """Return, packed, the keys of the blocks that `blocks` blocks from number `first_block` on continue."""
        if self.apart or not blocks:
            return bytes(KEY_BYTES * blocks)
        inside = self.keys.packed[first_block * KEY_BYTES : (first_block + blocks - 1) * KEY_BYTES]
        return self.parent_of(first_block) + inside

    def __len__(self) -> int:
        return len(self.keys)


class KeyChains:
    """A maker of the keys of token prefixes, for each layer group of `fingerprint`. `roots` are the keys from which the
    chain of each group starts, sent by the daemon. It remembers recent prefixes, so that only new blocks are hashed.
    It may be used from several threads.
    """

    def __init__(self, fingerprint: Fingerprint, roots: list[bytes]) -> None:
        self._fingerprint = fingerprint
        self._apart = {group.group_id for group in fingerprint.groups if group.kind == "items"}
        self._roots = dict(zip((group.group_id for group in fingerprint.groups), roots, strict=True))
        self._recent: OrderedDict[tuple[int, bytes], Chain] = OrderedDict()  # by the tokens of the first block
        self._lock = threading.Lock()

    def chain(self, tokens: TokenIds | None, keys: BlockKeys | None, group_id: int) -> Chain:
        """Return the keys of a prefix in the layer group `group_id`. The prefix is given by `tokens`, of which a tail
        that fills no block is left out, or by `keys`.

        Raises KVStoreError(INVALID) unless exactly one is given, for ids that are no int32, and for unknown groups.
        """
        block_tokens = self._fingerprint.block_tokens
        packed = packed_or_keys(tokens, keys)
        if group_id not in self._roots:
            raise invalid(f"the fingerprint has no layer group {group_id}; groups are {sorted(self._roots)}")
        if isinstance(packed, BlockKeys):
            return Chain(packed, None, block_tokens, apart=group_id in self._apart)
        step = block_tokens * TOKEN_BYTES
        full = packed[: len(packed) // step * step]
        if group_id in self._apart:
            apart = b"".join(self._key(full[at : at + step], group_id) for at in range(0, len(full), step))
            return Chain(BlockKeys(apart), full, block_tokens, apart=True)
        return self._chain_of(full, group_id, len(packed) // TOKEN_BYTES)

    def _key(self, packed: bytes, group_id: int) -> bytes:
        step, hash_name = self._fingerprint.engine_block_tokens, self._fingerprint.key_hash
        return chain(self._roots[group_id], packed, engine_block_tokens=step, hash_name=hash_name)

    def _chain_of(self, packed: bytes, group_id: int, prompt_tokens: int) -> Chain:
        block_tokens = self._fingerprint.block_tokens
        step = block_tokens * TOKEN_BYTES
        slot = (group_id, packed[:step])
        known = self._recent.get(slot)  # without the lock: it is one step
        if known is None:
            shared, head = 0, b""
        else:
            assert known.packed_tokens is not None
            if known.packed_tokens == packed and known.prompt_tokens == prompt_tokens:
                return known
            shared = _common_blocks(packed, known.packed_tokens, step)
            head = known.keys.packed[: shared * KEY_BYTES]
        if shared * step == len(packed):
            return Chain(BlockKeys(head), packed, block_tokens, prompt_tokens)
        rest = block_keys(
            head[-KEY_BYTES:] if shared else self._roots[group_id],
            np.frombuffer(packed, dtype="<i4")[shared * block_tokens :],
            block_tokens=block_tokens,
            engine_block_tokens=self._fingerprint.engine_block_tokens,
            hash_name=self._fingerprint.key_hash,
        )
        found = Chain(BlockKeys(head + rest.packed), packed, block_tokens, prompt_tokens)
        with self._lock:
            self._recent[slot] = found
            self._recent.move_to_end(slot)
            while len(self._recent) > REMEMBERED_CHAINS:
                self._recent.popitem(last=False)
        return found


def packed_or_keys(tokens: TokenIds | None, keys: BlockKeys | None) -> bytes | BlockKeys:
    """Return `tokens` packed as int32, or `keys` themselves, whichever the caller gave. Raises KVStoreError(INVALID)
    unless exactly one is given, with the right type.
    """
    if keys is not None and tokens is None:
        if not isinstance(keys, BlockKeys):
            raise invalid(f"keys= must be BlockKeys, got {type(keys).__name__}: wrap packed bytes in BlockKeys")
        return keys
    if tokens is None or keys is not None:
        raise invalid("give either tokens or keys=, not both and not neither")
    return pack_tokens(tokens)


def _common_blocks(a: bytes, b: bytes, step: int) -> int:
    """Return how many leading blocks of `step` bytes two packed runs share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // step
    left, right = np.frombuffer(a, np.uint8, length), np.frombuffer(b, np.uint8, length)
    return int(np.argmax(left != right)) // step
