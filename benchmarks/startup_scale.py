"""Measures how soon a daemon serves that finds a million blocks on NVMe, and what it weighs.

The directory is made in seconds: records packed and sealed by the tier's own code, slots preallocated, never written.
Before each start the slab files are put out of the page cache. Serving is from before the process is started until it
says READY=1; the very first lookup after that must find a whole chain. Measured:
    after a clean stop      sealed: no slab is synced
    after kill -9           the seal is gone: every slab is synced
    recovery                the second, less the start of an empty daemon of the same run: what a million blocks cost;
                            baseline: the same header regions read in sequence, once, into one buffer (page cache
                            empty); possible: reading them past the page cache or checking them, whichever is longer,
                            and then being given the memory that these blocks keep
    recovery_processor      the processor time of that; possible: of checksums and page faults alone
    floor_...               those, each by itself
    resident                growth of resident memory against the empty daemon, a block; and
                            after a client has been there, whose lookup index was built
    lookup                  64 keys, never looked up before, against the same 64 again and against a stream echo

    python benchmarks/startup_scale.py [--blocks 1000000] [--dir DIR] [--quick] [--json]
"""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.daemon import MIB, BenchDaemon, bench_daemon, model, tokens_of
from support.echo import echo
from support.report import AT_MOST, Row, median, parser_of, printed, progress, time_once, within

from kvstore_client import BlockKeys
from kvstore_cuda.host_copies import load_if_compiled
from kvstore_proto.arena import BlockHeader
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.layout import (
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    RecordState,
    Superblock,
    pack_record,
    record_holds,
    slots_that_fit,
)
from kvstore_tiers.nvme.record_checksums import BATCH_RECORDS, RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.record_scan import MAX_SCAN_THREADS
from kvstore_tiers.nvme.slab_file import SlabFile
from kvstored.clients.tenants.directory import tenant_digest

BLOCKS = 1_000_000
QUICK_BLOCKS = 100_000
CHAIN_BLOCKS = 64
PROBES = 50
SETTLE_S = 1.0
SLOT_BYTES, SLAB_BYTES, READ_BYTES = 8192, 256 << 20, 4 << 20
SCATTERED = 8  # one chain in so many
_TURNS = 3
RESTING = 5  # so many readings alike
REST_TIMEOUT_S = 120.0
FINGERPRINT = model(SLOT_BYTES - 4096)
Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Place:
    """A state directory with its blocks, and the settings of a daemon that serves them."""

    state: Path
    settings: tuple[str, ...]
    probes: list[BlockKeys]

    @property
    def nvme(self) -> Path:
        return self.state / "nvme"

    def empty_page_cache(self) -> None:
        for path in self.nvme.glob("slabs/*.slab"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(blocks: int, directory: Path, rounds: int) -> list[Row]:
    blocks -= blocks % CHAIN_BLOCKS
    settings = (f"nvme.capacity={blocks * 10240 // MIB + 600}MiB", "host.capacity=1GiB", "host.prefault=false")
    with bench_daemon(*settings, state_dir=directory / "probe") as daemon:
        keys = _probe_keys(daemon)
    empty = [_start_empty(settings) for _ in range(rounds)]
    place = Place(directory / "probe", settings, keys)
    _fill(place, blocks)
    clean, killed, processor, reads, lookups = [], [], [], [], []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        _leave_sealed(place)
        place.empty_page_cache()
        with bench_daemon(*settings, state_dir=place.state) as daemon:
            clean.append(daemon.ready_s)
            lookups.append(_lookups(daemon, place))
            os.kill(daemon.pid, signal.SIGKILL)
        place.empty_page_cache()
        with bench_daemon(*settings, state_dir=place.state) as daemon:
            killed.append(daemon.ready_s)
            processor.append(daemon.processor_s())
            _lookups(daemon, place)
    _leave_sealed(place)
    with bench_daemon(*settings, state_dir=place.state) as daemon:
        _wait_rest(daemon)
        grown = (daemon.rss_bytes() - median([rss for _, rss, _ in empty])) / blocks
        _lookups(daemon, place)
        _wait_rest(daemon)
        with_client = (daemon.rss_bytes() - median([rss for _, rss, _ in empty])) / blocks
    for _ in range(3):
        place.empty_page_cache()
        reads.append(time_once(lambda: read_once(place.nvme, direct=False)))
    floors = floors_of(place.nvme, round(grown * blocks))
    empty_s, empty_cpu_s = median([ready for ready, _, _ in empty]), median([cpu for _, _, cpu in empty])
    cold, warm, floor = (median([one[kind] for one in lookups]) for kind in range(3))
    ms = 1e3
    return [
        within("ready_after_clean_stop", median(clean), "s", 1.0),
        within("ready_after_kill", median(killed), "s", 1.0),
        Row("ready_empty", empty_s, "s", median(clean), "after a clean stop"),
        Row("recovery_after_kill", (median(killed) - empty_s) * ms, "ms", median(reads) * ms, "one sequential read",
            AT_MOST, 1.5, possible=floors.sum_s * ms, possible_name="read or check, then page faults"),
        Row("recovery_vs_direct_read", (median(killed) - empty_s) * ms, "ms", floors.direct_read_s * ms,
            "one O_DIRECT read"),
        Row("recovery_processor", (median(processor) - empty_cpu_s) * ms, "ms", median(reads) * ms,
            "one sequential read", possible=(floors.checksums_cpu_s + floors.page_faults_s) * ms,
            possible_name="checksums and page faults"),
        *_floors(floors, median(reads)),
        within("resident_bytes_a_block", grown, "B", 100.0),
        Row("resident_bytes_after_a_client", with_client, "B", grown, "before any client"),
        Row("lookup_64_cold", cold * ms, "ms", warm * ms, "the same again", AT_MOST, 1.3),
        Row("lookup_64_again", warm * ms, "ms", floor * ms, "stream echo"),
    ]  # fmt: skip


def _floors(floors: Floors, read_s: float) -> list[Row]:
    each = {
        "floor_read_direct": floors.direct_read_s,
        "floor_checksums": floors.checksums_s,
        "floor_checksums_processor": floors.checksums_cpu_s,
        "floor_page_faults": floors.page_faults_s,
    }
    return [Row(name, value * 1e3, "ms", read_s * 1e3, "one sequential read") for name, value in each.items()]


def _probe_keys(daemon: BenchDaemon) -> list[BlockKeys]:
    """Keys of chains as a client of this daemon would ask for them."""
    with daemon.connect(FINGERPRINT, staging_bytes=MIB) as session:
        found = [session.keys(tokens_of(conversation, CHAIN_BLOCKS)) for conversation in range(1, PROBES + 1)]
    assert all(keys is not None for keys in found)
    return [keys for keys in found if keys is not None]


def _start_empty(settings: tuple[str, ...]) -> tuple[float, int, float]:
    """Seconds until it is ready, resident bytes, processor seconds until it is ready."""
    with bench_daemon(*settings) as daemon:
        processor_s = daemon.processor_s()
        time.sleep(SETTLE_S)
        return daemon.ready_s, daemon.rss_bytes(), processor_s


def _fill(place: Place, blocks: int) -> None:
    started = time.monotonic()
    chains = np.frombuffer(secrets.token_bytes(blocks * 16), "<u8").reshape(-1, CHAIN_BLOCKS, 2).copy()
    step = max(1, len(chains) // len(place.probes))
    for number, keys in enumerate(place.probes[: len(chains) // step]):
        chains[number * step] = np.frombuffer(keys.packed, "<u8").reshape(-1, 2)
    tenant = tenant_digest(f"uid-{os.getuid()}")
    make_blocks(place.nvme, chains, tenant, FINGERPRINT.digest())
    progress(f"{blocks} blocks made in {time.monotonic() - started:.0f} s")


def _leave_sealed(place: Place) -> None:
    """Leave the directory as a clean stop does."""
    capacity_bytes = int(place.settings[0].partition("=")[2].removesuffix("MiB")) * MIB
    NvmeTier.open(place.nvme, capacity_bytes).close()


def _lookups(daemon: BenchDaemon, place: Place) -> tuple[float, float, float]:
    """Medians of a first lookup of a chain, of a second one, and of an echo."""
    first, again, echoes = [], [], []
    with daemon.connect(FINGERPRINT, staging_bytes=MIB) as session, echo() as floor:
        for keys in place.probes:
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
    if blocks < PROBES * CHAIN_BLOCKS:
        parser.error(f"--blocks: at least {PROBES * CHAIN_BLOCKS}")
    with tempfile.TemporaryDirectory(prefix="kvbench-scale-", dir=options.dir) as name:
        rows = measure(blocks, Path(name), 1 if options.quick else 3)
    return printed(rows, as_json=options.json)


@dataclass(frozen=True)
class Floors:
    """Seconds. `checksums_s` on the clock, with all threads; `checksums_cpu_s` of processor."""

    direct_read_s: float
    checksums_s: float
    checksums_cpu_s: float
    page_faults_s: float

    @property
    def sum_s(self) -> float:
        """Nothing done twice or one after another that can be done at once: judging hides behind reading."""
        return max(self.direct_read_s, self.checksums_s) + self.page_faults_s


def read_once(directory: Path, *, direct: bool) -> None:
    """All header regions in sequence, into one buffer."""
    buffer = mmap.mmap(-1, READ_BYTES)  # aligned, as O_DIRECT wants it
    for path, end in header_regions(directory):
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        for offset in range(0, end, READ_BYTES):
            os.preadv(fd, [memoryview(buffer)[: min(READ_BYTES, end - offset)]], offset)
        os.close(fd)


def floors_of(directory: Path, kept_bytes: int) -> Floors:
    """Return the floors of the slab files in this directory, for a daemon that keeps the given number of bytes."""
    direct_read_s = min(time_once(lambda: read_once(directory, direct=True)) for _ in range(_TURNS))
    return Floors(direct_read_s, *_checksums_s(directory), _page_faults_s(kept_bytes))


def _checksums_s(directory: Path) -> tuple[float, float]:
    """Return the seconds for checksums of all records, in memory: on the clock and of the processor; the least of some
    turns.
    """
    load_if_compiled()
    slabs = [_records(path, end) for path, end in header_regions(directory)]
    threads = min(MAX_SCAN_THREADS, os.cpu_count() or 1)
    scratch = [RecordChecksums() for _ in range(threads)]

    def check(thread: int) -> None:
        for records in slabs[thread::threads]:
            for first in range(0, len(records), BATCH_RECORDS):
                some = records[first : first + BATCH_RECORDS]
                scratch[thread].load(some, np.arange(len(some), dtype=np.uint64))

    with ThreadPoolExecutor(threads) as pool:

        def turn() -> tuple[float, float]:
            began, began_cpu = time.perf_counter(), time.process_time()
            list(pool.map(check, range(threads)))
            return time.perf_counter() - began, time.process_time() - began_cpu

        turns = [turn() for _ in range(_TURNS)]
    return min(clock for clock, _ in turns), min(cpu for _, cpu in turns)


def _page_faults_s(nbytes: int) -> float:
    """Return the seconds that the kernel takes to give this much memory, a page at a time: the least of some turns."""

    def touch() -> None:
        with mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)) as memory:
            view = np.frombuffer(memory, np.uint8)
            view[:: mmap.PAGESIZE] = 1
            del view

    return min(time_once(touch) for _ in range(_TURNS))


def _records(path: Path, end: int) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(SUPERBLOCK_BYTES)
        raw = file.read((end - SUPERBLOCK_BYTES) // RECORD_BYTES * RECORD_BYTES)
    return np.frombuffer(raw, "<u8").reshape(-1, RECORD_WORDS)


def make_blocks(directory: Path, chains: Words, tenant: bytes, fingerprint: bytes) -> None:
    """Write blocks whose keys are `chains`, shape (chains, blocks, 2): each row one chain."""
    keys, parents, depths = _columns(chains)
    slots = slots_that_fit(SLAB_BYTES, SLOT_BYTES)
    opened = TierDirectory(directory)
    opened.keep_format()
    model = BlockHeader(
        bytes(16), bytes(16), fingerprint, tenant, SLOT_BYTES - 4096, generation=1, created_ns=time.time_ns()
    )
    checksums = RecordChecksums()
    for number, first in enumerate(range(0, len(keys), slots), 1):
        superblock = Superblock(
            uuid.uuid4().bytes, secrets.randbits(64), number, SLOT_BYTES, slots, 1, SLAB_BYTES, time.time_ns()
        )
        part = slice(first, first + slots)
        count = len(keys[part])
        raw = np.frombuffer(pack_record(model, RecordState.LIVE, 1, 0), "<u8")
        records = np.tile(raw, (count, 1)).reshape(count, RECORD_WORDS)
        records[:, 3:5], records[:, 5:7], records[:, 15] = keys[part], parents[part], depths[part] << np.uint64(32)
        seeds = np.uint64(superblock.record_seed(0)) + np.arange(count, dtype=np.uint64)
        for begin in range(0, count, BATCH_RECORDS):
            some = slice(begin, begin + BATCH_RECORDS)
            records[some, -1] = checksums.load(records[some], seeds[some])[1]
        assert record_holds(records[count - 1].tobytes(), superblock.record_seed(count - 1))
        file = SlabFile.create(opened, superblock)
        with open(file.path, "r+b", buffering=0) as region:
            os.pwrite(region.fileno(), records.tobytes(), SUPERBLOCK_BYTES)
        file.sync()
        file.close()
    opened.close()


def header_regions(directory: Path) -> list[tuple[Path, int]]:
    """Every slab file, and where its record region ends."""
    end = SUPERBLOCK_BYTES + -(-slots_that_fit(SLAB_BYTES, SLOT_BYTES) * RECORD_BYTES // 4096) * 4096
    return [(path, end) for path in sorted((directory / "slabs").glob("*.slab"))]


def _columns(chains: Words) -> tuple[Words, Words, Words]:
    count, blocks, _ = chains.shape
    parents = np.zeros_like(chains)
    parents[:, 1:] = chains[:, :-1]
    depths = np.tile(np.arange(blocks, dtype=np.uint64), (count, 1))
    order = np.arange(count * blocks)
    scattered = np.flatnonzero(order // blocks % SCATTERED == 0)
    order[scattered] = np.random.default_rng(1).permutation(scattered)
    return chains.reshape(-1, 2)[order], parents.reshape(-1, 2)[order], depths.reshape(-1)[order]


if __name__ == "__main__":
    sys.exit(main())
