"""Keys of the client equal the keys of `kvstore_proto`, after any earlier calls; the cache only saves work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_client.keys import REMEMBERED_CHAINS, KeyChains
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import NO_PARENT, BlockKeys, block_keys

FINGERPRINT = Fingerprint(
    "m", "w", block_tokens=4, engine_block_tokens=2, groups=(LayerGroup(0), LayerGroup(3, "sliding", 8))
)
ROOTS = [b"r" * 16, b"s" * 16]


def plain_keys(tokens: list[int], root: bytes) -> BlockKeys:
    return block_keys(root, tokens, block_tokens=4, engine_block_tokens=2)


# Two different blocks and a tail, so that prefixes are shared, extended, cut short and diverge at every block.
PROMPT = st.tuples(
    st.lists(st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 0)]), max_size=5).map(lambda blocks: sum(blocks, ())),
    st.lists(st.just(0), max_size=3),
).map(lambda parts: [*parts[0], *parts[1]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), PROMPT), max_size=12))
def test_cached_chains_equal_plain_hashing(requests: list[tuple[bool, list[int]]]) -> None:
    chains = KeyChains(FINGERPRINT, ROOTS)
    for second_group, tokens in requests:
        chain = chains.chain(tokens, None, 3 if second_group else 0)
        assert chain.keys == plain_keys(tokens, ROOTS[second_group])
        assert chain.packed_tokens == np.array(tokens[: len(chain) * 4], "<i4").tobytes()
        assert (chain.prompt_tokens, chain.block_tokens) == (len(tokens), 4)


def test_a_prompt_that_was_asked_for_just_now_has_the_same_chain() -> None:
    chains = KeyChains(FINGERPRINT, ROOTS)
    assert chains.chain(range(9), None, 0) is chains.chain(list(range(9)), None, 0)


def test_prompts_that_part_in_their_second_block_share_only_the_first_key() -> None:
    chains = KeyChains(FINGERPRINT, ROOTS)
    for prompt in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9], [1, 2, 3, 4, 0, 6, 7, 8, 1, 1, 1, 1]):
        assert chains.chain(prompt, None, 0).keys == plain_keys(prompt, ROOTS[0])


def test_more_chains_than_are_remembered_stay_right() -> None:
    chains = KeyChains(FINGERPRINT, ROOTS)
    prompts = [[i, i, i, i, 5, 6, 7, 8] for i in range(REMEMBERED_CHAINS + 10)]
    for prompt in prompts + prompts[::-1]:
        assert chains.chain(prompt, None, 0).keys == plain_keys(prompt, ROOTS[0])


def test_a_chain_knows_parents_and_tokens_of_each_block() -> None:
    chain = KeyChains(FINGERPRINT, ROOTS).chain(range(9), None, 0)
    assert len(chain) == 2
    assert chain.parent_of(0) == NO_PARENT
    assert chain.parent_of(1) == chain.keys[0]
    assert chain.tokens_of(1) == np.array([4, 5, 6, 7], "<i4").tobytes()


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, ">i4"])
def test_any_array_of_whole_numbers_gives_the_same_keys(dtype: str) -> None:
    tokens = list(range(8))
    for given_tokens in (np.array(tokens, dtype), np.array([tokens], dtype), np.array(tokens * 2, dtype)[:8]):
        assert KeyChains(FINGERPRINT, ROOTS).chain(given_tokens, None, 0).keys == plain_keys(tokens, ROOTS[0])


def test_keys_instead_of_tokens_have_no_token_ids() -> None:
    keys = plain_keys(list(range(8)), ROOTS[0])
    chain = KeyChains(FINGERPRINT, ROOTS).chain(None, keys, 0)
    assert chain.keys == keys
    assert chain.tokens_of(0) is None


@pytest.mark.parametrize(
    ("tokens", "keys", "group", "said"),
    [
        (None, None, 0, "either tokens or keys"),
        ([1], BlockKeys(), 0, "either tokens or keys"),
        ([1], None, 9, "no layer group 9"),
        ([1 << 40], None, 0, "int32"),
        (["a"], None, 0, "int32"),
        (np.array([1, (1 << 32) + 5]), None, 0, "does not fit 32 bits"),
        (np.array([1 << 31], np.uint32), None, 0, "does not fit 32 bits"),
        (np.array([1.5, 2.5]), None, 0, "array of float64"),
        (np.zeros((2, 8), np.int32), None, 0, "several runs at once"),
        (None, b"x" * 16, 0, "wrap packed bytes in BlockKeys"),
    ],
)
def test_mistakes_are_named(tokens: object, keys: object, group: int, said: str) -> None:
    with pytest.raises(KVStoreError, match=said) as raised:
        KeyChains(FINGERPRINT, ROOTS).chain(tokens, keys, group)  # type: ignore[arg-type]
    assert raised.value.kind is ErrorKind.INVALID
