"""Two tiers of device memory before DRAM: a client is leased the memory of its own device, or host memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import MemoryKind
from kvstore_tiers.testing.memory import MemoryTier
from kvstored.clients.codes import codes_by_mask
from kvstored.store.blocks import Residency
from kvstored.store.operations.client import Client
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import Acquired, GetRequest
from kvstored.tier_set import NO_TIERS, ONLY, TierSet
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import SLOT_BYTES, SmallStore, small_store
from tests.unit.kvstored.test_device_before_host import idle
from tests.unit.kvstored.test_device_promotion import CHAIN, on_nvme_alone, places

FIRST, SECOND, HOST, NVME = ONLY[:4]
BOTH = FIRST.union(SECOND)
KEYS = b"".join(SmallStore.key(number) for number in CHAIN)


async def get(store: DrivenStore, client: Client, *, host_only: bool = False) -> Acquired:
    """Get the chain and release it. A lease that names a tier which lacks a block raises."""
    held = await store.operations.get.acquire(client, GetRequest(KEYS, host_only=host_only))
    assert held.run is not None and held.blocks == len(CHAIN)
    store.operations.get.release(client, [held.run.lease_id])
    return held


def leased_in(store: DrivenStore, held: Acquired) -> list[int]:
    """The tiers that a lease names, as masks."""
    residency = store.small.residency
    assert held.run is not None
    return [
        sum(1 << at for at in range(4) if residency.is_in(row, at) and residency.slot(row, at) == slot)
        for row, slot in zip(held.run.rows, held.run.slots, strict=True)
    ]


@asynccontextmanager
async def two_devices(directory: Path) -> AsyncIterator[DrivenStore]:
    devices = [MemoryTier(16 * SLOT_BYTES, name=name, memory=MemoryKind.DEVICE) for name in ("first", "second")]
    for device in devices:
        device.info = replace(device.info, loads_files=True)
    for _ in range(8):  # no slot of one is equal to one of the other
        devices[0].allocate(SLOT_BYTES)
    async with small_store(directory, before=devices) as small:
        yield DrivenStore(small)


@pytest.mark.parametrize(("own", "other"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_blocks_go_straight_to_the_clients_own_device_and_another_one_has_them_from_dram(
    tmp_path: Path, own: TierSet, other: TierSet
) -> None:
    async def main() -> None:
        async with two_devices(tmp_path) as store:
            small = store.small
            here, there = store.new_client(2), store.new_client(3)
            here.device_tiers, there.device_tiers = own, other
            rows = await on_nvme_alone(small)
            held = await get(store, here)
            assert places(small, rows) == [own | NVME] * len(rows)
            assert leased_in(store, held) == [own] * len(rows)
            assert leased_in(store, await get(store, there)) == [HOST] * len(rows)
            assert leased_in(store, await get(store, here)) == [own] * len(rows)
            assert leased_in(store, await get(store, here, host_only=True)) == [HOST] * len(rows)
            assert small.store.counters["straight_blocks"] == len(rows)

    asyncio.run(main())


@pytest.mark.parametrize(("own", "copied_to"), [(FIRST, FIRST), (SECOND, SECOND), (NO_TIERS, BOTH)])
def test_what_is_used_is_copied_to_the_device_of_the_client_or_to_all(
    tmp_path: Path, own: TierSet, copied_to: TierSet
) -> None:
    async def main() -> None:
        async with two_devices(tmp_path) as store:
            client, keys = store.new_client(2), keys_of(1, 5)
            client.device_tiers = own
            await store.put(keys, DurabilityMode.NONE, client)
            assert (await store.get(keys, client)).blocks == len(keys)
            await idle(store.small.store.sharing)
            assert [store.tiers_of(key) for key in keys] == [copied_to | HOST] * len(keys)

    asyncio.run(main())


def test_a_client_is_shown_as_device_memory_what_it_has_on_its_own_device() -> None:
    residency = Residency(("first", "second", "host", "nvme"), mapped=2, exported=BOTH)
    shown = {device_tiers: codes_by_mask(residency, device_tiers) for device_tiers in (NO_TIERS, FIRST, SECOND)}
    masks = (FIRST, SECOND, FIRST | SECOND, FIRST | SECOND | HOST, SECOND | NVME, NVME)
    gpu, host, memory, nvme = pb.TIER_CODE_GPU, pb.TIER_CODE_HOST, pb.TIER_CODE_MEMORY, pb.TIER_CODE_NVME
    assert [shown[0][mask] for mask in masks] == [memory, memory, memory, host, memory, nvme]
    assert [shown[FIRST][mask] for mask in masks] == [gpu, memory, gpu, host, memory, nvme]
    assert [shown[SECOND][mask] for mask in masks] == [memory, gpu, gpu, host, gpu, nvme]
