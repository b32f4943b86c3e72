"""The reference driver keeps the contract that real ones are judged by, and a store that is full or gone says so."""

from __future__ import annotations

import pytest

from kvstore_tiers.remote.driver import Driver, WriteResult
from kvstore_tiers.testing.driver_contract import DriverContract, Lent, new_names, noise
from kvstore_tiers.testing.memory_driver import MemoryDriver, MemoryStore


class TestMemoryDriver(DriverContract):
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.store = MemoryStore()

    def make_driver(self) -> Driver:
        return MemoryDriver(self.store)


def test_a_full_store_refuses() -> None:
    lent = Lent(MemoryDriver(MemoryStore(capacity_bytes=250)))
    names = new_names(4)
    written = lent.write_all(names, [noise(100), noise(100), noise(100), noise(50)])
    assert written == [WriteResult.STORED, WriteResult.STORED, WriteResult.NO_ROOM, WriteResult.STORED]
    lent.driver.remove(names[:1])
    assert lent.write(names[2], noise(100)) is WriteResult.STORED


def test_a_full_store_that_evicts_forgets_the_oldest() -> None:
    lent = Lent(MemoryDriver(MemoryStore(capacity_bytes=250, evicts=True)))
    names = new_names(3)
    assert lent.write_all(names, [noise(100)] * 3) == [WriteResult.STORED] * 3
    assert lent.driver.sizes(names) == [0, 100, 100]
    assert lent.write(new_names(1)[0], noise(251)) is WriteResult.NO_ROOM


def test_a_store_that_is_gone_is_an_error() -> None:
    store = MemoryStore()
    lent = Lent(MemoryDriver(store))
    store.is_reachable = False
    with pytest.raises(ConnectionError):
        lent.driver.sizes(new_names(1))
    store.is_reachable = True
    assert lent.driver.sizes(new_names(1)) == [0]
