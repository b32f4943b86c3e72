"""A tier of slower memory between DRAM and NVMe: where blocks go when they leave a tier, and how they come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

import pytest

from kvstore_tiers.host import HostTier
from kvstore_tiers.testing.transfers import block
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from tests.reference.small_store import PAYLOAD_BYTES, SLOT_BYTES, SmallStore, small_store
from tests.reference.tiers import HOST

FAR, NVME = 1, 2
SETTINGS = (
    "host.capacity=4MiB", "host.policy=lru", "tier.far.capacity=2MiB", "tier.far.arena=1MiB", "tier.far.policy=lru",
)  # fmt: skip
IN_HOST = 4 * (1 << 20) // SLOT_BYTES


def run(directory: Path, drive: Callable[[SmallStore], Coroutine[None, None, None]], *settings: str) -> None:
    async def main() -> None:
        async with small_store(directory, *SETTINGS, *settings) as small:
            assert small.residency.tiers == ("host", "far", "nvme") and small.residency.durable == NVME
            await drive(small)
            assert check(small.residency) == []
            for tier in small.store.tiers:
                assert tier.check_books() == []
                assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes

    asyncio.run(main())


def has(small: SmallStore, number: int) -> list[bool]:
    row = small.find(number)
    return [row >= 0 and small.residency.has(row, position) for position in (HOST, FAR, NVME)]


async def fill_host(small: SmallStore, first: int, blocks: int) -> None:
    for number in range(first, first + blocks):
        assert await small.store_in(HOST, number) >= 0
        small.clock.advance(s=1)


def test_what_leaves_dram_goes_to_slower_memory_and_comes_back(tmp_path: Path) -> None:
    async def drive(small: SmallStore) -> None:
        await fill_host(small, 1, IN_HOST + 10)
        demoted = [number for number in range(1, IN_HOST) if has(small, number) == [False, True, False]]
        assert len(demoted) >= 10
        assert await small.fetch(demoted[0])
        assert has(small, demoted[0])[:2] == [True, True]
        slot = small.residency.slot(small.find(demoted[0]), HOST)
        stored = bytes(small.store.host.view(slot)[4096 : 4096 + PAYLOAD_BYTES])
        assert stored == bytes(block(demoted[0], PAYLOAD_BYTES)[1])
        lanes = small.store.mover.lanes
        assert set(lanes) == {"far→host", "host→far", "nvme→host", "host→nvme"}
        now_ns = small.clock.monotonic_ns()
        assert sum(lanes["far→host"].statistics(now_ns).moved_blocks) == 1
        assert sum(lanes["host→nvme"].statistics(now_ns).moved_blocks) == 0

    run(tmp_path, drive)


@pytest.mark.slow
def test_what_leaves_slower_memory_goes_to_nvme(tmp_path: Path) -> None:
    async def drive(small: SmallStore) -> None:
        await fill_host(small, 1, 3 * IN_HOST)
        await small.settle()
        on_nvme_alone = [number for number in range(1, 3 * IN_HOST) if has(small, number) == [False, False, True]]
        assert on_nvme_alone, "the coldest are on NVMe alone"
        assert all(any(has(small, number)) for number in range(1, 3 * IN_HOST)), "no block is lost on the way"
        assert await small.fetch(on_nvme_alone[0])
        assert has(small, on_nvme_alone[0])[HOST]

    run(tmp_path, drive)


def test_a_block_that_nvme_has_is_kept_in_slower_memory_too(tmp_path: Path) -> None:
    """Slower memory is read faster than NVMe: it is worth a copy."""

    async def drive(small: SmallStore) -> None:
        await small.fill(range(1, 5))
        await fill_host(small, 100, IN_HOST + 4)
        assert any(has(small, number) == [False, True, True] for number in range(1, 5))

    run(tmp_path, drive)


def test_a_block_in_slower_memory_is_made_durable_from_there(tmp_path: Path) -> None:
    async def drive(small: SmallStore) -> None:
        await fill_host(small, 1, IN_HOST + 6)
        number = next(number for number in range(1, IN_HOST) if has(small, number) == [False, True, False])
        assert await asyncio.wait_for(asyncio.shield(small.writeback.write_through(small.find(number))), 30)
        assert has(small, number) == [False, True, True]
        assert small.writeback.is_durable(small.find(number))

    run(tmp_path, drive)


@pytest.mark.parametrize("durable", [False, True])
def test_damage_in_slower_memory_is_found_on_the_way_up(tmp_path: Path, durable: bool) -> None:
    async def drive(small: SmallStore) -> None:
        await fill_host(small, 1, IN_HOST + 6)
        number = next(number for number in range(1, IN_HOST) if has(small, number) == [False, True, False])
        row = small.find(number)
        if durable:
            assert await asyncio.wait_for(asyncio.shield(small.writeback.write_through(row)), 30)
        cast(HostTier, small.store.tiers[FAR]).view(small.residency.slot(row, FAR))[5000] ^= 1
        is_there = await small.fetch(number)
        if durable:
            assert is_there and has(small, number) == [True, False, True], "NVMe has a good one"
        else:
            assert not is_there
            assert small.find(number) < 0
            tenant = small.residency.tenant("tenant")
            assert small.residency.why_missing(tenant, small.key(number)).cause is Cause.CORRUPT

    run(tmp_path, drive)


@pytest.mark.slow
def test_without_room_in_slower_memory_blocks_go_on_to_nvme(tmp_path: Path) -> None:
    async def drive(small: SmallStore) -> None:
        await fill_host(small, 1, IN_HOST + 40)
        far = [number for number in range(1, IN_HOST) if has(small, number)[FAR]]
        small.residency.pin_run([small.find(number) for number in far])
        await fill_host(small, 1000, 2 * IN_HOST)
        await small.settle()
        assert all(has(small, number)[FAR] for number in far), "pinned copies stay"
        everything = [*range(1, IN_HOST + 40), *range(1000, 1000 + 2 * IN_HOST)]
        assert all(any(has(small, number)) for number in everything)
        for number in far:
            small.residency.unpin(small.find(number))

    run(tmp_path, drive)
