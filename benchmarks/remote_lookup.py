"""What does a remote tier that has nothing add to a request that misses everywhere? p50, against no remote tier.

Both stores are in this process, as the daemon builds them, over real host and NVMe tiers; requests take turns. The
remote store answers each question after 2 ms, and always no. The first requests learn that; the figure is of those
after. A third store hangs: no request may wait longer than the deadline of a question (50 ms).

A client waits for the stream, too: what an empty echo of it takes is measured first, and added to both. Expected: below
1.05. A request that does not ask pays one to two microseconds; each 512th asks, and no request waits for it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from support.driven import Driven, driven_store, keys_of
from support.echo import echo
from support.report import AT_MOST, Row, main
from support.timing import median, percentile, time_each

from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstored.store.operations.get import Wanted
from kvstored.store.remote import DEADLINE_MS

SETTINGS = ("host.capacity=64MiB", "host.staging=8MiB", "nvme.capacity=128MiB", "nvme.slab=16MiB")
BLOCKS = 64
ANSWER_S = 0.002
LEARN = 200
A_TURN = 50


def measure(quick: bool) -> list[Row]:
    with echo() as floor:
        time_each(floor.ping, 200)
        echo_s = median(time_each(floor.ping, 1000))
    return asyncio.run(_measure(20 if quick else 100, echo_s))


async def _measure(turns: int, echo_s: float) -> list[Row]:
    empty, hanging = LossyStore(latency_s=ANSWER_S), LossyStore()
    with TemporaryDirectory(prefix="kvstored-bench-") as place:
        async with (
            driven_store(Path(place, "without"), *SETTINGS) as without,
            driven_store(Path(place, "with"), *SETTINGS, keyed=[KeyedTier(empty, 64 << 20)]) as below,
            driven_store(Path(place, "hangs"), *SETTINGS, keyed=[KeyedTier(hanging, 64 << 20)]) as hung,
        ):
            chains = iter(range(1 << 40))
            for _ in range(LEARN):
                await _misses(below, chains, 1)
                await _misses(without, chains, 1)
                await asyncio.sleep(ANSWER_S)
            asked = below.store.counters["discovery_questions"]
            base: list[float] = []
            added: list[float] = []
            for _ in range(turns):
                base += await _misses(without, chains, A_TURN)
                added += await _misses(below, chains, A_TURN)
                await asyncio.sleep(ANSWER_S)
            questions = (below.store.counters["discovery_questions"] - asked) / BLOCKS
            hanging.hang()
            slow = await _misses(hung, chains, A_TURN)
            hanging.let_go()
            await asyncio.sleep(0.1)
    us, ms = 1e6, 1e3
    base_name = "without a remote tier"
    return [
        Row(
            "miss_with_idle_remote_p50", (median(added) + echo_s) * us, "us", (median(base) + echo_s) * us,
            f"{base_name}, both with an echo of the stream", AT_MOST, 1.05,
        ),
        Row("miss_with_idle_remote_p50_in_process", median(added) * us, "us", median(base) * us, base_name),
        Row("miss_with_idle_remote_p99", percentile(added, 99) * us, "us", percentile(base, 99) * us, base_name),
        Row("questions_per_1000_requests", 1000 * questions / len(added), "", 1000.0, "each request asks"),
        Row("miss_with_hanging_remote_max", max(slow) * ms, "ms", float(DEADLINE_MS), "the deadline", AT_MOST, 1.2),
    ]  # fmt: skip


async def _misses(driven: Driven, chains: Iterator[int], times: int) -> list[float]:
    """Seconds of each request for a chain that no tier has, as the daemon serves them."""
    taken = []
    for _ in range(times):
        wanted = Wanted(b"".join(keys_of(next(chains), BLOCKS)))
        begun = time.perf_counter()
        held = driven.operations.get.acquire_mapped(driven.client, wanted)
        if held is None:
            held = await driven.operations.get.acquire(driven.client, wanted)
        taken.append(time.perf_counter() - begun)
        if held.blocks:
            raise RuntimeError("a chain that was never stored was found")
        await asyncio.sleep(0)
    return taken


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
