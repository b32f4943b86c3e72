"""Which payloads from pages of a pool are copied in one batch, and behind which events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_client.device import DevicePool, PoolPart
from kvstore_client.device.stores import BATCH_RUNS, Stores
from kvstore_proto.cuda_copies import Runs

PAGES, MIB = 6, 1 << 20


class NotedStream:
    """Notes what is queued: events, and the bytes of batches."""

    def __init__(self) -> None:
        self.queued: list[int] = []

    def wait(self, event: int) -> None:
        self.queued.append(event)

    def queue(self, runs: Runs, way: str) -> None:
        self.queued.append(int(runs.nbytes.sum()))

    def synchronize(self) -> None:
        pass


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
