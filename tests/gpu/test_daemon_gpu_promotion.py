"""A daemon whose tiers are GPU, DRAM and NVMe in that order: what NVMe alone has goes straight to the GPU for an engine
on that device, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.emulated import emulated_node
from tests.gpu.emulated_storage import EmulatedStorage
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, SETTINGS, whole
from tests.gpu.test_daemon_gpu_tier import workers_of
from tests.gpu.test_device_leases import DeviceClient, device_client
from tests.gpu.test_gpu_worker import order
from tests.reference.conversations import put_conversation
from tests.reference.damage import flip_on_disk
from tests.reference.kvctl import Kvctl
from tests.reference.nvrtc import need_nvrtc
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.slow
WHOLE = {"blocks": BLOCKS, "right": True, "verified": True, "valid": True}


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *settings: str) -> Iterator[RunningDaemon]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS, "tier.vram.admission=always", "scrub.enabled=false", *settings) as daemon:
        daemon.socket_dir.parent.chmod(0o711)
        yield daemon


def leave_on_nvme(daemon: RunningDaemon, client: DeviceClient, number: int) -> None:
    def is_on_nvme_alone() -> bool:
        """Copies that are under way stay where they are when a tier is dropped."""
        for tier in set(daemon.tiers()) - {"nvme"}:
            daemon.drop(tier)
        return bool(client("lookup", number, BLOCKS)["tiers"] == ["nvme"] * BLOCKS)

    with daemon.connect(MODEL) as session:
        put_conversation(session, number, BLOCKS, wait="settled")
    assert eventually(is_on_nvme_alone)


def comes_straight(daemon: RunningDaemon, client: DeviceClient, number: int) -> bool:
    leave_on_nvme(daemon, client, number)
    found = client("get", number, BLOCKS)
    assert found["blocks"] == BLOCKS and found["right"], "a get does not wait for a worker"
    return bool(found["on_device"] == BLOCKS)


def straight_blocks(daemon: RunningDaemon) -> int:
    return daemon.status().counters["straight_blocks"]


def test_a_chain_on_nvme_is_leased_on_the_device_and_dram_has_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    with running(monkeypatch, emulated_node()) as daemon, device_client(daemon) as client:
        leave_on_nvme(daemon, client, 1)
        found = client("get", 1, BLOCKS)
        assert found == WHOLE | {"on_device": BLOCKS, "promoted_bytes": found["promoted_bytes"]}
        assert found["promoted_bytes"] > 0 and straight_blocks(daemon) == BLOCKS
        tiers = daemon.tiers()
        assert (tiers["vram"].blocks, tiers["host"].blocks) == (BLOCKS, 0)
        assert (tiers["nvme"].promoted_blocks, tiers["nvme"].hits) == (BLOCKS, BLOCKS)
        assert client("get", 1, BLOCKS) == WHOLE | {"on_device": BLOCKS, "promoted_bytes": 0}
        assert straight_blocks(daemon) == BLOCKS
        with daemon.connect(MODEL) as session:
            assert whole(session, 1), "a client without the device gets them in DRAM"
        for command in ("tiers", "status"):
            assert "reads NVMe through host memory" in Kvctl(daemon, capfdbinary)(command).out


def test_other_ways_lead_through_dram(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, emulated_node(), "tier.vram.from_nvme=off") as daemon, device_client(daemon) as client:
        leave_on_nvme(daemon, client, 1)
        found = client("get", 1, BLOCKS)
        assert found["blocks"] == BLOCKS and found["right"]
        assert straight_blocks(daemon) == 0 and daemon.tiers()["host"].blocks == BLOCKS


def test_direct_storage_serves_a_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_nvrtc()
    storage = EmulatedStorage(tmp_path)
    with (
        running(monkeypatch, emulated_node() | storage.variables, "tier.vram.from_nvme=direct") as daemon,
        device_client(daemon) as client,
    ):
        leave_on_nvme(daemon, client, 1)
        found = client("get", 1, BLOCKS)
        assert found == WHOLE | {"on_device": BLOCKS, "promoted_bytes": found["promoted_bytes"]}
        assert storage.reads == BLOCKS == straight_blocks(daemon)
        leave_on_nvme(daemon, client, 2)
        storage.order("spoil")
        found = client("get", 2, BLOCKS)
        assert (found["blocks"], found["right"]) == (BLOCKS, True), "what it spoiled was read again"
        assert daemon.status().counters["corrupt_blocks"] == 0


def test_damage_on_nvme_is_a_shorter_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(monkeypatch, emulated_node()) as daemon, device_client(daemon) as client:
        leave_on_nvme(daemon, client, 1)
        assert flip_on_disk(daemon, 3, 1) == 1
        found = client("get", 1, BLOCKS)
        assert (found["blocks"], found["on_device"], found["right"]) == (3, 3, True)
        status = daemon.status()
        assert status.counters["corrupt_blocks"] == 1 and not status.degraded
        assert daemon.tiers()["nvme"].quarantined_blocks == 1


def test_a_worker_that_dies_while_it_reads_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.touch()
    with (
        running(monkeypatch, emulated_node(control=control)) as daemon,
        device_client(daemon, EMULATED_CUDA_CONTROL="") as client,
    ):
        for number in range(1, 4):
            assert eventually(partial(comes_straight, daemon, client, number))  # with the first worker, and the next
            leave_on_nvme(daemon, client, number)
            (worker,) = workers_of(daemon.process.pid)
            order(control, "run:2=kill")
            found = client("get", number, BLOCKS)
            assert (found["blocks"], found["right"]) == (BLOCKS, True) and found["on_device"] < BLOCKS, "by DRAM"
            order(control, "")
            assert workers_of(daemon.process.pid) != [worker]
            status = daemon.status()
            assert not status.degraded and status.counters["corrupt_blocks"] == 0
        vram = daemon.tiers()["vram"]
        assert vram.used_bytes <= vram.capacity_bytes
