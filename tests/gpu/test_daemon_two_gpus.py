"""A daemon with a GPU tier on each of two devices before DRAM: clients read the memory of their own device, and host
memory otherwise. The emulated devices are no peers: one cannot read the memory of the other.
"""

from __future__ import annotations

import pytest

from kvstore_proto.arena import DEVICE_ARENAS
from kvstored.lifetime.warm.ledger import CHUNKS_A_TIER
from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_first import BLOCKS
from tests.gpu.test_daemon_gpu_promotion import leave_on_nvme, running, straight_blocks
from tests.gpu.test_device_leases import DeviceClient, device_client
from tests.reference.running_daemon import RunningDaemon, eventually

pytestmark = pytest.mark.slow
SECOND = tuple(
    f"tier.second.{setting}"
    for setting in (
        "kind=gpu", "device=1", "before_host=true", "capacity=4MiB", "chunk=2MiB", "bounce=4MiB", "policy=lru",
        "admission=always",
    )
)  # fmt: skip


def blocks_in(daemon: RunningDaemon, *names: str) -> list[int]:
    tiers = daemon.tiers()
    return [tiers[name].blocks for name in names]


def on_device(client: DeviceClient, number: int) -> int:
    """Blocks of a conversation that a lease names on the device; all of them are had, and right."""
    found = client("get", number, BLOCKS)
    assert (found["blocks"], found["right"], found["verified"], found["valid"]) == (BLOCKS, True, True, True)
    return int(found["on_device"])


def test_clients_on_two_devices_read_each_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(monkeypatch, emulated_node(must_emulate=True), *SECOND) as daemon,
        device_client(daemon, device=0) as first,
        device_client(daemon, device=1) as second,
    ):
        leave_on_nvme(daemon, first, 1)
        assert on_device(first, 1) == BLOCKS == straight_blocks(daemon)
        assert blocks_in(daemon, "vram", "second", "host") == [BLOCKS, 0, 0]
        assert first("lookup", 1, BLOCKS)["tiers"] == ["gpu"] * BLOCKS
        assert second("lookup", 1, BLOCKS)["tiers"] == ["memory"] * BLOCKS
        assert first("arena", DEVICE_ARENAS)["granted"] and not second("arena", DEVICE_ARENAS)["granted"]
        assert on_device(second, 1) == 0, "from the other device to DRAM, by the daemon"
        assert daemon.tiers()["vram"].promoted_blocks == BLOCKS
        assert on_device(first, 1) == BLOCKS
        assert eventually(lambda: on_device(second, 1) == BLOCKS), "it was used there, too"
        assert blocks_in(daemon, "vram", "second", "host") == [BLOCKS] * 3
        chunk = DEVICE_ARENAS + CHUNKS_A_TIER
        assert second("arena", chunk)["granted"] and not first("arena", chunk)["granted"]


def test_blocks_go_from_nvme_straight_to_the_clients_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(monkeypatch, emulated_node(must_emulate=True), *SECOND) as daemon,
        device_client(daemon, device=0) as first,
        device_client(daemon, device=1) as second,
    ):
        leave_on_nvme(daemon, second, 1)
        leave_on_nvme(daemon, second, 2)
        assert on_device(second, 1) == BLOCKS == straight_blocks(daemon)
        assert blocks_in(daemon, "vram", "second", "host") == [0, BLOCKS, 0]
        assert on_device(first, 2) == BLOCKS == straight_blocks(daemon) - BLOCKS
        assert blocks_in(daemon, "vram", "second", "host") == [BLOCKS, BLOCKS, 0]


def test_a_client_on_a_device_without_a_tier_is_served_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(monkeypatch, emulated_node(must_emulate=True)) as daemon,
        device_client(daemon, device=0) as first,
        device_client(daemon, device=1) as second,
    ):
        leave_on_nvme(daemon, second, 1)
        assert on_device(second, 1) == 0 == straight_blocks(daemon)
        assert eventually(lambda: on_device(first, 1) == BLOCKS)

        def is_on_the_first_alone() -> bool:
            daemon.drop("host")
            return bool(second("lookup", 1, BLOCKS)["tiers"] == ["memory"] * BLOCKS)

        assert eventually(is_on_the_first_alone)
        assert on_device(second, 1) == 0 and not second("arena", DEVICE_ARENAS)["granted"]
