"""Attacks on the room that is made by emptying containers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.testing.faulty import Fault, hung
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.blocks.listing import rows_in
from kvstored.store.transfer import evacuation
from tests.reference.small_store import SmallStore, small_store
from tests.reference.tiers import HOST, NVME

KIB = 1024
SMALL = (
    "host.policy=lru",
    "nvme.policy=lru",
    "host.capacity=6MiB",
    "host.arena=1MiB",
    "nvme.capacity=8MiB",
    "nvme.slab=1MiB",
)
WAIT_S = 15.0


def run(tmp_path: Path, scenario, *settings: str) -> None:
    async def inside() -> None:
        async with small_store(tmp_path, *SMALL, *settings) as small:
            await scenario(small)

    asyncio.run(inside())


async def fill(
    small: SmallStore, position: int, first: int, payload: int, tenant: str = "tenant", most: int = 10_000
) -> list[int]:
    """Blocks until the next would evict."""
    numbers = []
    tier = small.store.tiers[position]
    while len(numbers) < most:
        slot = tier.allocate(slot_bytes(payload), tenant)
        if slot is None:
            return numbers
        tier.free(slot)
        number = first + len(numbers)
        assert await small.store_in(position, number, tenant=tenant, payload_bytes=payload) >= 0
        numbers.append(number)
        small.clock.advance(s=1)
    return numbers


def lease(small: SmallStore, number: int, tenant: str = "tenant") -> int:
    row = small.find(number, tenant)
    residency = small.residency
    residency.pin(row)
    return small.store.leases.grant(
        1, residency.tenant_of(row), [residency.token(row)], [residency.slot(row, HOST)],
        small.clock.monotonic_ns() + 3600 * NS_PER_S,
    ).lease_id  # fmt: skip


def one_lease_a_container(small: SmallStore, numbers: list[int], tenant: str = "tenant") -> list[int]:
    """Lease the block used last in each arena, so that the coldest block is not leased."""
    by_arena = {}
    for number in numbers:
        by_arena[small.residency.slot(small.find(number, tenant), HOST).container] = number
    return [lease(small, number, tenant) for number in by_arena.values()]


def test_a_leased_block_in_each_arena_of_another_size_does_not_stop_puts_of_ones_own(tmp_path: Path) -> None:
    """The coldest block is of another size, and no arena of that size can be emptied now (one leased block in each).
    Blocks of the newcomer's own size could be evicted."""

    async def scenario(small: SmallStore) -> None:
        old = await fill(small, HOST, 1, 60 * KIB, most=45)  # three arenas of 15
        new = await fill(small, HOST, 1001, 15 * KIB)  # the rest
        assert len(new) > 20
        leases = one_lease_a_container(small, old)
        small.disk.plan(Fault("write", "fail"))  # nothing is demoted: the host tier alone matters
        stored = [await small.store_in(HOST, 2001 + n, payload_bytes=15 * KIB) >= 0 for n in range(20)]
        for lease_id in leases:
            small.store.leases.release(1, lease_id)
        assert all(stored), f"{stored.count(False)} of 20 puts refused"

    run(tmp_path, scenario)


def test_another_tenants_cold_blocks_in_sealed_arenas_do_not_stop_puts(tmp_path: Path) -> None:
    async def inside() -> None:
        async with small_store(tmp_path, *SMALL) as small:
            small.store.host._mode = "sealed"  # as host.sealed makes it; SmallStore makes its own host tier
            await fill(small, HOST, 1, 60 * KIB, "cold", most=45)
            await fill(small, HOST, 1001, 60 * KIB, "warm")
            stored = [
                await small.store_in(HOST, 2001 + n, tenant="warm", payload_bytes=60 * KIB) >= 0 for n in range(10)
            ]
            assert all(stored), f"{stored.count(False)} of 10 puts refused"

    asyncio.run(inside())


@pytest.mark.slow
def test_a_hung_copy_on_nvme_does_not_hang_dram_once_the_breaker_is_open(tmp_path: Path) -> None:
    """DRAM is full of blocks of a new size, NVMe of an old one. Their demotion needs an emptied slab; that hangs."""

    async def scenario(small: SmallStore) -> None:
        await fill(small, NVME, 1, 60 * KIB)
        await fill(small, HOST, 1001, 15 * KIB)
        for n in range(1001, 1100):
            row = small.find(n)
            if row >= 0:
                for _ in range(5):
                    small.residency.touch_run([row], small.clock.monotonic_ns())
        small.store.tick()  # the clock has run on
        small.disk.plan(*hung())
        puts = [asyncio.create_task(small.store_in(HOST, 5001 + n, payload_bytes=15 * KIB)) for n in range(60)]
        for _ in range(100):
            await asyncio.sleep(0.002)
        for _ in range(40):  # 20 s: the breaker opens after 5
            small.clock.advance(s=0.5)
            small.store.tick()
            await asyncio.sleep(0.005)
        assert not small.breaker.takes_writes, "the breaker did not open"
        _, waiting = await asyncio.wait(puts, timeout=3)
        small.disk.plan()
        small.disk.let_go()
        await asyncio.wait(puts, timeout=5)
        # Those whose write is in flight wait for it; what is queued was given up when the breaker opened.
        assert len(waiting) <= small.config.movement.in_flight, f"{len(waiting)} puts wait for NVMe that is shed"

    run(tmp_path, scenario)


def test_a_hung_demotion_within_an_evacuation_does_not_hang_other_puts(tmp_path: Path) -> None:
    """A change of size in DRAM demotes a block, and its write hangs: puts that come after NVMe was shed go on."""

    async def scenario(small: SmallStore) -> None:
        blocks = await fill(small, HOST, 1001, 60 * KIB)
        for n in blocks:
            for _ in range(5):
                small.residency.touch_run([small.find(n)], small.clock.monotonic_ns())
        small.store.tick()  # the clock has run on
        small.disk.plan(*hung())
        put = asyncio.create_task(small.store_in(HOST, 5001, payload_bytes=15 * KIB))
        for _ in range(50):
            await asyncio.sleep(0.002)
        for _ in range(40):
            small.clock.advance(s=0.5)
            small.store.tick()
            await asyncio.sleep(0.002)
        assert not small.breaker.takes_writes
        late = asyncio.create_task(small.store_in(HOST, 5002, payload_bytes=15 * KIB))
        other = asyncio.create_task(small.store_in(HOST, 5003, payload_bytes=4 * KIB))
        done, _ = await asyncio.wait([late, other], timeout=3)
        n_done = len(done)
        small.disk.plan()
        small.disk.let_go()
        await asyncio.wait([put, late, other], timeout=5)
        assert n_done == 2, f"{2 - n_done} of 2 puts wait for NVMe that is shed (first put done: {put.done()})"

    run(tmp_path, scenario)


def test_a_block_taken_by_force_while_a_batch_is_copied_leaves_no_pin_and_no_slot_behind(tmp_path: Path) -> None:
    """More than one batch of copies: a block of the second is found damaged while the first is copied."""

    async def scenario(small: SmallStore) -> None:
        small.disk.plan(Fault("write", "fail"))
        numbers = await fill(small, HOST, 1, 4 * KIB)
        host = small.store.host
        assert small.residency.blocks(HOST) > 300 if hasattr(small.residency, "blocks") else True
        # Cold ones are spread, so that a container's rest has to be moved.
        for n in numbers:
            if n % 3:
                small.residency.touch_run([small.find(n)], small.clock.monotonic_ns())
        relocation = small.store.rooms[HOST]._evacuation._relocation
        original, taken = relocation._start, []

        def start(copy):
            if not taken:
                pinned = list(small.residency.pins)
                victim = pinned[-1]  # of the last batch
                taken.append(small.residency.key(victim))
                asyncio.get_running_loop().call_soon(small.store.damage.found, HOST, victim, "flipped")
            return original(copy)

        relocation._start = start
        await small.store_in(HOST, 50_001, payload_bytes=60 * KIB)
        assert taken
        assert not small.residency.pins, f"{len(small.residency.pins)} pins left"
        used = sum(report.used_slots for report in host.containers())
        held = small.residency.copies[HOST].blocks
        assert used == held, f"{used} slots out, {held} blocks"
        assert check(small.residency) == []

    run(tmp_path, scenario)


def test_a_caller_that_is_cancelled_does_not_open_the_turn(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        small.disk.plan(Fault("write", "fail"))
        await fill(small, HOST, 1, 4 * KIB)
        host, evacuation = small.store.host, small.store.rooms[HOST]._evacuation
        vacating = asyncio.create_task(small.store.rooms[HOST].vacate(host.containers()[0].container))
        while not host._arenas.aside:
            await asyncio.sleep(0)
        vacating.cancel()
        await asyncio.wait([vacating])
        assert not evacuation._running or evacuation._turn.locked(), "one is being emptied, and the turn is free"
        put = asyncio.create_task(small.store_in(HOST, 60_001, payload_bytes=60 * KIB))
        aside = 0
        while not put.done():
            aside = max(aside, len(host._arenas.aside))
            await asyncio.sleep(0)
        assert aside <= 1
        arenas = [id(a) for rooms in host._arenas.with_room.values() for a in rooms]
        assert len(arenas) == len(set(arenas)), "an arena is listed twice"

    run(tmp_path, scenario)


@pytest.mark.parametrize("payload", [400 * KIB, 60 * KIB])
def test_many_at_once_of_one_size_are_not_refused(tmp_path: Path, payload: int) -> None:
    """Each loses the slot it evicted to another now and then."""

    async def scenario(small: SmallStore) -> None:
        blocks = await fill(small, HOST, 1, payload)
        for n in blocks:
            for _ in range(5):
                small.residency.touch_run([small.find(n)], small.clock.monotonic_ns())
        tier, room, owner = small.store.host, small.store.rooms[HOST], small.residency.tenant("tenant")
        refused = 0

        async def writer(n: int) -> None:
            nonlocal refused
            for i in range(10):
                slot = await room.allocate_for(None, slot_bytes(payload), owner)
                if isinstance(slot, Slot):
                    tier.free(slot)
                    row = await small.store_in(HOST, 10_000 + n * 100 + i, payload_bytes=payload)
                    refused += row < 0
                else:
                    refused += 1

        await asyncio.gather(*map(writer, range(8)))
        assert refused == 0, f"{refused} refused"

    run(tmp_path, scenario)


def test_a_container_that_was_emptied_serves_who_emptied_it(tmp_path: Path) -> None:
    """While blocks of the old size come in one after the other."""

    async def scenario(small: SmallStore) -> None:
        small.disk.plan(Fault("write", "fail"))
        await fill(small, HOST, 1, 60 * KIB)
        stop = False
        counts = {"old": 0}

        async def old_kind(base: int) -> None:
            n = base
            while not stop:
                n += 1
                row = await small.store_in(HOST, n, payload_bytes=60 * KIB)
                counts["old"] += row >= 0
                small.clock.advance(s=1)
                await asyncio.sleep(0)

        others = [asyncio.create_task(old_kind(10_000 * (1 + t))) for t in range(6)]
        refused, evicted = 0, []
        for n in range(12):
            before = small.store.counters["evicted_blocks"]
            size = (4, 15, 250)[n % 3] * KIB
            row = await asyncio.wait_for(small.store_in(HOST, 100_000 + n, payload_bytes=size), WAIT_S)
            refused += row < 0
            evicted.append(small.store.counters["evicted_blocks"] - before)
        stop = True
        await asyncio.gather(*others)
        # One put may evict so much and no more: where others take what it frees, it may end with nothing, once.
        assert refused <= 1, f"{refused} of 12 refused, {evicted}"

    run(tmp_path, scenario)


def test_room_goes_on_after_slabs_of_a_larger_size_are_found(tmp_path: Path) -> None:
    """A directory that was filled with larger slabs: what is configured is smaller (`auto` is, since this release)."""

    async def inside() -> None:
        async with small_store(tmp_path, *SMALL, "nvme.slab=4MiB") as small:
            numbers = await fill(small, NVME, 1, 15 * KIB)
            assert await small.writeback.flush(5) == 0
        async with small_store(tmp_path, *SMALL) as small:
            report = small.nvme.containers()
            assert max(each.nbytes for each in report) > small.nvme.info.container_bytes
            residency, tenant = small.residency, small.residency.tenant("tenant")
            for slot, header in small.disk.recover():
                row = residency.insert(
                    tenant, header.key, bytes(16), fingerprint_id=1, group=0, depth=0,
                    payload_bytes=header.payload_bytes, now_ns=1,
                )  # fmt: skip
                residency.attach(row, NVME, slot, 1)
            assert residency.copies[NVME].blocks == len(numbers)
            before, stored = small.store.counters["evicted_blocks"], []
            for n in range(6):
                stored.append(await small.store_in(NVME, 10_001 + n, payload_bytes=60 * KIB) >= 0)
            evicted = small.store.counters["evicted_blocks"] - before
            assert stored[0], f"{stored.count(False)} of 6 refused ({stored}), {evicted} of {len(numbers)} evicted"

    asyncio.run(inside())


def test_one_block_that_cannot_be_read_is_tried_no_more_than_a_few_times(tmp_path: Path) -> None:
    """The medium refuses to read one block; each change of size meets its slab first, since it is the emptiest."""

    async def scenario(small: SmallStore) -> None:
        numbers = await fill(small, NVME, 1, 60 * KIB)
        bad = small.key(numbers[-1])
        relocate, tries, modes = small.nvme.relocate, [], []

        def failing(source, target, expect_key, done):
            if expect_key == bad:
                from kvstore_tiers.base import Outcome, OutcomeKind

                tries.append(1)
                done(Outcome(OutcomeKind.FAILED, message="Input/output error", errno=5))
            else:
                relocate(source, target, expect_key, done)

        small.nvme.relocate = failing
        stored = []
        for n, size in enumerate((15, 4, 250, 30, 100, 2, 9, 200, 120, 45) * 3):
            small.residency.touch_run([small.find(numbers[-1])], small.clock.monotonic_ns())
            stored.append(await small.store_in(NVME, 1001 + n, payload_bytes=size * KIB) >= 0)
            small.clock.advance(s=1)
            modes.append(small.breaker.mode.name)
            if small.find(numbers[-1]) < 0:
                break
        print(len(tries), stored.count(False), set(modes))
        assert len(tries) <= 3 and set(modes) == {"OK"}, (
            f"{len(tries)} tries, {stored.count(False)} refused, modes {set(modes)}"
        )

    run(tmp_path, scenario)


def test_a_slot_freed_while_its_copy_is_queued_does_not_break_the_lane(tmp_path: Path) -> None:
    """A damaged block's slot is freed at once when the quarantine is full, also while its copy waits in the lane."""

    async def scenario(small: SmallStore) -> None:
        await fill(small, NVME, 1, 15 * KIB)
        small.nvme._max_quarantined = 0
        evacuation = small.store.rooms[NVME]._evacuation
        original, taken = evacuation._relocation._start, []

        def start(copy):
            future = original(copy)
            if len(taken) == 0:
                taken.append(copy.key)
                row = small.residency.find(small.residency.tenant("tenant"), copy.key)
                small.store.damage.found(NVME, row, "flipped")
            return future

        evacuation._relocation._start = start
        row = await asyncio.wait_for(small.store_in(NVME, 5001, payload_bytes=60 * KIB), 10)
        assert taken and row >= 0
        lane = small.store.mover.lanes["host→nvme"]
        assert not lane.has_queued and not any(lane.statistics(0).in_flight)
        assert not small.residency.pins and check(small.residency) == []

    run(tmp_path, scenario, "nvme.quarantine_slots=0")


def test_a_tier_that_takes_no_writes_any_more_is_not_evicted_from(tmp_path: Path) -> None:
    """The medium becomes read-only while room is made."""

    async def scenario(small: SmallStore) -> None:
        numbers = await fill(small, NVME, 1, 15 * KIB)
        evict, calls = small.store.rooms[NVME]._eviction.evict, []

        async def counting(row, cause):
            calls.append(row)
            if len(calls) == 2:
                small.disk.plan(Fault("allocate", "refuse"))
                small.breaker._modes.enter("nvme", type(small.breaker.mode).READ_ONLY, "it says so")
            return await evict(row, cause)

        small.store.rooms[NVME]._eviction.evict = counting
        await asyncio.wait_for(small.store_in(NVME, 5001, payload_bytes=60 * KIB), 10)
        assert len(calls) < 10, f"{len(calls)} of {len(numbers)} blocks evicted for nothing"

    run(tmp_path, scenario)


def test_puts_of_the_old_size_do_not_wait_while_a_container_is_emptied(tmp_path: Path) -> None:
    """The disk is slow. One block of a new size empties an arena, writing each victim; others keep their pace."""

    async def scenario(small: SmallStore) -> None:
        import time

        blocks = await fill(small, HOST, 1, 60 * KIB)
        small.disk.plan(Fault("write", "delay", delay_s=0.05))
        new = asyncio.create_task(small.store_in(HOST, 5001, payload_bytes=15 * KIB))
        await asyncio.sleep(0.01)
        took = []
        for n in range(4):
            began = time.perf_counter()
            await small.store_in(HOST, 6001 + n, payload_bytes=60 * KIB)
            took.append(time.perf_counter() - began)
        await new
        assert len(blocks) and max(took) < 0.3, f"{[round(t, 2) for t in took]} s"

    run(tmp_path, scenario)


def test_a_lost_slot_does_not_refuse_a_put_in_a_tier_without_containers(tmp_path: Path) -> None:
    """The tiers have the simulated tiers' allowance: it is the block's own size, so that one slot lost to another ends
    in a refusal.
    """
    from dataclasses import replace

    async def scenario(small: SmallStore) -> None:
        await fill(small, HOST, 1, 400 * KIB)
        host, room = small.store.host, small.store.rooms[HOST]
        host.info = replace(host.info, container_bytes=0)
        evict, stolen = room._eviction.evict, []

        async def and_lose_it(row, cause):
            evicted = await evict(row, cause)
            if len(stolen) < 1:
                stolen.append(host.allocate(slot_bytes(400 * KIB), "tenant"))
            return evicted

        room._eviction.evict = and_lose_it
        slot = await room.allocate_for(None, slot_bytes(400 * KIB), small.residency.tenant("tenant"))
        for each in (slot, *stolen):
            if isinstance(each, Slot):
                host.free(each)
        assert isinstance(slot, Slot) and stolen

    run(tmp_path, scenario)


def test_an_orphan_goes_without_asking_whether_it_is_worth_more_than_the_newcomer(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        small.disk.plan(Fault("write", "fail"))
        numbers = await fill(small, HOST, 1, 60 * KIB)
        import numpy as np

        small.store.orphans.replace([np.array([small.residency.token(small.find(numbers[-1]))], np.uint64)] * 2)
        policy = small.store.policies[HOST]
        policy.declines = lambda *_: True
        slot = await small.store.rooms[HOST].allocate_for(
            (b"n" * 16, 0), slot_bytes(60 * KIB), small.residency.tenant("tenant")
        )
        if isinstance(slot, Slot):
            small.store.host.free(slot)
        assert isinstance(slot, Slot), "bypassed for the sake of an orphan"

    run(tmp_path, scenario)


def test_one_put_evicts_no_more_than_promised_when_its_tenant_is_over_its_maximum(tmp_path: Path) -> None:
    from kvstored.store.policies.base import Share

    async def scenario(small: SmallStore) -> None:
        small.disk.plan(Fault("write", "fail"))
        await fill(small, HOST, 1, 400 * KIB)
        tenant = small.residency.tenant("tenant")
        small.store.policies[HOST].set_share(tenant, Share(max_bytes=0x10000))
        before = small.residency.tenant_bytes(tenant, HOST)
        await small.store_in(HOST, 5001, payload_bytes=4 * KIB)
        lost = before - small.residency.tenant_bytes(tenant, HOST)
        promised = (1 << 20) + slot_bytes(4 * KIB)
        assert lost <= promised, f"{lost} of {promised} bytes"

    run(tmp_path, scenario)


def test_evictions_that_are_not_waited_for_take_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way down of each victim takes longer than an evacuation waits. The put goes on to the next container; what it
    has left behind must not evict more than one put may, whenever the disk comes back."""
    monkeypatch.setattr(evacuation, "EVICTION_WAIT_S", 0.005)

    async def scenario(small: SmallStore) -> None:
        numbers = await fill(small, HOST, 1, 250 * KIB)
        small.disk.plan(Fault("write", "hang"))
        put = asyncio.create_task(small.store_in(HOST, 5001, payload_bytes=60 * KIB))
        await small.until(lambda: small.writeback.pending() > 6 or put.done())
        small.disk.plan()
        small.disk.let_go()
        await asyncio.wait_for(put, WAIT_S)
        await small.settle()
        lost = sum(slot_bytes(250 * KIB) for number in numbers if small.find(number) < 0)
        promised = (1 << 20) + slot_bytes(60 * KIB)
        assert lost <= promised, f"{lost} of {promised} bytes"

    run(tmp_path, scenario)


def test_a_container_that_is_cut_anew_meanwhile_is_not_evicted_from_as_if_it_were_of_the_old_size(
    tmp_path: Path,
) -> None:
    """While an arena of small blocks is emptied, another one becomes empty and takes large blocks, the coldest now."""

    async def scenario(small: SmallStore) -> None:
        small.disk.plan(Fault("write", "fail"))
        numbers = await fill(small, HOST, 1, 4 * KIB)
        residency, room = small.residency, small.store.rooms[HOST]
        evict, large = room._eviction.evict, []

        async def evict_and_cut_another(row: int, cause: Cause) -> bool:
            evicted = await evict(row, cause)
            if not large:
                large.extend(range(7001, 7003))
                (aside,) = room._evacuation.aside
                arena = next(each.container for each in small.store.host.containers() if each.container != aside)
                for other in rows_in(residency, HOST, arena):
                    for taken in residency.remove(other, Cause.DROPPED, 1):
                        small.store.host.free(taken.slot)
                for number in large:
                    assert await small.store_in(HOST, number, payload_bytes=400 * KIB, uses=0) >= 0
                for number in numbers:
                    if (held := small.find(number)) >= 0:
                        residency.touch_run([held], small.clock.monotonic_ns())
            return evicted

        room._eviction.evict = evict_and_cut_another
        await asyncio.wait_for(small.store_in(HOST, 5001, payload_bytes=60 * KIB), WAIT_S)
        assert large and all(small.find(number) >= 0 for number in large), "evicted for places of another size"

    run(tmp_path, scenario)


@pytest.mark.parametrize("second_sync_fails", [False, True])
def test_a_copy_that_is_given_up_leaves_the_index_at_the_block(tmp_path: Path, second_sync_fails: bool) -> None:
    """Blocks that are pinned, or whose sync fails, while their copies are on the medium already: the copies go, and
    other copies are not written over them while a record names them."""

    async def scenario(small: SmallStore) -> None:
        await fill(small, NVME, 1, 15 * KIB)
        relocation = small.store.rooms[NVME]._evacuation._relocation
        original, given_up = relocation.copy, []

        async def copy(copies):
            outcomes = await original(copies)
            for each, outcome in zip(copies, outcomes, strict=True):
                if outcome.ok and len(given_up) < 20:
                    row = small.residency.find(small.residency.tenant("tenant"), each.key)
                    small.residency.pin(row)
                    given_up.append((small.residency.token(row), each))
            return outcomes

        if second_sync_fails:
            sync, syncs = relocation._commit.sync, []

            async def failing_sync():
                syncs.append(1)
                ended = await sync()
                if len(syncs) == 2:
                    given_up.append((0, None))
                    return Outcome(OutcomeKind.FAILED, message="Input/output error", errno=5)
                return ended

            relocation._commit = SimpleNamespace(sync=failing_sync)
        else:
            relocation.copy = copy
        for number in range(5001, 5004):
            await asyncio.wait_for(small.store_in(NVME, number, payload_bytes=60 * KIB), WAIT_S)
        assert given_up, "nothing was copied"
        for token, each in given_up:
            row = small.residency.current(token) if each is not None else -1
            if row >= 0:
                small.residency.unpin(row)
        synced = asyncio.get_running_loop().create_future()
        small.nvme.sync(small.completions.to_loop(synced.set_result))
        assert (await synced).ok
        rows = small.residency.rows
        held = [row for row in range(rows.capacity) if rows.key(row) is not None and small.residency.has(row, NVME)]
        assert held
        for row in held:
            header = small.nvme.describe_quarantined(small.residency.slot(row, NVME))
            assert header is not None and header.key == small.residency.key(row), "the record names the block"
        assert check(small.residency) == [] and not small.nvme.check_books()

    run(tmp_path, scenario)
