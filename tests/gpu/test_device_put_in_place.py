"""Puts in place of an engine on a device: pages of its pool are copied straight into the slots where the blocks are
stored, and no staging memory is used.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu.emulated import emulated_node, host_copies
from tests.gpu.test_daemon_gpu_first import SETTINGS as SMALL
from tests.gpu.test_device_leases import device_client
from tests.reference.conversations import found_blocks, model
from tests.reference.running_daemon import running_daemon

pytestmark = pytest.mark.slow
ARENA, STAGING = re.compile(r"/memfd:kvstore-arena-\d+\b"), re.compile(r"/memfd:kvstored-staging-")
MODEL, BLOCKS = model(kib_a_block=128), 9  # less than a MiB is not written in place
SETTINGS = (*SMALL, "host.capacity=48MiB", "host.arena=8MiB", "host.staging=8MiB", "limits.staging_per_client=2MiB")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_node(must_emulate=True).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("command", ["store", "store-at-once"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "by staging"])
def test_pages_are_copied_straight_into_the_slots_where_their_blocks_are_stored(
    tmp_path: Path, command: str, in_place: bool
) -> None:
    log = tmp_path / "copies"
    log.touch()
    with (
        running_daemon(*SETTINGS, f"put.in_place={str(in_place).lower()}") as daemon,
        daemon.connect(MODEL) as reader,
        device_client(daemon, EMULATED_CUDA_COPIES=str(log), TEST_KIB_A_BLOCK="128") as client,
    ):
        for number in (1, 2):  # the first ones by the pinned buffer: the arena is not registered yet
            log.write_text("")
            assert client(command, number, BLOCKS)["stored"] == BLOCKS
            assert client("register")["settled"]
            assert found_blocks(reader, number, BLOCKS) == BLOCKS
        copies = [each for each in host_copies(log) if not each.to_device]
        assert sum(each.nbytes for each in copies) == BLOCKS * MODEL.payload_bytes()
        files = {each.file for each in copies}
        assert all((ARENA if in_place else STAGING).match(file) for file in files), files
