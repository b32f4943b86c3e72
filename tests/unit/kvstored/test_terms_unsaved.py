"""Later terms that are not saved yet: what a put may promise, what a save costs the control thread, what is kept."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvstore_proto.terms import NO_TERMS, Terms
from kvstore_tiers.base import Slot
from kvstored.clock import NS_PER_S, ManualClock, SystemClock
from kvstored.lifecycle import Cause
from kvstored.state import terms as module
from kvstored.state.process import StateProcess
from kvstored.state.terms import MARK, TermsKeeper
from kvstored.store.later_terms import STEP_ENTRIES
from kvstored.unsaved import Unsaved
from tests.reference.kept_terms import retention_of
from tests.reference.state_at_scale import index_of

PINNED = Terms(pin="a")


def test_a_new_copy_beside_one_with_another_header_makes_the_terms_later_ones() -> None:
    """NVMe is shed, so a put gives its block a new copy in DRAM: the header on NVMe does not have the new terms."""
    residency, clock = index_of(64), ManualClock(50 * NS_PER_S, 1_700_000_000 * NS_PER_S)
    retention = retention_of(residency, clock)
    for row in (3, 4, 5):
        assert residency.has(row, residency.durable)
        residency.attach(row, residency.mapped, Slot(0, row * 8192, 8192, 1), clock.monotonic_ns())
    retention.stored([3], Terms(ttl_s=3600))
    residency.rows.optional.set("expires_s", 4, 60)  # by its header on NVMe; the new one has none
    retention.stored([4, 5], NO_TERMS)
    assert [retention.later.is_unsaved(row) for row in (3, 4, 5)] == [True, True, False]


def test_puts_that_ended_leave_no_names_of_owners() -> None:
    retention = retention_of(index_of(64), ManualClock(NS_PER_S, NS_PER_S))
    for number in range(100):
        let_go = retention.pins.hold(0, f"owner {number}", 4096)
        let_go()
    assert not retention.pins._coming


def test_a_block_stored_anew_is_not_durable_while_its_old_entry_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks have changed than are noted one by one: the removed one is among them."""
    monkeypatch.setattr("kvstored.store.later_terms.MOST_CHANGED", 4)

    async def run() -> None:
        residency = index_of(64)
        retention = retention_of(residency, SystemClock())
        process = StateProcess(tmp_path, "1", SystemClock())
        keeper, key = TermsKeeper(process, retention, Unsaved(), tmp_path), residency.key(63)
        retention.change([63], Terms(ttl_s=10))
        assert await keeper.save()
        residency.remove(63, Cause.DROPPED, 1)
        retention.change(list(range(20, 40)), PINNED)
        row = residency.insert(
            0, key, residency.key(62), fingerprint_id=0, group=0, depth=63, payload_bytes=4096, now_ns=1
        )
        residency.attach(row, residency.durable, Slot(0, 0, 8192, 1), 1)
        assert retention.later.is_unsaved(row)
        assert await keeper.save()
        assert not retention.later.is_unsaved(row)
        assert key not in [name[-16:] for name, _ in await process.read("pins")]
        await process.close()

    asyncio.run(run())


def test_terms_are_unsaved_until_the_save_of_all_entries_has_ended(tmp_path: Path) -> None:
    """The state was set aside: terms that were saved before are not, until they are committed anew."""

    async def run() -> None:
        retention = retention_of(index_of(64), SystemClock())
        process = StateProcess(tmp_path, "1", SystemClock())
        keeper = TermsKeeper(process, retention, Unsaved(), tmp_path)
        retention.change([5], PINNED)
        assert await keeper.save()
        retention.later.is_whole = True
        saving, unsaved = asyncio.create_task(keeper.save()), []
        while not saving.done():
            unsaved.append(retention.later.is_unsaved(5))
            await asyncio.sleep(0)
        assert all(unsaved) and not retention.later.is_unsaved(5)
        await process.close()

    asyncio.run(run())


def test_a_save_looks_at_few_blocks_at_once_however_many_have_terms(tmp_path: Path) -> None:
    async def run() -> None:
        residency = index_of(16 * STEP_ENTRIES)
        retention = retention_of(residency, SystemClock())
        process = StateProcess(tmp_path, "1", SystemClock())
        keeper, key = TermsKeeper(process, retention, Unsaved(), tmp_path), residency.key
        looks, most = 0, 0

        def counted(row: int) -> bytes:
            nonlocal looks
            looks += 1
            return key(row)

        async def watch() -> None:
            nonlocal looks, most
            while True:
                most, looks = max(most, looks), 0
                await asyncio.sleep(0)

        retention.change(list(range(16 * STEP_ENTRIES)), PINNED)
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        residency.key = counted  # type: ignore[method-assign]
        assert await keeper.save()
        retention.later.is_whole = True
        assert await keeper.save()
        await asyncio.sleep(0)
        watching.cancel()
        assert most <= 2 * STEP_ENTRIES
        await process.close()

    asyncio.run(run())


def test_terms_that_are_read_late_are_not_given_to_blocks_that_were_stored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small state did not answer at the start. A block was removed and stored anew meanwhile."""

    async def run() -> None:
        residency = index_of(64)
        retention = retention_of(residency, SystemClock())
        process = StateProcess(tmp_path, "1", SystemClock())
        keeper = TermsKeeper(process, retention, Unsaved(), tmp_path)
        retention.change([7], Terms(priority=2))
        assert await keeper.save() and (tmp_path / MARK).exists()

        residency = index_of(64)
        retention, key = retention_of(residency, SystemClock()), residency.key(7)
        keeper = TermsKeeper(process, retention, Unsaved(), tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(module, "START_S", 0.0)
            await keeper.restore_before_serving()
        residency.remove(7, Cause.DROPPED, 1)
        row = residency.insert(
            0, key, residency.key(6), fingerprint_id=0, group=0, depth=7, payload_bytes=4096, now_ns=1
        )
        residency.attach(row, residency.mapped, Slot(0, 0, 8192, 1), 1)
        retention.stored([row], NO_TERMS)
        assert retention.later.is_unsaved(row)
        assert await keeper.save()
        assert residency.terms_of(row) == (0, 0, 0) and not retention.later.is_unsaved(row)
        assert await process.read("pins") == []
        await process.close()

    asyncio.run(run())


def test_terms_that_are_read_late_are_given_to_blocks_that_the_start_lets_live_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header lets the block expire before one that continues it."""

    async def run() -> None:
        process = StateProcess(tmp_path, "1", SystemClock())
        retention = retention_of(index_of(64), SystemClock())
        retention.change([7], PINNED)
        assert await TermsKeeper(process, retention, Unsaved(), tmp_path).save()

        residency = index_of(64)
        residency.rows.optional.set("expires_s", 7, 1 << 31)
        retention = retention_of(residency, SystemClock())
        keeper = TermsKeeper(process, retention, Unsaved(), tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(module, "START_S", 0.0)
            await keeper.restore_before_serving()
        assert not residency.expires_s(7) and not residency.pinned_by(7)
        await keeper.restore()
        assert not residency.expires_s(7) and list(retention.pins.names(7)) == ["a"]
        await process.close()

    asyncio.run(run())


def test_a_start_gives_blocks_their_saved_terms_although_the_process_of_the_state_died(tmp_path: Path) -> None:
    async def run() -> None:
        retention = retention_of(index_of(64), SystemClock())
        process = StateProcess(tmp_path, "1", SystemClock())
        retention.change([5], PINNED)
        assert await TermsKeeper(process, retention, Unsaved(), tmp_path).save()
        await process.close()

        residency = index_of(64)
        process.start()
        os.kill(process.pid, signal.SIGKILL)
        await TermsKeeper(process, retention_of(residency, SystemClock()), Unsaved(), tmp_path).restore_before_serving()
        assert residency.pinned_by(5)
        await process.close()

    asyncio.run(run())
