"""The driver of object stores: the contract on a directory and on an S3 server, and what a store may do to it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore_tiers.remote.driver import Driver, WriteResult
from kvstore_tiers.remote.drivers import open_driver
from kvstore_tiers.testing.driver_contract import MIB, DriverContract, Lent, new_name, new_names, noise
from tests.reference.running_daemon import free_port
from tests.reference.s3_server import KEYS, S3Server, s3_server

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")

TIMEOUT_S = 20.0


def opened(url: str, timeout_s: float = TIMEOUT_S, credentials: dict[str, str] | None = None) -> Driver:
    return open_driver(url, timeout_s=timeout_s, threads=2, credentials=credentials or {})


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="moto is not installed")
    with s3_server() as running:
        running.make_bucket("blocks")
        yield running


class TestDirectory(DriverContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/store?index_age_s=0"

    def make_driver(self) -> Driver:
        return opened(self.url)


@pytest.mark.slow
class TestS3(DriverContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: S3Server) -> None:
        self.url = server.url("blocks/contract", index_age_s="0")

    def make_driver(self) -> Driver:
        return opened(self.url, credentials=KEYS)


class Directory:
    """The files of a store in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"file://{path}?index_age_s=0"

    def files(self, folder: str) -> list[Path]:
        return sorted(path for path in (self.path / folder).glob("*") if path.is_file())

    def holds(self, value: bytes) -> bool:
        return any(value in path.read_bytes() for path in self.path.rglob("*") if path.is_file())


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "store")


def test_one_write_is_one_run_and_one_change(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver:
        Lent(driver).write_all(new_names(20), [noise(1000 + n) for n in range(20)])
    assert len(directory.files("runs")) == len(directory.files("log")) == 1


def test_names_that_are_known_cost_no_object(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver:
        lent, names = Lent(driver), new_names(3)
        lent.write_all(names, [noise(100)] * 3)
        assert lent.write_all(names, [noise(100)] * 3) == [WriteResult.EXISTS] * 3
    assert len(directory.files("runs")) == len(directory.files("log")) == 1


def test_no_bytes_of_a_removed_value_are_kept(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver:
        lent, names, values = Lent(driver), new_names(4), [noise(5000, n) for n in range(4)]
        lent.write_all(names, values)
        driver.remove(names[1:2])
        assert [directory.holds(value) for value in values] == [True, False, True, True]
        driver.remove(names)
        assert not any(directory.holds(value) for value in values)
        assert directory.files("runs") == []


def test_an_evicted_value_is_not_found_and_its_run_goes_with_its_last(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver, closing(opened(directory.url)) as other:
        lent, names, values = Lent(driver), new_names(4), [noise(5000, n) for n in range(4)]
        lent.write_all(names, values)
        (run,) = directory.files("runs")
        driver.evict(names[2:])
        assert other.sizes(names) == [5000, 5000, 0, 0]
        assert directory.files("runs") == [run]
        driver.evict(names[:2])
        assert directory.files("runs") == []


def test_an_order_to_remove_reaches_values_that_were_evicted(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver, closing(opened(directory.url)) as other:
        lent, names, values = Lent(driver), new_names(4), [noise(5000, n) for n in range(4)]
        lent.write_all(names, values)
        driver.evict(names[3:])
        assert directory.holds(values[3])
        other.remove(names[3:])
        assert not directory.holds(values[3])
        assert lent.read_all(names[:3], [5000] * 3) == values[:3]


def test_a_run_of_little_use_is_written_anew(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver:
        lent, names, values = Lent(driver), new_names(10), [noise(5000, n) for n in range(10)]
        lent.write_all(names, values)
        driver.evict(names[1:])
        (run,) = directory.files("runs")
        assert run.stat().st_size == 5000
        assert lent.read(names[0], 5000) == values[0]


def test_values_of_a_run_that_is_gone_are_forgotten(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver:
        lent, names = Lent(driver), new_names(3)
        lent.write_all(names, [noise(100, n) for n in range(3)])
        (run,) = directory.files("runs")
        run.unlink()
        assert driver.sizes(names) == [100] * 3
        assert lent.read_all(names, [100] * 3) == [None] * 3
        assert driver.sizes(names) == [0] * 3
        assert lent.write(names[0], noise(100, 7)) is WriteResult.STORED
        assert lent.read(names[0], 100) == noise(100, 7)


def test_a_run_that_was_cut_short_has_no_value(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    with closing(opened(directory.url)) as driver:
        lent, names = Lent(driver), new_names(3)
        lent.write_all(names, [noise(1000, n) for n in range(3)])
        (run,) = directory.files("runs")
        os.truncate(run, 1500)
        assert lent.read_all(names, [1000] * 3) == [None] * 3
    assert "shorter than the index says" in caplog.text


def test_a_new_value_is_found_without_a_listing_until_the_index_is_old(directory: Directory) -> None:
    url = directory.url.replace("index_age_s=0", "index_age_s=3600")
    with closing(opened(url)) as one, closing(opened(url)) as other:
        assert other.sizes(new_names(1)) == [0]
        name = new_name()
        assert Lent(one).write(name, noise(10)) is WriteResult.STORED
        assert (one.sizes([name]), other.sizes([name])) == ([10], [0])
        other.probe()
        assert other.sizes([name]) == [10]
        one.remove([name])
        assert Lent(other).read(name, 10) is None


def test_an_old_index_does_not_store_a_name_twice(directory: Directory) -> None:
    url = directory.url.replace("index_age_s=0", "index_age_s=3600")
    with closing(opened(url)) as one, closing(opened(url)) as other:
        other.probe()
        name = new_name()
        assert Lent(one).write(name, noise(10, 1)) is WriteResult.STORED
        assert Lent(other).write(name, noise(10, 2)) is WriteResult.EXISTS
        assert Lent(other).read(name, 10) == noise(10, 1)
    assert len(directory.files("runs")) == 1


def test_a_store_that_was_emptied_is_written_again(directory: Directory) -> None:
    with closing(opened(directory.url)) as driver:
        lent, names = Lent(driver), new_names(2)
        lent.write_all(names, [noise(100)] * 2)
        for folder in ("runs", "log"):
            shutil.rmtree(directory.path / folder)
        assert lent.read(names[0], 100) is None
        assert lent.write(names[0], noise(100)) is WriteResult.STORED
        with closing(opened(directory.url)) as other:
            assert Lent(other).read(names[0], 100) == noise(100)


def test_no_thread_is_left_after_close(directory: Directory) -> None:
    before = set(threading.enumerate())
    driver = opened(directory.url)
    driver.probe()
    driver.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(OSError, match="closed"):
        driver.sizes(new_names(1))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:///prefix?region=x", "name a bucket"),
        ("s3://bucket?no_such_option=1", "no_such_option"),
        ("s3://bucket?index_age_s=soon", "index_age_s=soon"),
        ("s3://bucket?index_age_s=-1", "0 to 3600"),
        ("file://host/directory", "name a directory"),
        ("file:///tmp/x?region=here", "no option region"),
        ("az://container/prefix", "ccount"),
    ],
)
def test_a_wrong_url_is_explained(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        opened(url)


def test_nothing_listens(tmp_path: Path) -> None:
    url = f"s3://blocks?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1&allow_http=true"
    with closing(opened(url, credentials=KEYS)) as driver, pytest.raises(ConnectionError, match="cannot be reached"):
        driver.sizes(new_names(1))


@pytest.mark.slow
class TestS3Server:
    def test_large_values_are_written_in_parts(self, server: S3Server) -> None:
        with closing(opened(server.url("blocks/parts"), credentials=KEYS)) as driver:
            lent, names = Lent(driver), new_names(12)
            values = [noise(MIB + n, n) for n in range(12)]
            assert lent.write_all(names, values) == [WriteResult.STORED] * 12
            assert lent.read_all(names, [MIB + 100] * 12) == values

    def test_no_such_bucket(self, server: S3Server) -> None:
        with closing(opened(server.url("absent"), credentials=KEYS)) as driver:
            with pytest.raises(OSError, match="no such bucket"):
                driver.probe()
            with pytest.raises(OSError, match="no such bucket"):
                Lent(driver).write(new_name(), noise(10))

    def test_wrong_keys(self) -> None:
        with s3_server(needs_keys=True) as strict:
            strict.make_bucket("blocks")
            with (
                closing(opened(strict.url("blocks"), credentials=KEYS)) as driver,
                pytest.raises(PermissionError, match="check the credentials"),
            ):
                driver.probe()

    def test_a_server_that_is_killed_and_started_again(self) -> None:
        with s3_server() as own:
            own.make_bucket("blocks")
            with closing(opened(own.url("blocks", index_age_s="0"), credentials=KEYS)) as driver:
                lent, name = Lent(driver), new_name()
                assert lent.write(name, noise(100)) is WriteResult.STORED
                own.stop()
                for call in (driver.probe, lambda: lent.read(name, 100), lambda: lent.write(new_name(), noise(10))):
                    with pytest.raises(ConnectionError):
                        call()
                own.restart()
                own.make_bucket("blocks")
                assert lent.read(name, 100) is None
                assert lent.write(name, noise(100)) is WriteResult.STORED
                assert lent.read(name, 100) == noise(100)

    def test_a_server_that_does_not_answer(self) -> None:
        with s3_server() as own:
            own.make_bucket("blocks")
            with closing(opened(own.url("blocks", index_age_s="0"), timeout_s=0.5, credentials=KEYS)) as driver:
                lent, name = Lent(driver), new_name()
                assert lent.write(name, noise(100)) is WriteResult.STORED
                own.process.send_signal(signal.SIGSTOP)
                for call in (driver.probe, lambda: lent.read(name, 100), lambda: lent.write(new_name(), noise(10))):
                    with pytest.raises(TimeoutError):
                        call()
                own.process.send_signal(signal.SIGCONT)
                with closing(opened(own.url("blocks"), credentials=KEYS)) as patient:
                    assert Lent(patient).read(name, 100) == noise(100)

    def test_a_server_that_starts_after_the_driver(self) -> None:
        with s3_server() as own:
            own.stop()
            with closing(opened(own.url("blocks", index_age_s="0"), credentials=KEYS)) as driver:
                with pytest.raises(ConnectionError):
                    driver.probe()
                own.restart()
                own.make_bucket("blocks")
                assert Lent(driver).write(new_name(), noise(10)) is WriteResult.STORED
