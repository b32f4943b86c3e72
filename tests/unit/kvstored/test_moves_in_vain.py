"""Promotions and writes that come to nothing, and callers who ask before that has been dealt with."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_tiers.base import Slot
from kvstore_tiers.testing.faulty import Fault
from kvstored.store.endurance.budget import COMMIT_BYTES
from kvstored.store.transfer.gate import Refusal
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.mover import LaneTransfer
from tests.reference.small_store import FAR_S, SmallStore, small_store


def over_nvme(directory: Path, scenario: Callable[[SmallStore], Coroutine[None, None, None]]) -> None:
    """Run `scenario` over a store with two blocks that NVMe alone has."""

    async def main() -> None:
        async with small_store(directory) as small:
            for number in (1, 2):
                assert await small.is_durable(number)
            small.drop_from_dram(1, 2)
            await scenario(small)
            await small.settle()
            assert not small.residency.pins

    asyncio.run(main())


def limit(small: SmallStore, lane_name: str, priority: Priority, items: int) -> None:
    """Let at most `items` items of a priority wait in a lane."""
    lane = small.store.mover.lanes[lane_name]
    limits = lane.settings.limits
    few = replace(limits[priority], queued_items=items)
    lane.settings = replace(lane.settings, limits=limits | {priority: few})


def test_a_caller_who_comes_right_after_the_last_one_has_left_gets_the_block(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        promoter, row = small.store.promoter, small.find(1)
        left = promoter.promote(row, Priority.DEMAND)
        promoter.give_up(small.residency.token(row))
        came = promoter.promote(row, Priority.DEMAND)
        async with asyncio.timeout(FAR_S):
            assert await came
            await left
        assert small.residency.has(row, small.mapped)

    over_nvme(tmp_path, scenario)


def test_a_request_for_a_block_whose_prefetch_was_refused_just_now_gets_it(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        promoter = small.store.promoter
        limit(small, "nvme→host", Priority.PREFETCH, 1)
        assert promoter.prefetch(small.find(1)) and not promoter.prefetch(small.find(2))
        async with asyncio.timeout(FAR_S):
            assert await promoter.promote(small.find(2), Priority.DEMAND)

    over_nvme(tmp_path, scenario)


def test_blocks_that_are_one_transfer_end_each_by_itself(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        rows, lane = [small.find(1), small.find(2)], small.store.mover.lanes["nvme→host"]
        small.disk.plan(Fault("read", "corrupt", at=2, until=2))
        async with asyncio.timeout(FAR_S):
            answers = await asyncio.gather(*small.store.promoter.promote_run(rows, Priority.DEMAND))
        assert answers == [True, False] and small.residency.has(rows[0], small.mapped)
        assert small.find(2) < 0
        assert lane.statistics(0).moved_blocks[Priority.DEMAND] == 0, "a transfer that did not go well is no measure"

    over_nvme(tmp_path, scenario)


def test_a_block_that_is_still_wanted_comes_though_the_others_of_its_transfer_are_not(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        promoter, rows = small.store.promoter, [small.find(1), small.find(2)]
        answers = promoter.promote_run(rows, Priority.DEMAND)
        promoter.give_up(small.residency.token(rows[0]))
        async with asyncio.timeout(FAR_S):
            assert await answers[1]

    over_nvme(tmp_path, scenario)


def test_no_block_is_read_that_nobody_waits_for(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        promoter, rows = small.store.promoter, [small.find(1), small.find(2)]
        answers = promoter.promote_run(rows, Priority.DEMAND)
        for row in rows:
            promoter.give_up(small.residency.token(row))
        async with asyncio.timeout(FAR_S):
            assert await asyncio.gather(*answers) == [False, False]
        assert not any(small.residency.is_in(row, small.mapped) for row in rows)

    over_nvme(tmp_path, scenario)


def test_blocks_are_written_through_as_one_transfer(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        rows = [await small.store_in(small.mapped, number, number - 1 if number > 3 else None) for number in (3, 4, 5)]
        small.disk.plan(Fault("write", "fail", at=2, until=2))
        settled = small.writeback.write_through_run(rows, at_once=True)
        writes = [small.writeback.gate.backlog.writes[small.residency.token(row)] for row in rows]
        assert len({write.ticket for write in writes}) == 1
        async with asyncio.timeout(FAR_S):
            assert await asyncio.gather(*settled) == [True, False, True]
        assert small.writeback.are_durable(rows) == [True, False, True]
        assert small.writeback.gate.refusal_of(rows[1]) is Refusal.WRITE_FAILED

    over_nvme(tmp_path, scenario)


def test_a_prefetch_that_fails_to_make_room_does_not_hold_up_the_ones_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(small: SmallStore) -> None:
        def refuse(*_: object, **__: object) -> list[Slot]:
            raise ZeroDivisionError("a mistake")

        promoter = small.store.promoter
        with monkeypatch.context() as patched:
            patched.setattr(small.store.room, "allocate_run", lambda *_, **__: [])
            promotion = promoter.promote(small.find(1), Priority.PREFETCH)
            assert promoter.prefetch_seeks_room
            patched.setattr(small.store.room, "allocate_run", refuse)
            async with asyncio.timeout(FAR_S):
                assert not await promotion
        assert not promoter.prefetch_seeks_room
        assert promoter.prefetch(small.find(1))

    over_nvme(tmp_path, scenario)


def test_a_write_that_a_client_insists_on_is_made_though_a_lesser_one_was_refused_just_now(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        row = await small.store_in(small.mapped, 3)
        limit(small, "host→nvme", Priority.DEMOTION, 0)
        small.writeback.write_through(row)
        small.writeback.write_through(await small.store_in(small.mapped, 4), at_once=True)  # starts both
        async with asyncio.timeout(FAR_S):
            assert await small.writeback.write_through(row, at_once=True)
        assert small.writeback.is_durable(row)

    over_nvme(tmp_path, scenario)


def test_nothing_is_charged_for_a_write_that_fails_to_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(small: SmallStore) -> None:
        def refuse(*_: object, **__: object) -> list[Slot]:
            raise ZeroDivisionError("a mistake")

        row, room = await small.store_in(small.mapped, 3), small.store.rooms[small.residency.durable]
        before_bytes = small.store.endurance.report().spent_bytes
        with monkeypatch.context() as patched:
            patched.setattr(room, "allocate_run", lambda *_, **__: [])
            settled = small.writeback.write_through(row, at_once=True)
            patched.setattr(room, "allocate_run", refuse)
            async with asyncio.timeout(FAR_S):
                assert not await settled
        assert small.writeback.gate.refusal_of(row) is Refusal.ROOM
        assert small.store.endurance.report().spent_bytes - before_bytes in (0, COMMIT_BYTES)

    over_nvme(tmp_path, scenario)


def test_a_caller_who_comes_when_a_write_has_just_failed_gets_its_end(tmp_path: Path) -> None:
    """The caller comes in the turn between the end of the transfer and what follows it: the medium's word is as good as
    new.
    """

    async def scenario(small: SmallStore) -> None:
        row = await small.store_in(small.mapped, 3)
        small.disk.plan(Fault("write", "fail", errno=errno.EIO))
        first = small.writeback.write_through(row, at_once=True)
        write = small.writeback.gate.backlog.writes[small.residency.token(row)]
        assert write.outcome is not None and not write.outcome.done()
        came: list[asyncio.Future[bool]] = []
        write.outcome.add_done_callback(lambda _: came.append(small.writeback.write_through(row, at_once=True)))
        async with asyncio.timeout(FAR_S):
            assert not await first
            assert not await came[0]
        assert small.writeback.gate.refusal_of(row) is Refusal.WRITE_FAILED
        small.disk.plan()
        async with asyncio.timeout(FAR_S):
            assert await small.writeback.write_through(row, at_once=True), "asked again later, it is written"

    over_nvme(tmp_path, scenario)


@pytest.mark.parametrize("priority", [Priority.DEMAND, Priority.PREFETCH])
def test_the_more_blocks_are_before_it_the_longer_a_transfer_may_be(tmp_path: Path, priority: Priority) -> None:
    transfers: list[int] = []

    def trace(lane: str, of: Priority, nbytes: int, transfer: LaneTransfer) -> LaneTransfer:
        transfers.append(transfer.blocks)
        return transfer

    async def scenario() -> None:
        async with small_store(tmp_path, "host.capacity=16MiB", "movement.in_flight=8") as small:
            numbers = range(10, 34)
            rows = [await small.store_in(small.residency.durable, each, payload_bytes=300_000) for each in numbers]
            small.store.mover.trace = trace
            async with asyncio.timeout(FAR_S):
                assert all(await asyncio.gather(*small.store.promoter.promote_run(rows, priority)))
            assert all(small.residency.has(row, small.mapped) for row in rows)

    asyncio.run(scenario())
    is_demand = priority is Priority.DEMAND
    assert transfers == ([1] * 8 + [2, 2, 3, 3, 4, 2] if is_demand else [1] * 24)
