"""NVMe goes bad under the daemon's own movement: what is shed, what still works, what is said, how it comes back."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvstore_tiers.base import ERRORS_IN_A_ROW, TierState
from kvstore_tiers.testing.faulty import Fault, gone, hung
from kvstored.health.scrub.scrubber import Verification
from kvstored.lifecycle import Cause
from kvstored.store.degraded.breaker import LAST_PROBE_S, STALL_S, SYNC_ERRORS_IN_A_ROW
from kvstored.store.degraded.modes import Mode
from kvstored.store.transfer.gate import Refusal
from kvstored.store.transfer.promote import LEAST_PATIENCE_MS, PATIENCE
from tests.reference.small_store import FAR_S, SmallStore, small_store
from tests.reference.tiers import HOST, NVME

Scenario = Callable[[SmallStore], Awaitable[None]]


def over_a_store(*settings: str) -> Callable[[Scenario], Callable[[Path], None]]:
    """Run an async test over a store in a directory of its own."""

    def decorate(scenario: Scenario) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def inside() -> None:
                async with small_store(tmp_path, *settings) as small:
                    await scenario(small)

            asyncio.run(inside())

        run.__name__, run.__doc__ = scenario.__name__, scenario.__doc__
        return run

    return decorate


async def stored_on_nvme_alone(small: SmallStore, count: int) -> None:
    for number in range(1, count + 1):
        assert await small.is_durable(number)
    small.drop_from_dram(*range(1, count + 1))


async def hanging_fetch(small: SmallStore, *faults: Fault) -> asyncio.Task[bool]:
    """A fetch of block 1 that has begun, with faults by which it does not end."""
    small.disk.plan(*faults)
    fetch = asyncio.create_task(small.fetch(1))
    await small.settle()
    return fetch


async def works_again(small: SmallStore, after_s: float) -> bool:
    """Return whether the tier works again the given time after its last fault."""
    small.disk.plan()
    await small.pass_time(after_s)
    return small.breaker.mode is Mode.OK


@over_a_store()
async def test_without_faults_nothing_is_said(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 3)
    assert await small.fetch(1)
    await small.pass_time(30)
    assert small.breaker.mode is Mode.OK
    assert small.store.modes.sentences() == []
    assert small.store.counters["degraded_transitions"] == small.store.counters["tier_probes"] == 0


@over_a_store()
async def test_write_errors_shed_writes_and_reads_go_on(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 1)
    small.disk.plan(Fault("write", "fail"), Fault("probe", "fail"))
    for number in range(2, 2 + ERRORS_IN_A_ROW):
        assert not await small.is_durable(number), "answered volatile"
    assert small.breaker.mode is Mode.READ_ONLY
    assert await small.fetch(1)
    failures = small.store.counters["write_failures"]
    assert await small.put(50) is None
    assert small.store.counters["write_failures"] == failures, "the tier is not even asked"
    assert small.store.counters["shed_blocks"] == 1
    assert small.writeback.gate.refusal_of(small.find(50)) is Refusal.TIER
    assert not await small.is_durable(51, mode="always")
    assert small.find(51) >= 0, "it is served from DRAM all the same"


@over_a_store()
async def test_values_that_another_node_holds_say_nothing_of_the_medium(small: SmallStore) -> None:
    small.disk.plan(Fault("write", "fail", errno=errno.EBUSY))
    for number in range(1, 1 + 2 * ERRORS_IN_A_ROW):
        assert not await small.is_durable(number)
    assert small.breaker.mode is Mode.OK


@over_a_store()
async def test_a_read_only_medium_is_noticed_at_the_first_write(small: SmallStore) -> None:
    small.disk.plan(Fault("write", "fail", errno=errno.EROFS), Fault("probe", "fail", errno=errno.EROFS))
    assert not await small.is_durable(1)
    assert small.breaker.mode is Mode.READ_ONLY


@over_a_store()
async def test_syncs_that_fail_promise_nothing_and_shed_writes(small: SmallStore) -> None:
    small.disk.plan(Fault("sync", "fail"), Fault("probe", "fail"))
    for number in range(1, 4):
        assert not await small.is_durable(number), "no sync, no durable"
    assert small.breaker.mode is Mode.READ_ONLY
    assert "syncs fail" in small.store.modes.sentences()[0]


@over_a_store()
async def test_a_probe_brings_writes_back_without_a_restart(small: SmallStore) -> None:
    small.disk.plan(Fault("write", "fail", errno=errno.EROFS), Fault("probe", "fail", until=3))
    assert not await small.is_durable(1)
    await small.pass_time(4)
    assert small.breaker.mode is Mode.READ_ONLY, "a probe that fails brings nothing back"
    assert await works_again(small, 10)
    assert small.store.counters["degraded_recoveries"] == 1
    assert await small.is_durable(2)


@over_a_store()
async def test_half_open_the_first_failure_sheds_it_again(small: SmallStore) -> None:
    small.disk.plan(Fault("write", "fail"))  # probes mislead: they succeed
    for number in range(1, 1 + ERRORS_IN_A_ROW):
        await small.is_durable(number)
    assert small.breaker.mode is Mode.READ_ONLY
    await small.pass_time(2)
    assert small.breaker.mode is Mode.OK
    await small.is_durable(50)
    assert small.breaker.mode is Mode.READ_ONLY, "one is enough this time"


@over_a_store()
async def test_probes_become_rare_while_it_stays_bad(small: SmallStore) -> None:
    small.disk.plan(Fault("write", "fail", errno=errno.EROFS), Fault("probe", "fail"))
    await small.is_durable(1)
    await small.pass_time(600)
    assert 8 <= small.store.counters["tier_probes"] <= 20
    assert small.store.counters["tier_probe_failures"] == small.store.counters["tier_probes"]


@over_a_store()
async def test_a_disk_that_is_gone_is_left_out_of_lookups(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, ERRORS_IN_A_ROW)
    small.disk.plan(*gone())
    rows = [small.find(number) for number in range(1, ERRORS_IN_A_ROW + 1)]
    for number in range(1, ERRORS_IN_A_ROW + 1):
        assert not await small.fetch(number)
    assert small.breaker.mode is Mode.FAILED
    promoter = small.store.promoter
    assert promoter.reachable(rows) == [-1] * len(rows)
    assert promoter.reachable_run(rows) == []
    assert not promoter.prefetch(rows[0])
    failures = small.store.counters["read_failures"]
    assert not await small.fetch(1)
    assert small.store.counters["read_failures"] == failures, "no read is sent there"
    assert not await small.is_durable(100), "puts are volatile"
    assert promoter.reachable([small.find(100)]) == [small.find(100)], "DRAM goes on"
    assert all(row >= 0 for row in rows), "nothing is forgotten: the disk may come back"
    assert await works_again(small, 5)
    assert await small.fetch(1), "without a restart"


@over_a_store()
async def test_a_block_that_cannot_be_read_twice_is_given_up(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 2)
    small.disk.plan(Fault("read", "fail", at=1, until=1), Fault("read", "fail", at=3, until=3))
    assert not await small.fetch(1)
    assert small.find(1) >= 0, "once may be chance"
    assert await small.fetch(2)
    assert not await small.fetch(1)
    assert small.find(1) < 0
    absence = small.residency.why_missing(0, small.key(1))
    assert absence.cause is Cause.READ_FAILED
    assert small.disk.statistics().quarantined_slots == 1, "the place is not used again"
    assert small.breaker.mode is Mode.OK, "one bad place is no bad disk"
    assert await small.is_durable(1), "the client's next put stores it anew"


@over_a_store()
async def test_a_hanging_read_raises_estimates_then_sheds_the_tier(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 3)
    rows = [small.find(number) for number in (1, 2, 3)]
    before_us = small.store.promoter.estimate_us(rows)[0]
    waiting = await hanging_fetch(small, *hung())
    await small.pass_time(2)
    assert small.breaker.mode is Mode.OK
    assert small.store.promoter.estimate_us(rows)[0] > before_us + 1_500_000, "engines compute instead"
    await small.pass_time(STALL_S)
    assert small.breaker.mode is Mode.SLOW
    assert not await waiting, "who waited is let go"
    assert small.store.promoter.reachable(rows) == [-1, -1, -1]
    assert not await small.is_durable(9)
    small.disk.plan()
    await small.pass_time(30)
    assert small.breaker.mode is Mode.SLOW, "probes go well, but the transfer still hangs"
    small.disk.let_go()
    await small.pass_time(70)
    assert small.breaker.mode is Mode.OK
    assert await small.fetch(2)


@over_a_store()
async def test_no_request_waits_for_many_times_the_estimate(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 2)
    rows = [small.find(1), small.find(2)]
    promoter = small.store.promoter
    assert promoter.patience_ms(rows) == LEAST_PATIENCE_MS, "an estimate of microseconds may well be wrong"
    waiting = await hanging_fetch(small, Fault("read", "hang"))
    await small.pass_time(1)
    estimate_us = sum(promoter.estimate_us(rows))
    assert estimate_us > 1_000_000
    assert promoter.patience_ms(rows) == PATIENCE * estimate_us // 1000 > LEAST_PATIENCE_MS
    small.disk.let_go()
    assert not await waiting


@over_a_store("movement.in_flight=1")
async def test_what_is_queued_behind_a_hanging_transfer_is_taken_back(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 4)
    small.disk.plan(*hung())
    waiting = [asyncio.create_task(small.fetch(number)) for number in (1, 2, 3, 4)]
    writing = await small.put(10, mode="always")
    await small.settle()
    queued = await small.put(11, mode="always")
    assert writing is not None and queued is not None
    await small.settle()
    await small.pass_time(STALL_S + 1)
    assert small.breaker.mode is Mode.SLOW
    assert [await task for task in waiting] == [False] * 4
    assert not await queued
    pinned = [number for number in (1, 2, 3, 4, 10, 11) if small.residency.pin_count(small.find(number))]
    assert pinned == [1, 10], "only what is in flight keeps its place"


@over_a_store()
async def test_a_daemon_that_stood_still_does_not_blame_the_disk(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 1)
    waiting = await hanging_fetch(small, Fault("read", "hang"))
    await small.pass_time(1)
    small.clock.advance(s=60)  # SIGSTOP, a suspended machine
    small.store.tick()
    assert small.breaker.mode is Mode.OK
    small.disk.plan()
    small.disk.let_go()
    assert not await waiting
    assert await small.fetch(1)


@over_a_store()
async def test_a_disk_that_falls_behind_is_given_no_more(small: SmallStore) -> None:
    """The waiting blocks may be pinned DRAM: bounded by time, at the rate that the disk has shown."""
    small.writeback.gate.backlog.nbytes = 32 << 20
    small.writeback.gate.backlog._bytes_per_s = lambda: float(1 << 20)
    assert await small.put(1) is None
    assert small.writeback.gate.refusal_of(small.find(1)) is Refusal.BEHIND
    small.writeback.gate.backlog._bytes_per_s = lambda: float(1 << 30)
    assert await small.is_durable(2)
    small.writeback.gate.backlog.nbytes = 0


@over_a_store()
async def test_a_full_medium_keeps_what_it_has(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 2)
    small.disk.plan(Fault("write", "fail", errno=errno.ENOSPC))
    assert not await small.is_durable(3)
    assert small.breaker.mode is Mode.FULL
    assert small.breaker.takes_writes, "there may be room in the slabs that are there"
    assert await small.fetch(1)
    for number in range(4, 4 + ERRORS_IN_A_ROW):
        await small.is_durable(number)
    assert not small.breaker.takes_writes, "it is not asked in vain for ever"
    assert await works_again(small, 5)
    assert await small.is_durable(50)


@over_a_store()
async def test_each_transition_is_said_once(small: SmallStore) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("kvstored.store.degraded.modes")
    logger.addHandler(handler)
    changed: list[str] = []
    small.store.modes.on_change.append(changed.append)
    small.disk.plan(Fault("write", "fail", errno=errno.EROFS), Fault("probe", "fail"))
    for number in range(1, 5):
        await small.is_durable(number)
    await small.pass_time(100)
    small.disk.plan()
    await small.pass_time(100)
    logger.removeHandler(handler)
    assert [record.levelname for record in records] == ["ERROR", "WARNING"]
    assert changed == ["nvme", "nvme"]
    assert small.store.counters["degraded_transitions"] == small.store.counters["degraded_recoveries"] == 1


@over_a_store()
async def test_a_directory_that_is_taken_away_is_noticed_without_traffic(small: SmallStore) -> None:
    assert await small.is_durable(1)
    away = small.nvme.path.with_name("elsewhere")
    small.nvme.path.rename(away)
    await small.pass_time(12)
    assert small.breaker.mode is Mode.READ_ONLY, "nothing that is written there would be found again"
    assert "is gone" in small.store.modes.sentences()[0]
    assert await small.put(2) is None
    small.nvme.path.mkdir()
    (small.nvme.path / "lock").touch()
    await small.pass_time(70)
    assert small.breaker.mode is Mode.READ_ONLY, "another directory of that name is not ours"
    (small.nvme.path / "lock").unlink()
    small.nvme.path.rmdir()
    away.rename(small.nvme.path)
    await small.pass_time(70)
    assert small.breaker.mode is Mode.OK
    assert await small.is_durable(3)


@over_a_store()
async def test_the_tiers_own_state_counts_too_and_a_probe_clears_it(small: SmallStore) -> None:
    """Here the errors come from the medium itself, by failpoints inside the tier."""
    from kvstore_tiers import failpoints

    await stored_on_nvme_alone(small, 1)
    failpoints.arm("nvme.before-slot-write=error:EROFS;nvme.probe=error:EROFS@1")
    try:
        assert not await small.is_durable(2)
        assert small.nvme.statistics().state is TierState.READ_ONLY
        assert small.breaker.mode is Mode.READ_ONLY
        assert await small.fetch(1)
    finally:
        failpoints.arm("nvme.before-slot-write=delay:0;nvme.probe=delay:0")
    await small.pass_time(10)
    failpoints.disarm()
    assert small.nvme.statistics().state is TierState.OK
    assert small.breaker.mode is Mode.OK
    assert await small.is_durable(3)


@over_a_store()
async def test_dram_goes_on_when_the_disk_under_it_fails(small: SmallStore) -> None:
    """Eviction does not wait for a tier that takes nothing: leaves are given up."""
    small.disk.plan(*gone(errno.EROFS))
    await small.is_durable(1)
    for number in range(2, 700):  # more than DRAM holds
        await small.put(number)
    assert small.store.counters["evicted_blocks"] > 0
    assert small.find(699) >= 0


@over_a_store()
async def test_a_chain_goes_to_nvme_whole(small: SmallStore) -> None:
    """The chain's head was refused when it was put; what continues it takes it along."""
    small.disk.plan(Fault("write", "fail", until=1))
    assert not await small.is_durable(1)
    assert await small.is_durable(2, 1)
    await small.until(lambda: small.writeback.is_durable(small.find(1)))
    assert small.residency.has(small.find(1), NVME) and small.residency.has(small.find(1), HOST)


@over_a_store()
async def test_a_medium_that_only_probes_can_write_is_tried_ever_more_rarely(small: SmallStore) -> None:
    small.disk.plan(Fault("write", "fail"))  # probes mislead: they succeed
    for number in range(1, 301):
        await small.is_durable(number)
        await small.pass_time(1)
    assert small.store.counters["degraded_transitions"] <= 12, "not once a second"
    assert await works_again(small, 2 * LAST_PROBE_S) and await small.is_durable(400)
    small.disk.plan(Fault("write", "fail", errno=errno.EROFS), Fault("probe", "fail", until=1))
    assert not await small.is_durable(401)
    await small.pass_time(5)
    assert small.breaker.mode is Mode.OK, "after a time without trouble it starts anew: looks after 1 s and 2 s"


@over_a_store()
async def test_half_open_a_read_says_nothing_of_writes(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 1)
    small.disk.plan(Fault("write", "fail"))
    for number in range(2, 2 + ERRORS_IN_A_ROW):
        await small.is_durable(number)
    await small.pass_time(2)
    assert small.breaker.mode is Mode.OK
    assert await small.fetch(1)
    await small.is_durable(50)
    assert small.breaker.mode is Mode.READ_ONLY, "one is enough still"


@over_a_store()
async def test_syncs_without_a_write_count_too(small: SmallStore) -> None:
    small.disk.plan(Fault("sync", "fail"), Fault("probe", "fail"))
    for _ in range(SYNC_ERRORS_IN_A_ROW):
        assert not await asyncio.wait_for(small.writeback.sync(), FAR_S)
    assert small.breaker.mode is Mode.READ_ONLY


@over_a_store()
async def test_what_verifies_a_suspect_counts_and_is_shed_like_any_read(small: SmallStore) -> None:
    await stored_on_nvme_alone(small, 1)
    verification = Verification(small.store)
    small.disk.plan(Fault("read", "fail"), Fault("probe", "fail"))
    for _ in range(ERRORS_IN_A_ROW):
        assert await verification.verify(small.find(1)) is None
    assert small.breaker.mode is Mode.FAILED
    small.disk.plan(Fault("read", "hang"), Fault("probe", "fail"))
    assert await asyncio.wait_for(verification.verify(small.find(1)), FAR_S) is None, "the medium is not asked"
    small.disk.plan()
    await small.pass_time(5)
    outcome = await verification.verify(small.find(1))
    assert outcome is not None and outcome.ok


@over_a_store()
async def test_a_block_that_a_put_is_bringing_again_is_not_promoted_beside_it(small: SmallStore) -> None:
    """The tier was out of reach when the put came, and is in reach again: before a promotion, and while one waits."""
    assert await small.is_durable(1)
    small.drop_from_dram(1)
    row, room, residency = small.find(1), small.store.rooms[HOST], small.residency

    def put_begins() -> None:
        slot = room.allocate_now(residency.slot(row, NVME).nbytes, residency.tenant_of(row))
        assert slot is not None
        residency.attach(row, HOST, slot, small.clock.monotonic_ns(), filling=True)

    def put_is_taken_back() -> None:
        small.store.host.free(residency.detach(row, HOST))

    put_begins()
    assert not await small.fetch(1)
    put_is_taken_back()
    assert await small.fetch(1)
    small.drop_from_dram(1)
    allocate_run, allocate = room.allocate_run, room.allocate

    async def allocate_late(*wanted: Any, **how: Any) -> Any:
        room.allocate_run = allocate_run  # type: ignore[method-assign]
        slot = await allocate(*wanted, **how)
        put_begins()
        return slot

    room.allocate_run = lambda *wanted, **how: []  # type: ignore[method-assign]
    moves = small.store.promoter.moves
    moves._allocate = allocate_late
    assert not await small.fetch(1)
    moves._allocate = allocate
    put_is_taken_back()
    assert await small.fetch(1) and not residency.pins
