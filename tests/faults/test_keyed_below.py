"""A key-addressed tier below NVMe that delays, loses, damages or refuses: nothing wrong is served, no request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from kvstore_proto.errors import KVStoreError
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.degraded.modes import Mode
from kvstored.store.operations.delete import Fate
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import GetRequest
from kvstored.store.remote import RemoteValue
from kvstored.store.transfer.demotion import Demotion
from kvstored.store.transfer.rates import TokenBucket
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.examples import each_nth
from tests.reference.small_store import FAR_S, small_store
from tests.reference.tiers import HOST, NVME

REMOTE = 2
CHAINS, BLOCKS = 130, 4
SETTINGS = (
    "host.capacity=4MiB", "host.policy=lru", "nvme.capacity=4MiB",
    "nvme.slab=1MiB", "nvme.policy=lru",
)  # fmt: skip


def run(
    directory: Path,
    scenario: Callable[[DrivenStore], Coroutine[None, None, None]],
    store: LossyStore,
    capacity_bytes: int = 64 << 20,
) -> None:
    async def main() -> None:
        async with small_store(directory, *SETTINGS, keyed=[KeyedTier(store, capacity_bytes)]) as small:
            driven = DrivenStore(small)
            assert small.residency.tiers == ("host", "nvme", "remote") and small.residency.durable == NVME
            try:
                await scenario(driven)
            finally:
                store.let_go()
            await small.settle()
            assert check(small.residency) == []
            for tier in small.store.tiers:
                assert tier.check_books() == []
                assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes

    asyncio.run(main())


def wait_for_demotions(driven: DrivenStore) -> Demotion:
    """A busy machine may take longer to copy a block down than the block otherwise waits for it."""
    (demotion,) = (each for each in driven.small.store.copiers if isinstance(each, Demotion))
    demotion._bounds = demotion._bounds._replace(wait_s=None)
    return demotion


async def store_chains(driven: DrivenStore, chains: Sequence[int]) -> None:
    """More than DRAM and NVMe hold together, so that the first ones leave both."""
    for chain in chains:
        await driven.put(keys_of(chain, BLOCKS), DurabilityMode.ALWAYS)
        await driven.small.settle()
        driven.small.clock.advance(s=1)
        driven.small.store.tick()


def test_a_block_that_finds_no_room_below_takes_nothing_of_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(driven: DrivenStore) -> None:
        small = driven.small
        await driven.put_on_nvme_alone(keys_of(1, 1))
        row = small.residency.find(driven.client.tenant_id, keys_of(1, 1)[0])
        demotion = wait_for_demotions(driven)
        gate = demotion._bounds.gate
        assert gate is not None
        gate._bucket = TokenBucket(1.0, 1)
        with monkeypatch.context() as full:
            full.setattr(small.store.rooms[REMOTE], "allocate_now", lambda *_, **__: None)
            full.setattr(small.store.tiers[REMOTE], "allocate", lambda *_: None)
            assert not await demotion.write_back(row)
        assert gate.has_budget(), "nothing was written"
        assert await demotion.write_back(row)
        assert not gate.has_budget()

    run(tmp_path, scenario, LossyStore())


def only_remote(driven: DrivenStore) -> list[int]:
    """Chains whose blocks are all in the key-addressed tier alone."""
    return [
        chain for chain in range(CHAINS)
        if all(driven.tiers_of(key) == 1 << REMOTE for key in keys_of(chain, BLOCKS))
    ]  # fmt: skip


@pytest.mark.slow
def test_what_leaves_nvme_comes_back_from_below(tmp_path: Path) -> None:
    async def scenario(driven: DrivenStore) -> None:
        wait_for_demotions(driven)
        await store_chains(driven, range(CHAINS))
        far = only_remote(driven)
        assert len(far) > 10
        expected, _, end = await driven.stream(GetRequest(b"".join(keys_of(far[0], BLOCKS))))
        assert set(expected.tiers) == {REMOTE} and end.blocks == BLOCKS
        driven.small.store.leases.release_session(driven.client.session_id)
        for chain in range(CHAINS):
            assert (await driven.get(keys_of(chain, BLOCKS))).blocks == BLOCKS
        flows = driven.small.store.flows.tiers
        assert flows[NVME].demoted_blocks > 0 and flows[REMOTE].promoted_blocks > 0

    run(tmp_path, scenario, LossyStore(latency_s=0.001))


@pytest.mark.slow
@pytest.mark.parametrize("seed", each_nth(range(4), 4))
def test_a_get_is_whole_or_shorter_when_the_store_loses_or_damages_objects(tmp_path: Path, seed: int) -> None:
    async def scenario(driven: DrivenStore) -> None:
        await store_chains(driven, range(CHAINS))
        lengths = [(await driven.get(keys_of(chain, BLOCKS))) for chain in range(CHAINS)]
        short = [held for held in lengths if held.blocks < BLOCKS]
        assert short and len(short) < CHAINS
        assert {held.cause for held in short} <= {Cause.FORGOTTEN, Cause.CORRUPT}
        counters = driven.small.store.counters
        assert counters["forgotten_blocks"] > 0 and counters["corrupt_blocks"] > 0
        # What a get has missed is computed and put again; each get may find one more that is lost.
        for chain in range(CHAINS):
            for _ in range(BLOCKS + 1):
                await driven.put(keys_of(chain, BLOCKS), DurabilityMode.NONE)
                held = await driven.get(keys_of(chain, BLOCKS))
                if held.blocks == BLOCKS:
                    break
            assert held.blocks == BLOCKS

    run(tmp_path, scenario, LossyStore(lost=0.2, damaged=0.2, seed=seed))


@pytest.mark.slow
def test_blocks_of_another_process_are_found_before_the_deadline(tmp_path: Path) -> None:
    store = LossyStore()

    async def first(driven: DrivenStore) -> None:
        await store_chains(driven, range(CHAINS))
        far.extend(only_remote(driven))

    async def second(driven: DrivenStore) -> None:
        driven.operations.discovery.value = RemoteValue(saved_us_per_token=1e6)  # it always pays
        keys = keys_of(far[0], BLOCKS)
        assert driven.operations.look_up.look_up(driven.client, b"".join(keys)).usable == 0
        stranger = driven.new_client(2, "another")
        assert (await driven.get(keys, stranger)).blocks == 0
        longer = [*keys, b"?" * 16]
        held = await driven.get(longer)
        if held.blocks == 0:  # this machine was busy for longer than the deadline
            await driven.small.settle()
            held = await driven.get(longer)
        assert (held.blocks, held.cause) == (BLOCKS, Cause.NEVER_STORED)
        store.hang()
        late = await driven.get(keys_of(far[1], BLOCKS))
        assert late.blocks == 0 and driven.small.store.counters["discovery_timeouts"] >= 1
        store.let_go()
        await driven.small.settle()
        assert (await driven.get(keys_of(far[1], BLOCKS))).blocks == BLOCKS, "what came late is in the index"

    far: list[int] = []
    run(tmp_path / "first", first, store)
    assert len(far) > 2
    run(tmp_path / "second", second, store)


@pytest.mark.slow
def test_a_deleted_block_is_found_by_no_lookup(tmp_path: Path) -> None:
    store = LossyStore(latency_s=0.002)

    async def scenario(driven: DrivenStore) -> None:
        wait_for_demotions(driven)
        await store_chains(driven, range(CHAINS))
        far = only_remote(driven)
        for chain in far[:3]:
            deleted = await driven.operations.delete.delete(driven.client, keys_of(chain, BLOCKS))
            assert deleted.fates == [Fate.DELETED] * BLOCKS
            assert not any(name[16:] in keys_of(chain, BLOCKS) for name in store.objects)
            assert (await driven.get(keys_of(chain, BLOCKS))).blocks == 0

    run(tmp_path, scenario, store)


@pytest.mark.slow
def test_a_deletion_that_the_store_refuses_is_not_answered_as_done(tmp_path: Path) -> None:
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        await store_chains(driven, range(CHAINS))
        keys = keys_of(only_remote(driven)[0], BLOCKS)
        store.refused = 1.0
        with pytest.raises(KVStoreError, match="delete again"):
            await driven.operations.delete.delete(driven.client, keys)
        store.refused = 0.0
        await driven.operations.delete.delete(driven.client, keys)
        assert not any(name[16:] in keys for name in store.objects)

    run(tmp_path, scenario, store)


@pytest.mark.slow
def test_a_store_that_hangs_holds_up_no_put_and_is_shed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.store.movement.KEYED_WAIT_S", 0.02)
    store = LossyStore()

    async def scenario(driven: DrivenStore) -> None:
        small = driven.small
        await store_chains(driven, range(CHAINS))
        store.hang()
        async with asyncio.timeout(FAR_S):
            for chain in range(CHAINS, CHAINS + 10):
                await driven.put(keys_of(chain, BLOCKS), DurabilityMode.ALWAYS)
        for _ in range(20):
            small.clock.advance(s=0.5)
            small.store.tick()
            await asyncio.sleep(0)
        assert small.store.modes.mode("remote") is Mode.SLOW and small.store.modes.mode("nvme") is Mode.OK
        async with asyncio.timeout(FAR_S):
            for chain in range(CHAINS + 10, CHAINS + 40):
                answers = await driven.put(keys_of(chain, BLOCKS), DurabilityMode.ALWAYS)
                assert set(answers[-1].durability) == {2}
            assert (await driven.get(keys_of(CHAINS + 39, BLOCKS))).blocks == BLOCKS
        assert small.residency.has(small.residency.find(driven.client.tenant_id, keys_of(CHAINS + 39, 1)[0]), HOST)

    run(tmp_path, scenario, store)


@pytest.mark.slow
def test_room_below_is_bounded_too(tmp_path: Path) -> None:
    async def scenario(driven: DrivenStore) -> None:
        await store_chains(driven, range(CHAINS))
        assert driven.small.store.tiers[REMOTE].statistics().blocks <= 10
        assert (await driven.get(keys_of(CHAINS - 1, BLOCKS))).blocks == BLOCKS

    run(tmp_path, scenario, LossyStore(), capacity_bytes=10 * 16384)
