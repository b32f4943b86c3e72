"""Keys of blocks that depend on more than their tokens: never shared with anything that differs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore_connectors.vllm.identity import Extras, MediaItem, address, derived_keys
from kvstore_connectors.vllm.orders import RequestPrefix
from kvstore_proto.identity import BlockKeys, pack_tokens
from tests.reference.vllm_records import BLOCK_TOKENS, KeyedStore

TOKENS = list(range(12))
BLOCKS = len(TOKENS) // BLOCK_TOKENS


def keys_of(extras: Extras) -> list[bytes]:
    prefix = RequestPrefix(pack_tokens(TOKENS), extras.digests(BLOCKS, BLOCK_TOKENS))
    named = address(KeyedStore(), prefix)
    assert named is not None
    found = named["keys"] if "keys" in named else KeyedStore().keys(named["tokens"])
    assert isinstance(found, BlockKeys)
    return list(found)


def test_plain_text_is_named_by_its_tokens_so_that_they_are_verified() -> None:
    named = address(KeyedStore(), RequestPrefix(pack_tokens(TOKENS)))
    assert named is not None and list(named) == ["tokens"]
    assert np.array_equal(named["tokens"], TOKENS)


def test_a_run_that_starts_later_is_named_by_keys() -> None:
    named = address(KeyedStore(), RequestPrefix(pack_tokens(TOKENS)), 2)
    assert named == {"keys": BlockKeys(keys_of(Extras())[2])}


def test_nothing_can_be_named_without_a_daemon_but_by_tokens() -> None:
    absent = KeyedStore(connected=False)
    assert address(absent, RequestPrefix(pack_tokens(TOKENS)), 1) is None
    assert address(absent, RequestPrefix(pack_tokens(TOKENS), Extras(salt="a").digests(BLOCKS, BLOCK_TOKENS))) is None


def test_salt_and_adapter_change_every_key() -> None:
    variants = [Extras(), Extras(salt="a"), Extras(salt="b"), Extras(adapter="a"), Extras(adapter="a", salt="a")]
    keys = [key for extras in variants for key in keys_of(extras)]
    assert len(set(keys)) == len(variants) * BLOCKS


def test_parts_cannot_be_shifted_into_each_other() -> None:
    assert keys_of(Extras(adapter="ab", salt="c")) != keys_of(Extras(adapter="a", salt="bc"))
    assert keys_of(Extras(items=(MediaItem("12", 1, 2),))) != keys_of(Extras(items=(MediaItem("1", 21, 2),)))


def test_an_image_changes_its_block_and_those_behind_it() -> None:
    one, other = (keys_of(Extras(items=(MediaItem(digest, 5, 2),))) for digest in ("cat", "dog"))
    assert one[0] == other[0]  # before the image
    assert one[1] != other[1] and one[2] != other[2]


def test_an_image_elsewhere_in_the_same_block_is_another_block() -> None:
    assert keys_of(Extras(items=(MediaItem("cat", 4, 2),)))[1] != keys_of(Extras(items=(MediaItem("cat", 5, 2),)))[1]


def test_an_image_over_two_blocks_counts_in_both() -> None:
    long, short = (keys_of(Extras(items=(MediaItem("cat", 2, tokens),))) for tokens in (4, 3))
    assert long[0] != short[0] and long[1] != short[1]


def test_a_request_with_images_shares_nothing_with_plain_text() -> None:
    """The request's blocks are stored without token ids: a plain request could never verify them."""
    assert not set(keys_of(Extras(items=(MediaItem("cat", 9, 2),)))) & set(keys_of(Extras()))


@given(st.integers(0, 6), st.integers(0, 6))
def test_digests_of_a_longer_prefix_begin_with_those_of_a_shorter(first: int, second: int) -> None:
    extras = Extras("adapter", "salt", (MediaItem("cat", 3, 9),))
    shorter, longer = sorted((first, second))
    fresh = Extras("adapter", "salt", (MediaItem("cat", 3, 9),))
    assert fresh.digests(longer, BLOCK_TOKENS)[:shorter] == extras.digests(shorter, BLOCK_TOKENS)
    assert extras.digests(longer, BLOCK_TOKENS) == fresh.digests(longer, BLOCK_TOKENS)


def test_derived_keys_are_pinned() -> None:
    """Stored blocks outlive a release: a change here is a new person string, not a new expectation."""
    digests = Extras("adapter", "salt", (MediaItem("cat", 1, 2),)).digests(1, 4)
    assert derived_keys(BlockKeys(bytes(16)), digests).packed.hex() == "824e900cbbbda459e0e5b99bd200742a"
