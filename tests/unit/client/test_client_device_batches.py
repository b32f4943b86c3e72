"""Payloads from pages of a pool are copied in one batch, behind their events."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvstore_client.device import DeviceError, DevicePool, PoolPart
from kvstore_client.device.stores import BATCH_RUNS, Stores
from kvstore_cuda.copies import Runs

PAGES, MIB = 6, 1 << 20
PAGE_BYTES = 16 << 10


class NotedStream:
    """Notes what is queued: events, and the bytes of batches."""

    def __init__(self, *, fails: bool = False) -> None:
        self.queued: list[int] = []
        self._fails = fails

    def wait(self, event: int) -> None:
        self.queued.append(event)

    def queue(self, runs: Runs, way: str) -> None:
        self.queued.append(int(runs.nbytes.sum()))

    def synchronize(self) -> None:
        if self._fails:
            raise DeviceError("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


@pytest.mark.parametrize(
    ("after", "queued"),
    [
        ([(), (), ()], [6 * MIB]),
        ([(7,), (7,), (7,)], [7, 6 * MIB]),
        ([(7, 8), (7, 8), (7, 8)], [7, 3 * MIB, 8, 3 * MIB]),
        ([(7,), (7,), (9,)], [7, 4 * MIB, 9, 2 * MIB]),
    ],
)
def test_payloads_behind_the_same_events_are_one_batch(after: list[tuple[int, ...]], queued: list[int]) -> None:
    stream: Any = NotedStream()
    unregistered: Any = SimpleNamespace(take=lambda *_: None)
    pool = DevicePool([[PoolPart(1 << 32, MIB, MIB)], [PoolPart(1 << 33, MIB, MIB)]], PAGES)
    stores = Stores(stream, unregistered, np.zeros(8 * MIB, np.uint8))
    begun = [stores.begin(pool, np.zeros(2 * MIB, np.uint8), page, each) for page, each in enumerate(after)]
    stores.settle()
    assert stream.queued == queued and all(storing.is_over for storing in begun)


def test_a_batch_that_is_large_enough_waits_for_no_other_payload() -> None:
    stream: Any = NotedStream()
    unregistered: Any = SimpleNamespace(take=lambda *_: None)
    layer = [PoolPart((at + 1) << 20, 64, 64) for at in range(BATCH_RUNS // 2)]
    pool = DevicePool([layer], PAGES)
    stores = Stores(stream, unregistered, np.zeros(MIB, np.uint8))
    for page, batches in enumerate((0, 1, 1)):
        stores.begin(pool, np.zeros(pool.block_bytes, np.uint8), page, ())
        assert stream.queued == batches * [2 * pool.block_bytes]
    stores.settle()
    assert stream.queued == [2 * pool.block_bytes, pool.block_bytes]


@pytest.mark.parametrize(
    ("after", "runs_of_a_page", "fails", "seen"),
    [
        ((), 2, False, [(2 * PAGE_BYTES, 1.0)]),
        ((7,), 2, False, []),
        ((), BATCH_RUNS, False, []),
        ((), 2, True, []),
    ],
    ids=["two payloads", "behind an event", "begun before", "failed"],
)
def test_what_moved_is_told_where_nothing_else_took_time(
    after: tuple[int, ...], runs_of_a_page: int, fails: bool, seen: list[tuple[int, float]]
) -> None:
    stream, told, ticks = NotedStream(fails=fails), list[tuple[int, float]](), itertools.count()
    unregistered: Any = SimpleNamespace(take=lambda *_: None)
    each = PAGE_BYTES // runs_of_a_page
    pool = DevicePool([[PoolPart((at + 1) << 20, each, each) for at in range(runs_of_a_page)]], PAGES)
    stores = Stores(
        cast(Any, stream), unregistered, np.zeros(MIB, np.uint8),
        seen=lambda nbytes, seconds: told.append((nbytes, seconds)), clock=lambda: float(next(ticks)),
    )  # fmt: skip
    for page in range(2):
        stores.begin(pool, np.zeros(PAGE_BYTES, np.uint8), page, after)
    stores.settle()
    assert told == seen


def test_slices_are_waited_for_when_they_are_large_enough() -> None:
    stream: Any = NotedStream()
    unregistered: Any = SimpleNamespace(take=lambda *_: None)
    pool = DevicePool([[PoolPart((at + 1) << 20, 64, 64) for at in range(BATCH_RUNS)]], PAGES)
    stores = Stores(stream, unregistered, np.zeros(MIB, np.uint8))
    begun = [
        stores.begin(pool, np.zeros(pool.block_bytes, np.uint8), page, (), slice_bytes=40_000) for page in range(4)
    ]
    assert [each.is_over for each in begun] == [True, True, True, False]
    assert stream.queued == [3 * pool.block_bytes]
    stores.settle()
    assert begun[3].is_over and stream.queued == [3 * pool.block_bytes, pool.block_bytes]
