"""The keeper of later terms, over an index and a real process of small state; and what a put promises by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvstore_proto.terms import Terms
from kvstored.clock import SystemClock
from kvstored.lifecycle import Cause
from kvstored.state import terms as module
from kvstored.state.process import StateProcess
from kvstored.state.terms import MARK, TermsKeeper
from kvstored.store.blocks import Residency
from kvstored.store.operations.durability import Durability, DurabilityMode
from kvstored.store.retention import Retention
from kvstored.unsaved import Unsaved
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.kept_terms import retention_of, terms_in_index
from tests.reference.small_store import small_store
from tests.reference.state_at_scale import index_of

BLOCKS = 64
PINNED = Terms(pin="a")


class Node:
    """One life of a daemon's index, its retention and its small state."""

    def __init__(self, directory: Path) -> None:
        self.residency: Residency = index_of(BLOCKS)
        self.retention: Retention = retention_of(self.residency, SystemClock())
        self.process = StateProcess(directory, "1", SystemClock())
        self.unsaved = Unsaved()
        self.keeper = TermsKeeper(self.process, self.retention, self.unsaved, directory)

    @property
    def rows(self) -> list[int]:
        return sorted(self.residency.find(0, key) for key in terms_in_index(self.retention, self.residency))


@asynccontextmanager
async def node(directory: Path) -> AsyncIterator[Node]:
    """Yield a running node that ends as in a crash."""
    found = Node(directory)
    await found.keeper.restore_before_serving()
    running = asyncio.create_task(found.keeper.run())
    try:
        yield found
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await found.process.close()


def test_changes_are_saved_without_anybody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)

    async def run() -> None:
        async with node(tmp_path) as one:
            one.retention.change([3, 5], PINNED)
            while not one.retention.later.are_saved:
                await asyncio.sleep(0.02)
            assert (tmp_path / MARK).exists()
            async with one.process.transaction(rewrite=True):
                pass  # as after a deletion
        async with node(tmp_path) as two:
            assert two.rows == [3, 5], "before anything else, for the mark is there"
            two.retention.change([3], Terms(unpin="a"))
            two.residency.remove(5, Cause.DROPPED, 1)
            while (tmp_path / MARK).exists():
                await asyncio.sleep(0.02)
        async with node(tmp_path) as three:
            assert await three.retention.later.when_saved()
            assert three.rows == []

    asyncio.run(run())


def test_many_changes_at_once_are_saved_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many to note one by one: every entry is written anew, and entries of nobody are removed."""
    monkeypatch.setattr("kvstored.store.later_terms.MOST_CHANGED", 4)

    async def run() -> None:
        async with node(tmp_path) as one:
            one.retention.change([1, 2, 3], PINNED)
            assert await one.retention.later.when_saved()
            one.residency.remove(2, Cause.DROPPED, 1)
            one.retention.change(list(range(20, 40)), PINNED)
            assert one.retention.later.is_whole and one.retention.later.is_unsaved(25)
            assert await one.retention.later.when_saved()
            assert not one.retention.later.is_unsaved(25)
        async with node(tmp_path) as two:
            assert two.rows == [1, 3, *range(20, 40)]

    asyncio.run(run())


def test_who_waits_learns_that_nothing_can_be_saved_and_the_next_save_has_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)
    place = tmp_path / "not there"

    async def run() -> None:
        async with node(place) as one:
            one.retention.change([7], PINNED)
            assert not await one.retention.later.when_saved()
            assert ["forgets pins" in sentence for sentence in one.unsaved.sentences()] == [True]
            place.mkdir()
            while not one.retention.later.are_saved:
                await asyncio.sleep(0.02)
            assert one.unsaved.sentences() == []
        async with node(place) as two:
            assert two.rows == [7]

    asyncio.run(run())


def test_a_stop_leaves_nobody_waiting(tmp_path: Path) -> None:
    async def run() -> None:
        async with node(tmp_path) as one:
            one.retention.change([7], PINNED)
            before = one.retention.later.when_saved()
            await asyncio.sleep(0)  # the save has begun
        assert not await before and not await one.retention.later.when_saved()

    asyncio.run(run())


@pytest.mark.parametrize("goes_well", [True, False])
@pytest.mark.parametrize("mode", [DurabilityMode.ALWAYS, DurabilityMode.BATCH])
def test_a_put_is_durable_only_with_its_terms(tmp_path: Path, mode: DurabilityMode, goes_well: bool) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            driven, later = DrivenStore(small), small.store.retention.later
            later.follow()
            said = Durability.DURABLE if goes_well else Durability.VOLATILE

            async def saver() -> None:
                while True:
                    await later.wanted.wait()
                    waiting, _ = later.take_waiting(), later.begin_save()
                    assert waiting is not None
                    (later.saved if goes_well else later.not_saved)()
                    waiting.set_result(goes_well)

            async def put(terms: Terms) -> list[int]:
                (*_, last) = await driven.put(keys_of(1, 3), mode, terms=terms)
                return list(last.durability)

            saving = asyncio.create_task(saver())
            assert await put(Terms(ttl_s=10, priority=1)) == [Durability.DURABLE] * 3, "in the headers"
            for terms in (Terms(ttl_s=5), Terms(priority=1)):
                assert await put(terms) == [Durability.DURABLE] * 3, "nothing has changed"
            for terms in (Terms(ttl_s=100), Terms(priority=3), Terms(pin="a")):
                assert await put(terms) == [said] * 3
            saving.cancel()
            driven.operations.hints.touch(driven.client, b"".join(keys_of(1, 3)), Terms(unpin="a"))

    asyncio.run(run())
