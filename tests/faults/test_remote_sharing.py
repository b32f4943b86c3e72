"""Blocks are written to a key-addressed tier before they are evicted, or not: by use, by rate, beside requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstored.policy_names import ALL, EVICTED, REUSED
from kvstored.store.blocks.check import check
from kvstored.store.operations.delete import Fate
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import GetRequest
from kvstored.store.remote import RemoteValue
from kvstored.store.transfer.admission import RemoteWrites
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.sharing import AT_ONCE
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import FAR_S, SLOT_BYTES, small_store

REMOTE, BLOCKS = 2, 4
Scenario = Callable[[DrivenStore], Coroutine[None, None, None]]


def run(directory: Path, scenario: Scenario, store: LossyStore, share: str, bytes_per_s: int = 0) -> None:
    async def main() -> None:
        writes = RemoteWrites(share, bytes_per_s=bytes_per_s)
        async with small_store(directory, keyed=[KeyedTier(store, 64 << 20)], remote_writes=writes) as small:
            try:
                await scenario(DrivenStore(small))
            finally:
                store.let_go()
            await small.settle()
            assert check(small.residency) == []

    asyncio.run(main())


def shared(store: LossyStore) -> set[bytes]:
    return {name[16:] for name in store.objects}


def is_pinned(driven: DrivenStore, key: bytes) -> bool:
    residency = driven.small.residency
    return residency.pin_count(residency.find(driven.client.tenant_id, key)) > 0


async def shared_all(driven: DrivenStore) -> None:
    """Let the pass end that follows uses."""
    (sharing,) = driven.small.store.sharing
    await driven.small.until(lambda: not sharing.waiting)


@pytest.mark.parametrize("mode", [DurabilityMode.NONE, DurabilityMode.ALWAYS])
def test_all_shares_what_is_put_and_another_node_finds_it(tmp_path: Path, mode: DurabilityMode) -> None:
    store = LossyStore()

    async def first(driven: DrivenStore) -> None:
        await driven.put(keys_of(1, BLOCKS), mode)
        await shared_all(driven)
        assert shared(store) == set(keys_of(1, BLOCKS))
        assert driven.small.store.counters["shared_blocks"] == BLOCKS
        assert all(driven.tiers_of(key) >> REMOTE & 1 for key in keys_of(1, BLOCKS))

    async def second(driven: DrivenStore) -> None:
        assert (await driven.get(keys_of(1, BLOCKS))).blocks == BLOCKS

    run(tmp_path / "first", first, store, ALL)
    run(tmp_path / "second", second, store, EVICTED)


def test_an_answer_that_comes_late_is_there_for_the_next_request(tmp_path: Path) -> None:
    store = LossyStore()

    async def first(driven: DrivenStore) -> None:
        await driven.put(keys_of(1, BLOCKS), DurabilityMode.NONE)
        await shared_all(driven)

    async def second(driven: DrivenStore) -> None:
        store.hang()
        assert (await driven.get(keys_of(1, BLOCKS))).blocks == 0
        store.let_go()
        await driven.small.until(lambda: driven.small.store.counters["discovered_blocks"] == BLOCKS)
        questions = driven.small.store.counters["discovery_questions"]
        assert (await driven.get(keys_of(1, BLOCKS))).blocks == BLOCKS
        assert driven.small.store.counters["discovery_questions"] == questions

    async def third(driven: DrivenStore) -> None:
        store.hang()
        keys = keys_of(1, BLOCKS)
        assert (await driven.get(keys)).blocks == 0
        deleting = asyncio.create_task(driven.operations.delete.delete(driven.client, keys))
        await asyncio.sleep(0.01)
        driven.small.residency.forget(driven.client.tenant_id, tuple(keys))
        store.let_go()
        await deleting
        await driven.small.settle()
        assert driven.small.store.counters["discovered_blocks"] == 0, "a deletion overtook the answer"
        assert (await driven.get(keys)).blocks == 0

    run(tmp_path / "first", first, store, ALL)
    run(tmp_path / "second", second, store, EVICTED)
    run(tmp_path / "third", third, store, EVICTED)


def test_a_deletion_waits_for_our_own_copies(tmp_path: Path) -> None:
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        keys = keys_of(1, 3 * AT_ONCE)
        await driven.put(keys, DurabilityMode.NONE)
        (sharing,) = driven.small.store.sharing
        store.hang()
        await driven.small.until(lambda: sharing.waiting > 1 and is_pinned(driven, keys[0]))
        deleting = asyncio.create_task(driven.operations.delete.delete(driven.client, keys))
        await asyncio.sleep(0)
        assert not deleting.done()
        store.let_go()
        assert (await deleting).fates == [Fate.DELETED] * len(keys)
        await shared_all(driven)
        assert not store.objects

    run(tmp_path, scenario, store, ALL)


def test_a_block_that_waits_for_room_is_shared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, has_room, asked, broken = LossyStore(), asyncio.Event(), [0], list[str]()
    allocate, allocate_now = Room.allocate, Room.allocate_now

    def none_yet(room: Room, nbytes: int, tenant: int, *, writable: bool = False) -> Slot | None:
        is_open = has_room.is_set() or room._position != REMOTE
        return allocate_now(room, nbytes, tenant, writable=writable) if is_open else None

    async def late(room: Room, nbytes: int, tenant: int, *, is_patient: bool = True) -> Slot | None:
        asked[0] += not is_patient
        if not is_patient:
            await has_room.wait()
        return await allocate(room, nbytes, tenant, is_patient=is_patient)

    async def scenario(driven: DrivenStore) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(str(context)))
        keys = keys_of(1, BLOCKS)
        await driven.put(keys, DurabilityMode.NONE)
        (sharing,) = driven.small.store.sharing
        await driven.small.until(lambda: asked[0] == BLOCKS)
        sharing.used([driven.small.residency.find(driven.client.tenant_id, key) for key in keys])
        sharing.tick()
        await driven.small.until(lambda: sharing.waiting == BLOCKS)
        has_room.set()
        await shared_all(driven)
        assert (asked[0], broken) == (BLOCKS, [])

    monkeypatch.setattr(Room, "allocate", late)
    monkeypatch.setattr(Room, "allocate_now", none_yet)
    run(tmp_path, scenario, store, ALL)


def test_reused_shares_what_is_used_again_with_the_blocks_before_it(tmp_path: Path) -> None:
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        once, twice = keys_of(1, BLOCKS), keys_of(2, BLOCKS)
        for keys in (once, twice):
            await driven.put(keys, DurabilityMode.NONE)
        await shared_all(driven)
        assert not store.objects
        await driven.get(twice[:3])
        await asyncio.sleep(0)
        await shared_all(driven)
        assert shared(store) == set(twice[:3])

    run(tmp_path, scenario, store, REUSED)


def test_reused_shares_a_prefix_with_which_two_chains_go_on(tmp_path: Path) -> None:
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        prefix = keys_of(1, 2)
        for branch in (2, 3):
            await driven.put([*prefix, *keys_of(branch, 1)], DurabilityMode.NONE)
        await shared_all(driven)
        assert shared(store) == set(prefix)

    run(tmp_path, scenario, store, REUSED)


def test_the_byte_rate_holds(tmp_path: Path) -> None:
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        small = driven.small
        await driven.put(keys_of(1, 16), DurabilityMode.NONE)
        (sharing,) = small.store.sharing
        for second in range(1, 4):
            sharing.tick()
            sharing.tick()
            await small.settle()
            assert len(store.objects) <= 2 * (second + 1) + 1
            small.clock.advance(s=1)
        assert 2 <= len(store.objects) < 12

    run(tmp_path, scenario, store, ALL, bytes_per_s=2 * SLOT_BYTES)


@pytest.mark.slow
def test_a_store_that_hangs_holds_few_blocks_and_no_request(tmp_path: Path) -> None:
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        small = driven.small
        store.hang()
        async with asyncio.timeout(FAR_S):
            for chain in range(200):  # more than DRAM has
                await driven.put(keys_of(chain, BLOCKS), DurabilityMode.BATCH)
                assert (await driven.get(keys_of(chain, BLOCKS))).blocks == BLOCKS
            small.store.tick()
            assert len(small.residency.pins) <= AT_ONCE + small.writeback.pending()
            expected, _, end = await driven.stream(GetRequest(b"".join(keys_of(199, BLOCKS))))
            assert end.blocks == BLOCKS and len(expected.tiers) == BLOCKS

    run(tmp_path, scenario, store, ALL)


def test_blocks_that_are_lost_are_shared_again_and_never_wrong(tmp_path: Path) -> None:
    store = LossyStore(lost=0.3, damaged=0.3)

    async def first(driven: DrivenStore) -> None:
        for chain in range(20):
            await driven.put(keys_of(chain, BLOCKS), DurabilityMode.NONE)
        await shared_all(driven)
        assert len(store.objects) > BLOCKS

    async def second(driven: DrivenStore) -> None:
        lengths = [(await driven.get(keys_of(chain, BLOCKS))).blocks for chain in range(20)]  # compares the bytes
        assert 0 < sum(lengths) < 20 * BLOCKS

    run(tmp_path / "first", first, store, ALL)
    run(tmp_path / "second", second, store, EVICTED)


def test_a_mistake_in_the_last_copies_does_not_hold_up_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        (sharing,) = driven.small.store.sharing
        is_copied, left = sharing._damage.is_copied, [AT_ONCE]

        def fail_at_first(*outcome: Any) -> bool:
            left[0] -= 1
            if left[0] >= 0:
                raise ZeroDivisionError("a mistake")
            return is_copied(*outcome)

        monkeypatch.setattr(sharing._damage, "is_copied", fail_at_first)
        await driven.put(keys_of(1, 3 * AT_ONCE), DurabilityMode.NONE)
        await shared_all(driven)
        assert left[0] < 0 and shared(store) == set(keys_of(1, 3 * AT_ONCE))

    run(tmp_path, scenario, store, ALL)


def test_the_end_of_a_chain_that_another_node_stored_continues_its_beginning(tmp_path: Path) -> None:
    store, keys = LossyStore(), keys_of(1, BLOCKS)

    async def first(driven: DrivenStore) -> None:
        await driven.put(keys, DurabilityMode.NONE)
        await shared_all(driven)

    async def second(driven: DrivenStore) -> None:
        residency, tenant = driven.small.residency, driven.client.tenant_id
        driven.operations.discovery.value = RemoteValue(saved_us_per_token=1e6)
        end = GetRequest(b"".join(keys[2:]), parent=keys[1])
        _, _, last = await driven.stream(end)
        assert last.blocks == 0, "a block without the one before it is of no use"
        driven.small.clock.advance(s=5)
        await driven.get(keys[:2])
        _, runs, last = await driven.stream(end)
        assert last.blocks == BLOCKS - 2
        assert [residency.parent_key(residency.find(tenant, key)) for key in keys] == [NO_PARENT, *keys[:-1]]
        for held in runs:
            driven.operations.get.release(driven.client, [held.lease_id])

    run(tmp_path / "first", first, store, ALL)
    run(tmp_path / "second", second, store, ALL)
