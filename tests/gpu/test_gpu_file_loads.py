"""The worker of a GPU reads blocks from slabs of NVMe: what it brought is verified before it is readable, also by
direct storage, which is not trusted; and its deaths lose nothing.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing.transfers import block, finish, finish_all, get
from tests.gpu.emulated import emulated_node
from tests.gpu.emulated_storage import EmulatedStorage
from tests.gpu.test_gpu_verification import without_nvrtc
from tests.gpu.test_gpu_worker import order, wait_for_worker
from tests.reference.nvrtc import need_nvrtc
from tests.reference.running_daemon import eventually
from tests.reference.stored_blocks import stored_slot

pytestmark = pytest.mark.slow
CHUNK_BYTES = 2 << 20
PAYLOAD_BYTES = 1_400_000  # more than half of the bounce buffer: a range that is not given back stops everything


def open_tier(variables: dict[str, str], from_files: str = "auto", **settings: Any) -> GpuTier:
    return GpuTier(
        4 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES,
        settings=GpuWorkerSettings(variables=variables, from_files=from_files, **settings),
    )  # fmt: skip


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[NvmeTier]:
    with closing(NvmeTier.open(tmp_path / "nvme", 32 << 20, slab_bytes=8 << 20)) as tier:
        yield tier


@pytest.fixture
def storage(tmp_path: Path) -> EmulatedStorage:
    need_nvrtc()
    return EmulatedStorage(tmp_path)


def stored(nvme: NvmeTier, number: int = 1) -> Slot:
    return stored_slot(nvme, *block(number, PAYLOAD_BYTES))


def load(tier: GpuTier, nvme: NvmeTier, source: Slot, number: int = 1) -> tuple[Outcome, Slot]:
    """Load from NVMe to a new slot on the device, which the caller frees unless it went well."""
    slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
    assert slot is not None
    key = block(number, PAYLOAD_BYTES)[0].key
    return finish(lambda done: nvme.lend(source, tier.loader(slot, key), done)), slot


def must_hold(tier: GpuTier, slot: Slot, number: int = 1) -> None:
    header, payload = block(number, PAYLOAD_BYTES)
    outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
    assert outcome.ok and np.array_equal(copy, payload), outcome
    assert outcome.header is not None and outcome.header.tokens == header.tokens


def must_hold_nothing(tier: GpuTier, slot: Slot, number: int = 1) -> None:
    key = block(number, PAYLOAD_BYTES)[0].key
    assert get(tier, slot, key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT
    tier.free(slot)


def change(nvme: NvmeTier, slot: Slot, at: int) -> None:
    """Change a byte of a slot on the medium."""
    path, _, offset = nvme.location(slot).rpartition(":")
    with open(path, "r+b", buffering=0) as file:
        file.seek(int(offset) + at)
        byte = file.read(1)[0]
        file.seek(int(offset) + at)
        file.write(bytes([byte ^ 255]))
        os.fsync(file.fileno())


def wait_until_ready(tier: GpuTier, starts: int = 1) -> None:
    """A write waits for the worker, a load does not."""
    wait_for_worker(tier, starts)
    tier.free(stored_slot(tier, *block(9, 10_000)))


def tier_says(tier: GpuTier) -> str:
    """Return why the tier reads through host memory."""
    return tier.statistics().message.partition("reads NVMe through host memory: ")[2]


def files_open() -> int:
    gc.collect()  # what earlier tests left is closed now, not in between
    return len(os.listdir("/proc/self/fd"))


def test_a_block_comes_from_a_slab_and_both_tiers_count_it(nvme: NvmeTier) -> None:
    with closing(open_tier(emulated_node())) as tier:
        source = stored(nvme)
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok and outcome.nbytes == PAYLOAD_BYTES
        must_hold(tier, slot)
        assert tier.statistics().writes == 1 and nvme.statistics().reads == 1
        tier.free(slot)
        before = files_open()
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok
        must_hold(tier, slot)
        assert files_open() == before, "the descriptor that was lent is closed"
        assert get(nvme, source, block(1, PAYLOAD_BYTES)[0].key, PAYLOAD_BYTES)[0].ok


@pytest.mark.parametrize("at", [100, HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1])
@pytest.mark.parametrize("checks", [True, False])
def test_damage_on_nvme_does_not_become_readable(nvme: NvmeTier, at: int, checks: bool) -> None:
    """The damage is found by the device's checksum, or by this process in the bounce buffer."""
    with closing(open_tier(emulated_node(), checks=checks)) as tier:
        source = stored(nvme)
        change(nvme, source, at)
        outcome, slot = load(tier, nvme, source)
        assert outcome.kind is OutcomeKind.CORRUPT, outcome
        must_hold_nothing(tier, slot)
        assert nvme.statistics().corrupt == 1 and nvme.statistics().errors == 0
        change(nvme, source, at)
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok
        must_hold(tier, slot)


def test_another_block_in_the_slot_is_not_taken_for_it(nvme: NvmeTier) -> None:
    with closing(open_tier(emulated_node())) as tier:
        outcome, slot = load(tier, nvme, stored(nvme), 2)
        assert outcome.kind is OutcomeKind.CORRUPT and "holds block" in outcome.message
        must_hold_nothing(tier, slot, 2)


def test_a_file_that_was_cut_is_a_failure_of_the_medium(nvme: NvmeTier) -> None:
    with closing(open_tier(emulated_node())) as tier:
        source = stored(nvme)
        path, _, offset = nvme.location(source).rpartition(":")
        os.truncate(path, int(offset) + HEADER_BYTES + 8192)
        outcome, slot = load(tier, nvme, source)
        assert outcome.kind is OutcomeKind.FAILED and outcome.errno and "bytes read" in outcome.message
        must_hold_nothing(tier, slot)
        assert nvme.statistics().errors == 1


def test_without_a_compiler_damage_is_found_on_the_way(nvme: NvmeTier, tmp_path: Path) -> None:
    with closing(open_tier(without_nvrtc(tmp_path))) as tier:
        assert not tier.verifies
        source = stored(nvme)
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok
        must_hold(tier, slot)
        tier.free(slot)
        change(nvme, source, HEADER_BYTES + 5)
        outcome, slot = load(tier, nvme, source)
        assert outcome.kind is OutcomeKind.CORRUPT
        must_hold_nothing(tier, slot)


@pytest.mark.parametrize("death", ["run:1=kill", "cuMemcpyHtoDAsync:1=kill", "cuLaunchKernel:1=kill"])
def test_a_worker_that_dies_meanwhile_is_no_fault_of_nvme(nvme: NvmeTier, tmp_path: Path, death: str) -> None:
    need_nvrtc()
    control = tmp_path / "control"
    control.touch()
    with closing(open_tier(emulated_node(control=control))) as tier:
        source = stored(nvme)
        warm, slot = load(tier, nvme, source)
        assert warm.ok
        tier.free(slot)
        wait_until_ready(tier)
        before = files_open()
        for deaths in (1, 2):
            order(control, death)
            outcome, slot = load(tier, nvme, source)
            assert outcome.kind is OutcomeKind.FAILED and not outcome.errno, outcome
            order(control, "")
            must_hold_nothing(tier, slot)
            wait_until_ready(tier, deaths + 1)
            outcome, slot = load(tier, nvme, source)
            assert outcome.ok
            must_hold(tier, slot)
            tier.free(slot)
        statistics = nvme.statistics()
        assert (statistics.errors, statistics.corrupt) == (0, 0)
        assert eventually(lambda: files_open() == before), "a worker that died left files open"


def test_a_load_does_not_wait_for_another_worker(nvme: NvmeTier) -> None:
    with closing(open_tier(emulated_node())) as tier:
        source = stored(nvme)

        os.kill(tier.worker_process, signal.SIGKILL)
        outcome, slot = load(tier, nvme, source)
        assert outcome.kind is OutcomeKind.FAILED and not outcome.errno and tier.worker_starts <= 2
        tier.free(slot)
        wait_until_ready(tier, 2)
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok
        must_hold(tier, slot)


def test_without_the_library_the_tier_says_which_extra_brings_it() -> None:
    node = emulated_node(must_emulate=True)  # kvikio may be on a machine with a GPU
    with closing(open_tier(node)) as tier:
        message = tier.statistics().message
        assert "reads NVMe through host memory: " in message and "pip install '.[gds]'" in message
    with closing(GpuTier(CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, settings=GpuWorkerSettings(variables=node))) as tier:
        assert tier.statistics().message.endswith("reads NVMe through host memory"), "unless it is asked for"
    with closing(open_tier(node, from_files="off")) as tier:
        assert not tier.info.loads_files and "reads NVMe" not in tier.statistics().message
    with pytest.raises(OSError, match=r"there is no direct storage: .*\.\[gds\]"):
        open_tier(emulated_node(), from_files="direct")


def test_direct_storage_brings_the_payload(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    with closing(open_tier(emulated_node() | storage.variables, from_files="direct")) as tier:
        assert tier.statistics().message.endswith("reads NVMe by direct storage")
        source, other = stored(nvme), stored(nvme, 2)
        for number, lent in ((1, source), (2, other), (1, source)):
            outcome, slot = load(tier, nvme, lent, number)
            assert outcome.ok
            must_hold(tier, slot, number)
            tier.free(slot)
        assert storage.reads == 3


def test_damage_on_nvme_is_not_blamed_on_direct_storage(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    with closing(open_tier(emulated_node() | storage.variables)) as tier:
        source, other = stored(nvme), stored(nvme, 2)
        change(nvme, source, HEADER_BYTES + 7)
        outcome, slot = load(tier, nvme, source)
        assert outcome.kind is OutcomeKind.CORRUPT
        must_hold_nothing(tier, slot)
        assert load(tier, nvme, other, 2)[0].ok
        assert storage.reads == 2 and tier.statistics().message.endswith("by direct storage")


@pytest.mark.parametrize("fault", ["spoil", "short", "refuse", "fail"])
def test_direct_storage_that_fails_or_lies_is_not_used_again(
    nvme: NvmeTier, storage: EmulatedStorage, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The block is read through host memory, and is right."""
    with closing(open_tier(emulated_node() | storage.variables)) as tier:
        source = stored(nvme)
        storage.order(fault)
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok, outcome
        must_hold(tier, slot)
        tier.free(slot)
        assert "direct storage is not used any more" in caplog.text
        assert "reads NVMe through host memory: " in tier.statistics().message
        storage.order("")
        reads = storage.reads
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok and storage.reads == reads
        must_hold(tier, slot)
        assert nvme.statistics().errors == nvme.statistics().corrupt == 0


def test_direct_storage_that_kills_the_worker_is_given_up(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    with closing(open_tier(emulated_node() | storage.variables)) as tier:
        source = stored(nvme)
        storage.order("kill")
        for deaths in range(1, 4):
            outcome, slot = load(tier, nvme, source)
            assert outcome.kind is OutcomeKind.FAILED and not outcome.errno
            tier.free(slot)
            wait_until_ready(tier, deaths + 1)
        outcome, slot = load(tier, nvme, source)
        assert outcome.ok
        must_hold(tier, slot)


def test_loads_that_one_death_ended_are_one_death(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    with closing(open_tier(emulated_node() | storage.variables)) as tier:
        lent = {number: stored(nvme, number) for number in range(1, 5)}
        slots = {number: slot for number in lent if (slot := tier.allocate(slot_bytes(PAYLOAD_BYTES)))}
        storage.order("kill")

        def start(number: int, done: Completion) -> None:
            nvme.lend(lent[number], tier.loader(slots[number], block(number, PAYLOAD_BYTES)[0].key), done)

        outcomes = finish_all([partial(start, number) for number in lent])
        assert [outcome.kind for outcome in outcomes] == [OutcomeKind.FAILED] * len(lent)
        storage.order("")
        for slot in slots.values():
            tier.free(slot)
        wait_until_ready(tier, 2)
        assert tier.statistics().message.endswith("by direct storage")


def test_a_worker_is_not_killed_for_a_disk_that_hangs_for_a_while(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    with closing(open_tier(emulated_node() | storage.variables, patience_s=0.5)) as tier:
        storage.order("slow")
        outcome, slot = load(tier, nvme, stored(nvme))
        assert outcome.ok and storage.reads == 1 and tier.worker_starts == 1, outcome
        must_hold(tier, slot)
    with closing(open_tier(emulated_node() | storage.variables, patience_s=0.5, file_patience_s=0.5)) as tier:
        assert load(tier, nvme, stored(nvme, 2), 2)[0].kind is OutcomeKind.FAILED, "there is an end to it"


def test_what_the_device_cannot_verify_is_not_read_past_host_memory(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    node = emulated_node() | storage.variables
    with closing(open_tier(node, checks=False)) as tier:
        assert "the device cannot verify" in tier.statistics().message
        outcome, slot = load(tier, nvme, stored(nvme))
        assert outcome.ok and not storage.reads
        must_hold(tier, slot)
    with pytest.raises(OSError, match="the device cannot verify"):
        open_tier(node, checks=False, from_files="direct")


def test_a_library_without_cufile_is_not_used(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    node = emulated_node() | storage.variables | {"EMULATED_KVIKIO_NO_CUFILE": "1"}
    with closing(open_tier(node)) as tier:
        assert "cuFile does not start" in tier.statistics().message
        outcome, slot = load(tier, nvme, stored(nvme))
        assert outcome.ok and not storage.reads
        must_hold(tier, slot)


@pytest.mark.parametrize(("start", "reason"), [("raise", "RuntimeError: kvikio does not start"), ("kill", "status -9")])
def test_a_library_that_does_not_start_stops_a_tier_only_if_it_is_demanded(
    nvme: NvmeTier, storage: EmulatedStorage, start: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = emulated_node() | storage.variables | {"EMULATED_KVIKIO_START": start}
    with closing(open_tier(node)) as tier:
        assert f"reads NVMe through host memory: {tier_says(tier)}" in caplog.text and reason in tier_says(tier)
        outcome, slot = load(tier, nvme, stored(nvme))
        assert outcome.ok and not storage.reads
        must_hold(tier, slot)
    with pytest.raises(OSError, match=reason):
        open_tier(node, from_files="direct")


def test_the_library_never_copies_through_host_memory_by_itself(nvme: NvmeTier, storage: EmulatedStorage) -> None:
    node = emulated_node() | storage.variables | {"KVIKIO_COMPAT_MODE": "ON"}
    with closing(open_tier(node)) as tier:
        assert tier.statistics().message.endswith("reads NVMe by direct storage")
