"""Measures what small state costs at a million blocks, and what a crash takes of it.
forgotten       from a use to its row on the medium, at most: a turn's pause, collecting and the commit, for three
                loads: chains of 64 blocks, 20,000 blocks at random every 5 s, and all blocks in every turn
longest wait    of another task on the control loop meanwhile, and while all is read and policies are made anew
first 1,000     hits after kill -9 under load against the same daemon without a restart

python benchmarks/state.py [--blocks 1000000] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
from support.daemon import bench_daemon, model, payloads, tokens_of
from support.report import AT_LEAST, Row, parser_of, printed, progress, within

from kvstored.state.keeper import INTERVAL_S
from kvstored.telemetry import Counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reference.state_at_scale import CHAIN, index_of, keeper_of, status_kib, timed, use

BLOCK = 64 << 10
LOADS = ("chains", "random", "all")


def shown(name: str, value: float, unit: str) -> Row:
    return Row(name, value, unit, value or 1.0, "itself")


async def at_scale(blocks: int, directory: Path, turns: int) -> list[Row]:
    residency, chance = index_of(blocks), np.random.default_rng(2)
    counters, rows = Counters(), []
    keeper = keeper_of(residency, directory, counters)
    await keeper.restore()
    await keeper.save()
    for load in LOADS:
        forgotten, longest, written = 0.0, 0.0, 0
        for _ in range(turns):
            use(residency, load, chance)
            counters.add("acquires")
            took_s, longest_s = await timed(keeper.save())
            forgotten, longest = max(forgotten, keeper.pause_s + took_s), max(longest, longest_s)
            written = max(written, keeper.written_bytes)
        rows.append(within(f"forgotten_{load}", forgotten, "s", INTERVAL_S + 1.5))
        rows.append(shown(f"longest_wait_{load}", longest * 1e3, "ms"))
        rows.append(shown(f"written_{load}", written / 2**20, "MiB"))
    pid = keeper.process.pid
    for name in ("RssAnon", "RssFile"):
        rows.append(shown(f"process_{name}", status_kib(pid, name) / 1024, "MiB"))
    os.kill(pid, signal.SIGKILL)
    after = keeper_of(residency, directory, counters)
    np.frombuffer(residency.rows.accesses, np.uint16)[:] = 0
    took_s, longest_s = await timed(after.restore())
    known = int((np.frombuffer(residency.rows.accesses, np.uint16) > 0).sum())
    rows += [
        shown("read_after_kill", took_s, "s"), shown("longest_wait_read", longest_s * 1e3, "ms"),
        Row("known_again", known / blocks, "", 1.0, "all"),
    ]  # fmt: skip
    await after.process.close()
    return rows


def hits(requests: int, *, kill: bool) -> int:
    """Return the blocks found by the last thousand requests of many, before which the daemon is killed or is not."""
    settings = ("host.capacity=48MiB", "host.staging=8MiB", "host.arena=2MiB", "nvme.capacity=96MiB", "nvme.slab=8MiB")
    fingerprint, stored, chance, found = model(BLOCK), payloads(4, BLOCK), random.Random(3), 0
    popular = [min(int(chance.paretovariate(0.7)), 1200) for _ in range(requests + 1000)]
    with tempfile.TemporaryDirectory(prefix="kvbench-state-") as name:
        part, parts = popular[:requests], [popular[requests:]]
        if not kill:
            part, parts = popular, []
        for number, wanted in enumerate([part, *parts]):
            with bench_daemon(*settings, state_dir=Path(name) / "state") as daemon:
                with daemon.connect(fingerprint, staging_bytes=4 << 20) as session:
                    for at, conversation in enumerate(wanted):
                        tokens = tokens_of(conversation, 4)
                        with session.get(tokens) as lease:
                            is_last = number == 1 or at >= requests
                            found += lease.blocks if is_last else 0
                            left = 4 - lease.blocks
                        if left:
                            session.put(tokens, payloads=stored, durability="always")
                os.kill(daemon.pid, signal.SIGKILL)
    return found


def main() -> int:
    parser = parser_of(__doc__, "fewer blocks and turns")
    parser.add_argument("--blocks", type=int, help="how many (default 1,000,000; quick 64,000)")
    options = parser.parse_args()
    blocks = options.blocks or (64_000 if options.quick else 1_000_000)
    with tempfile.TemporaryDirectory(prefix="kvbench-state-") as name:
        rows = asyncio.run(at_scale(blocks - blocks % CHAIN, Path(name), 2 if options.quick else 5))
    progress("the first requests after a kill")
    without, with_kill = hits(3000, kill=False), hits(3000, kill=True)
    rows.append(Row("hits_first_1000", float(with_kill), "blocks", float(without), "no restart", AT_LEAST, 0.98))
    return printed(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
