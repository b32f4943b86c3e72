"""Attacks on the room for a promotion, where the blocks of one chain are in arenas of several kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore_proto.arena import slot_bytes
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.store.blocks.check import check
from kvstored.store.operations.records import GetRequest
from tests.reference.driven_store import DrivenStore
from tests.reference.small_store import FAR_S, SmallStore, small_store
from tests.reference.tiers import HOST, NVME

KIB, ARENA_BYTES, ARENAS = 1024, 1 << 20, 4
SETTINGS = (
    "host.policy=lru",
    "nvme.policy=lru",
    f"host.capacity={ARENAS}MiB",
    "host.arena=1MiB",
    "nvme.capacity=32MiB",
)
WANTED, WANTED_BYTES = 5001, 30 * KIB
Scenario = Callable[[SmallStore], Awaitable[None]]


def run(tmp_path: Path, scenario: Scenario) -> None:
    async def inside() -> None:
        async with small_store(tmp_path, *SETTINGS) as small:
            await scenario(small)
            assert check(small.residency) == []

    asyncio.run(inside())


async def chain_and_a_block_below(small: SmallStore, blocks: int, *, sizes: tuple[int, int], in_place: bool) -> None:
    """Store a chain whose blocks have the payload sizes `sizes` in turn, `in_place` every other one in an arena that
    clients write to. Make all durable, fill the rest of DRAM, and store a block of another size on NVMe alone."""
    room, parent = small.store.rooms[HOST], None
    allocate_for = room.allocate_for
    for number in range(1, blocks + 1):
        is_second = number % 2 == 0

        async def allocate(*asked: object, writable: bool = in_place and is_second, **how: object) -> object:
            return await allocate_for(*asked, writable=writable, **how)  # type: ignore[arg-type]

        room.allocate_for = allocate  # type: ignore[method-assign,assignment]
        assert await small.store_in(HOST, number, parent, payload_bytes=sizes[is_second]) >= 0
        parent = number
        small.clock.advance(s=1)
    room.allocate_for = allocate_for  # type: ignore[method-assign]
    small.writeback.write_through_run([small.find(number) for number in range(1, blocks + 1)])
    assert await small.writeback.flush(FAR_S) == 0
    while small.store.host.allocate(ARENA_BYTES, "another") is not None:
        pass
    assert await small.store_in(NVME, WANTED, payload_bytes=WANTED_BYTES) >= 0


def in_dram(small: SmallStore, blocks: int) -> list[int]:
    return [number for number in range(1, blocks + 1) if small.residency.has(small.find(number), HOST)]


@pytest.mark.parametrize("blocks", [203, 204])
def test_a_chain_in_arenas_of_two_owners_gives_way(tmp_path: Path, blocks: int) -> None:
    """All arenas are full, and each block waits for its child in an arena of the other kind. The last block is in an
    arena of either kind."""

    async def scenario(small: SmallStore) -> None:
        payload = 15 * KIB
        await chain_and_a_block_below(small, blocks, sizes=(payload, payload), in_place=True)
        before = len(in_dram(small, blocks))
        assert before == blocks and await small.fetch(WANTED)
        lost = (before - len(in_dram(small, blocks))) * slot_bytes(payload)
        assert lost <= ARENA_BYTES + slot_bytes(WANTED_BYTES)

    run(tmp_path, scenario)


def test_a_chain_in_arenas_of_two_sizes_gives_way(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        await chain_and_a_block_below(small, 100, sizes=(3 * KIB, 7 * KIB), in_place=False)
        assert await small.fetch(WANTED)
        left = in_dram(small, 100)
        assert left == list(range(1, len(left) + 1)), "the chain got a hole"

    run(tmp_path, scenario)


def test_what_stays_for_a_leased_block_costs_nothing_and_the_get_says_why(tmp_path: Path) -> None:
    async def scenario(small: SmallStore) -> None:
        driven, residency = DrivenStore(small), small.residency
        await chain_and_a_block_below(small, 100, sizes=(3 * KIB, 7 * KIB), in_place=False)
        last = small.find(100)
        residency.pin(last)
        lease = small.store.leases.grant(
            1, residency.tenant_of(last), [residency.token(last)], [residency.slot(last, HOST)],
            small.clock.monotonic_ns() + 3600 * NS_PER_S,
        )  # fmt: skip
        assert not await small.fetch(WANTED)
        asked = GetRequest(small.key(WANTED), max_wait_ms=int(FAR_S * 1000))
        assert (await driven.operations.get.acquire(driven.client, asked)).cause is Cause.NO_ROOM
        assert len(in_dram(small, 100)) == 100
        assert (await driven.operations.get.acquire(driven.client, asked._replace(mapped_only=True))).cause is None
        assert small.store.leases.release(1, lease.lease_id)
        assert (await driven.operations.get.acquire(driven.client, asked)).blocks == 1

    run(tmp_path, scenario)
