"""Calls of the driver that a client makes fail, break its context, hang or kill it: what it reads and stores is right
or is not there, the daemon goes on, and no device memory is lost.

Which calls there are in a situation is what the driver traced of it when nothing failed.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Session
from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, put_many, use, whole
from tests.gpu.test_device_leases import DeviceClient, device_client
from tests.gpu.test_emulated_driver import Driver, path
from tests.gpu.test_gpu_worker import order
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

__all__ = ["path"]  # the fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ON_DEVICE, MEMORY_BYTES, LONGEST_S = 1, 64 << 20, 60.0  # the number of a conversation
FAILS, BREAKS, HANGS, KILLS = "801", "700", "hang", "kill"
SITUATIONS = ("import", "load from the device", "load from host memory", "store", "store while the engine decodes")


class Bench:
    """A daemon with one conversation on the device, and a client of it with a pool there."""

    def __init__(self, daemon: RunningDaemon, session: Session, tmp_path: Path, library: Path) -> None:
        self.daemon, self.session = daemon, session
        self._control, self._trace = tmp_path / "control", tmp_path / "trace"
        self._control.touch()
        self.memory = Driver(library)
        self.variables = {"EMULATED_CUDA_CONTROL": str(self._control), "EMULATED_CUDA_TRACE": str(self._trace)}
        use(daemon, session, ON_DEVICE)
        self._number = 1000

    def begin(self, rule: str) -> None:
        self._trace.write_text("")
        order(self._control, rule)

    def end(self) -> Counter[str]:
        """What the client called since `begin`; calls that a rule met are NAME=WHAT."""
        order(self._control, "")
        return Counter(line for line in self._trace.read_text().splitlines() if not re.match(r"run\d", line))

    def has_failed(self, rule: str) -> bool:
        return rule in self._trace.read_text().splitlines()

    def act(self, client: DeviceClient, situation: str) -> dict[str, Any]:
        self._number += 1
        match situation:
            case "import":
                return client("get", ON_DEVICE, BLOCKS)
            case "load from the device":
                return client("load", ON_DEVICE, BLOCKS)
            case "load from host memory":
                put_many(self.session, range(self._number, self._number + 1))
                return client("load", self._number, BLOCKS)
            case _:
                answer = client("store" if situation == "store" else "store-decoding", self._number, BLOCKS)
                whole(self.session, self._number)  # asserts that what is there is right
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
    return "failed" not in answer and answer.get("stored", answer.get("blocks")) == BLOCKS


def must_not_lie(answer: dict[str, Any]) -> None:
    """It failed, or what it says to be there is right."""
    assert "failed" in answer or answer.get("right", True) or not answer["valid"], answer


def calls_of(bench: Bench, client: DeviceClient, situation: str) -> list[tuple[str, int]]:
    """Each call and its number, the first and the last of each name."""
    for _ in range(2):
        bench.begin("")
        answer = bench.act(client, situation)
        calls = bench.end()
        assert is_right(answer), answer
    return [(name, number) for name, count in calls.items() for number in sorted({1, count})]


@pytest.mark.parametrize("situation", SITUATIONS[1:])
def test_a_call_that_fails_once_fails_one_transfer(bench: Bench, situation: str) -> None:
    with device_client(bench.daemon, **bench.variables) as client:
        for call, number in calls_of(bench, client, situation):
            bench.begin(f"{call}:{number}={FAILS}")
            answer = bench.act(client, situation)
            assert f"{call}={FAILS}" in bench.end(), (call, number)
            must_not_lie(answer)
            if call == "run":
                break  # what fails on the device breaks the context; it comes last
            again = bench.act(client, situation)
            assert is_right(again), (call, number, answer, again)
    bench.must_be_sound()


@pytest.mark.parametrize("situation", SITUATIONS[:2])
def test_what_ends_a_client_ends_no_other(bench: Bench, situation: str) -> None:
    """Calls of its first use: of each kind of failure some others."""
    with device_client(bench.daemon, **bench.variables) as client:
        bench.begin("")
        assert is_right(bench.act(client, situation))
        calls = sorted(bench.end())
    for at, call in enumerate(calls[::2]):
        what = (BREAKS, KILLS, HANGS)[at % 3]
        with device_client(bench.daemon, **bench.variables) as client:
            bench.begin(f"{call}:1={what}")
            client.send("get" if situation == "import" else "load", ON_DEVICE, BLOCKS)
            assert eventually(lambda: bench.has_failed(f"{call}={what}"), LONGEST_S), call  # noqa: B023
            if what == BREAKS:
                must_not_lie(client.answer())
                bench.end()
                assert is_right(client("get", ON_DEVICE, BLOCKS)), "in host memory"
            elif what == KILLS:
                assert client.process.wait(LONGEST_S) == -signal.SIGKILL
            assert whole(bench.session, ON_DEVICE), "another client is served meanwhile"
        bench.end()
        bench.must_be_sound()
