"""vLLM's worker with KV caches on a device: what it stores and loads, layer by layer, and what a step may not read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, use, whole
from tests.gpu.test_device_leases import DeviceClient, device_client, held_on_device
from tests.reference.conversations import found_blocks, put_conversation
from tests.reference.running_daemon import RunningDaemon, running_daemon

pytestmark = pytest.mark.slow
WHOLE = {"loaded": [BLOCKS], "failed": [], "right": True}


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    for name, value in emulated_node(must_emulate=True).items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS) as running:
        monkeypatch.setenv("EMULATED_CUDA_DELAY_US", "5000")  # of the worker: waits that are missing are seen
        yield running


@pytest.fixture
def worker(daemon: RunningDaemon) -> Iterator[DeviceClient]:
    with device_client(daemon) as client:
        assert client("vllm", "LBNHC") == {}
        yield client


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC"])
def test_blocks_that_a_step_filled_are_stored_and_loaded_elsewhere_layer_by_layer(
    daemon: RunningDaemon, layout: str
) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon) as client:
        client("vllm", layout)
        for number in range(1, 4):
            assert client("vllm.save", number, BLOCKS) == {"drained": True, "stored": number * BLOCKS, "said": []}
            assert whole(session, number), "in the order that the bytes have in memory"
            assert client("vllm.load", number, BLOCKS) == WHOLE
            assert client("vllm.register")["settled"]  # the next one goes straight from and to the daemon's memory
        assert client("vllm.close")["done"].endswith(f"{3 * BLOCKS} stored, 0 dropped")


def test_blocks_on_the_device_and_in_host_memory_are_loaded_for_several_requests_of_a_step(
    daemon: RunningDaemon, worker: DeviceClient
) -> None:
    with daemon.connect(MODEL) as session:
        use(daemon, session, 1)
        assert held_on_device(worker, 1)
        worker("release")
        put_conversation(session, 2, 3, wait="settled")
        found = worker("vllm.load", 1, BLOCKS, 2, 5, 3, 2)
        assert found == {
            "loaded": [BLOCKS, 3, 0], "failed": [BLOCKS + 3, BLOCKS + 4, BLOCKS + 5, BLOCKS + 6], "right": True
        }  # fmt: skip


def test_memory_that_the_next_step_uses_is_not_stored_as_what_it_was(
    daemon: RunningDaemon, worker: DeviceClient
) -> None:
    with daemon.connect(MODEL) as session:
        stored = 0
        for number in range(1, 9):
            answer = worker("vllm.save_and_reuse", number, BLOCKS)
            assert answer["drained"]
            assert found_blocks(session, number, BLOCKS) == answer["stored"] - stored, "wrong bytes are found there"
            stored = answer["stored"]
        assert stored, "this shows nothing where all were cut off"


def test_a_lease_that_ends_before_its_copies_have_fails_the_step_and_nothing_of_it_is_stored(
    daemon: RunningDaemon, worker: DeviceClient
) -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, 1, BLOCKS, wait="settled")
    assert worker("vllm.begin", 1, BLOCKS)["leased"]
    daemon.kill9()
    assert worker("vllm.end") == {"failed": list(range(BLOCKS)), "tried": 0, "said": []}
    daemon.restart()


def test_the_stream_waits_for_a_layer_and_the_thread_of_the_engine_goes_on(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, 1, BLOCKS, wait="settled")
    with device_client(daemon, EMULATED_CUDA_FAULTS="run4:1=hang") as client:  # the stream of loads
        client("vllm", "LBNHC")
        assert client("vllm.queue", 1, BLOCKS) == {"waits": True}


def test_where_the_stream_cannot_wait_for_a_layer_the_engines_thread_waits_for_all(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session:
        put_conversation(session, 1, BLOCKS, wait="settled")
    faults = "cuStreamWaitEvent:2=999"  # the first is the copies' own, which are behind the engine's work
    with device_client(daemon, EMULATED_CUDA_FAULTS=faults) as client:
        client("vllm", "LBNHC")
        assert client("vllm.reach", 1, BLOCKS) == {"ended": True, "failed": []}


def test_steps_are_measured_by_the_device_and_reported_once_they_have_surely_ended(worker: DeviceClient) -> None:
    assert worker("vllm.steps", 4)["reports"] == [None, None, [1, True], [2, True]]
