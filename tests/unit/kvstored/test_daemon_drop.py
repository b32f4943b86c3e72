"""Dropping a tier: only copies stay unless they are discarded; a block that gets a new host copy stays too."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_proto.terms import Terms
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.testing.faulty import Fault
from kvstored.admin.drop import OperatorDrop
from kvstored.admin.durable_copies import save
from tests.reference.small_store import FAR_S, SLOT_BYTES, SmallStore, small_store
from tests.reference.tiers import HOST, NVME

DIGEST = bytes(range(32))
DIRECTORY: Any = SimpleNamespace(fingerprints=lambda: [DIGEST], known_number=lambda _: 1)


@pytest.mark.parametrize("how", ["drop", "invalidate"])
def test_a_block_that_is_being_filled_is_kept(tmp_path: Path, how: str) -> None:
    """The block is filled as by a put of a block that is stored on NVMe, which is out of reach."""

    async def run() -> None:
        async with small_store(tmp_path) as small:
            residency = small.residency
            await small.fill(range(1, 3))
            small.drop_from_dram(1, 2)
            row, tenant = small.find(1), residency.tenant("tenant")
            slot = await small.store.rooms[HOST].allocate(SLOT_BYTES, tenant)
            assert slot is not None
            residency.attach(row, HOST, slot, small.clock.monotonic_ns(), filling=True)
            drop = OperatorDrop(small.store, DIRECTORY)

            async def take_away() -> tuple[int, int]:
                if how == "drop":
                    dropped = await drop.drop(pb.DropRequest(tier="nvme", discard=True))
                    return dropped.dropped_blocks, dropped.kept_blocks
                gone = await drop.invalidate(pb.InvalidateRequest(fingerprint=DIGEST.hex()))
                return gone.blocks, gone.kept_blocks

            assert await take_away() == (1, 1)
            assert small.find(2) < 0 and residency.has(small.find(1), NVME)
            residency.publish(row, HOST, small.clock.monotonic_ns())
            assert (await take_away())[1] == 0
            assert not residency.has(row, NVME)
            assert residency.has(row, HOST) == (how == "drop")

    asyncio.run(run())


def ready(small: SmallStore) -> OperatorDrop:
    return OperatorDrop(small.store, DIRECTORY)


def counts(reply: pb.DropReply) -> tuple[int, int, int, int]:
    assert reply.only_copy_bytes == reply.only_copy_blocks * SLOT_BYTES
    return reply.dropped_blocks, reply.kept_blocks, reply.only_copy_blocks, reply.written_back_blocks


def test_the_slowest_tier_keeps_what_no_other_has(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            await small.fill(range(1, 5))
            small.drop_from_dram(1, 2, 3)
            drop = ready(small)
            assert counts(await drop.drop(pb.DropRequest(tier="nvme"))) == (1, 3, 3, 0)
            assert all(small.residency.has(small.find(number), NVME) for number in (1, 2, 3))
            assert small.residency.tier_mask(small.find(4)) == 1 << HOST
            assert counts(await drop.drop(pb.DropRequest(tier="nvme", discard=True))) == (3, 0, 0, 0)
            assert [small.find(number) >= 0 for number in range(1, 5)] == [False, False, False, True]

    asyncio.run(run())


def test_a_prefix_that_is_kept_on_nvme_is_kept_whole(tmp_path: Path) -> None:
    """The first block is in DRAM too, but without its copy on NVMe a crash would cut the others off."""

    async def run() -> None:
        async with small_store(tmp_path) as small:
            assert await small.is_durable(1) and await small.is_durable(2, parent=1) and await small.is_durable(3)
            small.drop_from_dram(2)
            assert counts(await ready(small).drop(pb.DropRequest(tier="nvme"))) == (1, 2, 1, 0)
            assert small.residency.has(small.find(1), NVME) and small.residency.has(small.find(2), NVME)

    asyncio.run(run())


def test_what_a_slower_tier_refuses_stays_in_dram(tmp_path: Path) -> None:
    async def run() -> None:
        async with small_store(tmp_path) as small:
            await small.fill(range(1, 2))
            small.disk.plan(Fault("write", "fail", errno=errno.EROFS), Fault("probe", "fail", errno=errno.EROFS))
            await small.put(2)
            await small.put(3)
            drop = ready(small)
            assert counts(await drop.drop(pb.DropRequest(tier="host"))) == (1, 2, 2, 0)
            assert small.residency.has(small.find(2), HOST) and small.residency.has(small.find(3), HOST)
            assert counts(await drop.drop(pb.DropRequest(tier="host", discard=True))) == (2, 0, 0, 0)
            assert small.find(2) < 0 and small.residency.has(small.find(1), NVME)

    asyncio.run(run())


def test_a_tenant_that_is_replaced_leaves_no_pinned_block(tmp_path: Path) -> None:
    """Nobody could unpin it: its clients have another identity from then on."""

    async def run() -> None:
        async with small_store(tmp_path) as small:
            residency, tenant = small.residency, small.residency.tenant("tenant")
            await small.put(1)
            await small.put(2, parent=1)
            assert await small.writeback.flush(FAR_S) == 0  # a write would keep them too
            small.store.retention.change([small.find(1), small.find(2)], Terms(pin="owner"))
            assert counts(await ready(small).drop(pb.DropRequest(tier="host", discard=True))) == (0, 2, 0, 0)
            reply = await ready(small).empty(tenant)
            assert reply.kept_blocks == 0
            assert len(residency) == residency.pinned_bytes[tenant] == 0

    asyncio.run(run())


def test_a_flush_of_more_than_nvme_holds_writes_what_was_used_last(tmp_path: Path) -> None:
    """A flush evicts nothing that it has just written, and nothing that was used later than the rest."""

    async def run() -> None:
        async with small_store(tmp_path, "nvme.capacity=1MiB", "host.capacity=8MiB", "nvme.policy=lru") as small:
            residency, nvme_blocks = small.residency, (1 << 20) // SLOT_BYTES
            await small.fill(range(1, 11))
            for number in range(11, 3 * nvme_blocks):
                small.clock.advance(s=1)
                await small.store_in(HOST, number)
            for number in range(1, 4):
                small.clock.advance(s=1)
                residency.touch_run([small.find(number)], small.clock.monotonic_ns())
            written, left, kept = await save(residency, small.writeback, [HOST], FAR_S)
            there = {number for number in range(1, 3 * nvme_blocks) if residency.has(small.find(number), NVME)}
            assert not left and kept == 3 * nvme_blocks - 11 - written > nvme_blocks
            assert there == {1, 2, 3, *range(3 * nvme_blocks - written, 3 * nvme_blocks)}

    asyncio.run(run())
