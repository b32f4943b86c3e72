"""A pass over a block in device memory finds what an engine wrote over it, and it is never leased again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.segments import view_at
from kvstored.health.integrity import Integrity
from kvstored.health.scrub.device_scrubber import DeviceScrubber
from kvstored.store.operations.delete import Fate
from kvstored.store.operations.durability import DurabilityMode
from tests.gpu.emulated import emulated_node
from tests.gpu.test_gpu_export import overwrite
from tests.reference.device_first import SMALL, must_hold, settle
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.nvrtc import need_nvrtc
from tests.reference.small_store import SmallStore, small_store

pytestmark = pytest.mark.slow
CHUNK_BYTES, BLOCKS = 2 << 20, 6


@pytest.fixture(autouse=True)
def compiler() -> None:
    need_nvrtc()


def open_tier(node: dict[str, str], *, checks: bool = True) -> GpuTier:
    return GpuTier(
        CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES, name="vram",
        settings=GpuWorkerSettings(variables=node, checks=checks),
    )  # fmt: skip


UNKEPT: Any = SimpleNamespace(scrub=None)  # no scrubber of NVMe runs here


def scrubber_of(small: SmallStore) -> DeviceScrubber:
    found = Integrity(small.store, lambda: True, UNKEPT).device_scrubber
    assert found is not None
    return found


async def on_device(store: DrivenStore) -> list[int]:
    """Rows of the blocks of a chain that has a copy in device memory."""
    keys = keys_of(1, BLOCKS)
    await store.put(keys, DurabilityMode.NONE)
    await store.get(keys)
    await settle(store)
    return [store.small.residency.find(store.client.tenant_id, key) for key in keys]


@pytest.mark.parametrize("checks", [True, False])
def test_a_block_that_an_importer_wrote_over_is_dropped(tmp_path: Path, checks: bool) -> None:
    node = emulated_node()
    tier = open_tier(node, checks=checks)

    async def run() -> None:
        async with small_store(tmp_path, *SMALL, "scrub.rate=1GiB", before=[tier]) as small:
            store, residency = DrivenStore(small), small.residency
            rows = await on_device(store)
            assert all(residency.has(row, 0) for row in rows)
            slot = residency.slot(rows[2], 0)
            overwrite(tier, node, slot.container, slot.offset + HEADER_BYTES + 77, b"forged", tmp_path / "data")
            await scrubber_of(small).scrub()
            counters = small.store.counters
            assert [residency.has(row, 0) for row in rows] == [not checks or at != 2 for at in range(BLOCKS)]
            assert counters["scrub_corrupt"] == counters["corrupt_blocks"] == int(checks)
            assert bool(counters["scrubbed_bytes"]) == checks, "without checksums on the device nothing is read"
            assert not any(residency.pin_count(row) for row in rows)
            if checks:
                assert (await store.get(keys_of(1, BLOCKS))).blocks == BLOCKS, "DRAM has it"
                await settle(store)
                assert must_hold(store)

    asyncio.run(run())


def test_a_block_that_the_device_checks_just_now_can_be_deleted(tmp_path: Path) -> None:
    """However long the device takes: here its worker is stopped."""
    tier = open_tier(emulated_node())

    async def run() -> None:
        async with small_store(tmp_path, *SMALL, "scrub.rate=1GiB", before=[tier]) as small:
            store, keys = DrivenStore(small), keys_of(1, BLOCKS)
            await on_device(store)
            os.kill(tier.worker_process, signal.SIGSTOP)
            try:
                scrubbing = asyncio.ensure_future(scrubber_of(small).scrub())
                await asyncio.sleep(0)  # the first block's check is under way
                deleted = await store.operations.delete.delete(store.client, keys)
            finally:
                os.kill(tier.worker_process, signal.SIGCONT)
            await scrubbing
            assert deleted.fates == [Fate.DELETED] * BLOCKS
            assert small.store.counters["scrub_corrupt"] == 0, "what was checked is not there any more"
            assert must_hold(store) == 0

    asyncio.run(run())


def test_a_block_that_is_damaged_in_dram_is_found_by_its_copy_to_the_device(tmp_path: Path) -> None:
    """The next get has it from NVMe."""
    tier = open_tier(emulated_node())

    async def run() -> None:
        async with small_store(tmp_path, *SMALL, before=[tier]) as small:
            store, residency, host = DrivenStore(small), small.residency, small.mapped
            keys = keys_of(1, BLOCKS)
            await store.put(keys, DurabilityMode.ALWAYS)
            await store.get(keys)
            row = residency.find(store.client.tenant_id, keys[2])
            place = small.store.host.slot_segment(residency.slot(row, host))
            view_at(place.address + HEADER_BYTES, 100)[77] ^= 1
            await settle(store)
            assert not residency.has(row, host) and not residency.has(row, 0)
            assert small.store.counters["corrupt_blocks"] == 1
            assert (await store.get(keys)).blocks == BLOCKS  # which compares the bytes
            await settle(store)
            assert must_hold(store)

    asyncio.run(run())


def test_a_store_without_device_memory_has_no_such_passes(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, *SMALL) as small:
            assert Integrity(small.store, lambda: True, UNKEPT).device_scrubber is None

    asyncio.run(run())


def test_a_scrubber_that_is_off_checks_no_device_either(tmp_path: Path) -> None:
    tier = open_tier(emulated_node())

    async def run() -> None:
        async with small_store(tmp_path, *SMALL, "scrub.enabled=false", before=[tier]) as small:
            integrity = Integrity(small.store, lambda: True, UNKEPT)
            assert integrity.device_scrubber is None and "device-scrubber" not in integrity.tasks()

    asyncio.run(run())
