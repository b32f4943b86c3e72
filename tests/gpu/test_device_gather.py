"""Small runs between host memory, the GPU tier and an engine's pool go by a kernel, larger ones in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client.device import crossover, gather
from tests.cuda_shim.build import shim_library
from tests.gpu.device_engine import POOL_BYTES
from tests.gpu.emulated import compiled, emulated_node
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, use, whole
from tests.gpu.test_device_leases import device_client, held_on_device
from tests.reference.conversations import put_conversation
from tests.reference.nvrtc import need_nvrtc
from tests.reference.running_daemon import RunningDaemon, running_daemon

pytestmark = pytest.mark.slow
NO_BATCH = {"EMULATED_CUDA_FAULTS": "cuMemcpyBatchAsync:0=999"}
TIER_BYTES = 4 << 20  # of SETTINGS
NO_KERNEL = {"EMULATED_CUDA_FAULTS": "cuLaunchKernel:0=999"}


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    need_nvrtc()
    compiled(gather.PROGRAM)
    for name, value in emulated_node(must_emulate=True).items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS) as running:
        monkeypatch.setenv("EMULATED_CUDA_DELAY_US", "5000")  # of clients: waits that are missing are seen
        monkeypatch.setenv("EMULATED_CUDA_KERNELS", str(shim_library(gather.PROGRAM)))
        monkeypatch.setenv(crossover.VARIABLE, "1000000")
        yield running


def loaded(client: Any, number: int) -> tuple[bool, bool]:
    found = client("load", number, BLOCKS)
    return found["right"] and found["blocks"] == BLOCKS, found["on_device"] == BLOCKS


def test_loads_from_host_memory_and_from_the_tier_need_no_batch_but_that_of_headers(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    trace = tmp_path / "calls"

    def batches() -> int:
        count = trace.read_text().split().count("cuMemcpyBatchAsync")
        trace.write_text("")
        return count

    with daemon.connect(MODEL) as session, device_client(daemon, EMULATED_CUDA_TRACE=str(trace)) as client:
        assert min(client("crossover").values()) == 1000000
        use(daemon, session, 1)
        assert held_on_device(client, 1)
        batches()
        assert loaded(client, 1) == (True, True)
        assert batches() == 1, "the headers of what is on the device"
        client("release")
        for number in range(2, 6):
            put_conversation(session, number, BLOCKS, wait="settled")
            assert loaded(client, number) == (True, False)
            assert batches() == 0
            assert client("register")["settled"], "the next time they are read where they are"
            assert loaded(client, number)[0]
            assert batches() <= 1, "on the device by now, perhaps"


def test_stores_need_none_where_one_event_is_behind_all_layers(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon, **NO_BATCH) as client:
        client("crossover")
        for number in range(1, 5):
            assert client("store-at-once", number, BLOCKS)["stored"] == BLOCKS
            assert whole(session, number)
            assert client("register")["settled"], "the next ones are copied straight into their slots"


@pytest.mark.parametrize("largest", ["0", "16"])
def test_what_is_larger_needs_no_kernel(daemon: RunningDaemon, largest: str) -> None:
    options = NO_KERNEL | {crossover.VARIABLE: largest}
    with daemon.connect(MODEL) as session, device_client(daemon, **options) as client:
        assert set(client("crossover").values()) <= {16}
        for number in range(1, 4):
            assert client("store-at-once", number, BLOCKS)["stored"] == BLOCKS
            assert whole(session, number) and loaded(client, number)[0]


def test_what_is_faster_is_measured_and_leaves_no_memory_behind(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon, **{crossover.VARIABLE: ""}) as client:
        put_conversation(session, 1, BLOCKS, wait="settled")
        assert loaded(client, 1)[0], "while it is measured"
        found = client("crossover")
        assert set(found) == set(crossover.WAYS) and all(each >= 0 for each in found.values())
        assert client("used")["bytes"] <= POOL_BYTES + TIER_BYTES < 3 * crossover.MOVED_BYTES
        assert loaded(client, 1)[0]


def test_no_graph_is_spoiled_that_the_engine_captures_meanwhile(daemon: RunningDaemon) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon, **{crossover.VARIABLE: ""}) as client:
        put_conversation(session, 1, BLOCKS, wait="settled")
        found = client("load-captured", 1, BLOCKS)
        assert (found["right"], found["blocks"]) == (True, BLOCKS) and found["registered"] > 0
        assert client("crossover") != {}


@pytest.mark.parametrize(
    "fault",
    [
        {"EMULATED_CUDA_FAULTS": "cuModuleLoadData:1=200"},
        {"EMULATED_CUDA_FAULTS": "cuMemAlloc:2=2"},
        {"EMULATED_CUDA_FAULTS": "cuLaunchKernel:1=1"},
        {"EMULATED_CUDA_KERNELS": ""},
        {crossover.VARIABLE: "much"},
    ],
    ids=["module", "memory", "launch", "function", "variable"],
)
def test_a_kernel_that_cannot_be_had_leaves_the_batches(daemon: RunningDaemon, fault: dict[str, str]) -> None:
    with daemon.connect(MODEL) as session, device_client(daemon, **{crossover.VARIABLE: "", **fault}) as client:
        put_conversation(session, 1, BLOCKS, wait="settled")
        assert client("crossover") == {}
        assert loaded(client, 1)[0]
