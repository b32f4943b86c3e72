"""A closed NVMe directory with a history, kept in memory: what corruption starts from, again and again.

Owns two sealed snapshots of one directory (`older`, `newer`) and the plain model of what was stored when. Between them
blocks were freed, their slots reused, some keys stored again with other bytes, so that stale bytes of every kind exist.
The model is a dictionary of bytes: it knows nothing of slots, checksums or the tier under test.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.testing import finish
from kvstore_tiers.testing.made_up_codec import MadeUpCodec, allow_made_up_codec
from kvstore_tiers.testing.transfers import put, put_encoded
from torture_runs.kill_model import Bytes, payload_of

CAPACITY_BYTES = 4 << 20
SLAB_BYTES = 256 << 10
SIZES = (700, 4096, 9_000, 20_000, 40_000)
TENANTS = (b"tenant-a".ljust(16, b"\0"), b"tenant-b".ljust(16, b"\0"))
FILL = 0.7  # of the capacity, so that fresh blocks find room in the check

Files = dict[str, bytes]


@dataclass
class StoredBlock:
    """One key: what its header must say, and its bytes by version. The last version is the true one."""

    number: int
    tenant: bytes
    versions: list[Bytes]

    @property
    def key(self) -> bytes:
        return self.number.to_bytes(16, "big")

    @property
    def payload(self) -> Bytes:
        return self.versions[-1]

    def header(self) -> BlockHeader:
        return BlockHeader(
            key=self.key,
            parent=(self.number - 1).to_bytes(16, "big"),
            fingerprint=bytes([self.number % 251]) * 32,
            tenant=self.tenant,
            tokens=np.arange(self.number, self.number + 64, dtype="<i4").tobytes(),
            payload_bytes=self.payload.nbytes,
            depth=self.number % 7,
        )

    def is_named_by(self, header: BlockHeader) -> bool:
        """Return whether the header's fields, apart from the payload's, are this block's."""
        mine = self.header()
        given = (header.key, header.parent, header.fingerprint, header.tenant, header.depth)
        return given == (mine.key, mine.parent, mine.fingerprint, mine.tenant, mine.depth)


@dataclass
class StoredDirectory:
    """`blocks` holds every key that was ever stored; `freed` the keys that are gone in `newer`."""

    older: Files = field(default_factory=dict)
    newer: Files = field(default_factory=dict)
    blocks: dict[bytes, StoredBlock] = field(default_factory=dict)
    freed: set[bytes] = field(default_factory=set)
    slots: dict[bytes, Slot] = field(default_factory=dict)  # in `newer`


def open_tier(directory: Path) -> NvmeTier:
    allow_made_up_codec()
    return NvmeTier.open(directory, CAPACITY_BYTES, slab_bytes=SLAB_BYTES, io_threads=2)


def make_directory(rng: np.random.Generator, directory: Path) -> StoredDirectory:
    """Store, close, remember; free half, store others and some again, close, remember."""
    made = StoredDirectory()
    sizes = rng.choice(SIZES, int(rng.integers(1, 4)), replace=False)
    numbers = iter(range(1, 1 << 30))
    shutil.rmtree(directory, ignore_errors=True)
    with closing(open_tier(directory)) as tier:
        _fill(made, tier, (_new_block(rng, number, sizes) for number in numbers))
    made.older = read_files(directory)
    with closing(open_tier(directory)) as tier:
        made.slots = {header.key: slot for slot, header in tier.recover()}
        keys = sorted(made.blocks)
        for position in rng.permutation(len(keys))[: len(keys) // 2].tolist():
            tier.free(made.slots.pop(keys[position]))
            made.freed.add(keys[position])
        again = [made.blocks[key] for key in sorted(made.freed) if rng.random() < 0.3]
        for block in again:
            block.versions.append(payload_of(block.payload.nbytes, block.number, len(block.versions)))
        made.freed -= {block.key for block in again}
        _fill(made, tier, (*again, *(_new_block(rng, next(numbers), sizes) for _ in range(len(keys) // 4))))
    made.newer = read_files(directory)
    return made


def _new_block(rng: np.random.Generator, number: int, sizes: Bytes) -> StoredBlock:
    payload = payload_of(int(rng.choice(sizes)), number, 0)
    return StoredBlock(number, TENANTS[number % 2], [payload])


def _fill(made: StoredDirectory, tier: NvmeTier, blocks: Iterable[StoredBlock]) -> None:
    for block in blocks:
        if tier.statistics().used_bytes > FILL * CAPACITY_BYTES and block.key not in made.blocks and not made.older:
            break
        slot = store(tier, block)
        if slot is None:
            raise RuntimeError("the tier is full below its capacity")
        made.blocks[block.key] = block
        made.slots[block.key] = slot
    outcome = finish(tier.sync)
    if not outcome.ok:
        raise RuntimeError(f"the tier could not sync: {outcome}")


def store(tier: NvmeTier, block: StoredBlock) -> Slot | None:
    """Store a block, every other one in the form of a codec."""
    if block.number % 2:
        return put(tier, block.header(), block.payload)
    return put_encoded(tier, MadeUpCodec(), block.header(), block.payload)


def read_files(directory: Path) -> Files:
    """Every file of a directory by its relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def write_files(directory: Path, files: Files | dict[str, bytearray]) -> None:
    """Make a directory hold just these files."""
    shutil.rmtree(directory, ignore_errors=True)
    for name, raw in files.items():
        path = directory / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(raw)
