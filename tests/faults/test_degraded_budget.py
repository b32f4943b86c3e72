"""Admission and the endurance budget under the daemon's own movement: what is refused, throttled, charged, and why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstored.clock import NS_PER_S, ManualClock
from kvstored.lifecycle import Cause
from kvstored.store.endurance.budget import COMMIT_BYTES, DAY_S, medium_bytes
from kvstored.store.transfer.gate import Refusal
from tests.reference.small_store import SLOT_BYTES, SmallStore, small_store
from tests.reference.tiers import NVME

BLOCK_COST = medium_bytes(SLOT_BYTES)
COST = BLOCK_COST + COMMIT_BYTES  # of a block that is committed alone
DAY_BYTES = 4 << 20
BUDGET = f"nvme.endurance_bytes_per_day={DAY_BYTES}"
A_DAY = DAY_BYTES // COST  # blocks


async def spend_all(small: SmallStore) -> int:
    """Put blocks that were used twice until one is refused; how many were taken."""
    number = 1000
    while await small.is_durable(number, uses=2):
        number += 1
    return number - 1000


def test_a_day_s_budget_and_no_more_is_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET) as small:
            assert await spend_all(small) == A_DAY
            assert small.writeback.gate.refusal_of(small.find(1000 + A_DAY)) is Refusal.BUDGET
            assert small.store.counters["endurance_bytes"] == A_DAY * COST <= DAY_BYTES
            assert small.store.counters["budget_refused_blocks"] == 1
            small.clock.advance(s=DAY_S / 2)
            assert await spend_all_from(small, 5000) in (A_DAY // 2, A_DAY // 2 + 1)

    async def spend_all_from(small: SmallStore, number: int) -> int:
        first = number
        while await small.is_durable(number, uses=2):
            number += 1
        return number - first

    asyncio.run(run())


def test_while_it_is_scarce_only_blocks_that_were_used_twice_are_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET) as small:
            number = 1
            while await small.is_durable(number):
                number += 1
            assert number - 1 - A_DAY // 2 in (0, 1), "half of it is kept for what has proved itself"
            assert small.writeback.gate.refusal_of(small.find(number)) is Refusal.SCARCE
            assert await small.is_durable(5000, uses=2)

    asyncio.run(run())


def test_the_budget_outlives_a_restart_and_a_kill(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(NS_PER_S)
        async with small_store(tmp_path, BUDGET, clock=clock) as small:
            assert await small.is_durable(1)
            left = small.store.endurance.report().left_bytes
        async with small_store(tmp_path, BUDGET, clock=clock) as small:
            assert small.store.endurance.report().left_bytes == left == DAY_BYTES - COST

    asyncio.run(run())


def test_always_waits_for_the_budget_and_then_says_volatile(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET, "nvme.endurance_wait_ms=60000") as small:
            await spend_all(small)
            waiting = await small.put(1, mode="always")
            assert waiting is not None
            await small.until(lambda: small.store.counters["budget_throttled_blocks"] == 1)
            assert not waiting.done()
            small.clock.advance(s=DAY_S / 4)
            assert await waiting, "the budget earned it"

    asyncio.run(run())


def test_always_is_not_refused_in_silence(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET, "nvme.endurance_wait_ms=20") as small:
            await spend_all(small)
            assert not await small.is_durable(1, mode="always")
            assert small.store.counters["budget_throttled_blocks"] == 1
            assert small.writeback.gate.refusal_of(small.find(1)) is Refusal.BUDGET

    asyncio.run(run())


def test_always_bypasses_admission(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, "nvme.admission=second-touch") as small:
            assert not await small.is_durable(1)
            assert small.writeback.gate.refusal_of(small.find(1)) is Refusal.ADMISSION
            assert small.store.counters["admission_refused_blocks"] == 1
            assert await small.is_durable(2, mode="always")

    asyncio.run(run())


def test_a_second_touch_after_eviction_is_admitted_with_its_chain(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, "nvme.admission=second-touch") as small:
            for number, parent in ((1, None), (2, 1), (3, 2)):
                assert not await small.is_durable(number, parent)
            tenant = small.residency.tenant("tenant")
            for taken in small.residency.remove(small.find(3), Cause.EVICTED, 2):
                small.store.host.free(taken.slot)
            assert small.residency.why_missing(tenant, small.key(3)).accesses == 1
            assert await small.is_durable(3, 2), "the ghost remembers that it was used"
            await small.until(lambda: all(small.writeback.is_durable(small.find(number)) for number in (1, 2, 3)))
            commits_bytes = small.store.counters["endurance_bytes"] - 3 * BLOCK_COST
            assert commits_bytes in (COMMIT_BYTES, 2 * COMMIT_BYTES, 3 * COMMIT_BYTES), "all three, each once"

    asyncio.run(run())


def test_a_path_is_paid_for_whole_or_not_at_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET, "nvme.admission=second-touch") as small:
            parent = None
            too_many = DAY_BYTES // BLOCK_COST
            for number in range(1, too_many + 1):
                await small.put(number, parent)
                parent = number
            assert not await small.is_durable(too_many + 1, too_many, uses=2), "too much hangs on it"
            assert small.store.counters["endurance_bytes"] == 0
            assert small.residency.tier_blocks(NVME) == 0

    asyncio.run(run())


def test_what_finds_no_room_is_not_charged(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET) as small:
            small.disk.plan()
            small.disk.inner.allocate = lambda nbytes, owner="": None  # type: ignore[method-assign, assignment]
            assert not await small.is_durable(1)
            assert small.writeback.gate.refusal_of(small.find(1)) is Refusal.ROOM
            assert small.store.endurance.report().left_bytes == DAY_BYTES - COMMIT_BYTES, "kept for the next commit"
            assert small.store.counters["endurance_bytes"] == COMMIT_BYTES

    asyncio.run(run())


def test_scarce_budget_is_shared_between_tenants(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET) as small:
            assert await small.is_durable(1, tenant="modest", uses=2)
            number = 100
            while await small.is_durable(number, tenant="noisy", uses=2):
                number += 1
            assert 0.4 * A_DAY <= number - 100 <= 0.6 * A_DAY
            assert small.writeback.gate.refusal_of(small.find(number, "noisy")) is Refusal.SHARE
            for mine in range(2, A_DAY // 4):
                assert await small.is_durable(mine, tenant="modest", uses=2)

    asyncio.run(run())


@pytest.mark.slow
def test_demotion_is_charged_too_and_does_not_wait(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path, BUDGET) as small:
            for number in range(1, 700):  # more than DRAM holds, and far more than the budget
                await small.put(number, uses=2)
            assert small.store.counters["endurance_bytes"] <= DAY_BYTES
            assert small.store.counters["evicted_blocks"] > 0

    asyncio.run(run())
