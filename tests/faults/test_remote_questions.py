"""Questions to a key-addressed tier that hangs or has nothing: no request waits in vain, nothing is asked twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstored.rpc.verbs import Verbs
from kvstored.store.degraded.modes import Mode
from kvstored.store.operations.discovery import MOST_OWED
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import GetRequest
from kvstored.store.remote import RemoteValue
from kvstored.telemetry import RecentMisses
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import FAR_S, small_store
from tests.reference.tiers import NVME

BLOCKS = 4


class CountingStore(LossyStore):
    """Also notes each question's names."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bytes] = []

    def sizes(self, names: Sequence[bytes]) -> list[int]:
        self.asked += [name[16:] for name in names]
        return super().sizes(names)


def run(directory: Path, scenario: Callable[[DrivenStore], Coroutine[None, None, None]], store: LossyStore) -> None:
    async def main() -> None:
        async with small_store(directory, keyed=[KeyedTier(store, 64 << 20)]) as small:
            try:
                await scenario(DrivenStore(small))
            finally:
                store.let_go()
            await small.settle()

    asyncio.run(main())


async def get(driven: DrivenStore, chain: int) -> int:
    return (await driven.get(keys_of(chain, BLOCKS))).blocks


def test_requests_for_one_chain_share_a_question(tmp_path: Path) -> None:
    store = CountingStore()

    async def scenario(driven: DrivenStore) -> None:
        store.hang()
        waiting = [asyncio.create_task(get(driven, 1)) for _ in range(8)]
        assert await asyncio.gather(*waiting) == [0] * 8
        store.let_go()
        await driven.small.settle()
        assert sorted(store.asked) == keys_of(1, BLOCKS)

    run(tmp_path, scenario, store)


def test_what_is_not_there_is_not_asked_for_again_before_its_time(tmp_path: Path) -> None:
    store = CountingStore()

    async def scenario(driven: DrivenStore) -> None:
        small = driven.small
        driven.operations.discovery.value = RemoteValue(saved_us_per_token=1e6)  # it pays on a busy machine, too
        for _ in range(3):
            assert await get(driven, 1) == 0
            await small.until(lambda: len(store.asked) == BLOCKS)  # an answer may come late
            await small.settle()
        assert len(store.asked) == BLOCKS and small.store.counters["discovery_known_absent"] >= 2
        small.clock.advance(s=1.1)
        assert await get(driven, 1) == 0
        await small.until(lambda: len(store.asked) == 2 * BLOCKS)
        await small.settle()
        small.clock.advance(s=1.1)
        assert await get(driven, 1) == 0
        assert len(store.asked) == 2 * BLOCKS, "the second time it is believed for longer"
        stranger = driven.new_client(2, "another")
        await driven.get(keys_of(1, BLOCKS), stranger)
        await small.until(lambda: len(store.asked) == 3 * BLOCKS)  # what one tenant learned says nothing to another

    run(tmp_path, scenario, store)


def test_a_lookup_that_waits_counts_what_it_does_not_ask_once(tmp_path: Path) -> None:
    store = CountingStore()

    async def scenario(driven: DrivenStore) -> None:
        nobody: Any = None
        verbs = Verbs(driven.small.store, driven.operations, RecentMisses(4, driven.small.clock), *[nobody] * 3)
        short, long = keys_of(1, 1), keys_of(2, 512)  # of the short one computing takes less than asking
        driven.operations.discovery.value = RemoteValue(saved_us_per_token=1.0)
        sets = [pb.KeySet(keys=b"".join(each)) for each in (short, long)]
        request, session = pb.Request(lookup=pb.Lookup(sets=sets, max_wait_ms=1000)), cast(Any, driven.client)
        for times in driven.operations.discovery.times.values():
            times.deadline_s = FAR_S  # no store is late on a busy machine
        assert verbs.quick["lookup"](session, request) is None, "it waits for the long one"
        (reply,) = [each async for each in verbs.slow["lookup"](session, request)]
        assert len(reply.lookup.sets) == 2 and driven.small.store.counters["discovery_declined"] == 1

    run(tmp_path, scenario, store)


def test_a_store_that_hangs_is_owed_few_answers_and_is_shed(tmp_path: Path) -> None:
    store = CountingStore()

    async def scenario(driven: DrivenStore) -> None:
        small = driven.small
        store.hang()
        async with asyncio.timeout(FAR_S):
            for chain in range(2 * MOST_OWED):
                assert await get(driven, chain) == 0
        assert small.store.counters["discovery_questions"] <= MOST_OWED * BLOCKS
        for _ in range(20):
            small.clock.advance(s=0.5)
            small.store.tick()
            await asyncio.sleep(0)
        assert small.store.modes.mode("remote") is Mode.SLOW
        before = small.store.counters["discovery_questions"]
        assert await get(driven, 100) == 0 and small.store.counters["discovery_questions"] == before

    run(tmp_path, scenario, store)


@pytest.mark.slow
def test_the_local_part_is_promoted_while_a_question_is_open(tmp_path: Path) -> None:
    store = CountingStore()

    async def scenario(driven: DrivenStore) -> None:
        keys = keys_of(1, BLOCKS)
        await driven.put(keys, DurabilityMode.ALWAYS)
        await driven.small.settle()
        driven.leave_host(keys)
        store.hang()
        longer = [*keys, *keys_of(2, BLOCKS)]
        expected, runs, end = await driven.stream(GetRequest(b"".join(longer)))
        assert set(expected.tiers) == {NVME} and end.blocks == BLOCKS
        assert sum(len(each.rows) for each in runs) == BLOCKS

    run(tmp_path, scenario, store)
