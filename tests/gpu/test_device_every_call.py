"""Every call of the driver that a client makes fails, breaks its context, hangs and kills it: what it reads and stores
is right or is not there, the daemon goes on, and no device memory is lost.

Which calls there are in a situation is what the driver traced of it when nothing failed. A run tries a few of them that
chance chooses; all of them, for some hours:

    KVSTORED_TEST_EVERY_CASE=1 python -m pytest tests/gpu/test_device_every_call.py
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Session
from tests.gpu.driver_faults import BREAKS, FAILS, HANGS, KILLS, Cell, DriverFaults, cells, tried
from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, put_many, use, whole
from tests.gpu.test_device_leases import DeviceClient, device_client, started_client
from tests.gpu.test_emulated_driver import Driver, path
from tests.reference.examples import EVERY_CASE, chosen
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

__all__ = ["path"]  # the fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if EVERY_CASE else 600)]
ON_DEVICE, MEMORY_BYTES, LONGEST_S = 1, 64 << 20, 60.0  # the number of a conversation
SITUATIONS = (
    "import", "load from the device", "load from host memory", "store", "store while the engine decodes", "close",
)  # fmt: skip
FIRST_USE, LATER = True, False
TRIED = 10  # of the cells of a situation, in one run


class Bench:
    """A daemon with one conversation on the device, and clients of it with a pool there."""

    def __init__(self, daemon: RunningDaemon, session: Session, tmp_path: Path, library: Path) -> None:
        self.daemon, self.session = daemon, session
        self.faults = DriverFaults(tmp_path)
        self.memory = Driver(library)
        use(daemon, session, ON_DEVICE)
        self._number = 1000

    def client(self) -> AbstractContextManager[DeviceClient]:
        return device_client(self.daemon, **self.faults.variables)

    def starting(self) -> AbstractContextManager[DeviceClient]:
        return started_client(self.daemon, **self.faults.variables)

    def send(self, client: DeviceClient, situation: str) -> None:
        self._number += 1
        match situation:
            case "import":
                client.send("get", ON_DEVICE, BLOCKS)
            case "load from the device":
                client.send("load", ON_DEVICE, BLOCKS)
            case "load from host memory":
                put_many(self.session, range(self._number, self._number + 1))
                client.send("load", self._number, BLOCKS)
            case "close":
                client.send("close")
            case _:
                client.send("store" if situation == "store" else "store-decoding", self._number, BLOCKS)

    def act(self, client: DeviceClient, situation: str) -> dict[str, Any]:
        self.send(client, situation)
        return self.answer(client, situation)

    def answer(self, client: DeviceClient, situation: str) -> dict[str, Any]:
        """Assert that the call failed, or that what it says to be there is right."""
        answer = client.answer()
        if situation.startswith("store"):
            whole(self.session, self._number)  # asserts that what is there is right
        assert "failed" in answer or answer.get("right", True) or not answer["valid"], answer
        return answer

    def must_be_sound(self) -> None:
        """The daemon serves others; all that is used of the device is its own."""
        assert whole(self.session, ON_DEVICE)
        assert eventually(lambda: MEMORY_BYTES - self.memory.free_bytes() == self.daemon.tiers()["vram"].used_bytes), (
            "of a client that has ended"
        )


@pytest.fixture
def bench(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name, value in emulated_node(MEMORY_BYTES, must_emulate=True).items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS) as daemon, daemon.connect(MODEL) as session:
        yield Bench(daemon, session, tmp_path, path)


def is_right(answer: dict[str, Any]) -> bool:
    return "failed" not in answer and answer.get("stored", answer.get("blocks", BLOCKS)) == BLOCKS


def prepare(bench: Bench, client: DeviceClient, situation: str, is_first_use: bool) -> None:
    before = "load from the device" if situation == "close" else situation
    if not is_first_use:
        assert is_right(bench.act(client, before))


def calls_of(bench: Bench, situation: str, is_first_use: bool) -> Counter[str]:
    with bench.client() as client:
        prepare(bench, client, situation, is_first_use)
        bench.faults.begin()
        assert is_right(bench.act(client, situation))
        return bench.faults.end()


def must_survive(bench: Bench, client: DeviceClient, situation: str, cell: Cell) -> None:
    """`situation` with a client that is ended after it. A new one goes on in its place."""
    bench.faults.begin(cell.rule)
    bench.send(client, situation)
    assert eventually(lambda: bench.faults.has_met, LONGEST_S), "it was not called"
    if cell.what == KILLS:
        assert client.process.wait(LONGEST_S) == -signal.SIGKILL
    assert whole(bench.session, ON_DEVICE), "another client is served meanwhile"
    if cell.what in (FAILS, BREAKS):
        answer = bench.answer(client, situation)
        bench.faults.end()
        assert is_right(client("get", ON_DEVICE, BLOCKS)), "in host memory"
        if cell.what == FAILS and cell.call != "run":  # what fails on the device breaks the context
            again = "load from the device" if situation == "close" else situation
            assert is_right(bench.act(client, again)), answer


def test_a_get_reads_the_headers_of_its_blocks_in_one_batch(bench: Bench) -> None:
    """The client of the test reads their payloads one by one then."""
    calls = calls_of(bench, "import", LATER)
    copies = {name: count for name, count in calls.items() if name.startswith(("cuMemcpy", "cuStream"))}
    payloads = {"cuMemcpyDtoHAsync": BLOCKS, "cuStreamSynchronize": BLOCKS + 1}
    assert copies == {"cuMemcpyBatchAsync": 1} | payloads, calls


@pytest.mark.parametrize(
    ("situation", "is_first_use"),
    [
        pytest.param(situation, is_first_use, id=f"{situation}-{'first' if is_first_use else 'later'}")
        for situation in SITUATIONS
        for is_first_use in (FIRST_USE, LATER)
        if situation != "close" or not is_first_use  # nothing is open then
    ],
)
def test_a_call_that_goes_wrong_harms_no_other_client(bench: Bench, situation: str, is_first_use: bool) -> None:
    for cell in chosen(cells(calls_of(bench, situation, is_first_use)), TRIED):
        with tried(cell):
            with bench.client() as client:
                prepare(bench, client, situation, is_first_use)
                must_survive(bench, client, situation, cell)
            bench.faults.end()
            bench.must_be_sound()


@pytest.mark.parametrize("situation", SITUATIONS[2:4])
def test_calls_that_fail_one_after_another_fail_one_transfer_each(bench: Bench, situation: str) -> None:
    """All calls come from one client."""
    found = [each for each in cells(calls_of(bench, situation, LATER)) if each.what == FAILS and each.call != "run"]
    with bench.client() as client:
        prepare(bench, client, situation, LATER)
        for cell in chosen(found, 5 * TRIED):
            with tried(cell):
                bench.faults.begin(cell.rule)
                answer = bench.act(client, situation)
                assert f"{cell.call}={FAILS}" in bench.faults.end(), "it was not called"
                again = bench.act(client, situation)
                assert is_right(again), (answer, again)
    bench.must_be_sound()


@pytest.mark.parametrize("rule", ["cuCtxGetCurrent:4=801", "cuMemHostUnregister:0=801", "cuCtxSetCurrent:0=801"])
def test_memory_that_the_driver_does_not_let_go_is_not_mapped_for_others(bench: Bench, rule: str) -> None:
    """Nothing could be registered at the address of the buffer that was closed."""
    with bench.client() as client:
        for _ in range(3):
            assert is_right(bench.act(client, "load from the device"))
            bench.faults.begin(rule)
            client("close")
            assert bench.faults.end(), "it was not called"
        assert is_right(bench.act(client, "load from the device"))
    bench.must_be_sound()


def test_a_call_that_goes_wrong_when_a_client_starts_harms_no_other(bench: Bench) -> None:
    bench.faults.begin()
    with bench.client():
        calls = bench.faults.end()
    for cell in chosen(cells(calls), TRIED):
        with tried(cell):
            bench.faults.begin(cell.rule)
            with bench.starting() as client:
                assert eventually(lambda: bench.faults.has_met, LONGEST_S), "it was not called"
                assert whole(bench.session, ON_DEVICE), "another client is served meanwhile"
                if cell.what == KILLS:
                    assert client.process.wait(LONGEST_S) == -signal.SIGKILL
                elif cell.what != HANGS and client.is_ready():
                    bench.faults.end()
                    assert is_right(client("get", ON_DEVICE, BLOCKS))
                elif cell.what != HANGS:
                    assert client.process.wait(LONGEST_S) == 1
            bench.faults.end()
            bench.must_be_sound()
