"""Copies of an engine that decodes: stores come in slices and at their rate, and hold up neither loads nor an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_client.device import DeviceTransfers, LinkBudget, TwoWayTransfers
from kvstore_client.device.budget import ASSUMED_BYTES_S, SLICE_BYTES
from kvstore_client.errors import KVStoreError
from kvstore_client.payload import PayloadWriter
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_proto.arena import HEADER_BYTES
from tests.reference.stepped_time import SteppedTime
from tests.unit.client.test_client_device_stores import LAYERS, PAGES, Engine

MIB = 1 << 20
RATE = 100 * MIB
BLOCK = 3 * MIB


class Waits:
    """A budget whose time stands still: who waits goes on only when he is told."""

    def __init__(self, stores: int | None = RATE, loads: int | None = None) -> None:
        self.begun = threading.Event()
        self.budget = LinkBudget(stores, loads, clock=lambda: 0.0, wait=self._wait)
        self.budget.decoding(True)

    def _wait(self, changed: threading.Condition, timeout_s: float) -> None:
        self.begun.set()
        changed.wait()


class Thread(threading.Thread):
    """Keeps what its function raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._function, self.error = function, None
        self.start()

    def run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self.error = error  # type: ignore[assignment]


@pytest.fixture
def waits() -> Iterator[Waits]:
    made = Waits()
    yield made
    made.budget.close()


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_put_of_an_engine_that_decodes_comes_whole_in_slices_at_the_rate(is_registered: bool) -> None:
    time = SteppedTime()
    budget = LinkBudget(RATE, clock=time.clock, wait=time.wait)
    time.while_waiting = lambda: budget.decoding(True)
    engine = Engine(BLOCK, budget)
    engine.device.refuses = not is_registered
    engine.transfers.registered.want(engine.staging)
    assert engine.transfers.registered.settle(30.0)
    budget.decoding(True)
    assert engine.put() == PAGES // 2, "a slice has two blocks"
    assert np.array_equal(engine.stored, engine.pages)
    assert engine.device.most_queued_bytes == 2 * BLOCK
    assert time.now_s - 1000 == pytest.approx(((PAGES - 1) * BLOCK - SLICE_BYTES) / RATE)
    budget.decoding(False)
    engine.staging[:] = 0
    before_s = time.now_s
    assert engine.put() == (1 if is_registered else PAGES // 2), "as many at once as the buffer holds"
    assert np.array_equal(engine.stored, engine.pages) and time.now_s == before_s
    engine.means.close()


def test_a_load_does_not_wait_for_the_rate_of_a_store(waits: Waits) -> None:
    engine = Engine(BLOCK, waits.budget)
    storing = Thread(engine.put)
    assert waits.begun.wait(20)
    lease: Any = SimpleNamespace(valid=True)
    assert engine.transfers.load(lease, []).finish()
    assert np.array_equal(engine.stored[:, :2], engine.pages[:, :2]), "what had the buffer is in its slots"
    assert not engine.stored[:, 2:].any() and storing.is_alive()
    waits.budget.decoding(False)
    storing.join(20)
    assert storing.error is None and np.array_equal(engine.stored, engine.pages)
    engine.means.close()


def test_transfers_that_are_closed_keep_no_store_waiting(waits: Waits) -> None:
    engine = Engine(BLOCK)
    anything: Any = engine.device
    transfers = TwoWayTransfers(anything, engine.pool, waits.budget)

    def put() -> None:
        with PayloadWriter(BLOCK) as writer:
            for page in range(PAGES):
                writer.write(engine.staging, page * engine.slot_bytes, transfers.stores.payload_of(page))

    storing = Thread(put)
    assert waits.begun.wait(20)
    transfers.close()
    storing.join(20)
    assert isinstance(storing.error, KVStoreError) and "closed" in str(storing.error)
    assert np.array_equal(engine.stored[:, :2], engine.pages[:, :2]) and not engine.stored[:, 2:].any()
    engine.means.close()


def test_kernels_of_stores_come_behind_those_of_an_engine() -> None:
    engine = Engine(BLOCK)
    anything: Any = engine.device
    engine.device.priorities.clear()
    transfers = TwoWayTransfers(anything, engine.pool)
    loads, stores = engine.device.priorities
    assert loads < 0 < stores, "0 is that of a stream without one"
    transfers.close()
    engine.means.close()


def test_a_store_that_keeps_to_a_rate_is_not_queued_behind_events(waits: Waits) -> None:
    """A load would have to wait for them on the same stream."""
    engine, called = Engine(BLOCK, waits.budget), list[tuple[str, int]]()
    device: Any = engine.device
    device.cuEventSynchronize = lambda event: called.append(("sleeps", event)) or (0,)
    device.cuStreamWaitEvent = lambda _, event, __: called.append(("queues", event)) or (0,)
    slot = engine.staging[HEADER_BYTES : HEADER_BYTES + BLOCK]
    for _ in range(2):
        finish = engine.transfers.payload_of(1, [7, 8])(slot)
        assert finish is not None
        finish()
        waits.budget.decoding(False)
    assert called == [("sleeps", 7), ("sleeps", 8), ("queues", 7), ("queues", 8)]
    engine.means.close()


class Host:
    """Leased blocks, one for each page, in an arena that is registered."""

    valid = True

    def __init__(self, transfers: DeviceTransfers, engine: Engine) -> None:
        self.arena = np.random.default_rng(2).integers(0, 256, PAGES * engine.slot_bytes, dtype=np.uint8)
        self._engine = engine
        transfers.registered.want(self.arena)
        assert transfers.registered.settle(30.0)

    def leased(self, block: int) -> Any:
        offset = block * self._engine.slot_bytes
        return SimpleNamespace(chunk=None, arena=self.arena, offset=offset, payload_bytes=BLOCK)

    @property
    def payloads(self) -> np.ndarray:
        slots = self.arena.reshape(PAGES, -1)[:, HEADER_BYTES:]
        return slots.reshape(PAGES, LAYERS, -1).transpose(1, 0, 2)


def test_loads_that_have_a_rate_come_in_slices() -> None:
    time = SteppedTime()
    budget = LinkBudget(None, RATE, clock=time.clock, wait=time.wait)
    time.while_waiting = lambda: budget.decoding(True)
    engine = Engine(BLOCK, budget)
    lease: Any = Host(engine.transfers, engine)
    budget.decoding(True)
    engine.device.most_queued_bytes = 0
    assert engine.transfers.load(lease, range(PAGES)).finish()
    assert np.array_equal(engine.pages, lease.payloads)
    assert engine.device.most_queued_bytes <= SLICE_BYTES
    slice_bytes = 2 * BLOCK // LAYERS
    assert time.now_s - 1000 == pytest.approx((PAGES * BLOCK - slice_bytes - SLICE_BYTES) / RATE)
    engine.means.close()


def test_a_layer_that_the_engine_waits_for_comes_at_once() -> None:
    waits = Waits(None, RATE)
    engine = Engine(BLOCK, waits.budget)
    lease: Any = Host(engine.transfers, engine)
    load = engine.transfers.load(lease, range(PAGES))
    assert waits.begun.wait(20)
    assert not np.array_equal(engine.pages, lease.payloads)
    load.wait(LAYERS - 1, 0)
    assert load.finish() and np.array_equal(engine.pages, lease.payloads)
    engine.means.close()


def test_a_thread_that_waits_for_all_copies_in_place_of_its_stream_has_them_at_once() -> None:
    waits = Waits(None, RATE)
    engine = Engine(BLOCK, waits.budget)
    lease: Any = Host(engine.transfers, engine)
    load = engine.transfers.load(lease, range(4))
    assert waits.begun.wait(20), "in the second layer"
    engine.device.failures_to_be_current = 1
    waiting = Thread(lambda: load.wait_quietly(0, 0))
    waiting.join(20)
    is_over = not waiting.is_alive()
    waits.budget.close()
    assert is_over and load.finish()
    assert np.array_equal(engine.pages[:, :4], lease.payloads[:, :4])
    engine.means.close()


def test_copy_resources_tell_their_budget_what_stores_move() -> None:
    budget = LinkBudget()
    engine = Engine(BLOCK, budget)
    engine.device.refuses = True
    assert budget.link_bytes_s == ASSUMED_BYTES_S
    engine.put()
    assert budget.link_bytes_s != ASSUMED_BYTES_S
    engine.means.close()


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [([], []), ([3, 3, 3], [[3, 3], [3]]), ([9, 1, 9], [[9], [1], [9]]), ([6], [[6]]), ([2, 4, 1], [[2, 4], [1]])],
)
def test_slices_of_copies(sizes: list[int], parts: list[list[int]]) -> None:
    runs = Runs.of([CopyRun(100 * at, 1000 * at, nbytes) for at, nbytes in enumerate(sizes)])
    slices = runs.slices(6)
    assert [part.nbytes.tolist() for part in slices] == parts
    assert [run for part in slices for run in part.rows()] == list(runs.rows())
