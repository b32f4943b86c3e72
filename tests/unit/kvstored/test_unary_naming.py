"""A chain names blocks: token ids give the keys that a client with shared memory computes, names of objects the keys
that kvctl computes.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import NO_EXTRA, NO_PARENT, block_keys, pack_tokens, split_keys
from kvstore_proto.objects import OBJECTS, object_tokens
from kvstore_proto.v1 import unary_pb2 as pb
from kvstored.rpc.verbs.naming import NamedBlocks, blocks_of, fingerprint_of

SMALL = Fingerprint("small", "w", block_tokens=4, engine_block_tokens=2, groups=(LayerGroup(0), LayerGroup(5)))
ROOTS = {0: b"r" * 16, 5: b"s" * 16}


def named(chain: pb.Chain, fingerprint: Fingerprint = SMALL, roots: dict[int, bytes] = ROOTS) -> NamedBlocks:
    session: Any = SimpleNamespace(fingerprint=fingerprint, roots=roots)
    return asyncio.run(blocks_of(session, chain, 100))


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    first=st.integers(0, 12),
    group=st.sampled_from([0, 5]),
    marked=st.lists(st.sampled_from([bytes(16), b"x" * 16]), min_size=10, max_size=10),
)
def test_keys_of_token_ids_are_those_of_every_other_client(
    tokens: list[int], first: int, group: int, marked: list[bytes]
) -> None:
    count = len(tokens) // 4
    extras = [NO_EXTRA if extra == bytes(16) else extra for extra in marked[:count]]
    expected = block_keys(ROOTS[group], tokens, block_tokens=4, engine_block_tokens=2, extras=extras)
    chain = pb.Chain(group=group, token_ids=tokens, first_block=first, extras=b"".join(marked[:count]))
    blocks = named(chain)
    assert blocks.keys == split_keys(expected.packed)[first:]
    assert blocks.parents == [NO_PARENT, *split_keys(expected.packed)][first:count]
    assert blocks.tokens == [pack_tokens(tokens[at : at + 4]) for at in range(first * 4, count * 4, 4)]
    assert len(blocks.keys) == len(blocks.parents) == len(blocks.extras)
    assert not blocks.are_given


@pytest.mark.parametrize("token", [1 << 31, (1 << 32) + 5, -(1 << 31) - 1])
def test_ids_of_more_than_32_bits_are_refused_and_not_cut(token: int) -> None:
    with pytest.raises(KVStoreError, match="int32 token ids") as refused:
        named(pb.Chain(token_ids=[token] * 4))
    assert refused.value.kind is ErrorKind.INVALID


@given(st.text(min_size=1, max_size=20), st.integers(0, 8), st.integers(0, 9))
def test_an_object_is_the_blocks_of_its_token_ids_and_another_one_for_another_tenant(
    called: str, count: int, first: int
) -> None:
    blocks = named(pb.Chain(object=called, object_blocks=count, first_block=first), OBJECTS)
    expected = block_keys(ROOTS[0], object_tokens(called, count or 1), block_tokens=8, engine_block_tokens=8)
    assert blocks.keys == split_keys(expected.packed)[first:]
    elsewhere = named(pb.Chain(object=called, object_blocks=count), OBJECTS, {0: b"another tenant's"})
    assert not set(split_keys(expected.packed)) & set(elsewhere.keys)
    assert not blocks.are_given and all(len(tokens) == 32 for tokens in blocks.tokens)


def test_given_keys_are_taken_as_they_are() -> None:
    blocks = named(pb.Chain(keys=bytes(range(32))))
    assert blocks.packed == bytes(range(32))
    assert blocks.are_given


def test_a_chain_without_a_fingerprint_is_of_objects() -> None:
    assert fingerprint_of(pb.Chain(object="x")) is OBJECTS
    assert OBJECTS.payload_bytes() == 0, "payloads of any size"
    assert fingerprint_of(pb.Chain(fingerprint=SMALL.canonical())) == SMALL
    with pytest.raises(KVStoreError, match="fingerprint of their own"):
        fingerprint_of(pb.Chain(object="x", fingerprint=SMALL.canonical()))


@pytest.mark.parametrize(
    "chain",
    [
        pb.Chain(token_ids=[1], keys=bytes(16)),
        pb.Chain(token_ids=[1], object="x"),
        pb.Chain(keys=bytes(16), object="x"),
        pb.Chain(keys=bytes(16), first_block=1),
        pb.Chain(object="x", extras=bytes(16)),
        pb.Chain(object_blocks=2),
        pb.Chain(object="x" * 4097),
        pb.Chain(token_ids=[1] * 8, extras=bytes(16)),
        pb.Chain(group=1),
    ],
)
def test_what_contradicts_itself_is_invalid(chain: pb.Chain) -> None:
    with pytest.raises(KVStoreError) as caught:
        named(chain)
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(
    "chain", [pb.Chain(token_ids=[1] * 404), pb.Chain(keys=bytes(16 * 101)), pb.Chain(object="x", object_blocks=101)]
)
def test_too_many_blocks_are_too_large(chain: pb.Chain) -> None:
    with pytest.raises(KVStoreError, match="limit is 100") as caught:
        named(chain)
    assert caught.value.kind is ErrorKind.TOO_LARGE
