"""The bound on unary calls at once, and the bytes of a message as a put sees them."""

from __future__ import annotations

import ctypes

import pytest

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstored.dataplane.inline import InlineBlocks
from kvstored.rpc.unary import CallLimit


def test_no_more_calls_than_allowed_and_each_end_makes_room() -> None:
    limit = CallLimit(2)
    with limit:
        with limit:
            with pytest.raises(KVStoreError) as caught, limit:
                pytest.fail("a third call")
            assert caught.value.kind is ErrorKind.THROTTLED and caught.value.retry_after_ms > 0
        with limit:
            pass
    with pytest.raises(ZeroDivisionError), limit:
        _ = 1 // 0
    with limit, limit:
        pass


def test_inline_blocks_lie_where_their_bytes_are() -> None:
    staged = InlineBlocks()
    assert staged.allocate(8192) is None, "nothing was offered"
    payload = bytes(range(256)) * 4
    staged.offer(b"tokens", payload)
    offset = staged.allocate(8192)
    assert offset is not None
    assert staged.allocate(8192) is None, "an offer is taken up once"
    assert staged.tokens_at(offset) == b"tokens"
    segment = staged.payload_at(offset, len(payload))
    staged.free(offset, 8192)
    del payload
    assert ctypes.string_at(segment.address, segment.nbytes) == bytes(range(256)) * 4, "the segment keeps its bytes"
