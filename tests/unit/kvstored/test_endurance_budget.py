"""The endurance budget: what a day earns, what a crash costs, who gets how much while it is scarce."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_tiers import failpoints
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.store.endurance.account import EnduranceAccount, packed, unpacked
from kvstored.store.endurance.budget import (
    DAY_S,
    MIN_CHUNK_BYTES,
    OVERHEAD_BYTES,
    BurstBudget,
    ClockReading,
    FairShares,
    SavedBudget,
    WriteVerdict,
    medium_bytes,
)
from kvstored.store.transfer.gate import Backlog, Refusal, WriteGate
from kvstored.telemetry import Counters
from tests.reference.blocks import BLOCK_BYTES, Shelf
from tests.reference.tiers import NVME

DAY_BYTES = 256 * MIN_CHUNK_BYTES


def at(seconds: float, *, wall_s: float | None = None, boot: str = "boot") -> ClockReading:
    return ClockReading(round(seconds * NS_PER_S), round((seconds if wall_s is None else wall_s) * NS_PER_S), boot)


def spend(budget: BurstBudget, nbytes: int, now: ClockReading) -> WriteVerdict:
    """Spend with allotments that are saved at once."""
    while budget.wants_allotment(nbytes, now.monotonic_ns):
        budget.begin_allotment(nbytes, now)
        budget.end_allotment(saved=True)
    return budget.spend(nbytes, now.monotonic_ns)


def test_a_day_earns_what_is_configured_and_no_more_than_a_day_is_kept() -> None:
    budget = BurstBudget(DAY_BYTES, None, at(0))
    assert spend(budget, DAY_BYTES, at(0)) is WriteVerdict.GRANTED, "a first start has a full bucket"
    assert spend(budget, 1, at(0)) is WriteVerdict.SPENT
    assert budget.left_bytes(at(DAY_S / 4).monotonic_ns) == DAY_BYTES // 4
    assert budget.left_bytes(at(9 * DAY_S).monotonic_ns) == DAY_BYTES
    assert spend(budget, DAY_BYTES + 1, at(9 * DAY_S)) is WriteVerdict.SPENT


def test_nothing_is_spent_before_its_allotment_is_saved() -> None:
    budget = BurstBudget(DAY_BYTES, None, at(0))
    assert budget.spend(1000, 0) is WriteVerdict.SAVING
    state = budget.begin_allotment(1000, at(0))
    assert state.level_bytes == DAY_BYTES - MIN_CHUNK_BYTES
    assert budget.spend(1000, 0) is WriteVerdict.SAVING, "it is under way, not saved"
    budget.end_allotment(saved=False)
    assert budget.spend(1000, 0) is WriteVerdict.SAVING
    assert budget.left_bytes(0) == DAY_BYTES, "an allotment that could not be saved costs nothing"


def test_a_crash_costs_the_allotment_and_an_orderly_end_nothing() -> None:
    budget = BurstBudget(DAY_BYTES, None, at(0))
    saved = budget.begin_allotment(0, at(0))
    budget.end_allotment(saved=True)
    assert budget.spend(1000, 0) is WriteVerdict.GRANTED
    assert BurstBudget(DAY_BYTES, saved, at(0)).left_bytes(0) == DAY_BYTES - MIN_CHUNK_BYTES
    assert BurstBudget(DAY_BYTES, budget.close(at(0)), at(0)).left_bytes(0) == DAY_BYTES - 1000


def test_time_without_a_process_earns_by_the_clock_that_can_be_trusted() -> None:
    saved = SavedBudget(0, 100 * NS_PER_S, 1000 * NS_PER_S, "boot")
    same_boot = BurstBudget(DAY_BYTES, saved, at(100 + DAY_S / 2, wall_s=10**9))
    assert same_boot.left_bytes(same_boot._at_ns) == DAY_BYTES // 2, "the wall clock jumped, the machine's own did not"
    other_boot = BurstBudget(DAY_BYTES, saved, at(5, wall_s=1000 + DAY_S / 4, boot="later"))
    assert other_boot.left_bytes(other_boot._at_ns) == DAY_BYTES // 4
    set_back = BurstBudget(DAY_BYTES, saved, at(5, wall_s=10, boot="later"))
    assert set_back.left_bytes(set_back._at_ns) == 0


def test_a_smaller_budget_than_yesterday_holds_at_once() -> None:
    saved = SavedBudget(DAY_BYTES, 0, 0, "boot")
    assert BurstBudget(DAY_BYTES // 2, saved, at(0)).left_bytes(0) == DAY_BYTES // 2


def test_a_block_costs_its_slot_and_its_records() -> None:
    assert medium_bytes(8192) == 8192 + OVERHEAD_BYTES == 8192 + 2 * 4096


# Fair portions


def test_alone_a_tenant_gets_everything() -> None:
    shares = FairShares(1000)
    shares.asked(1, 0)
    shares.used(1, 10**9, 0)
    assert not shares.is_over(1, 0)


def test_a_noisy_tenant_waits_for_the_others_to_catch_up() -> None:
    shares = FairShares(1000)
    for tenant in (1, 2):
        shares.asked(tenant, 0)
    shares.used(1, 50_000, 0)
    assert shares.is_over(1, 0)
    assert not shares.is_over(2, 0)
    shares.used(2, 49_000, 0)
    assert not shares.is_over(1, 0)


def test_who_has_not_asked_for_long_keeps_nothing_from_anybody() -> None:
    shares = FairShares(1000)
    shares.asked(2, 0)
    shares.used(1, 50_000, 0)
    now_ns = 1000 * NS_PER_S
    shares.asked(1, now_ns)
    assert not shares.is_over(1, now_ns)


def test_what_was_written_long_ago_is_forgotten() -> None:
    shares = FairShares(1000)
    shares.used(1, 50_000, 0)
    now_ns = 2 * DAY_S * NS_PER_S
    for tenant in (1, 2):
        shares.asked(tenant, now_ns)
    assert not shares.is_over(1, now_ns)


# The account and its file


def account(directory: Path, clock: ManualClock, day_bytes: int = DAY_BYTES) -> EnduranceAccount:
    """An account that is kept in a file of `directory`."""
    made, path = EnduranceAccount(day_bytes, clock, Counters()), directory / "budget"

    async def save(budget: bytes) -> None:
        path.write_bytes(budget)

    made.begin(save, path.read_bytes() if path.exists() else None)
    return made


def test_nothing_is_granted_before_it_is_known_what_is_left(tmp_path: Path) -> None:
    async def save(_: bytes) -> None:
        """Take it."""

    async def run() -> None:
        waiting = EnduranceAccount(DAY_BYTES, ManualClock(NS_PER_S), Counters())
        assert waiting.charge(0, 1) is WriteVerdict.SAVING and waiting.left_bytes == 0 and waiting.report().trouble
        asked = asyncio.create_task(waiting.charge_in_time(0, lambda: 1, 30))
        await asyncio.sleep(0)
        waiting.begin(save, packed(SavedBudget(5, 0, ManualClock(NS_PER_S).wall_ns(), "")))
        assert await asked is WriteVerdict.GRANTED and waiting.left_bytes == 4
        lost = EnduranceAccount(DAY_BYTES, ManualClock(NS_PER_S), Counters())
        lost.begin(save, None, was_lost=True)
        assert lost.left_bytes == 0, "damage gives no budget away"

    asyncio.run(run())


async def granted(from_: EnduranceAccount, tenant: int, nbytes: int) -> WriteVerdict:
    return await from_.charge_in_time(tenant, lambda: nbytes, 10, allotment_only=True)


def test_without_a_budget_everything_is_granted_and_counted(tmp_path: Path) -> None:
    unlimited = account(tmp_path, ManualClock(), 0)
    assert unlimited.charge(0, 1 << 40) is WriteVerdict.GRANTED
    unlimited.refund(0, 1 << 39)
    assert unlimited.report().spent_bytes == 1 << 39
    assert list(tmp_path.iterdir()) == []


def test_a_restart_carries_the_budget_over(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(NS_PER_S)
        first = account(tmp_path, clock)
        assert first.charge(0, 1000) is WriteVerdict.SAVING
        assert await granted(first, 0, DAY_BYTES // 4) is WriteVerdict.GRANTED
        await first.close()
        assert first.charge(0, 1) is WriteVerdict.SPENT, "a closed account grants nothing"
        second = account(tmp_path, clock)
        assert second.report().left_bytes == DAY_BYTES - DAY_BYTES // 4
        assert second.report().spent_bytes == DAY_BYTES // 4
        clock.advance(s=DAY_S)
        assert account(tmp_path, clock).report().left_bytes == DAY_BYTES

    asyncio.run(run())


def test_a_kill_gives_nothing_back(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(NS_PER_S)
        first = account(tmp_path, clock)
        assert await granted(first, 0, 1000) is WriteVerdict.GRANTED
        before = first.report().left_bytes
        assert account(tmp_path, clock).report().left_bytes <= before  # no close: killed

    asyncio.run(run())


def test_a_file_that_cannot_be_written_stops_spending_and_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(NS_PER_S)
        broke = account(tmp_path, clock)
        failpoints.arm("endurance.saved=error:ENOSPC")
        try:
            assert await granted(broke, 0, 1000) is WriteVerdict.SPENT
            assert "cannot be written" in broke.report().trouble
            assert broke.charge(0, 1000) is WriteVerdict.SPENT
        finally:
            failpoints.disarm()
        clock.advance(s=31)
        assert await granted(broke, 0, 1000) is WriteVerdict.GRANTED
        assert broke.report().trouble == ""

    asyncio.run(run())


def test_scarce_budget_is_shared(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(NS_PER_S)
        shared = account(tmp_path, clock)
        noisy, modest, step = 1, 2, DAY_BYTES // 64
        await granted(shared, modest, 1000)
        used = 0
        while await granted(shared, noisy, step) is WriteVerdict.GRANTED:
            used += step
        assert 0.4 * DAY_BYTES <= used <= 0.6 * DAY_BYTES, "the noisy one burns half of the day's budget"
        assert shared.charge(noisy, step) is WriteVerdict.OVER_SHARE
        for _ in range(16):
            assert await granted(shared, modest, step) is WriteVerdict.GRANTED, "the other half is there for the others"

    asyncio.run(run())


def test_who_insists_waits_for_the_budget_to_be_earned_and_comes_first(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock(NS_PER_S)
        slow = account(tmp_path, clock)
        assert await granted(slow, 0, DAY_BYTES) is WriteVerdict.GRANTED
        waiting = asyncio.create_task(slow.charge_in_time(0, lambda: 1000, 30))
        while 0 not in slow._short:
            await asyncio.sleep(0)
        clock.advance(s=DAY_S / 4)
        assert slow.charge(0, 10) is WriteVerdict.SPENT, "who only asks does not overtake"
        assert await waiting is WriteVerdict.GRANTED
        assert await slow.charge_in_time(0, lambda: DAY_BYTES, 0.01) is WriteVerdict.SPENT
        assert await slow.charge_in_time(0, lambda: None, 30) is WriteVerdict.SPENT, "what it was for has gone"

    asyncio.run(run())


@pytest.mark.parametrize(
    "old, new", [(b": 5,", b": Infinity,"), (b": 5,", b": 1e999,"), (b"{", b"[["), (b": 3,", b": 4,")]
)
def test_damage_gives_no_budget_away(old: bytes, new: bytes) -> None:
    whole = packed(SavedBudget(5, 6, 7, "boot", 8))
    assert old in whole and unpacked(whole) == SavedBudget(5, 6, 7, "boot", 8)
    loaded = unpacked(whole.replace(old, new))
    assert loaded.level_bytes == 0
    assert BurstBudget(DAY_BYTES, loaded, at(1)).left_bytes(at(1).monotonic_ns) == 0


def test_a_spent_budget_is_found_out_without_a_walk_to_the_head_of_a_long_chain(tmp_path: Path) -> None:
    clock, shelf = ManualClock(NS_PER_S), Shelf("host", "nvme")
    rows = shelf.chain(*range(2000))
    block_bytes = medium_bytes(BLOCK_BYTES)
    left = SavedBudget(3 * block_bytes + 1, clock.monotonic_ns(), clock.wall_ns(), "")
    (tmp_path / "budget").write_bytes(packed(left))
    spent = account(tmp_path, clock)
    breaker: Any = SimpleNamespace(takes_writes=True)
    unused: Any = None
    walked: list[int] = []

    class Watched(Backlog):
        def __contains__(self, token: int) -> bool:
            walked.append(token)
            return False

    backlog = Watched(lambda: 1.0)
    gate = WriteGate(shelf.residency, unused, spent, breaker, Counters(), backlog, clock, throttle_ms=100)

    async def run() -> None:
        assert gate.pay(rows[-1]) is WriteVerdict.SPENT
        assert len(walked) <= 4, "three blocks could be paid for"
        walked.clear()
        assert await gate.pay_in_time(shelf.residency.token(rows[-1]), insists=True) is None
        assert 0 < len(walked) < 200
        assert gate.refusal_of(rows[-1]) is Refusal.BUDGET
        shelf.residency.attach(rows[-3], NVME, shelf.slot(), 1)
        paid = await gate.pay_in_time(shelf.residency.token(rows[-2]), insists=False)
        assert paid == rows[-2:-1], "what can be paid for is"

    asyncio.run(run())
