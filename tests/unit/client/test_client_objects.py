"""Named objects: names become keys, bytes become blocks, and no damaged head is taken for one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.objects.named import payloads_of
from kvstore_proto import objects
from kvstore_proto.objects import (
    HEAD_BYTES,
    NAME_TOKENS,
    OBJECTS,
    ChecksumKind,
    ObjectHead,
    content_of,
    head_of,
    object_tokens,
    read_head,
)

GREETING_TOKENS = [1613592688, 1973948422, -491899100, 632835806, 1936648854, -1698475384, 1803006043, 744442843]
OBJECTS_DIGEST = "03007ed7122b8ebacf09775a964d38de9d29c3fd745cbd8376803df789982d98"
HELLO_HEAD_SHA256 = "4b564f3101000100250000000000000005000000000000002cf24dba5fb0a30e"
HELLO_HEAD = "4b564f310100000025000000000000000500000000000000fddc625c55e85595"


def assembled(head: ObjectHead, data: npt.NDArray[np.uint8]) -> list[bytes]:
    """The payloads as they would be in their blocks."""
    blocks = []
    for number, payload in enumerate(payloads_of(head, data)):
        if callable(payload):
            destination = np.zeros(head.payload_bytes(number), np.uint8)
            payload(destination)
            blocks.append(destination.tobytes())
        else:
            blocks.append(np.asarray(payload).tobytes())
    return blocks


@given(st.binary(max_size=5000), st.integers(HEAD_BYTES + 1, 600), st.sampled_from(ChecksumKind))
def test_an_object_is_its_blocks_less_the_head(content: bytes, block_bytes: int, kind: ChecksumKind) -> None:
    data = np.frombuffer(content, np.uint8)
    head = head_of(content, block_bytes, kind)
    blocks = assembled(head, data)
    assert len(blocks) == head.blocks
    assert [len(block) for block in blocks] == [head.payload_bytes(number) for number in range(head.blocks)]
    assert b"".join(blocks)[HEAD_BYTES:] == content
    assert read_head(blocks[0]) == head
    assert objects.payloads_of(content, head) == blocks
    assert content_of(blocks) == content and head.is_of(content)


def test_bytes_that_are_not_the_whole_object_are_no_object() -> None:
    content = bytes(range(200))
    blocks = objects.payloads_of(content, head_of(content, 64))
    assert content_of(blocks[:-1]) is None
    assert content_of([*blocks[:-1], bytes(len(blocks[-1]))]) is None
    assert content_of([]) is None
    other = head_of(content[::-1], 64)
    assert not other.is_of(content)


@given(st.binary(max_size=200))
def test_other_bytes_are_no_head(junk: bytes) -> None:
    assert read_head(junk) is None


def test_a_head_that_names_absurd_sizes_is_none() -> None:
    for head in (ObjectHead(1 << 60, 4096, 0), ObjectHead(10, HEAD_BYTES, 0), ObjectHead(10, 0, 0)):
        assert read_head(head.pack()) is None


@given(st.text(max_size=50), st.text(max_size=50))
def test_names_are_apart_and_longer_objects_begin_alike(one: str, other: str) -> None:
    assert len(object_tokens(one, 3)) == 3 * NAME_TOKENS == 3 * OBJECTS.block_tokens
    assert np.array_equal(object_tokens(one, 3)[:NAME_TOKENS], object_tokens(one, 1))
    assert np.array_equal(object_tokens(one, 2), object_tokens(other, 2)) == (one == other)


def test_the_format_stays_what_it_is() -> None:
    """Stored objects must be found by later releases: these values never change."""
    assert object_tokens("greeting", 1).tolist() == GREETING_TOKENS
    assert OBJECTS.digest().hex() == OBJECTS_DIGEST
    assert head_of(b"hello").pack().hex() == HELLO_HEAD
    assert head_of(b"hello", kind=ChecksumKind.SHA256).pack().hex() == HELLO_HEAD_SHA256
