"""Blocks on the GPU outlive the daemon, its worker and its clients, and no device memory is lost."""

from __future__ import annotations

import os

import pytest

from benchmarks.gpu_kills import SETTINGS, kill_all, kill_mixed, on_device
from tests.gpu.emulated import emulated_node, is_hardware
from tests.gpu.test_daemon_gpu_first import BLOCKS, MODEL, put_many, use, whole
from tests.gpu.test_device_leases import device_client, held_on_device
from tests.reference.conversations import tokens_of
from tests.reference.free_device_memory import free_bytes
from tests.reference.nvrtc import need_nvrtc
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("KVSTORED_TEST_GPU_KILLS", "2"))  # of each


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_node().items():
        monkeypatch.setenv(name, value)


def filled(daemon: RunningDaemon) -> int:
    """Put blocks on the device and out of DRAM; how many are there alone."""
    with daemon.connect(MODEL) as session:
        for number in (1, 2, 3):
            use(daemon, session, number)
        put_many(session, range(100, 180))
    return on_device(daemon)


def test_every_block_outlives_kills_of_daemon_worker_and_engines_and_no_memory_is_lost() -> None:
    losses = kill_all(KILLS, KILLS, KILLS)
    assert (losses.blocks, losses.found_blocks, losses.lost_bytes) == (3 * BLOCKS, 3 * BLOCKS, 0)
    assert losses.killed == 3 * KILLS


def test_so_it_is_over_deaths_of_any_in_turns_while_blocks_are_copied() -> None:
    losses = kill_mixed(4 * KILLS, seed=2)
    assert (losses.killed, losses.blocks, losses.found_blocks, losses.lost_bytes) == (
        4 * KILLS, 3 * BLOCKS, 3 * BLOCKS, 0,
    )  # fmt: skip


def test_no_kill_is_begun_when_the_time_for_them_is_over() -> None:
    losses = kill_all(1, 1, 1, longest_s=0.0)
    assert (losses.killed, losses.found_blocks) == (0, 3 * BLOCKS)


def test_a_deleted_block_does_not_come_back() -> None:
    with running_daemon(*SETTINGS) as daemon:
        assert filled(daemon) == 3 * BLOCKS
        with daemon.connect(MODEL) as session:
            assert session.delete(tokens_of(2, BLOCKS)).blocks == BLOCKS
        daemon.kill9()
        daemon.restart()
        assert on_device(daemon) == 2 * BLOCKS
        with daemon.connect(MODEL) as session:
            assert session.lookup(tokens_of(2, BLOCKS)).blocks == 0 and whole(session, 1) and whole(session, 3)


@pytest.mark.parametrize(
    "change", ["tier.vram.device=1", "tier.vram.chunk=4MiB", "host.warm_restart=off"], ids=["device", "chunk", "off"]
)
def test_what_is_not_taken_over_is_given_back(change: str) -> None:
    if is_hardware() and change.endswith("device=1"):
        pytest.skip("needs two devices")
    before_bytes = free_bytes()
    with running_daemon(*SETTINGS) as daemon:
        assert filled(daemon) == 3 * BLOCKS and free_bytes() < before_bytes
        daemon.kill9()
        daemon.settings = (*SETTINGS, change)
        daemon.restart()
        assert daemon.tiers()["vram"].blocks == 0 and free_bytes(before_bytes) >= before_bytes
        assert change.endswith("off") or daemon.status().counters["warm_dropped_arenas"] > 0
        assert change.endswith("off") or "chunk of GPU memory" in daemon.log


def test_a_smaller_capacity_holds() -> None:
    with running_daemon(*SETTINGS) as daemon:
        with daemon.connect(MODEL) as session:
            for number in range(1, 17):  # more than a chunk holds
                use(daemon, session, number)
        daemon.kill9()
        daemon.settings = (*SETTINGS, "tier.vram.capacity=2MiB")
        daemon.restart()
        vram = daemon.tiers()["vram"]
        assert 0 < vram.blocks < 16 * BLOCKS and vram.used_bytes == vram.capacity_bytes == 2 << 20


def test_what_an_engine_wrote_over_before_the_restart_is_never_leased() -> None:
    need_nvrtc()
    with running_daemon(*SETTINGS) as daemon, device_client(daemon) as client:
        assert filled(daemon) == 3 * BLOCKS and held_on_device(client, 1)
        client("forge")
        client("release")
        daemon.kill9()
        daemon.restart()
        assert eventually(lambda: client("get", 2, BLOCKS)["on_device"] == BLOCKS)
        assert client("get", 1, BLOCKS)["blocks"] == 0, "no other tier has it"
        assert daemon.status().counters["corrupt_blocks"] == 1


def test_a_lease_on_device_memory_is_valid_again_over_the_same_bytes() -> None:
    with running_daemon(*SETTINGS) as daemon, device_client(daemon) as client:
        assert filled(daemon) == 3 * BLOCKS and held_on_device(client, 1)
        daemon.kill9()
        daemon.restart()
        assert eventually(lambda: client("again")["valid"])
        with daemon.connect(MODEL) as session:
            for number in range(200, 240):  # far more than the device holds
                put_many(session, range(number, number + 1))
                assert whole(session, number)
        again = client("again")
        assert again["right"] and again["verified"] and again["valid"]
