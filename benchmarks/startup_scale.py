"""Measures how soon a daemon serves that finds a million blocks on NVMe, what it weighs, and how fast it answers.

The directory is made in seconds: records packed and sealed by the tier's own code; the slots are holes, so the disk has
every byte that a start reads, 256 a block, and no payload (support/sparse_slabs.py). Before each start the slab files
are put out of the page cache. Serving is from before the process is started until it says READY=1, which has a limit up
to a million blocks; the very first lookup after that must find a whole chain. Measured:
    after a clean stop      sealed: no slab is synced
    after kill -9           the seal is gone: every slab is synced
    recovery                the second, less the start of an empty daemon of the same run: what the blocks cost;
                            baseline: the same header regions read in sequence, once, into one buffer (page cache
                            empty); possible: reading them past the page cache or checking them, whichever is longer,
                            and then being given the memory that these blocks keep
    recovery_processor      the processor time of that; possible: of checksums and page faults alone
    floor_...               those, each by itself
    resident                growth of resident memory against the empty daemon, a block; and
                            after a client has been there, whose lookup index was built
    lookup                  64 keys, never looked up before, against the same 64 again and against a stream echo
    ..._at_scale            medians against a daemon with ten thousand blocks, asked in turns, both with NVMe full: a
                            lookup of 64, a put of 64 into DRAM, and one that is durable, so that it evicts 64 from
                            NVMe; control: of that, what the thread that evicts has computed

    python benchmarks/startup_scale.py [--blocks 1000000] [--dir DIR] [--quick] [--json]
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from support.daemon import MIB, BenchDaemon, bench_daemon
from support.echo import echo
from support.report import AT_MOST, Row, median, parser_of, printed, progress, time_once, within
from support.scale_floors import floors_of, read_once
from support.scale_requests import PASSED_PROBES, TURNS, rows_at_scale
from support.scale_store import (
    CHAIN_BLOCKS,
    FINGERPRINT,
    LEAST_BLOCKS,
    PROGRAM,
    Store,
    made,
    require_room,
    settings_of,
)

BLOCKS = 1_000_000
QUICK_BLOCKS = 100_000
FEW_BLOCKS = 10_000
SETTLE_S = 1.0
RESTING = 5  # so many readings alike
REST_TIMEOUT_S = 120.0


def measure(blocks: int, directory: Path, rounds: int) -> list[Row]:
    store = made(directory / "many", blocks)
    empty = [_start_empty(store) for _ in range(rounds)]
    empty_s, empty_cpu_s = median([ready for ready, _, _ in empty]), median([cpu for _, _, cpu in empty])
    clean, killed, processor, lookups = _starts(store, rounds)
    grown, with_client = _resident(store, median([rss for _, rss, _ in empty]))
    read_s = median([_read_cold(store) for _ in range(3)])
    floors = floors_of(store, round(grown * store.blocks))
    cold, warm, floor = (median([one[kind] for one in lookups]) for kind in range(3))
    ms, limited = 1e3, 1.0 if blocks <= BLOCKS else None
    rows = [
        Row("ready_after_clean_stop", median(clean), "s", 1.0, "limit", target=limited),
        Row("ready_after_kill", median(killed), "s", 1.0, "limit", target=limited),
        Row("ready_empty", empty_s, "s", median(clean), "after a clean stop"),
        Row("recovery_after_kill", (median(killed) - empty_s) * ms, "ms", read_s * ms, "one sequential read",
            AT_MOST, 1.5, possible=floors.sum_s * ms, possible_name="read or check, then page faults"),
        Row("recovery_vs_direct_read", (median(killed) - empty_s) * ms, "ms", floors.direct_read_s * ms,
            "one O_DIRECT read"),
        Row("recovery_processor", (median(processor) - empty_cpu_s) * ms, "ms", read_s * ms, "one sequential read",
            possible=(floors.checksums_cpu_s + floors.page_faults_s) * ms,
            possible_name="checksums and page faults"),
        *floors.rows(read_s),
        within("resident_bytes_a_block", grown, "B", 100.0),
        Row("resident_bytes_after_a_client", with_client, "B", grown, "before any client"),
        Row("lookup_64_cold", cold * ms, "ms", warm * ms, "the same again", AT_MOST, 1.3),
        Row("lookup_64_again", warm * ms, "ms", floor * ms, "stream echo"),
    ]  # fmt: skip
    progress("requests in turns")
    return rows + rows_at_scale(store, made(directory / "few", FEW_BLOCKS), TURNS if rounds > 1 else TURNS // 2)


Lookups = tuple[float, float, float]


def _starts(store: Store, rounds: int) -> tuple[list[float], list[float], list[float], list[Lookups]]:
    """Start `rounds` times after a clean stop, and as often after kill -9. Return the seconds of both until the daemon
    is ready, the processor seconds of the latter, and lookups after the former."""
    clean, killed, processor, lookups = [], [], [], []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        store.leave_sealed()
        store.empty_page_cache()
        with store.served() as daemon:
            clean.append(daemon.ready_s)
            lookups.append(_lookups(daemon, store))
            os.kill(daemon.pid, signal.SIGKILL)
        store.empty_page_cache()
        with store.served() as daemon:
            killed.append(daemon.ready_s)
            processor.append(daemon.processor_s())
            _lookups(daemon, store)
    return clean, killed, processor, lookups


def _resident(store: Store, empty_bytes: float) -> tuple[float, float]:
    """Return the resident bytes a block over `empty_bytes`: before any client, and after one."""
    store.leave_sealed()
    with store.served() as daemon:
        _wait_rest(daemon)
        grown = (daemon.rss_bytes() - empty_bytes) / store.blocks
        _lookups(daemon, store)
        _wait_rest(daemon)
        return grown, (daemon.rss_bytes() - empty_bytes) / store.blocks


def _read_cold(store: Store) -> float:
    store.empty_page_cache()
    return time_once(lambda: read_once(store, direct=False))


def _start_empty(store: Store) -> tuple[float, int, float]:
    """Seconds until it is ready, resident bytes, processor seconds until it is ready."""
    with bench_daemon(*settings_of(store.roomy_bytes), program=PROGRAM) as daemon:
        processor_s = daemon.processor_s()
        time.sleep(SETTLE_S)
        return daemon.ready_s, daemon.rss_bytes(), processor_s


def _lookups(daemon: BenchDaemon, store: Store) -> Lookups:
    """Medians of a first lookup of a chain, of a second one, and of an echo."""
    first, again, echoes = [], [], []
    with daemon.connect(FINGERPRINT, staging_bytes=MIB) as session, echo() as floor:
        for keys in store.probes[:PASSED_PROBES]:
            began = time.perf_counter()
            found = session.lookup(keys=keys)
            first.append(time.perf_counter() - began)
            if found.blocks != CHAIN_BLOCKS:
                raise SystemExit(f"a chain of {CHAIN_BLOCKS} stored blocks: {found.blocks} found")
            again.append(time_once(lambda keys=keys: session.lookup(keys=keys)))  # type: ignore[misc]
            echoes.append(time_once(floor.ping))
    return median(first), median(again), median(echoes)


def _wait_rest(daemon: BenchDaemon) -> None:
    """Until the resident memory of the daemon rests: what its start needed is given back."""
    deadline = time.monotonic() + REST_TIMEOUT_S
    seen = [0]
    while time.monotonic() < deadline and (len(seen) < RESTING or max(seen) - min(seen) > MIB):
        time.sleep(SETTLE_S)
        seen = [*seen[1 - RESTING :], daemon.rss_bytes()]


def main() -> int:
    parser = parser_of(__doc__, "one round, fewer blocks")
    parser.add_argument("--blocks", type=int, help=f"how many (default {BLOCKS}, quick {QUICK_BLOCKS})")
    parser.add_argument("--dir", type=Path, help="where the blocks are put; a directory on the disk to measure")
    options = parser.parse_args()
    blocks = options.blocks or (QUICK_BLOCKS if options.quick else BLOCKS)
    if blocks < LEAST_BLOCKS:
        parser.error(f"--blocks: at least {LEAST_BLOCKS}")
    require_room(options.dir or Path(tempfile.gettempdir()), blocks)
    with tempfile.TemporaryDirectory(prefix="kvbench-scale-", dir=options.dir) as name:
        rows = measure(blocks, Path(name), 1 if options.quick else 3)
    return printed(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
