"""Damages the bytes of one slot: pure functions from whole images to a damaged one.

Owns the list `SLOT_DAMAGES`. A function gets the slot's image (header page and payload), the image that lay there
before, and the image of another slot, and gives what the medium might hold instead. Sectors are 512 bytes: what a disk
writes whole. Never touches a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torture_runs.kill_model import Bytes

SECTOR_BYTES = 512
HEADER_BYTES = 4096


@dataclass(frozen=True)
class SlotBytes:
    """An image and what it may be mixed up with. All are as long as the slot; `used_bytes` of it are ever read."""

    image: Bytes
    used_bytes: int
    former: Bytes
    other: Bytes


SlotDamage = Callable[[np.random.Generator, SlotBytes], Bytes]


def tear(rng: np.random.Generator, slot: SlotBytes) -> Bytes:
    """Only the first sectors of the write arrived."""
    kept = _sectors(rng, slot.used_bytes)
    return np.concatenate([slot.image[:kept], slot.former[kept:]])


def tear_backwards(rng: np.random.Generator, slot: SlotBytes) -> Bytes:
    """Only the last sectors of the write arrived."""
    kept = _sectors(rng, slot.used_bytes)
    return np.concatenate([slot.former[:kept], slot.image[kept:]])


def tear_in_holes(rng: np.random.Generator, slot: SlotBytes) -> Bytes:
    """Each sector of the write arrived or not."""
    sectors = len(slot.image) // SECTOR_BYTES
    arrived = np.repeat(rng.random(sectors) < 0.8, SECTOR_BYTES)
    return np.where(arrived, slot.image[: len(arrived)], slot.former[: len(arrived)])


def zero_sectors(rng: np.random.Generator, slot: SlotBytes) -> Bytes:
    first = _sectors(rng, slot.used_bytes) - SECTOR_BYTES
    damaged = slot.image.copy()
    damaged[first : first + SECTOR_BYTES * int(rng.integers(1, 9))] = 0
    return damaged


def scribble(rng: np.random.Generator, slot: SlotBytes) -> Bytes:
    first = int(rng.integers(0, slot.used_bytes))
    length = int(rng.integers(1, slot.used_bytes - first + 1))
    damaged = slot.image.copy()
    damaged[first : first + length] = rng.integers(0, 256, length, dtype=np.uint8)
    return damaged


SLOT_DAMAGES: dict[str, SlotDamage] = {
    "flip_payload": lambda rng, slot: _flipped(rng, slot.image, HEADER_BYTES, slot.used_bytes),
    "flip_header": lambda rng, slot: _flipped(rng, slot.image, 0, HEADER_BYTES),
    "flip_identity": lambda rng, slot: _flipped(rng, slot.image, 0, 160),  # key, tenant, lengths, generation, checksums
    "torn": tear,
    "torn_backwards": tear_backwards,
    "torn_in_holes": tear_in_holes,
    "zeroed_sectors": zero_sectors,
    "scribbled": scribble,
    # A write was lost, or went astray: an image is whole, with sound checksums.
    "stale": lambda rng, slot: slot.former,
    "stale_payload": lambda rng, slot: np.concatenate([slot.image[:HEADER_BYTES], slot.former[HEADER_BYTES:]]),
    "misdirected": lambda rng, slot: slot.other,
    "misdirected_payload": lambda rng, slot: np.concatenate([slot.image[:HEADER_BYTES], slot.other[HEADER_BYTES:]]),
}


def _flipped(rng: np.random.Generator, image: Bytes, start: int, end: int) -> Bytes:
    """One to eight bits flipped, no bit twice."""
    bits = np.unique(rng.integers(start * 8, end * 8, int(rng.integers(1, 9))))
    damaged = image.copy()
    np.bitwise_xor.at(damaged, bits // 8, (1 << (bits % 8)).astype(np.uint8))
    return damaged


def _sectors(rng: np.random.Generator, nbytes: int) -> int:
    """A multiple of the sector, from one sector to `nbytes`."""
    return SECTOR_BYTES * int(rng.integers(1, max(2, nbytes // SECTOR_BYTES)))
