"""Leases on device memory: a client that asked for it reads blocks where they are on the GPU, blocks of its own tenant
alone, and cannot write them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from kvstore_proto.arena import DEVICE_ARENAS
from tests.gpu.emulated import emulated_node, is_hardware, need_what_it_is_told
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, put_many, use, whole
from tests.gpu.test_daemon_gpu_tier import workers_of
from tests.reference.conversations import put_conversation
from tests.reference.forked import ForkedProcess, popen
from tests.reference.running_daemon import RunningDaemon, connected_as, eventually, running_daemon

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


class DeviceClient:
    def __init__(self, process: ForkedProcess | subprocess.Popen[bytes], requests: IO[str], answers: IO[str]) -> None:
        self.process = process
        self._requests, self._answers = requests, answers

    def __call__(self, *command: Any) -> dict[str, Any]:
        self.send(*command)
        return self.answer()

    def send(self, *command: Any) -> None:
        self._requests.write(json.dumps(command) + "\n")
        self._requests.flush()

    def is_ready(self) -> bool:
        """Return whether the client has connected; wait for that or for its end."""
        return self._answers.readline() == "ready\n"

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer


@contextmanager
def started_client(
    daemon: RunningDaemon,
    uid: int = 0,
    *,
    device: int = 0,
    module: str = "tests.gpu.device_client",
    stderr: IO[str] | None = None,
    **environment: str,
) -> Iterator[DeviceClient]:
    need_what_it_is_told(environment)
    (to_read, to_ask), (to_hear, to_answer) = os.pipe(), os.pipe()
    with open(to_ask, "w") as requests, open(to_hear) as answers:
        with open(to_read) as stdin, open(to_answer, "w") as stdout:
            process = popen(
                [sys.executable, "-m", module, str(daemon.socket_dir), str(uid), str(device)],
                stdin=stdin, stdout=stdout, stderr=stderr, cwd=ROOT, env={**os.environ, **environment},
            )  # fmt: skip
        try:
            yield DeviceClient(process, requests, answers)
        finally:
            process.kill()
            process.wait()


@contextmanager
def device_client(daemon: RunningDaemon, uid: int = 0, **options: Any) -> Iterator[DeviceClient]:
    """One that is connected."""
    with started_client(daemon, uid, **options) as client:
        assert client.is_ready()
        yield client


def held_on_device(client: DeviceClient, number: int) -> bool:
    """Hold a lease on a conversation, all of it on the device as soon as the copies have ended."""
    is_there = eventually(lambda: client("get", number, BLOCKS)["on_device"] == BLOCKS)
    return is_there and client("hold", number, BLOCKS)["on_device"] == BLOCKS


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    for name, value in emulated_node().items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS) as running:
        running.socket_dir.parent.chmod(0o711)
        yield running


def test_a_lease_names_device_memory_for_a_client_that_asked_for_it(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as client:
        use(daemon, session, 1)
        assert client("lookup", 1, BLOCKS)["tiers"] == ["host"] * BLOCKS
        everything = {"blocks": BLOCKS, "right": True, "verified": True, "valid": True}
        assert held_on_device(client, 1)
        assert client("get", 1, BLOCKS) == everything | {"on_device": BLOCKS, "promoted_bytes": 0}
        client("release")
        put_many(session, range(100, 170))  # until DRAM does not have it any more
        assert client("lookup", 1, BLOCKS)["tiers"] == ["gpu"] * BLOCKS
        assert client("get", 1, BLOCKS) == everything | {"on_device": BLOCKS, "promoted_bytes": 0}
        assert client("get", 101, BLOCKS) | {"promoted_bytes": 0} == everything | {"on_device": 0, "promoted_bytes": 0}
        assert daemon.tiers()["vram"].promoted_blocks == 0
        assert whole(session, 1), "another client has it copied to DRAM"
        assert daemon.tiers()["vram"].promoted_blocks == BLOCKS


def test_arrays_of_a_lease_on_the_device_are_its_bytes_and_keep_it(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as client:
        use(daemon, session, 1)
        assert held_on_device(client, 1)
        assert client("arrays") == {
            "devices": [[2, 0]], "right": True, "described": ["<f2", [64, 16], [32, 2], None],
            "read_only": [True, False],
        }  # fmt: skip
        client("keep")
        client("release")
        client("get", 1, 1)  # whose release is sent with all that were waiting
        assert eventually(lambda: daemon.status().leases == 1)
        client("lookup", 1, 1)
        assert daemon.status().leases == 1, "what a library has of it keeps it"
        client("let-go")
        assert eventually(lambda: daemon.status().leases == 0)


def test_a_client_cannot_write_what_it_reads_on_the_device(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as client:
        use(daemon, session, 1)
        put_many(session, range(100, 170))
        assert held_on_device(client, 1)
        assert "ILLEGAL_ADDRESS" in client("write")["failed"]
        assert whole(session, 1)


def test_a_leased_block_stays_on_the_device_over_eviction_and_the_deaths_of_its_worker(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as client:
        use(daemon, session, 1)
        assert held_on_device(client, 1)
        (worker,) = workers_of(daemon.process.pid)
        os.kill(worker, signal.SIGKILL)
        assert eventually(lambda: workers_of(daemon.process.pid) not in ([], [worker]))
        for number in range(2, 60):  # far more than the device holds
            put_many(session, range(number, number + 1))
            assert whole(session, number)
        again = client("again")
        assert (again["right"], again["verified"]) == (True, True)
        assert daemon.tiers()["vram"].used_bytes <= daemon.tiers()["vram"].capacity_bytes
        client("release")


def test_a_client_imports_no_memory_of_another_tenant(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as own, device_client(daemon, 65534) as other:
        use(daemon, session, 1)
        assert eventually(lambda: own("get", 1, BLOCKS)["on_device"] == BLOCKS)
        assert own("arena", DEVICE_ARENAS)["granted"]
        assert not other("arena", DEVICE_ARENAS)["granted"]
        assert other("get", 1, BLOCKS)["blocks"] == 0


def test_a_client_that_did_not_ask_gets_no_device_memory(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        use(daemon, session, 1)
        connected = session._connection.current()
        assert connected is not None
        assert connected._handshake.request_arena(DEVICE_ARENAS, 30.0) is None


def test_after_a_restart_numbers_mean_other_memory_and_nothing_is_mixed_up(daemon: RunningDaemon) -> None:
    with device_client(daemon) as client:
        with daemon.connect(MODEL) as session:
            use(daemon, session, 1)
            assert held_on_device(client, 1)
        daemon.kill9()
        daemon.restart()
        with daemon.connect(MODEL) as session:
            assert eventually(lambda: whole(session, 1))
            use(daemon, session, 2)
            assert eventually(lambda: client("get", 2, BLOCKS)["on_device"] == BLOCKS)
        assert client("get", 2, BLOCKS)["right"]
        again = client("again")
        assert again["right"] and not again["valid"], "what was mapped before is what it was, and promised no more"


def test_a_client_that_cannot_import_gets_its_blocks_in_host_memory(daemon: RunningDaemon) -> None:
    faults = "cuMemImportFromShareableHandle:0=2"
    with daemon.connect(MODEL) as session, device_client(daemon, EMULATED_CUDA_FAULTS=faults) as client:
        use(daemon, session, 1)
        put_many(session, range(100, 170))
        assert client("lookup", 1, BLOCKS)["tiers"] == ["gpu"] * BLOCKS
        found = client("get", 1, BLOCKS)
        assert (found["blocks"], found["on_device"], found["right"]) == (BLOCKS, 0, True)
        assert found["promoted_bytes"] > 0, "from the device to DRAM, by the daemon"


def test_a_client_gives_up_chunks_that_the_daemon_has_dropped(daemon: RunningDaemon) -> None:
    with (
        daemon.connect(MODEL) as session,
        connected_as(daemon, 65534, MODEL) as other,
        device_client(daemon) as client,
    ):
        use(daemon, session, 1)
        assert held_on_device(client, 1)
        client("release")
        for number in range(1, 60):  # more than the device holds: it takes the chunks of the first tenant
            put_conversation(other, number, BLOCKS, wait="settled")
            assert whole(other, number)
        assert client("lookup", 1, BLOCKS)["tiers"] != ["gpu"] * BLOCKS
        assert eventually(lambda: client("used")["mapped_bytes"] <= daemon.tiers()["vram"].used_bytes)
        # All that is used of hardware is contexts, too, and what tests beside this one have.
        assert is_hardware() or eventually(lambda: client("used")["bytes"] <= daemon.tiers()["vram"].used_bytes)
