"""Taking blocks away while one of them gets a new host copy: it stays, and is counted as kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.operations.drop import Drop
from kvstored.tiering import HOST, NVME
from tests.reference.small_store import SLOT_BYTES, small_store

DIGEST = bytes(range(32))
DIRECTORY: Any = SimpleNamespace(fingerprints=lambda: [DIGEST], known_number=lambda _: 1)


@pytest.mark.parametrize("how", ["drop", "invalidate"])
def test_a_block_that_is_being_filled_is_kept(tmp_path: Path, how: str) -> None:
    """As by a put of a block that is stored on NVMe, which is out of reach."""

    async def run() -> None:
        async with small_store(tmp_path) as small:
            residency = small.residency
            await small.fill(range(1, 3))
            small.drop_from_dram(1, 2)
            row, tenant = small.find(1), residency.tenant("tenant")
            slot = await small.store.rooms[HOST].allocate(SLOT_BYTES, tenant)
            assert slot is not None
            residency.attach(row, HOST, slot, small.clock.monotonic_ns(), filling=True)
            drop = Drop(residency, DIRECTORY, small.writeback, small.store.retire, small.clock)

            async def take_away() -> tuple[int, int]:
                if how == "drop":
                    dropped = await drop.drop(pb.DropRequest(tier="nvme"))
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
