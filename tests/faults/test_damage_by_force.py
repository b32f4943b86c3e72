"""Blocks that are taken by force, because they are damaged, while a lease or a write holds them."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_tiers.base import Slot
from kvstore_tiers.testing.faulty import Fault
from kvstored.clock import SystemClock
from kvstored.health.maintenance import AT_ONCE_S, TICK_S, Maintenance
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.leases import LeaseTable
from kvstored.telemetry import Counters
from tests.faults.test_degraded_nvme import over_a_store
from tests.reference.small_store import FAR_S, SLOT_BYTES, SmallStore
from tests.reference.tiers import HOST, NVME


def lease(small: SmallStore, *rows: int) -> int:
    small.residency.pin_run(rows)
    tokens = [small.residency.token(row) for row in rows]
    slots = small.residency.slots(rows, HOST)
    return small.store.leases.grant(1, 0, tokens, slots, small.clock.monotonic_ns() + 1).lease_id


@over_a_store()
async def test_a_lease_lapses_though_one_of_its_blocks_was_taken(small: SmallStore) -> None:
    small.disk.plan(Fault("write", "fail"))
    for number in (1, 2):
        assert not await small.is_durable(number), "in DRAM alone"
    row, other = small.find(1), small.find(2)
    lease(small, row, other)
    small.store.damage.found(HOST, row, "flipped")
    again = small.residency.insert(
        0, b"k" * 16, bytes(16), fingerprint_id=1, group=0, depth=0, payload_bytes=1, now_ns=1
    )
    assert again == row, "its row number is used again"
    small.residency.attach(again, HOST, Slot(99, 0, SLOT_BYTES, 1), 1)
    small.residency.pin(again)
    assert small.store.leases.expire(small.clock.monotonic_ns() + 1) == 1
    assert small.residency.pin_count(other) == 0
    assert small.residency.pin_count(again) == 1, "the pin of another holder"
    small.residency.unpin(again)
    small.residency.remove(again, Cause.DROPPED, 1)


@over_a_store("durability.batch_ms=60000")
async def test_a_bad_dram_copy_that_waits_to_be_written_stays_until_it_is_found_again(small: SmallStore) -> None:
    settled = await small.put(1)
    assert settled is not None and small.writeback.gate.is_coming(small.find(1))
    small.store.damage.found(HOST, small.find(1), "flipped")
    assert small.residency.has(small.find(1), HOST), "write-back reads it in a moment"
    assert await small.writeback.flush(FAR_S) == 0
    assert await asyncio.wait_for(settled, FAR_S) is True, "each waiting request is answered"
    assert check(small.residency) == []


@over_a_store("durability.batch_ms=60000")
async def test_a_write_whose_block_was_taken_ends_and_is_not_charged(small: SmallStore) -> None:
    first = await small.put(1)
    second = await small.put(2)
    assert first is not None and second is not None
    charged_bytes = small.store.counters["endurance_bytes"]
    for taken in small.residency.remove(small.find(1), Cause.CORRUPT, 1):
        small.store.leases.retire(taken.slot, 0)
    assert await small.writeback.flush(FAR_S) == 0
    assert (await asyncio.wait_for(first, FAR_S), await asyncio.wait_for(second, FAR_S)) == (False, True)
    assert small.store.counters["endurance_bytes"] < charged_bytes
    assert small.writeback.gate.backlog.nbytes == 0 and check(small.residency) == []


@over_a_store()
async def test_a_block_that_is_taken_while_room_is_made_for_it_is_not_written(
    small: SmallStore,
) -> None:
    """Nor is the block that has its row number now called durable."""
    room, go_on = small.store.rooms[NVME], asyncio.Event()
    allocate = room.allocate

    async def later(nbytes: int, tenant: int) -> Slot | None:
        await go_on.wait()
        return await allocate(nbytes, tenant)

    room.allocate_run, room.allocate = (lambda *wanted, **how: []), later  # type: ignore[method-assign]
    settled = await small.put(1, mode="always")
    del room.allocate_run  # type: ignore[method-assign]
    row = small.find(1)
    assert settled is not None
    for taken in small.residency.remove(row, Cause.CORRUPT, 1):
        small.store.leases.retire(taken.slot, 0)
    blocks_before = small.nvme.statistics().blocks
    await small.put(2, uses=0)
    go_on.set()
    assert await asyncio.wait_for(settled, FAR_S) is False
    await small.writeback.flush(FAR_S)
    assert small.find(2) == row, "its row number is used again"
    assert small.nvme.statistics().blocks - blocks_before == small.residency.tier_blocks(NVME), "no slot is lost"
    assert small.residency.pin_count(row) == 0 and check(small.residency) == []


def test_an_error_in_one_part_ends_no_other_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ticked: list[str] = []
    leases = LeaseTable(lambda tokens: 1 / 0, lambda slot: None)  # type: ignore[arg-type,return-value]
    for _ in range(3):
        leases.grant(1, 0, [7], [Slot(1, 0, 4096, 1)], 0)
    retention: Any = SimpleNamespace(tick=lambda: ticked.append("blocks"))
    store: Any = SimpleNamespace(leases=leases, retention=retention, clock=SystemClock(), counters=Counters())
    maintenance = Maintenance(store, [lambda: ticked.append("sample")])

    async def run() -> None:
        task = asyncio.create_task(maintenance.run())
        async with asyncio.timeout(FAR_S):
            while ticked.count("sample") < 3:
                await asyncio.sleep(TICK_S)
        task.cancel()

    caplog.set_level(logging.ERROR)
    asyncio.run(run())
    assert ticked[:2] == ["blocks", "sample"]
    assert len(caplog.records) == 1 and "ZeroDivisionError" in caplog.text


def test_requests_have_their_turn_between_the_parts_of_a_tick_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        now_s, ran = loop.time(), list[str]()
        monkeypatch.setattr(loop, "time", lambda: now_s)

        def part() -> None:
            nonlocal now_s
            now_s += AT_ONCE_S
            ran.append("part")

        retention: Any = SimpleNamespace(tick=lambda: False)
        leases: Any = SimpleNamespace(expire=lambda now_ns: 0)
        store: Any = SimpleNamespace(leases=leases, retention=retention, clock=SystemClock(), counters=Counters())
        loop.call_soon(ran.append, "request")
        await Maintenance(store, [part, part]).tick()
        assert ran == ["part", "request", "part"]

    asyncio.run(run())
