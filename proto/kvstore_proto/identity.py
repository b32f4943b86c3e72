"""Block identity: 128-bit keys chained over the prefix.

Owns how token ids become keys. A key names the state after a whole prefix: `key_i = h(key_{i-1} || tokens_i || extra)`
over engine blocks; a storage block spans several engine blocks and takes the key of its last one (the scheme of
vLLM's prefix caching and SGLang's HiCache, with a secret root). The root is `HMAC(tenant secret, fingerprint, group)`:
two tenants, two models or two layer groups never share a key, and a key reveals nothing about its tokens.

Never does: look at where blocks are, or hold the tenant secret of a client (clients receive roots, not secrets).
Invariants: pure; the golden vectors in tests/golden pin every byte; a partial tail has no key.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import xxhash

from kvstore_proto.errors import InvalidValue
from kvstore_proto.token_ids import TokenIds, checked_tokens

KEY_BYTES = 16
NO_PARENT = bytes(KEY_BYTES)
NO_EXTRA = b""
_ROOT_LABEL = b"kvstore.v1 root\0"


def _blake2b_128(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


# xxh3 is fast and not cryptographic: a tenant that works at it can make two of its own prefixes collide, and harms
# itself alone, since the root is secret and the index is per tenant. blake2b costs about 1 us a block and closes that.
HASHES: dict[str, Callable[[bytes], bytes]] = {"xxh3": xxhash.xxh3_128_digest, "blake2b": _blake2b_128}


class BlockKeys:
    """An immutable sequence of block keys, packed in one bytes object. `keys[i]` is a key of 16 bytes, and `keys[a:b]`
    is a shorter sequence.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        if not isinstance(packed, (bytes, bytearray, memoryview)):
            raise InvalidValue(f"packed keys must be bytes, got {type(packed).__name__}")
        packed = bytes(packed)
        if len(packed) % KEY_BYTES:
            raise InvalidValue(f"packed keys must be a multiple of {KEY_BYTES} bytes, got {len(packed)}")
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> BlockKeys: ...
    def __getitem__(self, index: int | slice) -> bytes | BlockKeys:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("keys are a chain: only contiguous runs can be taken")
            return BlockKeys(self.packed[start * KEY_BYTES : stop * KEY_BYTES])
        position = range(len(self))[index]
        return self.packed[position * KEY_BYTES : (position + 1) * KEY_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        return iter(split_keys(self.packed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockKeys) and other.packed == self.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"BlockKeys({len(self)})"

    def parents(self, first_parent: bytes = NO_PARENT) -> bytes:
        """Return, packed, the parent of each key: the key before it. The first key's parent is `first_parent`."""
        return first_parent + self.packed[:-KEY_BYTES] if self.packed else b""


def split_keys(packed: bytes) -> list[bytes]:
    """Cut `packed`, keys of 16 bytes one after another, into a list of keys. The caller has checked the length."""
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def root_key(tenant_secret: bytes, fingerprint_digest: bytes, group_id: int) -> bytes:
    """Return the 16-byte key from which every chain starts for one tenant, fingerprint and layer group. `tenant_secret`
    is known to the daemon alone.
    """
    message = _ROOT_LABEL + fingerprint_digest + group_id.to_bytes(4, "little")
    return hmac.new(tenant_secret, message, hashlib.sha256).digest()[:KEY_BYTES]


def pack_tokens(tokens: TokenIds) -> bytes:
    """Return `tokens` as little-endian int32, the form that is hashed for keys and stored in a block's header.

    Raises KVStoreError(INVALID) for the inputs that `kvstore_proto.token_ids.checked_tokens` refuses.
    """
    ids = checked_tokens(tokens)
    return ids.tobytes() if sys.byteorder == "little" else ids.astype("<i4").tobytes()


def chain(
    parent: bytes,
    packed_tokens: bytes,
    *,
    engine_block_tokens: int,
    extra: bytes = NO_EXTRA,
    hash_name: str = "xxh3",
) -> bytes:
    """Return the key of a block: the key `parent` of the block before it, hashed with `packed_tokens` (int32), one
    engine block of `engine_block_tokens` tokens after the other. `extra` is mixed into each hash, and `hash_name`
    names the hash function.

    Raises ValueError if the tokens do not fill whole engine blocks.
    """
    step = engine_block_tokens * 4
    if len(packed_tokens) % step:
        raise ValueError(f"{len(packed_tokens) // 4} tokens do not fill blocks of {engine_block_tokens}")
    digest = HASHES[hash_name]
    key = parent
    for start in range(0, len(packed_tokens), step):
        key = digest(key + packed_tokens[start : start + step] + extra)
    return key


def block_keys(
    root: bytes,
    tokens: TokenIds,
    *,
    block_tokens: int,
    engine_block_tokens: int,
    extras: Sequence[bytes] = (),
    hash_name: str = "xxh3",
) -> BlockKeys:
    """Return the keys of the full blocks of a prefix `tokens`, in a chain that starts from the key `root`. Tokens at
    the end that do not fill a block of `block_tokens` tokens get no key.

    `extras[i]`, if given, is mixed into the key of block i (an image's digest and offset, an adapter's digest).
    """
    packed = pack_tokens(tokens)
    step = block_tokens * 4
    keys = []
    key = root
    for index in range(len(packed) // step):
        extra = extras[index] if index < len(extras) else NO_EXTRA
        key = chain(
            key,
            packed[index * step : (index + 1) * step],
            engine_block_tokens=engine_block_tokens,
            extra=extra,
            hash_name=hash_name,
        )
        keys.append(key)
    return BlockKeys(b"".join(keys))
