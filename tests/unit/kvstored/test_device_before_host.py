"""A tier of device memory before DRAM: what is used often gets a copy there, and what leaves it is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_tiers.base import MemoryKind, TierInfo
from kvstore_tiers.testing.faulty import Fault, FaultyTier, gone
from kvstore_tiers.testing.memory import MemoryTier
from kvstored.clients.codes import codes_by_mask, tier_code
from kvstored.config import Config, load_config
from kvstored.config.tiers.gpu import LINK_SHARE
from kvstored.store.blocks.check import check
from kvstored.store.movement import make_lanes
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.residency import make_residency
from kvstored.store.transfer.lane import Priority
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import SLOT_BYTES, small_store

DEVICE, HOST, NVME = 0, 1, 2
ON = tuple(1 << position for position in (DEVICE, HOST, NVME))
IN_DEVICE = 20  # blocks
GPU = ("tier.vram.kind=gpu", "tier.vram.capacity=64MiB", "tier.vram.before_host=true")
Drive = Callable[[DrivenStore, FaultyTier], Coroutine[None, None, None]]


def drive(directory: Path, what: Drive, *settings: str) -> None:
    async def main() -> None:
        device = FaultyTier(MemoryTier(IN_DEVICE * SLOT_BYTES, name="vram", memory=MemoryKind.DEVICE))
        async with small_store(directory, *settings, before=[device]) as small:
            assert small.residency.tiers == ("vram", "host", "nvme") and small.residency.mapped == HOST
            await what(DrivenStore(small), device)
            await idle(small.store.sharing)
            await small.settle()
            assert check(small.residency) == []
            for tier in small.store.tiers:
                assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes

    asyncio.run(main())


async def idle(sharing: list) -> None:  # type: ignore[type-arg]
    await asyncio.sleep(0)  # an access is counted once its answer is on its way
    for each in sharing:
        async with asyncio.timeout(60):
            while each.waiting:
                await asyncio.sleep(0.001)


async def copied(store: DrivenStore, keys: list[bytes], *, durable: bool = True) -> None:
    """Put a chain, use it, and see its copies in device memory."""
    await store.put(keys, DurabilityMode.ALWAYS if durable else DurabilityMode.NONE)
    assert (await store.get(keys)).blocks == len(keys)
    await idle(store.small.store.sharing)
    assert all(store.tiers_of(key) & ON[DEVICE] for key in keys)


def test_puts_land_in_dram_and_what_is_used_gets_a_copy(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        keys = keys_of(1, 5)
        await store.put(keys, DurabilityMode.NONE)
        assert [store.tiers_of(key) & ~ON[DEVICE] for key in keys] == [ON[HOST]] * 5
        await copied(store, keys_of(2, 5))
        assert store.small.store.counters["device_blocks"] >= 5
        assert set(store.small.store.mover.lanes) == {"vram→host", "host→vram", "nvme→host", "host→nvme"}

    drive(tmp_path, what)


def test_a_block_that_device_memory_alone_has_is_read_back_to_dram(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        keys = keys_of(1, 8)
        await copied(store, keys, durable=False)
        store.leave_host(keys)
        assert [store.tiers_of(key) for key in keys] == [ON[DEVICE]] * 8
        held = await store.get(keys)
        assert held.blocks == 8 and held.run is not None and held.run.promoted == {DEVICE: 8}
        assert [store.tiers_of(key) & ON[HOST] for key in keys] == [ON[HOST]] * 8

    drive(tmp_path, what)


def test_what_leaves_device_memory_goes_to_dram_unless_dram_has_it(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        first = keys_of(1, IN_DEVICE // 2)
        await copied(store, first, durable=False)
        store.leave_host(first)
        for chain in (2, 3, 4):
            await store.put(keys_of(chain, IN_DEVICE // 2), DurabilityMode.NONE)
            for _ in range(chain):  # each is used more often than the one before
                await store.get(keys_of(chain, IN_DEVICE // 2))
                await idle(store.small.store.sharing)
        places = [store.tiers_of(key) for key in first]
        assert set(places) == {ON[DEVICE], ON[HOST]}, "none is lost, some went to DRAM"
        demoted = store.small.store.flows.tiers[DEVICE].demoted_blocks
        assert demoted == places.count(ON[HOST]), "what DRAM has is not copied to it again"
        moved = store.small.store.mover.lanes["vram→host"].statistics(0).moved_blocks
        assert (moved[Priority.DEMAND], moved[Priority.DEMOTION]) == (0, demoted), "no request waits for it"
        assert (await store.get(first)).blocks == len(first)

    drive(tmp_path, what, "nvme.policy=lru")  # as the device's, which has no section


def test_blocks_that_are_used_in_turn_and_have_no_room_together_do_not_displace_each_other(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        counters = store.small.store.counters
        chains = [keys_of(chain, IN_DEVICE // 2) for chain in range(1, 6)]
        for keys in chains:
            await store.put(keys, DurabilityMode.NONE)
        for _ in range(4):
            for keys in chains:
                assert (await store.get(keys)).blocks == len(keys)
                await idle(store.small.store.sharing)
        on_device = [all(store.tiers_of(key) & ON[DEVICE] for key in keys) for keys in chains]
        assert on_device == [True, True, False, False, False]
        assert counters["device_blocks"] == IN_DEVICE, "each once"
        assert counters["device_declined_blocks"] > IN_DEVICE
        for _ in range(2):
            await store.get(chains[-1])
            await idle(store.small.store.sharing)
        assert all(store.tiers_of(key) & ON[DEVICE] for key in chains[-1]), "by then used more often"

    drive(tmp_path, what)


@pytest.mark.parametrize("plan", [gone(), (Fault("read", "corrupt"),)], ids=["gone", "corrupt"])
def test_a_copy_that_cannot_be_read_is_read_from_nvme_in_the_same_get(tmp_path: Path, plan: tuple[Fault, ...]) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        keys = keys_of(1, 6)
        await copied(store, keys)
        store.leave_host(keys)
        device.plan(*plan)
        held = await store.get(keys)
        assert held.blocks == 6
        assert not any(store.tiers_of(key) & ON[DEVICE] for key in keys)
        assert store.small.store.counters["given_up_blocks"] == 0

    drive(tmp_path, what)


def test_blocks_that_device_memory_alone_had_are_a_miss_when_it_fails(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        lost, kept = keys_of(1, 4), keys_of(2, 4)
        await copied(store, lost, durable=False)
        await store.put(kept, DurabilityMode.NONE)
        store.leave_host(lost)
        device.plan(*gone())
        assert (await store.get(lost)).blocks == 0
        assert (await store.get(kept)).blocks == 4, "what DRAM has goes on"
        await store.put(keys_of(3, 4), DurabilityMode.NONE)
        assert (await store.get(keys_of(3, 4))).blocks == 4

    drive(tmp_path, what)


def test_device_memory_that_fails_writes_costs_no_block(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        device.plan(Fault("write", "fail"))
        keys = keys_of(1, 4)
        await store.put(keys, DurabilityMode.NONE)
        for _ in range(3):
            assert (await store.get(keys)).blocks == 4
            await idle(store.small.store.sharing)
        assert [store.tiers_of(key) for key in keys] == [ON[HOST]] * 4
        assert device.statistics().used_bytes == 0

    drive(tmp_path, what)


def test_an_evicted_block_of_dram_stays_in_device_memory(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        hot = keys_of(1, 10)
        await copied(store, hot, durable=False)
        for chain in range(2, 80):
            await store.put(keys_of(chain, 10), DurabilityMode.NONE)
        assert all(store.tiers_of(key) & ON[DEVICE] for key in hot)
        assert not any(store.tiers_of(key) & ON[HOST] for key in hot)
        assert (await store.get(hot)).blocks == 10

    drive(tmp_path, what, "host.policy=lru")


def test_copies_to_the_device_wait_for_its_byte_rate_and_gets_do_not(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        (sharing,), counters, keys = store.small.store.sharing, store.small.store.counters, keys_of(1, IN_DEVICE)
        await store.put(keys, DurabilityMode.NONE)
        assert (await store.get(keys)).blocks == IN_DEVICE
        async with asyncio.timeout(60):
            while not counters["device_rate_waits"]:
                await asyncio.sleep(0.001)
        waiting = [key for key in keys if not store.tiers_of(key) & ON[DEVICE]]
        assert len(waiting) > 10, "a second's worth passes at once"
        assert (await store.get(keys)).blocks == IN_DEVICE
        async with asyncio.timeout(60):
            while sharing.waiting:
                store.small.clock.advance(s=1)
                sharing.tick()
                await asyncio.sleep(0.001)
        assert all(store.tiers_of(key) & ON[DEVICE] for key in keys)

    drive(tmp_path, what, *GPU, "tier.vram.policy=lru", f"tier.vram.rate={2 * SLOT_BYTES}")


@pytest.mark.parametrize(("rate", "share", "bytes_per_s"), [("auto", LINK_SHARE, 0), ("0", 0, 0), ("5MiB", 0, 5 << 20)])
@pytest.mark.parametrize("before_host", [True, False])
def test_both_lanes_of_a_gpu_have_its_byte_rate(rate: str, share: float, bytes_per_s: int, before_host: bool) -> None:
    config = load_config(None, (*GPU, f"tier.vram.before_host={str(before_host).lower()}", f"tier.vram.rate={rate}"))
    kinds = {"vram": MemoryKind.DEVICE, "host": MemoryKind.SYSTEM, "nvme": MemoryKind.FILE}
    tiers = [MemoryTier(0, name=section.name, memory=kinds[section.name]) for section in config.tiers]
    for tier in tiers:
        tier.info = replace(tier.info, is_mapped=tier.info.name == "host", is_durable=tier.info.name == "nvme")
    lanes = make_lanes(config, make_residency(config, tiers), ())
    found = {lane.name: (lane.settings.spare_share, lane.settings.spare_bytes_per_s) for lane in lanes}
    assert [found.pop(name) for name in ("vram→host", "host→vram")] == [(share, bytes_per_s)] * 2
    assert set(found.values()) == {(0, 0)}
    assert load_config(None, GPU).tier("vram") == load_config(None, (*GPU, "tier.vram.rate=auto")).tier("vram")


def test_what_clients_are_shown_is_the_copy_that_they_can_have_soonest() -> None:
    tiers = [MemoryTier(0, name="vram", memory=MemoryKind.DEVICE), MemoryTier(0), MemoryTier(0)]
    tiers[1].info = TierInfo("host", "shared", MemoryKind.SYSTEM, is_mapped=True)
    tiers[2].info = TierInfo("nvme", "nvme", MemoryKind.FILE, is_durable=True)
    residency = make_residency(load_config(None, ()), tiers)
    device, host, nvme = (tier_code(residency, position) for position in range(3))
    assert list(codes_by_mask(residency)) == [0, device, host, host, nvme, device, host, host]


def test_a_store_without_a_tier_that_clients_map_is_refused() -> None:
    with pytest.raises(ValueError):
        make_residency(load_config(None, ()), [MemoryTier(0)])


def test_a_gpu_stands_where_the_configuration_says() -> None:
    def names(*settings: str) -> list[str]:
        chosen: Config = load_config(None, ("tier.vram.kind=gpu", "tier.vram.capacity=64MiB", *settings))
        return [tier.name for tier in chosen.tiers]

    assert names() == ["host", "vram", "nvme"]
    assert names("tier.vram.before_host=true") == ["vram", "host", "nvme"]
    second = ("tier.far.kind=memory", "tier.far.capacity=1GiB", "tier.old.kind=gpu", "tier.old.capacity=64MiB")
    assert names("tier.vram.before_host=true", *second) == ["vram", "host", "old", "far", "nvme"]


def test_a_write_that_waits_for_its_batch_is_made_from_the_memory_that_still_has_the_block(tmp_path: Path) -> None:
    async def what(store: DrivenStore, device: FaultyTier) -> None:
        small, keys = store.small, keys_of(1, 1)
        await copied(store, keys, durable=False)
        row = small.residency.find(store.client.tenant_id, keys[0])
        settled = small.writeback.write_through(row)  # gathers, with the copy that is fastest to read
        link = small.writeback.gate.backlog.writes[small.residency.token(row)].link
        small.store.damage.lost(link.source, row, "the test says so")
        async with asyncio.timeout(60):
            assert await settled

    drive(tmp_path, what, "durability.batch_ms=20")
