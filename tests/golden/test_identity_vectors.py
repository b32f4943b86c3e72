"""Golden vectors: two releases, two processes and two languages must make the same keys from the same tokens.

A change here is a change of the wire and of the disk format: every stored block becomes unreachable.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import NO_PARENT, BlockKeys, block_keys, chain, pack_tokens, root_key

SECRET = bytes(range(32))
FINGERPRINT = Fingerprint(
    model_name="a label, not part of the identity",
    weights_digest="0123456789abcdef",
    rope="neox/10000/1.0",
    kv_dtype="f16",
    tokenizer_digest="feed",
    groups=(LayerGroup(0, "full", 0, (0, 1, 2), 768), LayerGroup(1, "sliding", 4096, (3, 4), 768)),
)

FINGERPRINT_DIGEST = "e95988ed82f6ab312f4cfeb34e2ae9c19eaf6c3a03b62a185e47e0e0962a46aa"
ROOT_0 = "d439476adc1baea2e913d8ee136b0438"
ROOT_1 = "a7f46a1e13b86b797f844258027ec880"
KEYS_XXH3 = ["dc4b7e00da2581cc38433579404c830b", "8a91ccd0a2b1aa7ddce5e47183a9b390"]
KEYS_BLAKE2B = ["0e56a62623ca94e44998c6d374e42d5b", "2c761d4c2b94c42c01f9da5809a7a311"]
KEY_WITH_EXTRA = "15957f1871fd170188292e3ce59d1fc0"


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64) * 7 % 50_000


def test_fingerprint_digest() -> None:
    assert FINGERPRINT.digest().hex() == FINGERPRINT_DIGEST


def test_roots_differ_by_group() -> None:
    assert root_key(SECRET, FINGERPRINT.digest(), 0).hex() == ROOT_0
    assert root_key(SECRET, FINGERPRINT.digest(), 1).hex() == ROOT_1


@pytest.mark.parametrize(("hash_name", "expected"), [("xxh3", KEYS_XXH3), ("blake2b", KEYS_BLAKE2B)])
def test_chained_keys(hash_name: str, expected: list[str]) -> None:
    keys = block_keys(bytes.fromhex(ROOT_0), tokens(150), block_tokens=64, engine_block_tokens=16, hash_name=hash_name)
    assert [key.hex() for key in keys] == expected


def test_extra_changes_the_key_of_its_block() -> None:
    keys = block_keys(
        bytes.fromhex(ROOT_0), tokens(64), block_tokens=64, engine_block_tokens=16, extras=[bytes(range(16))]
    )
    assert keys[0].hex() == KEY_WITH_EXTRA


def test_keys_by_the_definition_in_the_glossary() -> None:
    """The scheme written out once more, without the code under test."""
    digest = FINGERPRINT.digest()
    root = hmac.new(SECRET, b"kvstore.v1 root\0" + digest + bytes(4), hashlib.sha256).digest()[:16]
    key = root
    for start in range(0, 128, 16):
        block = np.asarray(tokens(128)[start : start + 16], dtype="<i4").tobytes()
        key = xxhash.xxh3_128(key + block).digest()
    assert block_keys(root, tokens(128), block_tokens=64, engine_block_tokens=16)[-1] == key


@given(st.lists(st.integers(0, 2**31 - 1), max_size=300), st.integers(0, 299))
def test_a_key_depends_on_the_whole_prefix_and_on_nothing_after_it(ids: list[int], at: int) -> None:
    whole = block_keys(b"r" * 16, ids, block_tokens=64, engine_block_tokens=16)
    assert len(whole) == len(ids) // 64
    if at < len(ids):
        changed = [*ids[:at], (ids[at] + 1) % 2**31, *ids[at + 1 :]]
        other = block_keys(b"r" * 16, changed, block_tokens=64, engine_block_tokens=16)
        for index in range(len(whole)):
            assert (whole[index] == other[index]) == (index < at // 64)


def test_a_chain_can_be_continued_from_any_block() -> None:
    keys = block_keys(b"r" * 16, tokens(192), block_tokens=64, engine_block_tokens=16)
    tail = chain(keys[1], pack_tokens(tokens(192)[128:]), engine_block_tokens=16)
    assert tail == keys[2]


def test_packed_runs_slice_and_name_their_parents() -> None:
    keys = block_keys(b"r" * 16, tokens(256), block_tokens=64, engine_block_tokens=16)
    assert list(keys[1:3]) == [keys[1], keys[2]]
    assert keys.parents() == NO_PARENT + keys[:3].packed
    assert BlockKeys(keys.packed) == keys
    with pytest.raises(ValueError, match="multiple of 16"):
        BlockKeys(b"short")
    with pytest.raises(ValueError, match="do not fill"):
        chain(b"r" * 16, pack_tokens(tokens(17)), engine_block_tokens=16)
