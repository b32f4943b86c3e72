"""The contract that every driver of a remote store must keep, as tests. Subclass `DriverContract` and give
`make_driver`.

Owns the obligations of kvstore_tiers.remote.driver, one test each. Never knows a driver's kind. Every test uses names
of its own, so one store may serve a whole run.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from mmap import mmap

import numpy as np
import pytest

from kvstore_tiers.remote.driver import NAME_CHARACTERS, Driver, Placed, WriteResult

LENT_BYTES = 64 << 20
MIB = 1 << 20
LENGTHS = (1, 2, 63, 4096, 65_537, MIB, 3 * MIB + 1)


def new_name() -> str:
    return secrets.token_hex(NAME_CHARACTERS // 2)


def new_names(count: int) -> list[str]:
    return [new_name() for _ in range(count)]


def noise(nbytes: int, seed: int = 0) -> bytes:
    """Return `nbytes` pseudo-random bytes, with zeros and line ends among them. Calls with equal arguments return equal
    bytes.
    """
    return np.random.default_rng((seed, nbytes)).bytes(nbytes)


class Lent:
    """A driver of a remote store for a test, together with `lent_bytes` of memory that was lent to it. All values that
    the test writes or reads are in this memory.
    """

    def __init__(self, driver: Driver, lent_bytes: int = LENT_BYTES) -> None:
        self.driver = driver
        self._memory = memoryview(mmap(-1, lent_bytes))
        self._lock = threading.Lock()
        self._taken = 0
        driver.lend(self._memory)

    def piece(self, nbytes: int) -> memoryview:
        """Return a part of `nbytes` bytes of the lent memory that no earlier call returned."""
        with self._lock:
            start, self._taken = self._taken, self._taken + nbytes
        assert self._taken <= len(self._memory), "the test needs more lent memory"
        return self._memory[start : start + nbytes]

    def filled(self, value: bytes) -> memoryview:
        piece = self.piece(len(value))
        piece[:] = value
        return piece

    def write(self, name: str, value: bytes) -> WriteResult:
        (written,) = self.driver.write([Placed(name, self.filled(value))])
        return written

    def write_all(self, names: Sequence[str], values: Sequence[bytes]) -> list[WriteResult]:
        return self.driver.write([Placed(name, self.filled(value)) for name, value in zip(names, values, strict=True)])

    def read(self, name: str, room: int) -> bytes | None:
        """Return the value called `name`; None if the store has none. It may have at most `room` bytes."""
        (value,) = self.read_all([name], [room])
        return value

    def read_all(self, names: Sequence[str], rooms: Sequence[int]) -> list[bytes | None]:
        places = [self.piece(room) for room in rooms]
        sizes = self.driver.read([Placed(name, place) for name, place in zip(names, places, strict=True)])
        return [bytes(place[:size]) if size else None for place, size in zip(places, sizes, strict=True)]


class DriverContract:
    """A test suite that every driver of a remote store must pass. A subclass defines `make_driver`. Each call of it
    opens another driver of the same store; the tests close them.
    """

    def make_driver(self) -> Driver:
        raise TypeError("a subclass of DriverContract must define make_driver")

    @contextmanager
    def lent_driver(self, lent_bytes: int = LENT_BYTES) -> Iterator[Lent]:
        with closing(self.make_driver()) as driver:
            yield Lent(driver, lent_bytes)

    def test_it_says_what_it_takes(self) -> None:
        with self.lent_driver() as lent:
            lent.driver.probe()
            assert lent.driver.largest_value_bytes >= max(LENGTHS)
            assert isinstance(lent.driver.evicts, bool)

    @pytest.mark.parametrize("nbytes", LENGTHS)
    def test_a_value_comes_back_as_it_was_written(self, nbytes: int) -> None:
        with self.lent_driver() as lent:
            name, value = new_name(), noise(nbytes)
            assert lent.write(name, value) is WriteResult.STORED
            assert lent.driver.sizes([name]) == [nbytes]
            assert lent.read(name, nbytes) == value

    @pytest.mark.parametrize("byte", [0, 10, 13, 0x80, 0xFF])
    def test_every_byte_is_a_byte(self, byte: int) -> None:
        with self.lent_driver() as lent:
            value = bytes([byte]) * 1000
            name = new_name()
            assert lent.write(name, value) is WriteResult.STORED
            assert lent.read(name, len(value)) == value

    def test_another_driver_finds_what_one_wrote(self) -> None:
        with self.lent_driver() as one, self.lent_driver() as other:
            name = new_name()
            assert other.read(name, 100) is None
            assert one.write(name, noise(100)) is WriteResult.STORED
            assert other.driver.sizes([name]) == [100]
            assert other.read(name, 100) == noise(100)

    def test_a_value_outlives_its_driver(self) -> None:
        name = new_name()
        with self.lent_driver() as lent:
            assert lent.write(name, noise(100)) is WriteResult.STORED
        with self.lent_driver() as lent:
            assert lent.read(name, 100) == noise(100)

    def test_an_unknown_name_has_no_value(self) -> None:
        with self.lent_driver() as lent:
            name = new_name()
            place = lent.filled(b"before")
            assert lent.driver.sizes([name]) == [0]
            assert lent.driver.read([Placed(name, place)]) == [0]
            assert place.tobytes() == b"before"
            lent.driver.remove([name])

    def test_nothing_is_asked_of_nothing(self) -> None:
        with self.lent_driver() as lent:
            assert lent.driver.sizes([]) == []
            assert lent.driver.read([]) == []
            assert lent.driver.write([]) == []
            lent.driver.remove([])

    def test_answers_are_in_the_order_of_the_names(self) -> None:
        with self.lent_driver() as lent:
            names = new_names(40)
            values = [noise(1 + 997 * number % 5000, number) for number in range(40)]
            known = [number % 3 != 1 for number in range(40)]
            written = lent.write_all(
                [name for name, is_known in zip(names, known, strict=True) if is_known],
                [value for value, is_known in zip(values, known, strict=True) if is_known],
            )
            assert set(written) == {WriteResult.STORED}
            sizes = [len(value) if is_known else 0 for value, is_known in zip(values, known, strict=True)]
            assert lent.driver.sizes(names) == sizes
            wanted = [value if is_known else None for value, is_known in zip(values, known, strict=True)]
            assert lent.read_all(names, [5000] * 40) == wanted

    def test_a_batch_of_large_values(self) -> None:
        with self.lent_driver() as lent:
            names, values = new_names(16), [noise(MIB + number, number) for number in range(16)]
            assert lent.write_all(names, values) == [WriteResult.STORED] * 16
            assert lent.read_all(names, [MIB + 100] * 16) == values

    def test_one_name_may_be_asked_for_twice(self) -> None:
        with self.lent_driver() as lent:
            name = new_name()
            assert lent.write(name, noise(100)) is WriteResult.STORED
            assert lent.driver.sizes([name, name]) == [100, 100]
            assert lent.read_all([name, name], [100, 200]) == [noise(100)] * 2

    def test_only_the_front_of_the_memory_is_written(self) -> None:
        with self.lent_driver() as lent:
            name, value = new_name(), noise(100)
            lent.write(name, value)
            place = lent.filled(b"\xaa" * 200)
            assert lent.driver.read([Placed(name, place)]) == [100]
            assert place.tobytes() == value + b"\xaa" * 100

    @pytest.mark.parametrize("room", [1, 99, 0])
    def test_a_value_longer_than_its_memory_is_not_copied(self, room: int) -> None:
        with self.lent_driver() as lent:
            names = new_names(3)
            lent.write_all(names, [noise(100, number) for number in range(3)])
            before, short, after = lent.piece(100), lent.filled(b"\xaa" * room), lent.piece(100)
            places = [Placed(name, place) for name, place in zip(names, (before, short, after), strict=True)]
            assert lent.driver.read(places) == [100, 100, 100]
            assert short.tobytes() == b"\xaa" * room
            assert (before.tobytes(), after.tobytes()) == (noise(100, 0), noise(100, 2))

    def test_a_taken_name_keeps_its_value(self) -> None:
        with self.lent_driver() as lent:
            name = new_name()
            assert lent.write(name, noise(100, 1)) is WriteResult.STORED
            assert lent.write(name, noise(100, 2)) is WriteResult.EXISTS
            assert lent.write(name, noise(50, 3)) is WriteResult.EXISTS
            assert lent.read(name, 100) == noise(100, 1)

    def test_a_batch_may_hold_taken_names(self) -> None:
        with self.lent_driver() as lent:
            names = new_names(4)
            lent.write_all(names[1:3], [noise(100, 1), noise(100, 2)])
            written = lent.write_all(names, [noise(70, 10 + number) for number in range(4)])
            assert written == [WriteResult.STORED, WriteResult.EXISTS, WriteResult.EXISTS, WriteResult.STORED]
            wanted = [noise(70, 10), noise(100, 1), noise(100, 2), noise(70, 13)]
            assert lent.read_all(names, [100] * 4) == wanted

    def test_a_batch_may_hold_one_name_twice(self) -> None:
        with self.lent_driver() as lent:
            name = new_name()
            assert lent.write_all([name, name], [noise(90, 1), noise(90, 2)]) == [
                WriteResult.STORED,
                WriteResult.EXISTS,
            ]
            assert lent.read(name, 90) == noise(90, 1)

    def test_no_view_of_the_memory_is_kept(self) -> None:
        with self.lent_driver() as lent:
            name, value = new_name(), noise(MIB)
            piece = lent.filled(value)
            assert lent.driver.write([Placed(name, piece)]) == [WriteResult.STORED]
            piece[:] = bytes(MIB)
            assert lent.read(name, MIB) == value

    def test_a_removed_value_is_gone_for_everybody(self) -> None:
        with self.lent_driver() as one, self.lent_driver() as other:
            names = new_names(3)
            one.write_all(names, [noise(1000, number) for number in range(3)])
            assert other.read_all(names, [1000] * 3) == [noise(1000, number) for number in range(3)]
            one.driver.remove([names[0], new_name(), names[2]])
            for lent in (one, other):
                assert lent.driver.sizes(names) == [0, 1000, 0]
                assert lent.read_all(names, [1000] * 3) == [None, noise(1000, 1), None]

    def test_a_removed_name_can_be_written_again(self) -> None:
        with self.lent_driver() as lent:
            name = new_name()
            for seed in range(3):
                assert lent.write(name, noise(500, seed)) is WriteResult.STORED
                assert lent.read(name, 500) == noise(500, seed)
                lent.driver.remove([name])
                assert lent.read(name, 500) is None

    def test_of_several_writers_of_a_name_one_has_stored(self) -> None:
        writers, rounds = 4, 12
        with closing_all([self.make_driver() for _ in range(2)]) as drivers, ThreadPoolExecutor(writers) as pool:
            clients = [Lent(driver) for driver in drivers]
            together = threading.Barrier(writers)

            def write(writer: int, names: Sequence[str]) -> list[WriteResult]:
                together.wait(timeout=30)
                return clients[writer % 2].write_all(names, [noise(20_000, writer)] * len(names))

            for _ in range(rounds):
                names = new_names(3)
                answers = list(pool.map(write, range(writers), [names] * writers))
                for number, name in enumerate(names):
                    written = [answer[number] for answer in answers]
                    assert sorted(written, key=str) == [WriteResult.EXISTS] * (writers - 1) + [WriteResult.STORED]
                    winner = written.index(WriteResult.STORED)
                    assert clients[0].read(name, 20_000) == noise(20_000, winner)

    def test_a_reader_never_sees_half_a_value(self) -> None:
        with self.lent_driver() as writer, self.lent_driver(192 << 20) as reader:
            names = new_names(24)
            stop = threading.Event()

            def watch(number: int) -> set[bytes | None]:
                seen: set[bytes | None] = set()
                place = reader.piece(4 * MIB)
                while not stop.is_set() and len(seen) < 2:
                    (size,) = reader.driver.read([Placed(names[number], place)])
                    seen.add(bytes(place[:size]) if size else None)
                return seen

            with ThreadPoolExecutor(2) as pool:
                watchers = [pool.submit(watch, number) for number in (0, len(names) - 1)]
                for number, name in enumerate(names):
                    assert writer.write(name, noise(2 * MIB, number)) is WriteResult.STORED
                stop.set()
                for number, watcher in zip((0, len(names) - 1), watchers, strict=True):
                    assert watcher.result(timeout=60) <= {None, noise(2 * MIB, number)}

    def test_threads_do_not_mix_up_values(self) -> None:
        with self.lent_driver(256 << 20) as lent, ThreadPoolExecutor(2) as pool:

            def work(seed: int) -> None:
                for batch in range(6):
                    names = new_names(8)
                    values = [noise(30_000 + number, 1000 * seed + 10 * batch + number) for number in range(8)]
                    assert lent.write_all(names, values) == [WriteResult.STORED] * 8
                    assert lent.driver.sizes(names) == [len(value) for value in values]
                    assert lent.read_all(names, [40_000] * 8) == values
                    lent.driver.remove(names[:4])
                    assert lent.driver.sizes(names) == [0] * 4 + [len(value) for value in values[4:]]

            for done in [pool.submit(work, seed) for seed in range(4)]:
                done.result(timeout=120)

    def test_close_may_be_called_twice(self) -> None:
        driver = self.make_driver()
        driver.close()
        driver.close()
        with self.lent_driver() as lent:
            lent.write(new_name(), noise(10))
            lent.driver.close()


@contextmanager
def closing_all(drivers: list[Driver]) -> Iterator[list[Driver]]:
    try:
        yield drivers
    finally:
        for driver in drivers:
            driver.close()
