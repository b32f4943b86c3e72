"""An NVMe directory with a great many blocks, made in seconds: real superblocks and records, slots without bytes.

The records are packed by the tier's own layout code, one as a model for all, and sealed with its own checksums; the
slots are preallocated and never written, so nothing can be read from them, only found. Chains of `chain_blocks`, mostly
one block behind the other, as clients store them; every eighth chain is scattered, as reused slots leave it.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import BlockHeader
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
from kvstore_tiers.nvme.slab_file import SlabFile

SLOT_BYTES = 8192
SLAB_BYTES = 256 << 20
SCATTERED = 8  # one chain in so many
Words = npt.NDArray[Any]


def make_blocks(directory: Path, chains: Words, tenant: bytes, fingerprint: bytes) -> None:
    """Write blocks whose keys are `chains`, shape (chains, blocks, 2): each row one chain."""
    keys, parents, depths = _columns(chains)
    slots = slots_that_fit(SLAB_BYTES, SLOT_BYTES)
    opened = TierDirectory(directory)
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
            records[some, -1] = checksums.digests(checksums.load(records[some]), seeds[some])
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
