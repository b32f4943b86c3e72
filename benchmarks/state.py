"""Measures what small state costs at a million blocks, and what a crash takes of it.
forgotten       from a use to its row on the medium, at most: a turn's pause, collecting and the commit, for three
                loads: chains of 64 blocks, 20,000 blocks at random every 5 s, and all blocks in every turn
longest wait    of another task on the control loop meanwhile, and while all is read and policies are made anew
crash           kill -9 of a daemon whose NVMe holds half of the blocks, while clients get and put chains:
                how old the oldest use is that the next process does not know of, and the blocks that the first
                1,000 requests find (fewer with --quick), against the same requests to a daemon that was not killed

python benchmarks/state.py [--blocks 1000000] [--only scale|crash] [--dir DIR] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support.daemon import MIB, BenchDaemon, bench_daemon, model, payloads, tokens_of
from support.report import AT_LEAST, Row, parser_of, printed, progress, within

from kvstore_client import KVStoreError, Session
from kvstore_proto.identity import KEY_BYTES
from kvstored.state.saver import INTERVAL_S
from kvstored.store.blocks.usage import ROW, hashes_of
from kvstored.telemetry import Counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reference.state import entries
from tests.reference.state_at_scale import CHAIN, index_of, saver_of, status_kib, timed, use

PAYLOAD_BYTES = 4096
SLOT_BYTES = PAYLOAD_BYTES + 4096
CLIENTS = 2
LATE_S = 0.5  # from a use until its client notes it, at most: a machine that is short of time
PAYLOADS = payloads(CHAIN, PAYLOAD_BYTES)
LOADS = ("chains", "random", "all")


def shown(name: str, value: float, unit: str) -> Row:
    return Row(name, value, unit, value or 1.0, "itself")


async def at_scale(blocks: int, directory: Path, turns: int) -> list[Row]:
    residency, chance = index_of(blocks), np.random.default_rng(2)
    counters, rows = Counters(), []
    saver = saver_of(residency, directory, counters)
    await saver.restore()
    await saver.save()
    for load in LOADS:
        forgotten, longest, written = 0.0, 0.0, 0
        for _ in range(turns):
            use(residency, load, chance)
            counters.add("acquires")
            took_s, longest_s = await timed(saver.save())
            forgotten, longest = max(forgotten, saver.pause_s + took_s), max(longest, longest_s)
            written = max(written, saver.written_bytes)
        rows.append(within(f"forgotten_{load}", forgotten, "s", INTERVAL_S + 1.5))
        rows.append(shown(f"longest_wait_{load}", longest * 1e3, "ms"))
        rows.append(shown(f"written_{load}", written / 2**20, "MiB"))
    pid = saver.process.pid
    for name in ("RssAnon", "RssFile"):
        rows.append(shown(f"process_{name}", status_kib(pid, name) / 1024, "MiB"))
    os.kill(pid, signal.SIGKILL)
    after = saver_of(residency, directory, counters)
    np.frombuffer(residency.rows.accesses, np.uint16)[:] = 0
    took_s, longest_s = await timed(after.restore())
    known = int((np.frombuffer(residency.rows.accesses, np.uint16) > 0).sum())
    rows += [
        shown("read_after_kill", took_s, "s"), shown("longest_wait_read", longest_s * 1e3, "ms"),
        Row("known_again", known / blocks, "", 1.0, "all"),
    ]  # fmt: skip
    await after.process.close()
    return rows


@dataclass
class Crash:
    """One run of clients against a daemon whose NVMe is too small for all chains. `used_s`: when each chain was used
    last. `found`: blocks found by the requests from number `until` on."""

    chains: int
    requests: list[int]
    until: int
    used_s: dict[int, float] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)  # by chain: the hash of its first block's key
    found: int = 0
    at: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def settings(self) -> tuple[str, ...]:
        whole = self.chains * CHAIN * SLOT_BYTES
        nvme, host = max(48 * MIB, whole // 2), 36 * MIB + whole // 32
        slab = max(8 * MIB, nvme // 64 // MIB * MIB)
        return (
            f"nvme.capacity={nvme}", f"nvme.slab={slab}", f"host.capacity={host}",
            "host.staging=8MiB", "host.arena=2MiB",
        )  # fmt: skip

    def fill(self, session: Session, chains: Iterable[int]) -> None:
        for chain in chains:
            tokens = tokens_of(chain, CHAIN)
            session.put(tokens, payloads=PAYLOADS, durability="always")
            keys = session.keys(tokens)
            assert keys is not None
            self.heads[chain] = int(hashes_of(keys.packed[:KEY_BYTES])[0])

    def ask(self, session: Session, end: int) -> None:
        """Send requests in turn with the other clients, up to number `end`: get a chain, and put what is missing."""
        while True:
            with self.turn:
                if self.at >= end:
                    return
                number, self.at = self.at, self.at + 1
            chain = self.requests[number]
            tokens = tokens_of(chain, CHAIN)
            with session.get(tokens) as lease:
                found = lease.blocks
            self.used_s[chain] = time.time()
            self.found += found if number >= self.until else 0
            if found < CHAIN:
                session.put(tokens, payloads=PAYLOADS, durability="always")

    def clients(self, daemon: BenchDaemon, work: Callable[[Session, int], None]) -> list[threading.Thread]:
        """Start a thread for each client; its session ends with its work, or with the daemon."""

        def run(number: int) -> None:
            with suppress(KVStoreError), daemon.connect(model(PAYLOAD_BYTES), staging_bytes=4 << 20) as session:
                work(session, number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        return threads


def crash(chains: int, before: int, after: int, directory: Path, *, kill: bool) -> tuple[Crash, float]:
    """Return the run, and the age of the oldest use that a killed daemon had not saved."""
    chance = random.Random(3)
    requests = [int(chance.paretovariate(0.4)) % chains for _ in range(before + after)]
    run, state, age_s = Crash(chains, requests, before), directory / f"killed-{kill}", 0.0
    with bench_daemon(*run.settings, state_dir=state) as daemon:
        parts = [range(chains - 1 - number, -1, -CLIENTS) for number in range(CLIENTS)]  # the popular ones come last
        for thread in run.clients(daemon, lambda session, number: run.fill(session, parts[number])):
            thread.join()
        progress(f"{chains * CHAIN} blocks are put; {before} requests")
        end = before if kill else before + after
        threads = run.clients(daemon, lambda session, _: run.ask(session, end))
        if kill:
            while run.at < before - CLIENTS:
                time.sleep(0.001)
            os.kill(daemon.pid, signal.SIGKILL)  # while clients wait for answers
            age_s = lost_s(run, state, time.time())
        for thread in threads:
            thread.join()
    if kill:
        run.at, run.found = before, 0
        with bench_daemon(*run.settings, state_dir=state) as daemon:
            for thread in run.clients(daemon, lambda session, _: run.ask(session, before + after)):
                thread.join()
    return run, age_s


def lost_s(run: Crash, state: Path, now_s: float) -> float:
    """Return the seconds from the oldest use that is not in the file of small state until `now_s`. Chains whose blocks
    have no row there are left out: they may have been evicted, too."""
    saved: dict[int, int] = {}
    for _, value in entries(state, "usage"):
        rows = np.frombuffer(value, ROW)
        saved.update(zip(rows["block"].tolist(), rows["last_use_ns"].tolist(), strict=True))
    lost = [now_s]
    for chain, used_s in run.used_s.items():
        head = run.heads[chain]
        if head in saved and saved[head] / 1e9 < used_s - LATE_S:
            lost.append(used_s)
    return now_s - min(lost)


def main() -> int:
    parser = parser_of(__doc__, "fewer blocks and turns")
    parser.add_argument("--blocks", type=int, help="how many (default 1,000,000; quick 64,000)")
    parser.add_argument("--only", choices=("scale", "crash"), help="leave the other part out")
    parser.add_argument("--dir", type=Path, help="where the state directories are put")
    options = parser.parse_args()
    blocks = options.blocks or (64_000 if options.quick else 1_000_000)
    blocks -= blocks % CHAIN
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvbench-state-", dir=options.dir) as name:
        if options.only != "crash":
            (scale := Path(name) / "scale").mkdir()
            rows += asyncio.run(at_scale(blocks, scale, 2 if options.quick else 5))
        if options.only != "scale":
            before, after = (1500, 500) if options.quick else (6000, 1000)
            whole, _ = crash(blocks // CHAIN, before, after, Path(name), kill=False)
            killed, age_s = crash(blocks // CHAIN, before, after, Path(name), kill=True)
            rows.append(within("forgotten_under_load", age_s, "s", INTERVAL_S + 1.5))
            rows.append(
                Row("hits_after_kill", float(killed.found), "blocks", float(whole.found), "no restart", AT_LEAST, 0.98)
            )
            rows.append(Row("hits_without_a_kill", float(whole.found), "blocks", float(after * CHAIN), "requested"))
    return printed(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
