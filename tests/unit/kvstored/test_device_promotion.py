"""Blocks that NVMe alone has go straight to a tier of device memory before DRAM, or by DRAM where that is not right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import ERRORS_IN_A_ROW, MemoryKind, Outcome, Slot
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.faulty import Fault, FaultyTier, hung
from kvstore_tiers.testing.memory import MemoryTier
from kvstore_tiers.testing.transfers import block
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.degraded.breaker import STALL_S
from kvstored.store.degraded.modes import Mode
from kvstored.store.transfer.device_promotion import DevicePromotion
from kvstored.store.transfer.lane import Priority
from tests.reference.small_store import FAR_S, PAYLOAD_BYTES, SLOT_BYTES, SmallStore, small_store

DEVICE, HOST, NVME = (1 << position for position in range(3))
IN_DEVICE = 8  # blocks
DUE_NS = 1 << 62
CHAIN = range(1, 6)
Drive = Callable[[SmallStore, FaultyTier, DevicePromotion], Coroutine[None, None, None]]


class WatchedTier(MemoryTier):
    """Device memory; a test hears of slots that are given back."""

    def __init__(self, freed: Callable[[], None] | None = None) -> None:
        super().__init__(IN_DEVICE * SLOT_BYTES, name="vram", memory=MemoryKind.DEVICE)
        self.freed = freed

    def free(self, slot: Slot) -> None:
        super().free(slot)
        if self.freed is not None:
            self.freed()


def drive(directory: Path, what: Drive, *settings: str) -> None:
    async def main() -> None:
        device = FaultyTier(WatchedTier())
        device.info = replace(device.info, loads_files=True)
        async with small_store(directory, *settings, before=[device]) as small:
            (promotion,) = small.store.device_promotions
            await what(small, device, promotion)
            device.plan()
            await small.settle()
            assert check(small.residency) == [] and not small.residency.pins
            for tier in small.store.tiers:
                assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes

    asyncio.run(main())


async def on_nvme_alone(small: SmallStore, numbers: range = CHAIN, uses: int = 2) -> list[int]:
    """The rows of a chain. Its uses are only noted afterwards: else it would be copied to the device from DRAM."""
    for number in numbers:
        assert await small.is_durable(number, number - 1 if number > numbers[0] else None)
    small.drop_from_dram(*numbers)
    await small.until(lambda: not any(each.waiting for each in small.store.sharing))
    rows = [small.find(number) for number in numbers]
    for row in rows:
        small.residency.rows.accesses[row] = uses
    return rows


async def promote(promotion: DevicePromotion, rows: list[int]) -> list[bool | None]:
    """Promote the rows; return the outcome of each, None: it is to go to DRAM."""
    promotions = [promotion.promote(row, DUE_NS) for row in rows]
    async with asyncio.timeout(FAR_S):
        return [None if each is None else await each for each in promotions]


def places(small: SmallStore, rows: list[int]) -> list[int]:
    return [small.residency.tier_mask(row) for row in rows]


async def read_back(small: SmallStore, number: int) -> Outcome:
    """Read blocks back from the device."""
    row, copy = small.find(number), np.zeros(PAYLOAD_BYTES, np.uint8)
    ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    slot = small.residency.slot(row, 0)
    small.store.tiers[0].read(slot, small.key(number), [segment_of(copy)], small.completions.to_loop(ended.set_result))
    outcome = await ended
    assert not outcome.ok or np.array_equal(copy, block(number, PAYLOAD_BYTES)[1])
    return outcome


def damage(small: SmallStore, row: int) -> None:
    """Change a byte of the payload on NVMe."""
    path, _, offset = small.nvme.location(small.residency.slot(row, 2)).rpartition(":")
    with open(path, "r+b", buffering=0) as file:
        file.seek(int(offset) + HEADER_BYTES)
        byte = file.read(1)[0]
        file.seek(int(offset) + HEADER_BYTES)
        file.write(bytes([byte ^ 1]))


def test_a_chain_comes_to_the_device_and_dram_has_nothing_of_it(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows = await on_nvme_alone(small)
        host_bytes = small.store.host.statistics().blocks
        assert promotion.choose(rows) == set(rows)
        assert await promote(promotion, rows[::-1]) == [True] * len(rows)
        assert places(small, rows) == [DEVICE | NVME] * len(rows)
        assert small.store.host.statistics().blocks == host_bytes
        assert all([(await read_back(small, number)).ok for number in CHAIN])
        counters = small.store.counters
        assert counters["straight_blocks"] == counters["promoted_blocks"] == len(rows)
        assert small.store.flows.tiers[2].promoted_blocks == len(rows)
        lanes = small.store.mover.lanes
        assert lanes["nvme→vram"].neighbours == [lanes["nvme→host"], lanes["host→nvme"]], "prefetch waits for it too"

    drive(tmp_path, what)


def test_only_what_the_device_wants_goes_there_with_what_precedes_it(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows, once = await on_nvme_alone(small), await on_nvme_alone(small, range(11, 14), uses=1)
        assert promotion.choose(once) == set(), "used once"
        assert promotion.choose(rows[2:]) == set(), "the device has not the block before it"
        assert promotion.choose(rows[:3]) == set(rows[:3])
        assert await promote(promotion, rows[:2]) == [True, True]
        assert promotion.choose(rows[2:]) == set(rows[2:])
        assert await small.fetch(3)
        assert promotion.choose(rows[2:]) == set(), "DRAM has it"

    drive(tmp_path, what)


def test_one_read_serves_two_requests(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        (row,) = await on_nvme_alone(small, range(1, 2))
        reads = small.nvme.statistics().reads
        first, second = promotion.promote(row, DUE_NS), promotion.promote(row, DUE_NS)
        assert first is not None and second is not None and promotion.choose([row]) == {row}
        assert await first and await second
        assert small.nvme.statistics().reads == reads + 1

    drive(tmp_path, what)


def test_a_device_that_fails_costs_a_way_and_nvme_is_not_blamed(tmp_path: Path) -> None:
    """Not even while the next failure would be the last: NVMe has just come back, on trial."""

    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows, others = await on_nvme_alone(small), range(101, 101 + ERRORS_IN_A_ROW)
        await on_nvme_alone(small, others)
        small.disk.plan(Fault("read", "fail"))
        assert not any([await small.fetch(number) for number in others]) and not small.breaker.serves_reads
        small.disk.plan()
        await small.pass_time(5)
        assert small.breaker.serves_reads
        device.plan(Fault("write", "fail", errno=0))
        for row in rows:
            assert await promote(promotion, [row]) == [True]
        assert places(small, rows) == [HOST | NVME] * len(rows)
        assert small.breaker.mode is Mode.OK and small.store.counters["straight_blocks"] == 0
        assert device.statistics().used_bytes == 0

    drive(tmp_path, what)


def test_damage_on_nvme_is_a_miss_with_its_cause(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows = await on_nvme_alone(small)
        damage(small, rows[2])
        assert await promote(promotion, rows) == [True, True, False, True, True]
        assert small.find(3) < 0
        assert small.residency.why_missing(small.residency.tenant("tenant"), small.key(3)).cause is Cause.CORRUPT
        assert len(small.nvme.quarantined()) == 1 and small.store.counters["corrupt_blocks"] == 1
        assert small.breaker.mode is Mode.OK

    drive(tmp_path, what)


def test_a_medium_that_cannot_be_read_is_shed(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows = await on_nvme_alone(small, range(1, ERRORS_IN_A_ROW + 1))
        small.disk.plan(Fault("read", "fail"))
        assert await promote(promotion, rows[:1]) == [False]
        await promote(promotion, rows)
        assert not small.breaker.serves_reads
        assert promotion.choose(rows) == set()

    drive(tmp_path, what)


def test_a_medium_that_hangs_is_shed_while_the_read_is_under_way(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows = await on_nvme_alone(small)
        small.disk.plan(*hung())
        read = promotion.promote(rows[0], DUE_NS)
        assert read is not None
        await small.until(lambda: small.residency.is_in(rows[0], 0) or small.residency.being_filled(rows[0]))
        await small.pass_time(2 * STALL_S)
        assert small.breaker.mode is Mode.SLOW and promotion.choose(rows[1:2]) == set()
        small.disk.plan()
        small.disk.let_go()
        async with asyncio.timeout(FAR_S):
            assert not await read

    drive(tmp_path, what)


@pytest.mark.parametrize(("is_in_dram", "uses"), [(True, 3), (False, 3), (True, 2)])
def test_a_full_device_makes_room_at_once_or_not(tmp_path: Path, is_in_dram: bool, uses: int) -> None:
    """A place is made for a block that was used more often than the one that leaves, if that has not to be written
    first.
    """

    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        before = range(101, 101 + IN_DEVICE)
        there = await on_nvme_alone(small, before)
        assert await promote(promotion, there) == [True] * IN_DEVICE
        if is_in_dram:
            assert all([await small.fetch(number) for number in before])
        (row,) = await on_nvme_alone(small, range(1, 2), uses)
        wins = is_in_dram and uses > 2
        assert promotion.choose([row]) == {row}
        assert await promote(promotion, [row]) == ([True] if wins else [None])
        assert places(small, [row]) == [DEVICE | NVME if wins else NVME]
        assert small.store.counters["device_declined_blocks"] == (is_in_dram and not wins)

    drive(tmp_path, what, "tier.vram.kind=gpu", "tier.vram.capacity=64MiB", "tier.vram.before_host=true")


def test_only_as_many_blocks_go_straight_as_there_is_room_for_at_once(tmp_path: Path) -> None:
    """All of a request's blocks are judged before one of them has taken the slot."""

    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        there = await on_nvme_alone(small, range(101, 101 + IN_DEVICE))
        assert await promote(promotion, there) == [True] * IN_DEVICE
        assert await small.fetch(100 + IN_DEVICE), "the next victim"
        rows = await on_nvme_alone(small, range(1, 4), uses=3)
        assert await promote(promotion, rows) == [True] * 3
        assert places(small, rows) == [DEVICE | NVME, HOST | NVME, HOST | NVME]
        assert places(small, there) == [DEVICE | NVME] * (IN_DEVICE - 1) + [HOST | NVME]

    drive(tmp_path, what, "tier.vram.kind=gpu", "tier.vram.capacity=64MiB", "tier.vram.before_host=true")


def test_a_read_that_nothing_waits_for_is_not_begun(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows = await on_nvme_alone(small)
        small.disk.plan(*hung())
        hanging, queued = promotion.promote(rows[0], DUE_NS), promotion.promote(rows[1], DUE_NS)
        assert hanging is not None and queued is not None
        await small.until(lambda: small.residency.is_in(rows[1], 0))
        promotion.give_up(small.residency.token(rows[1]))
        async with asyncio.timeout(FAR_S):
            assert not await queued
        assert places(small, rows[:2]) == [NVME, NVME] and not small.residency.is_in(rows[1], 0)
        small.disk.plan()
        small.disk.let_go()
        async with asyncio.timeout(FAR_S):
            assert await hanging, "by DRAM"
        assert places(small, rows[:1]) == [HOST | NVME]

    drive(tmp_path, what, "movement.in_flight=1")


def test_damage_that_two_reads_find_is_dealt_with_once(tmp_path: Path) -> None:
    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        rows = await on_nvme_alone(small)
        damage(small, rows[-1])
        here = promotion.promote(rows[-1], DUE_NS)
        there = small.store.promoter.promote(rows[-1], Priority.DEMAND)
        assert here is not None
        async with asyncio.timeout(FAR_S):
            assert [await here, await there] == [False, False]
        assert small.find(CHAIN[-1]) < 0
        assert small.store.counters["corrupt_blocks"] == len(small.nvme.quarantined()) == 1

    drive(tmp_path, what)


def test_damage_of_a_block_that_was_removed_meanwhile_is_nobodys(tmp_path: Path) -> None:
    """Removed between the end of the read and the turn of who waits for it: its row may be another block's by then."""

    async def what(small: SmallStore, device: FaultyTier, promotion: DevicePromotion) -> None:
        (row,) = await on_nvme_alone(small, range(1, 2))
        inner = device.inner
        assert isinstance(inner, WatchedTier)

        def removed() -> None:
            inner.freed = None
            small.store.damage.forget(row, Cause.FORGOTTEN, "by force")

        inner.freed = removed
        device.plan(Fault("write", "corrupt"))
        assert await promote(promotion, [row]) == [False]
        assert small.store.counters["corrupt_blocks"] == 0

    drive(tmp_path, what)
