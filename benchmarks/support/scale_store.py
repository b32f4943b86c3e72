"""A state directory with very many blocks on NVMe, made in seconds: records packed and sealed by the tier's own code.

On the disk are superblocks and records, every byte that a start reads. The slots are holes in files of full length
(sparse_slabs.py), which get their space when a put writes to them: 256 bytes a block instead of 8448. Owns the
directory's content; never starts a daemon but for the keys of `PROBES` chains, which a client must know.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client import BlockKeys
from kvstore_proto.arena import BlockHeader
from kvstore_tiers.image import aligned_up
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
from kvstore_tiers.nvme.slab_file import SlabFile, find_superblock
from kvstore_tiers.nvme.space import FILES_BYTES
from kvstored.clients.tenants.directory import tenant_digest
from support import sparse_slabs
from support.daemon import MIB, BenchDaemon, bench_daemon, model, tokens_of
from support.report import progress

CHAIN_BLOCKS = 64
PROBES = 150
LEAST_BLOCKS = PROBES * CHAIN_BLOCKS
SLOT_BYTES, SLAB_BYTES = 8192, 256 * MIB
SCATTERED = 8  # one chain in so many
PROGRAM = ("-P", sparse_slabs.__file__)
FINGERPRINT = model(SLOT_BYTES - 4096)
_ROOM_BYTES = 512 * MIB  # for what a run writes beside the records, and for others
Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Store:
    """A state directory whose NVMe tier has `blocks` blocks. `probes` are the keys of some chains, as clients ask for
    them. The slab files are `full_bytes` long, and every slot has a block.
    """

    state: Path
    blocks: int
    probes: list[BlockKeys]

    @property
    def nvme(self) -> Path:
        return self.state / "nvme"

    @property
    def roomy_bytes(self) -> int:
        """A capacity with room for more blocks."""
        return self.blocks * 10240 + 600 * MIB

    @property
    def full_bytes(self) -> int:
        """The capacity that these blocks fill."""
        return sum((path.stat().st_size for path in self.slabs()), FILES_BYTES)

    def slabs(self) -> list[Path]:
        return sorted((self.nvme / "slabs").glob("*.slab"))

    def header_regions(self) -> list[tuple[Path, int]]:
        """Return every slab file, and where its record region ends."""
        found = []
        for path in self.slabs():
            superblock = find_superblock(path)
            assert isinstance(superblock, Superblock)
            found.append((path, superblock.slots_offset))
        return found

    @contextmanager
    def served(self, capacity_bytes: int = 0) -> Iterator[BenchDaemon]:
        """Yield a daemon on this directory, of this capacity; without one there is room for more blocks."""
        with bench_daemon(
            *settings_of(capacity_bytes or self.roomy_bytes), state_dir=self.state, program=PROGRAM
        ) as daemon:
            yield daemon

    def empty_page_cache(self) -> None:
        for path in self.slabs():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def leave_sealed(self) -> None:
        """Leave the directory as a clean stop does."""
        NvmeTier.open(self.nvme, self.roomy_bytes).close()


def settings_of(capacity_bytes: int) -> tuple[str, ...]:
    """Return the settings of a daemon whose NVMe tier has this capacity."""
    return (f"nvme.capacity={capacity_bytes}", "host.capacity=1GiB", "host.prefault=false")


def require_room(directory: Path, blocks: int) -> None:
    """Exit with one line unless the file system of `directory` has room for the records of `blocks` blocks."""
    disk = shutil.disk_usage(directory)
    need_bytes = blocks * RECORD_BYTES * 21 // 20 + _ROOM_BYTES
    length_bytes = blocks * 10240 + 600 * MIB
    if disk.free < need_bytes:
        raise SystemExit(
            f"{blocks} blocks need {need_bytes / 1e9:.1f} GB free in {directory}, which has {disk.free / 1e9:.1f}"
        )
    if disk.total < length_bytes:
        raise SystemExit(f"{blocks} blocks need a file system of {length_bytes / 1e9:.0f} GB, holes included; that of "
                         f"{directory} has {disk.total / 1e9:.0f}: --dir")  # fmt: skip


def made(state: Path, blocks: int) -> Store:
    """Make a store of about `blocks` blocks, whole chains, in the new directory `state`."""
    sparse_slabs.without_space()
    store = Store(state, blocks - blocks % CHAIN_BLOCKS, [])
    with store.served() as daemon:
        store.probes.extend(_probe_keys(daemon))
    started = time.monotonic()
    chains = np.frombuffer(secrets.token_bytes(store.blocks * 16), "<u8").reshape(-1, CHAIN_BLOCKS, 2).copy()
    step = (len(chains) // PROBES - 1) | 1  # odd: as many of them are scattered as of all
    for number, keys in enumerate(store.probes):
        chains[number * step] = np.frombuffer(keys.packed, "<u8").reshape(-1, 2)
    _write(store.nvme, chains)
    progress(f"{store.blocks} blocks made in {time.monotonic() - started:.0f} s")
    return store


def _probe_keys(daemon: BenchDaemon) -> list[BlockKeys]:
    """Return the keys of chains as a client of this daemon would ask for them."""
    with daemon.connect(FINGERPRINT, staging_bytes=MIB) as session:
        found = [session.keys(tokens_of(conversation, CHAIN_BLOCKS)) for conversation in range(1, PROBES + 1)]
    assert all(keys is not None for keys in found)
    return [keys for keys in found if keys is not None]


def _write(directory: Path, chains: Words) -> None:
    """Write blocks whose keys are `chains`, shape (chains, blocks, 2): each row one chain."""
    keys, parents, depths = _columns(chains)
    most = slots_that_fit(SLAB_BYTES, SLOT_BYTES)
    opened = TierDirectory(directory)
    opened.keep_format()
    tenant = tenant_digest(f"uid-{os.getuid()}")
    model = BlockHeader(
        bytes(16), bytes(16), FINGERPRINT.digest(), tenant, SLOT_BYTES - 4096, generation=1, created_ns=time.time_ns()
    )
    raw = np.frombuffer(pack_record(model, RecordState.LIVE, 1, 0), "<u8")
    for number, first in enumerate(range(0, len(keys), most), 1):
        part = slice(first, first + most)
        slots = len(keys[part])
        file_bytes = 2 * SUPERBLOCK_BYTES + aligned_up(slots * RECORD_BYTES) + slots * SLOT_BYTES
        superblock = Superblock(
            uuid.uuid4().bytes, secrets.randbits(64), number, SLOT_BYTES, slots, 1, file_bytes, time.time_ns()
        )
        records = np.tile(raw, (slots, 1)).reshape(slots, RECORD_WORDS)
        records[:, 3:5], records[:, 5:7], records[:, 15] = keys[part], parents[part], depths[part] << np.uint64(32)
        _seal(records, superblock)
        file = SlabFile.create(opened, superblock)
        with open(file.path, "r+b", buffering=0) as region:
            os.pwrite(region.fileno(), records.tobytes(), SUPERBLOCK_BYTES)
        file.sync()
        file.close()
    opened.close()


def _seal(records: Words, superblock: Superblock) -> None:
    checksums, count = RecordChecksums(), len(records)
    seeds = np.uint64(superblock.record_seed(0)) + np.arange(count, dtype=np.uint64)
    for begin in range(0, count, BATCH_RECORDS):
        some = slice(begin, begin + BATCH_RECORDS)
        records[some, -1] = checksums.load(records[some], seeds[some])[1]
    assert record_holds(records[count - 1].tobytes(), superblock.record_seed(count - 1))


def _columns(chains: Words) -> tuple[Words, Words, Words]:
    count, blocks, _ = chains.shape
    parents = np.zeros_like(chains)
    parents[:, 1:] = chains[:, :-1]
    depths = np.tile(np.arange(blocks, dtype=np.uint64), (count, 1))
    order = np.arange(count * blocks)
    scattered = np.flatnonzero(order // blocks % SCATTERED == 0)
    order[scattered] = np.random.default_rng(1).permutation(scattered)
    return chains.reshape(-1, 2)[order], parents.reshape(-1, 2)[order], depths.reshape(-1)[order]
