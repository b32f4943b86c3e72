"""The driver of object stores on a store in memory that loses an answer, fails a deletion, or is full."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing

import pytest

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")

from kvstore_tiers.remote.driver import Driver, WriteResult
from kvstore_tiers.remote.drivers.object_store import ObjectStoreDriver
from kvstore_tiers.remote.drivers.runs.reading import RUN_BYTES
from kvstore_tiers.testing.driver_contract import MIB, DriverContract, Lent, new_name, new_names, noise
from tests.remote.memory_objects import MemoryObjects


class FaultyObjects(MemoryObjects):
    """`failing`: the verb whose next request fails. A creation fails after it was done."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = ""
        self.room = 1 << 40

    def _fails(self, verb: str) -> bool:
        fails, self.failing = self.failing == verb, "" if self.failing == verb else self.failing
        return fails

    async def create(self, key: str, content: bytes) -> bool:
        created = await super().create(key, content)
        return created and not self._fails("create")  # what a client sees that sent it twice

    async def put(self, key: str, content: bytes) -> None:
        if self._fails("put"):
            raise ConnectionError("the connection broke")
        if len(content) > self.room:
            raise OSError(errno.ENOSPC, "full")
        await super().put(key, content)

    async def delete(self, keys: Sequence[str]) -> None:
        if self._fails("delete"):
            raise ConnectionError("the connection broke")
        await super().delete(keys)


def opened(objects: MemoryObjects) -> ObjectStoreDriver:
    return ObjectStoreDriver(objects, timeout_s=10, index_age_s=0)


class TestMemory(DriverContract):
    @pytest.fixture(autouse=True)
    def _objects(self) -> None:
        self.objects = MemoryObjects()

    def make_driver(self) -> Driver:
        return opened(self.objects)


def test_an_answer_that_is_lost_is_no_other_writer() -> None:
    objects = FaultyObjects()
    with closing(opened(objects)) as driver:
        objects.failing = "create"
        names = new_names(3)
        assert Lent(driver).write_all(names, [noise(100)] * 3) == [WriteResult.STORED] * 3
        assert driver.sizes(names) == [100] * 3
    assert len(objects.keys("log")) == 1


def test_a_removal_that_failed_is_finished_by_the_next() -> None:
    objects = FaultyObjects()
    with closing(opened(objects)) as driver:
        name = new_name()
        Lent(driver).write(name, noise(100))
        objects.failing = "delete"
        with pytest.raises(ConnectionError):
            driver.remove([name])
        assert len(objects.keys("runs")) == 1
        driver.remove([name])
        assert objects.keys("runs") == []


def test_a_write_that_failed_left_no_value() -> None:
    objects = FaultyObjects()
    with closing(opened(objects)) as driver:
        objects.failing = "put"
        name = new_name()
        with pytest.raises(ConnectionError):
            Lent(driver).write(name, noise(100))
        assert (driver.sizes([name]), objects.keys("log")) == ([0], [])
        assert Lent(driver).write(name, noise(100)) is WriteResult.STORED


def test_a_full_store_has_no_room() -> None:
    objects = FaultyObjects()
    with closing(opened(objects)) as driver:
        lent, names = Lent(driver), new_names(2)
        assert lent.write(names[0], noise(100)) is WriteResult.STORED
        objects.room = 50
        assert lent.write_all(names, [noise(100)] * 2) == [WriteResult.EXISTS, WriteResult.NO_ROOM]
        assert lent.read(names[0], 100) == noise(100)


def test_a_long_write_is_several_runs_and_one_change() -> None:
    objects = MemoryObjects()
    with closing(opened(objects)) as driver:
        Lent(driver).write_all(new_names(12), [noise(MIB)] * 12)
    assert len(objects.keys("log")) == 1
    assert sorted(len(objects.contents[key]) for key in objects.keys("runs")) == [4 * MIB, RUN_BYTES]


def test_a_read_asks_once_for_neighbours() -> None:
    objects = MemoryObjects()
    with closing(opened(objects)) as driver:
        lent, names = Lent(driver), new_names(20)
        lent.write_all(names, [noise(1000)] * 20)
        objects.requests.clear()
        assert lent.read_all(names, [1000] * 20) == [noise(1000)] * 20
    assert [request.partition("/")[0] for request in objects.requests] == ["get runs"]
