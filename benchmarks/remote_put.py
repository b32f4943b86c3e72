"""What does a remote tier below NVMe add to a put? p50 and p99, against the same store without one.

Both stores are in this process, as the daemon builds them, over real host and NVMe tiers that are full: each put evicts
from DRAM, and its write to NVMe evicts there, whose victims are written to the remote store, at the default settings
(`share = "reused"`, every victim admitted). The remote store is in this process too and answers after 2 ms. Puts of 8
blocks of 256 KiB in mode batch take turns; every second one is used again, so that it is shared early.

Expected: p50 below 1.03, p99 below 1.10.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from support.driven import Driven, driven_store, keys_of
from support.report import AT_MOST, Row, main
from support.timing import median, percentile

from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstored.policy_names import REUSED
from kvstored.store.operations.get import Wanted
from kvstored.store.transfer.admission import RemoteWrites

BLOCKS, BLOCK_BYTES = 8, 256 << 10
SETTINGS = ("host.capacity=64MiB", "host.staging=8MiB", "nvme.capacity=128MiB", "nvme.slab=16MiB")
FILL = 120
PAUSE_S = 0.02  # between puts: an engine computes meanwhile
A_TURN = 1


def measure(quick: bool) -> list[Row]:
    return asyncio.run(_measure(100 if quick else 400))


async def _measure(turns: int) -> list[Row]:
    store = LossyStore(latency_s=0.002)
    with TemporaryDirectory(prefix="kvstored-bench-") as place:
        async with (
            driven_store(Path(place, "without"), *SETTINGS, block_bytes=BLOCK_BYTES) as without,
            driven_store(
                Path(place, "with"), *SETTINGS, block_bytes=BLOCK_BYTES, keyed=[KeyedTier(store, 256 << 20)],
                remote_writes=RemoteWrites(REUSED),
            ) as below,
        ):  # fmt: skip
            chains = iter(range(1 << 40))
            for driven in (without, below):
                await _puts(driven, chains, FILL)
            base: list[float] = []
            added: list[float] = []
            for _ in range(turns):
                base += await _puts(without, chains, A_TURN)
                added += await _puts(below, chains, A_TURN)
            counters, flows = below.store.counters, below.store.flows.tiers
            shared, demoted = counters["shared_blocks"], flows[1].demoted_blocks
    if not demoted or not shared:
        raise RuntimeError(f"nothing was written to the remote store: {demoted} demoted, {shared} shared")
    puts, ms, base_name = (FILL + turns * A_TURN) * BLOCKS, 1e3, "without a remote tier"
    base_p99, added_p99 = percentile(base, 99) * ms, percentile(added, 99) * ms
    return [
        Row("put_with_remote_p50", median(added) * ms, "ms", median(base) * ms, base_name, AT_MOST, 1.03),
        Row("put_with_remote_p99", added_p99, "ms", base_p99, base_name, AT_MOST, 1.1),
        Row("blocks_written_remote", float(demoted + shared), "", float(puts), "blocks put"),
    ]


async def _puts(driven: Driven, chains: Iterator[int], times: int) -> list[float]:
    """Seconds of each put until its first answer."""
    taken = []
    for _ in range(times):
        keys = keys_of(next(chains), BLOCKS)
        begun = time.perf_counter()
        await driven.put(keys)
        taken.append(time.perf_counter() - begun)
        if len(taken) % 2:
            held = await driven.operations.get.acquire(driven.client, Wanted(b"".join(keys)))
            if held.run is not None:
                driven.operations.get.release(driven.client, [held.run.lease_id])
        await asyncio.sleep(PAUSE_S)
    return taken


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
