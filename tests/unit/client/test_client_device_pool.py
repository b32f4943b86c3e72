"""A pool on the device: where each layer of a page is, from addresses or from arrays, and what cannot be one."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_client.device import DevicePool, PoolPart
from kvstore_client.errors import KVStoreError
from kvstore_client.get import Get
from kvstore_client.keys import KeyChains
from kvstore_client.prefix import KeyedPrefix
from kvstore_client.results import REASON_VERIFY_FAILED, ClientCounters
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES
from kvstore_proto.v1 import kvstore_pb2 as wire
from tests.reference.conversations import model, tokens_of
from tests.reference.device_pool import pieces


@dataclass
class Array:
    __cuda_array_interface__: dict[str, Any]


def array(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, address: int = 4096) -> Array:
    return Array({"shape": shape, "typestr": "<f2", "data": (address, False), "strides": strides, "version": 3})


def test_arrays_say_where_each_layer_of_a_page_is() -> None:
    pool = DevicePool.from_tensors([(array((3, 4, 8)), array((3, 4, 8), (128, 16, 2), 8192)), array((3, 8, 8))])
    assert (pool.pages, pool.layer_bytes, pool.block_bytes) == (3, 128, 256)
    assert pieces(pool, 0, 2) == [(4096 + 2 * 64, 0, 64), (8192 + 2 * 128, 64, 64)]
    assert pieces(pool, 1, 1) == [(4096 + 128, 128, 128)]


def test_layers_given_as_parts_may_have_different_sizes() -> None:
    small = [PoolPart(16384, 16, 16)]
    pool = DevicePool([[PoolPart(4096, 64, 64), PoolPart(8192, 32, 32)], small, small], 3)
    assert (pool.layer_bytes, pool.block_bytes) == (96, 128)
    assert [pool.extent(layer) for layer in range(3)] == [(0, 96), (96, 16), (112, 16)]
    assert pieces(pool, 2, 2) == [(16384 + 2 * 16, 112, 16)]


def test_a_block_of_several_pages_has_each_parts_bytes_of_all_of_them() -> None:
    """The pages hold an engine's blocks of K and V: in the payload all of K comes before V."""
    pool = DevicePool([[PoolPart(4096, 64, 64), PoolPart(8192, 32, 32)]] * 2, 5, block_pages=3)
    assert (pool.layer_bytes, pool.block_bytes, pool.extent(1)) == (288, 576, (288, 288))
    k, v = [(4096 + page * 64, 64) for page in (4, 0, 2)], [(8192 + page * 32, 32) for page in (4, 0, 2)]
    found = sorted(pieces(pool, 1, [4, 0, 2]), key=lambda piece: piece.offset)
    assert [(piece.address, piece.nbytes) for piece in found] == k + v
    assert [piece.offset for piece in found] == [288, 352, 416, 480, 512, 544]
    with pytest.raises(IndexError):
        pool.pages_of([4, 5, 0])
    with pytest.raises(KVStoreError, match="a block has 3 pages of this pool, not 1"):
        pool.pages_of(4)


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_that_is_not_there_has_no_place(page: int) -> None:
    with pytest.raises(IndexError):
        pieces(DevicePool([[PoolPart(4096, 64, 64)]], 3), 0, page)


@pytest.mark.parametrize(
    "layers",
    [
        [array((3, 4, 8), (128, 32, 2))],  # gaps inside of a page
        [array((3, 4, 8), (32, 16, 2))],  # pages overlap
        [array((3, 4, 8)), array((2, 4, 8))],  # not equally many pages
        [array((3, 4, 8)), array((3, 4, 4))],  # layers of two sizes
        [array((0, 4, 8))],
        [array((3, 4, 8), address=0)],
        [np.zeros((3, 4))],  # not on a device
        [],
    ],
)
def test_what_cannot_be_a_pool_is_refused(layers: list[Any]) -> None:
    with pytest.raises(KVStoreError):
        DevicePool.from_tensors(layers)


def test_neighbours_on_both_sides_are_one_copy() -> None:
    a, b, c = CopyRun(0, 100, 8), CopyRun(8, 108, 8), CopyRun(16, 200, 8)
    assert list(Runs.of([c, a, b]).merged().rows()) == [CopyRun(0, 100, 16), c]


@pytest.mark.parametrize(("offset", "blocks"), [(0, 1), (HEADER_BYTES, 0)])
def test_a_payload_that_ends_outside_of_its_chunk_is_not_leased(offset: int, blocks: int) -> None:
    fingerprint = model()
    chunk = SimpleNamespace(address=1 << 40, nbytes=HEADER_BYTES + fingerprint.payload_bytes())
    page = np.zeros(HEADER_BYTES, np.uint8)
    daemon: Any = SimpleNamespace(
        device_arenas=SimpleNamespace(headers=lambda *_: {0: (chunk, page)}, is_off=False),
        max_keys=8, exact=True, hold=lambda _: None, release=lambda _: None,
    )  # fmt: skip
    chain = KeyChains(fingerprint, [b"r" * 16]).chain(tokens_of(1, 1), None, 0)
    get = Get(KeyedPrefix(daemon, fingerprint, fingerprint.groups[0], chain), ClientCounters(), 1.0, verify=False)
    reply = wire.AcquireReply(
        lease_id=1, blocks=1, arena_ids=[DEVICE_ARENAS], offsets=[offset], generations=[1],
        payload_bytes=[fingerprint.payload_bytes()], expires_in_ms=10_000,
    )  # fmt: skip
    lease = get.lease_of(reply, 1.0)
    assert (lease.blocks, lease.reason) == (blocks, "" if blocks else REASON_VERIFY_FAILED)
