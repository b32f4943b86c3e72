"""Our own engine on device memory: leases on the device and in arenas are restored beside the step, and what is stored
from the pool has the bytes that the processor's copies have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.emulated import emulated_node
from tests.gpu.test_device_leases import DeviceClient, device_client
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon
from tests.reference.skips import skip_without_ggml

pytest.importorskip("torch", reason="needs the extra torch: pip install '.[torch]'")
pytestmark = pytest.mark.slow
SETTINGS = (
    "host.capacity=8MiB", "host.staging=2MiB", "host.arena=1MiB", "host.warm_restart=off",
    "limits.staging_per_client=512KiB",
    "tier.vram.kind=gpu", "tier.vram.before_host=true", "tier.vram.capacity=4MiB", "tier.vram.chunk=2MiB",
    "tier.vram.bounce=4MiB", "nvme.capacity=64MiB", "nvme.slab=1MiB",
)  # fmt: skip
TOKENS = 3 * 64 + 30  # three blocks, and a tail of two steps
RIGHT = {"restored": 192, "tokens": True, "to the bit": True, "close": True}
MODULE = "tests.gpu.device_own_engine"


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    skip_without_ggml()  # it reads the weights
    for name, value in emulated_node(must_emulate=True).items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS) as running:
        monkeypatch.setenv("EMULATED_CUDA_DELAY_US", "15000")  # of the engine: waits that are missing are seen
        yield running


@pytest.fixture
def complaints(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "stderr"
    yield path
    assert "emulated CUDA" not in path.read_text(), path.read_text()


def _opened(client: DeviceClient, kv_dtype: str = "f16") -> None:
    assert client("open", kv_dtype) == {"by the device": True}


@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
def test_a_prompt_is_restored_from_arenas_and_from_the_device_to_the_bit(
    daemon: RunningDaemon, complaints: Path, kv_dtype: str
) -> None:
    with complaints.open("w") as stderr, device_client(daemon, module=MODULE, stderr=stderr) as client:
        _opened(client, kv_dtype)
        assert client("store", 1, TOKENS) == {"stored": 3, "same bytes": True}
        first = client("answer", 1, TOKENS)
        assert first | {"on_device": 0} == RIGHT | {"on_device": 0}
        assert client("register")["settled"], "from here on straight from the arenas"
        assert client("store", 2, TOKENS) == {"stored": 3, "same bytes": True}
        assert client("answer", 2, TOKENS) | {"on_device": 0} == RIGHT | {"on_device": 0}
        assert eventually(lambda: client("answer", 1, TOKENS)["on_device"] == 3), "hits are copied to the device"
        for _ in range(3):
            assert client("answer", 1, TOKENS) == RIGHT | {"on_device": 3}


def test_what_is_stored_while_the_engine_decodes_waits_for_its_rate_and_comes_when_it_ends(
    daemon: RunningDaemon, complaints: Path
) -> None:
    with complaints.open("w") as stderr, device_client(daemon, module=MODULE, stderr=stderr) as client:
        _opened(client)
        found = client("answer and store", 1, TOKENS)
        assert found == {"waits": found["waits"], "statuses": {"stored": 3}, "limited": False} and found["waits"]
        found = client("answer", 1, TOKENS)
        assert found | {"to the bit": True, "on_device": 0} == RIGHT | {"on_device": 0}


def test_what_a_step_read_under_a_lease_that_ended_does_not_count(daemon: RunningDaemon, complaints: Path) -> None:
    with complaints.open("w") as stderr, device_client(daemon, module=MODULE, stderr=stderr) as client:
        _opened(client)
        client("store", 1, TOKENS)
        found = client("answer while the lease ends", 1, TOKENS)
        assert (found["restored"], found["close"]) == (0, True), "it is computed, in other steps"
        assert client("answer", 1, TOKENS) | {"on_device": 0} == RIGHT | {"on_device": 0}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cuDevicePrimaryCtxRetain:2=2", "CUDA device 0 cannot be used: cuDevicePrimaryCtxRetain"),
        ("cuMemHostRegister:3=2", "cuMemHostRegister"),
    ],
    ids=["no context", "no pinned buffer"],
)
def test_a_device_that_makes_no_copies_leaves_them_to_the_host(
    daemon: RunningDaemon, tmp_path: Path, fault: str, reason: str
) -> None:
    path, faults = tmp_path / "stderr", {"EMULATED_CUDA_FAULTS": fault}
    with path.open("w") as stderr, device_client(daemon, module=MODULE, stderr=stderr, **faults) as client:
        assert client("open", "f16") == {"by the device": False}
        assert client("store", 1, TOKENS) == {"stored": 3, "same bytes": True}
        assert client("answer", 1, TOKENS) == RIGHT | {"on_device": 0}
    text = path.read_text()
    assert "blocks are copied through host memory: CUDA device 0 makes no copies of its own" in text and reason in text


def test_chunks_that_cannot_be_imported_are_read_in_arenas(daemon: RunningDaemon, complaints: Path) -> None:
    faults = {"EMULATED_CUDA_FAULTS": "cuMemImportFromShareableHandle:0=2"}
    with complaints.open("w") as stderr, device_client(daemon, module=MODULE, stderr=stderr, **faults) as client:
        _opened(client)
        client("store", 1, TOKENS)
        assert client("answer", 1, TOKENS) == RIGHT | {"on_device": 0}
        assert eventually(lambda: daemon.tiers()["vram"].blocks >= 3)
        for _ in range(2):
            assert client("answer", 1, TOKENS) == RIGHT | {"on_device": 0}
