"""Damage to a running or stopped daemon's blocks, done from outside: on its slab files and in its arenas.

Finds blocks by their headers, as a program would that knows only the formats. Never goes through the daemon.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, MAGIC, BlockHeader, read_header
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, Superblock, read_superblock
from tests.reference.conversations import TOKENS_A_BLOCK, tokens_of
from tests.reference.running_daemon import RunningDaemon


def blocks_on_disk(directory: Path) -> Iterator[tuple[Path, int, BlockHeader]]:
    """(slab file, offset of the slot, header) of every slot image whose header holds, old ones in free slots too."""
    for slab in sorted(directory.glob("slabs/*.slab")):
        yield from ((slab, offset, header) for offset, header in _images(slab, slab.stat().st_size))


def flip_on_disk(daemon: RunningDaemon, depth: int, conversation: int | None = None, group: int | None = None) -> int:
    """Flip a bit of each block on NVMe with `depth` blocks before it, or of the blocks of a conversation (`tokens_of`)
    or a layer group alone; return how many there were.
    """
    found = [
        (slab, at)
        for slab, at, header in blocks_on_disk(daemon.nvme_dir)
        if header.depth == depth
        and group in (None, header.group)
        and (conversation is None or header.token_ids[0] == tokens_of(conversation, depth + 1)[-TOKENS_A_BLOCK])
    ]
    for slab, at in found:
        _flip(slab, at + HEADER_BYTES + 100)
    return len(found)


def flip_record(daemon: RunningDaemon, depth: int) -> int:
    """Flip a bit of the record of each block with `depth` blocks before it; how many there were."""
    found = [(slab, at) for slab, at, header in blocks_on_disk(daemon.nvme_dir) if header.depth == depth]
    for slab, at in found:
        superblock = read_superblock(slab.read_bytes()[:SUPERBLOCK_BYTES])
        assert isinstance(superblock, Superblock)
        _flip(slab, SUPERBLOCK_BYTES + superblock.index_of(at) * RECORD_BYTES + 30)
    return len(found)


def flip_in_dram(daemon: RunningDaemon, depth: int) -> int:
    """Flip a payload bit of each block in the daemon's arenas with `depth` blocks before it; how many there were."""
    flipped = 0
    seen: set[int] = set()  # a daemon may have several descriptors of one arena
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        try:
            if "memfd:kvstore-arena" not in os.readlink(link) or link.stat().st_ino in seen:
                continue
        except FileNotFoundError:
            continue
        seen.add(link.stat().st_ino)
        for at, header in list(_images(link, os.stat(link).st_size)):
            if header.depth == depth:
                _flip(link, at + HEADER_BYTES + 100)
                flipped += 1
    return flipped


def _images(path: Path, size_bytes: int) -> Iterator[tuple[int, BlockHeader]]:
    with open(path, "rb", buffering=0) as file:
        for offset in range(0, size_bytes - HEADER_BYTES, ALIGNMENT_BYTES):
            if os.pread(file.fileno(), 4, offset) == MAGIC:
                header = read_header(os.pread(file.fileno(), HEADER_BYTES, offset))
                if not isinstance(header, str):
                    yield offset, header


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), offset)
        os.fsync(file.fileno())
