"""The driver of Mooncake Store against a real master and a real node, over TCP in a network of the test's own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers.remote.driver import Driver, MemoryHeld, Placed, WriteResult
from kvstore_tiers.remote.drivers import open_driver
from kvstore_tiers.testing.driver_contract import MIB, DriverContract, Lent, new_name, new_names, noise
from tests.reference.own_network import own_network
from tests.reference.remote_servers import MooncakeStore, mooncake_store, skip_without_mooncake

TIMEOUT_S = 10.0
pytestmark = pytest.mark.slow  # a client of Mooncake takes a second to close


def opened(store: MooncakeStore, query: str = "", timeout_s: float = TIMEOUT_S) -> Driver:
    return open_driver(store.url + query, timeout_s=timeout_s, threads=4, credentials={})


@pytest.fixture(autouse=True, scope="module")
def _network() -> Iterator[None]:
    skip_without_mooncake()
    with own_network():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MooncakeStore]:
    with mooncake_store(tmp_path) as running:
        yield running


class TestMooncakeDriver(DriverContract):
    store: MooncakeStore

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _store(cls, tmp_path_factory: pytest.TempPathFactory, _network: None) -> Iterator[None]:
        with mooncake_store(tmp_path_factory.mktemp("mooncake"), 512 << 20) as cls.store:
            yield

    def make_driver(self) -> Driver:
        return opened(self.store)


def test_a_driver_opens_before_its_master(store: MooncakeStore) -> None:
    store.master.kill()
    with closing(opened(store)) as driver:
        lent = Lent(driver)
        with pytest.raises(ConnectionError, match=r"Mooncake's master at 127\.0\.0\.1:\d+ is not reached"):
            driver.probe()
        store.master.start()
        driver.probe()
        assert lent.read(new_name(), 10) is None


def test_a_killed_master_is_found_again(store: MooncakeStore) -> None:
    with closing(opened(store, timeout_s=2)) as driver:
        lent, name = Lent(driver), new_name()
        assert lent.write(name, noise(100)) is WriteResult.STORED
        store.master.kill()
        for call in (driver.probe, lambda: driver.sizes([name]), lambda: lent.read(name, 100)):
            with pytest.raises((ConnectionError, TimeoutError)) as failed:
                call()
            assert not isinstance(failed.value, MemoryHeld)
        with pytest.raises(OSError):
            lent.write(name, noise(100))
        store.master.start()
        assert lent.read(name, 100) is None
        store.holder.kill()  # a new one is quicker than the old one's next heartbeat
        store.holder.start()
        assert lent.write(new_name(), noise(100)) is WriteResult.STORED


def test_a_frozen_master_is_given_up_in_time(store: MooncakeStore) -> None:
    with closing(opened(store, timeout_s=0.5)) as driver:
        lent, name = Lent(driver), new_name()
        assert lent.write(name, noise(100)) is WriteResult.STORED
        store.master.freeze()
        for call in (
            driver.probe,
            lambda: driver.sizes([name]),
            lambda: lent.read(name, 100),
            lambda: lent.write(new_name(), noise(100)),
            lambda: driver.remove(new_names(1)),
        ):
            with pytest.raises(TimeoutError) as failed:
                call()
            assert not isinstance(failed.value, MemoryHeld)
        store.master.thaw()
        assert lent.read(name, 100) == noise(100)


def test_a_read_from_a_frozen_node_says_that_the_memory_is_held(store: MooncakeStore) -> None:
    with closing(opened(store, timeout_s=0.5)) as driver:
        lent, name = Lent(driver), new_name()
        assert lent.write(name, noise(MIB)) is WriteResult.STORED
        store.holder.freeze()
        with pytest.raises(MemoryHeld, match="may still write"):
            lent.read(name, MIB)
        with pytest.raises(TimeoutError):
            lent.write(new_name(), noise(MIB))
        store.holder.thaw()


def test_a_write_that_was_given_up_is_never_seen(store: MooncakeStore) -> None:
    with closing(opened(store, timeout_s=0.5)) as driver, closing(opened(store)) as other:
        lent, reader, name = Lent(driver), Lent(other), new_name()
        driver.probe()
        piece = lent.filled(noise(4 * MIB))
        store.holder.freeze()
        with pytest.raises(TimeoutError):
            driver.write([Placed(name, piece)])
        piece[:] = bytes(4 * MIB)  # the memory is somebody else's from here on
        store.holder.thaw()
        assert lent.write(new_name(), noise(100)) is WriteResult.STORED
        assert reader.read(name, 4 * MIB) is None


_WRITER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("begun" if store.batch_put_session_start([sys.argv[2]], [100]) == [0] else "refused", flush=True)
sys.stdin.read()
"""


def test_a_value_that_another_node_only_began_is_not_stored(store: MooncakeStore) -> None:
    name = new_name()
    command = [sys.executable, "-c", _WRITER, store.master.address, name]
    with (
        closing(opened(store)) as driver,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer,
    ):
        lent = Lent(driver)
        assert writer.stdout is not None
        while (line := writer.stdout.readline()) and line != "begun\n":
            assert line != "refused\n"
        assert lent.write(name, noise(100)) is WriteResult.BEGUN
        writer.kill()
        assert lent.write(name, noise(100)) is WriteResult.BEGUN, "the master keeps the name for a dead node"
        other = new_name()
        assert lent.write_all([name, other, other], [noise(100)] * 3) == [
            WriteResult.BEGUN,
            WriteResult.STORED,
            WriteResult.EXISTS,
        ]
        assert lent.read(name, 100) is None and lent.read(other, 100) == noise(100)
        driver.remove([other])


def test_a_value_that_another_thread_is_writing_exists_once_it_can_be_read(store: MooncakeStore) -> None:
    with closing(opened(store)) as driver:
        lent, name = Lent(driver), new_name()
        piece = lent.filled(noise(4 * MIB))
        answers: list[WriteResult] = []
        threads = [
            threading.Thread(target=lambda: answers.extend(driver.write([Placed(name, piece)]))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answer.value for answer in answers) == ["exists"] * 3 + ["stored"]
        assert lent.read(name, 4 * MIB) == noise(4 * MIB)


def test_a_store_without_memory_refuses(store: MooncakeStore) -> None:
    with closing(opened(store)) as driver:
        lent, names = Lent(driver), new_names(2)
        lent.write_all(names, [noise(100)] * 2)
        store.holder.stop()
        assert lent.read_all(names, [100] * 2) == [None, None]
        assert lent.write(new_name(), noise(100)) is WriteResult.NO_ROOM


def test_a_store_full_of_leased_values_refuses(tmp_path: Path) -> None:
    with mooncake_store(tmp_path, 64 << 20, default_kv_lease_ttl="60000") as store, closing(opened(store)) as driver:
        lent, names = Lent(driver, 256 << 20), new_names(80)
        written = []
        for number, name in enumerate(names):
            written.append(lent.write(name, noise(MIB, number)))
            driver.sizes([name])
        assert set(written) == {WriteResult.STORED, WriteResult.NO_ROOM}
        stored = [name for name, was in zip(names, written, strict=True) if was is WriteResult.STORED]
        assert lent.read(stored[0], MIB) == noise(MIB, names.index(stored[0]))
        driver.remove(stored)
        assert lent.write(names[-1], noise(MIB)) is WriteResult.STORED


def test_a_store_of_values_that_nobody_reads_evicts(tmp_path: Path) -> None:
    with mooncake_store(tmp_path, 64 << 20) as store, closing(opened(store)) as driver:
        lent = Lent(driver)
        piece = lent.filled(noise(MIB))
        assert driver.evicts
        written = [driver.write([Placed(name, piece)])[0] for name in new_names(100)]
        assert written.count(WriteResult.STORED) > 64


def test_a_node_may_lend_memory_itself(store: MooncakeStore) -> None:
    store.holder.stop()
    with closing(opened(store, "?segment=64MiB&local=127.0.0.1")) as driver, closing(opened(store)) as other:
        lent, reader, name = Lent(driver), Lent(other), new_name()
        assert lent.write(name, noise(MIB)) is WriteResult.STORED
        assert lent.read(name, MIB) == noise(MIB)
        assert reader.read(name, MIB) == noise(MIB)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mooncake://", "is not mooncake://MASTER:PORT"),
        ("mooncake://host/path", "is not mooncake://MASTER:PORT"),
        ("mooncake://host?size=1", "takes no 'size'"),
        ("mooncake://host?protocol=udp", "tcp or rdma"),
        ("mooncake://host?protocol=rdma", "needs device="),
        ("mooncake://host?segment=much", "much"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_driver(url, timeout_s=1, threads=1, credentials={})


def test_credentials_are_refused() -> None:
    with pytest.raises(ValueError, match="no credentials"):
        open_driver("mooncake://host", timeout_s=1, threads=1, credentials={"password": "x"})
