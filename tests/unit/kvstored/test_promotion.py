"""Promotions that come to nothing, and callers who ask for the block before that has been dealt with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_tiers.base import Slot
from kvstored.store.transfer.lane import Priority
from tests.reference.small_store import FAR_S, SmallStore, small_store


def over_nvme(directory: Path, scenario: Callable[[SmallStore], Coroutine[None, None, None]], blocks: int = 2) -> None:
    """Run `scenario` over a store with some blocks that NVMe alone has."""

    async def main() -> None:
        async with small_store(directory) as small:
            for number in range(1, blocks + 1):
                assert await small.is_durable(number)
            small.drop_from_dram(*range(1, blocks + 1))
            await scenario(small)
            await small.settle()
            assert not small.residency.pins

    asyncio.run(main())


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
        lane, promoter = small.store.mover.lanes["nvme→host"], small.store.promoter
        limits = lane.settings.limits
        few = replace(limits[Priority.PREFETCH], queued_items=1)
        lane.settings = replace(lane.settings, limits=limits | {Priority.PREFETCH: few})
        assert promoter.prefetch(small.find(1)) and not promoter.prefetch(small.find(2))
        async with asyncio.timeout(FAR_S):
            assert await promoter.promote(small.find(2), Priority.DEMAND)

    over_nvme(tmp_path, scenario)


def test_a_prefetch_that_fails_to_make_room_does_not_hold_up_the_ones_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(small: SmallStore) -> None:
        def refuse(*_: object) -> Slot | None:
            raise ZeroDivisionError("a mistake")

        promoter = small.store.promoter
        with monkeypatch.context() as patched:
            patched.setattr(small.store.room, "allocate_now", lambda *_: None)
            promotion = promoter.promote(small.find(1), Priority.PREFETCH)
            assert promoter.prefetch_seeks_room
            patched.setattr(small.store.room, "allocate_now", refuse)
            async with asyncio.timeout(FAR_S):
                assert not await promotion
        assert not promoter.prefetch_seeks_room
        assert promoter.prefetch(small.find(1))

    over_nvme(tmp_path, scenario)
