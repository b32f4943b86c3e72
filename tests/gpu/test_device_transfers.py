"""Copies between leases, puts and an engine's pool on the device: host memory and GPU tier, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, use, whole
from tests.gpu.test_device_leases import device_client, held_on_device
from tests.reference.conversations import put_conversation
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.slow


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    for name, value in emulated_node().items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS) as running:
        monkeypatch.setenv("EMULATED_CUDA_DELAY_US", "5000")  # of clients: waits that are missing are seen
        yield running


@pytest.mark.parametrize("version", ["13000", "12080", "12040"], ids=["batches", "first form", "single copies"])
def test_leases_on_host_and_device_memory_are_loaded_into_pages(
    daemon: RunningDaemon, version: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    variables = {"EMULATED_CUDA_VERSION": version, "EMULATED_CUDA_TRACE": str(trace)}
    with daemon.connect(MODEL) as session, device_client(daemon, **variables) as client:
        whole_load = {"blocks": BLOCKS, "right": True, "valid": True}
        use(daemon, session, 1)
        assert eventually(lambda: client("registered")["pieces"] > 0), "arenas of which nothing was loaded"
        assert held_on_device(client, 1)
        client("release")
        found = client("load", 1, BLOCKS)
        assert found == whole_load | {"on_device": BLOCKS, "registered": found["registered"]}
        put_conversation(session, 1, 2 * BLOCKS, wait="settled")
        found = client("load", 1, 2 * BLOCKS)
        assert found == whole_load | {"blocks": 2 * BLOCKS, "on_device": BLOCKS, "registered": found["registered"]}
        assert client("register")["settled"]
        for number in range(2, 6):
            put_conversation(session, number, BLOCKS, wait="settled")
            found = client("load", number, BLOCKS)
            assert found == whole_load | {"on_device": 0, "registered": found["registered"]}
            assert client("register")["settled"]
            assert client("load", number, BLOCKS) | {"on_device": 0} == whole_load | {
                "on_device": 0, "registered": max(found["registered"], 1)
            }  # fmt: skip
    if trace.exists():  # the driver is emulated
        assert ("cuMemcpyBatchAsync" in trace.read_text().splitlines()) == (version != "12040")


def test_without_read_only_registration_host_memory_goes_by_a_buffer(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon, EMULATED_CUDA_READ_ONLY_REGISTER="0") as client:
        put_conversation(session, 1, BLOCKS, wait="settled")
        for _ in range(3):
            found = client("load", 1, BLOCKS)
            assert (found["blocks"], found["right"], found["registered"]) == (BLOCKS, True, 0)
            assert client("register")["settled"]


def test_pages_are_stored_once_the_engine_has_written_them(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as client:
        for number in range(1, 6):
            assert client("store", number, BLOCKS)["stored"] == BLOCKS
            assert whole(session, number)
            assert client("register")["settled"], "the next ones are copied straight into their slots"
            assert client("load", number, BLOCKS)["right"]


def test_a_store_of_an_engine_that_decodes_ends_whole_and_holds_up_no_load(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as client:
        put_conversation(session, 1, BLOCKS, wait="settled")
        for number in (2, 3):  # by the buffer, then straight
            found = client("store-beside-a-load", number, BLOCKS, 1)
            assert found == {"stored": BLOCKS, "waited": True, "loaded": BLOCKS, "right": True}
            assert whole(session, number)
