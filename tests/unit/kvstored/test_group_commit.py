"""Group commit against a tier that syncs when the test says so: what each waiter is answered; none is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstore_tiers.testing.memory import MemoryTier
from kvstored.completions import CompletionQueue
from kvstored.store.transfer import group_commit
from kvstored.store.transfer.group_commit import BatchLimits, GroupCommit
from kvstored.telemetry import Counters

DONE, FAILED = Outcome(OutcomeKind.DONE), Outcome(OutcomeKind.FAILED, message="refused")
FAR_S = 60.0


class Scene:
    """`syncs` holds the syncs that the tier has not answered."""

    def __init__(self) -> None:
        self.syncs: list[Completion] = []
        self.asked = asyncio.Event()
        self.notices: list[str] = []
        self.gone: set[int] = set()
        self.backlog = SimpleNamespace(queued=0, begun=0)
        breaker = SimpleNamespace(began=lambda: 1, ended=lambda number, what, outcome: self.notices.append(what))
        gate: Any = SimpleNamespace(breaker=breaker, backlog=self.backlog, commit_begins=lambda: None)
        residency: Any = SimpleNamespace(is_current=lambda token: token not in self.gone)
        nvme = MemoryTier(1 << 20)
        nvme.sync = self._sync  # type: ignore[method-assign]
        self.counters = Counters()
        self.commit = GroupCommit(
            nvme, residency, CompletionQueue(asyncio.get_running_loop()), self.counters, gate, BatchLimits(1, 100),
        )  # fmt: skip

    def _sync(self, done: Completion) -> None:
        self.syncs.append(done)
        self.asked.set()

    async def answer(self, outcome: Outcome) -> None:
        """End the oldest sync, waiting for one to be asked for."""
        while not self.syncs:
            self.asked.clear()
            await asyncio.wait_for(self.asked.wait(), FAR_S)
        self.syncs.pop(0)(outcome)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def written(self, token: int) -> asyncio.Future[bool]:
        write: Any = SimpleNamespace(token=token, settled=asyncio.get_running_loop().create_future(), state=None)
        self.commit.begun([write])
        self.commit.ended(write, went_well=True)
        settled: asyncio.Future[bool] = write.settled
        return settled


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RETRY_S", 0.001)


def scenario(play: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def inside() -> None:
            await play(Scene())

        asyncio.run(inside())

    run.__name__, run.__doc__ = play.__name__, play.__doc__
    return run


@scenario
async def test_what_is_written_while_a_sync_fails_is_answered_by_the_next(scene: Scene) -> None:
    """Though no write ends any more that would ask for one."""
    first = scene.written(1)
    second = scene.written(2)  # the last write there is; a sync runs
    waiter = scene.commit.when_synced()
    await scene.answer(FAILED)
    assert await first is False and not second.done() and not waiter.done()
    await scene.answer(DONE)
    assert await asyncio.wait_for(second, FAR_S) is True
    assert await asyncio.wait_for(waiter, FAR_S) is True
    assert not scene.commit.pending and scene.counters["durable_blocks"] == 2
    assert scene.notices == ["sync", "sync"], "the breaker hears of each"


@scenario
async def test_a_sync_that_failed_is_tried_again_until_it_goes_well(scene: Scene) -> None:
    only = scene.written(1)
    for _ in range(4):
        await scene.answer(FAILED)
        assert await only is False and 1 in scene.commit.pending
    await scene.answer(DONE)
    assert not scene.commit.pending and scene.syncs == []


@scenario
async def test_a_block_that_is_gone_is_not_synced_again(scene: Scene) -> None:
    only = scene.written(1)
    scene.gone.add(1)
    await scene.answer(FAILED)
    assert await only is False and not scene.commit.pending
    await asyncio.sleep(0.01)
    assert scene.syncs == []


@scenario
async def test_an_older_sync_says_nothing_of_a_block_that_was_written_again(scene: Scene) -> None:
    first = scene.written(1)
    again = scene.written(1)  # its first copy was found damaged, the sync for that one still runs
    await scene.answer(DONE)
    assert await first is True
    assert 1 in scene.commit.pending and not again.done(), "the newer copy is not on the medium yet"
    await scene.answer(DONE)
    assert await again is True and not scene.commit.pending


@scenario
async def test_what_is_written_during_a_sync_does_not_wait_for_writes_that_come_to_nothing(scene: Scene) -> None:
    scene.written(1)
    scene.backlog.queued = 1  # of a block that finds no room, so no write ends
    second = scene.written(2)
    await scene.answer(DONE)
    await scene.answer(DONE)
    assert await second is True
