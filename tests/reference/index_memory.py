"""A lookup index for tests of one side: the writer's table, and the reader over the same memory."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from kvstore_client.handshake import GrantedIndex
from kvstore_client.lookup_index import LookupIndex, map_index
from kvstore_proto.identity import BlockKeys
from kvstore_proto.lookup_index import IndexLayout, IndexState
from kvstored.clients.lookup_index import IndexTable

TENANT = bytes(range(16))


def table_of(buckets: int = 1, seed: int = 7, state: IndexState = IndexState.SERVING) -> IndexTable:
    table = IndexTable(IndexLayout(buckets, seed, TENANT))
    table.set_state(state)
    return table


def reader_of(table: IndexTable) -> LookupIndex:
    """Return a reader as a client has it: through a read-only descriptor."""
    index = map_index(GrantedIndex(table.layout.size_bytes, table.readonly_fd()))
    assert isinstance(index, LookupIndex), index
    return index


def image_of(table: IndexTable) -> npt.NDArray[np.uint8]:
    """A copy of the whole memory, to be damaged or handed to another reader."""
    descriptor = table.readonly_fd()
    try:
        return np.frombuffer(os.pread(descriptor, table.layout.size_bytes, 0), np.uint8).copy()
    finally:
        os.close(descriptor)


def index_over(image: npt.NDArray[np.uint8], table: IndexTable) -> LookupIndex:
    """A reader over a copy, which the test may change while it is read."""
    return LookupIndex(image.data, table.layout)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def run_of(*numbers: int) -> BlockKeys:
    return BlockKeys(b"".join(map(key_of, numbers)))
