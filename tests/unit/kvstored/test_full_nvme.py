"""A full NVMe tier: a block takes the place of one other, and nothing else is moved or evicted for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.reference.small_store import FAR_S, small_store


def test_a_block_evicts_one_block_of_its_size(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_store(tmp_path, "nvme.capacity=4MiB", "host.capacity=16MiB") as small:
            durable, puts = small.residency.durable, 400
            for number in range(1, puts + 1):
                await small.put(number, mode="always")
                if number % 20 == 0:
                    assert await small.writeback.flush(FAR_S) == 0
            counters = small.store.counters
            assert counters["written_back_blocks"] == puts > small.residency.tier_blocks(durable)
            assert counters["relocated_blocks"] == 0

    asyncio.run(main())
