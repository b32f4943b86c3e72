"""Damages the files of a closed NVMe directory: records, superblocks, seal, lengths, whole slots.

Owns the list `FILE_DAMAGES`: functions that change one place of a `Scene`, files in memory, and say whether any byte
is now another. Never opens a tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, Superblock, read_superblock
from torture_runs.slot_damage import SECTOR_BYTES, SLOT_DAMAGES, SlotBytes
from torture_runs.stored_directory import Files

SEAL = "seal"


@dataclass
class Scene:
    """A directory to be spoiled. `rolled_back` says that records of an earlier time were put back on purpose, with the
    slots that they name: a whole block of that time may then be served, as it is whole and was stored."""

    files: dict[str, bytearray]
    older: Files
    geometry: dict[str, Superblock] = field(default_factory=dict)
    rolled_back: bool = False

    def __post_init__(self) -> None:
        for name, raw in self.files.items():
            superblock = read_superblock(bytes(raw[:SUPERBLOCK_BYTES])) if name.endswith(".slab") else ""
            if isinstance(superblock, Superblock):
                self.geometry[name] = superblock

    def a_slab(self, rng: np.random.Generator) -> str:
        return str(rng.choice(sorted(self.geometry)))

    def a_slot(self, rng: np.random.Generator) -> tuple[str, int, slice]:
        name = self.a_slab(rng)
        superblock = self.geometry[name]
        index = int(rng.integers(superblock.slots))
        start = superblock.slot_offset(index)
        return name, index, slice(start, start + superblock.slot_bytes)

    def a_record(self, rng: np.random.Generator) -> tuple[str, slice]:
        name, index, _ = self.a_slot(rng)
        start = SUPERBLOCK_BYTES + index * RECORD_BYTES
        return name, slice(start, start + RECORD_BYTES)

    def replace(self, name: str, place: slice, raw: bytes) -> bool:
        """Replace bytes of a file; return whether that changed anything. Bytes behind the end of a cut file are not
        written.
        """
        now = self.files.get(name)
        if now is None:
            return False
        end = min(place.stop, len(now), place.start + len(raw))
        if end <= place.start or now[place.start : end] == raw[: end - place.start]:
            return False
        now[place.start : end] = raw[: end - place.start]
        return True

    def flip(self, rng: np.random.Generator, name: str, place: slice) -> bool:
        now = self.files.get(name)
        if now is None or place.stop > len(now) or place.stop <= place.start:
            return False
        raw = bytearray(now[place])
        for bit in np.unique(rng.integers(0, len(raw) * 8, int(rng.integers(1, 5)))).tolist():
            raw[bit // 8] ^= 1 << bit % 8
        return self.replace(name, place, bytes(raw))


FileDamage = Callable[[np.random.Generator, Scene], bool]


def flip_record(rng: np.random.Generator, scene: Scene) -> bool:
    return scene.flip(rng, *scene.a_record(rng))


def tear_record(rng: np.random.Generator, scene: Scene) -> bool:
    """A part of the write of a record arrived over what the older directory had there."""
    name, place = scene.a_record(rng)
    cut = int(rng.integers(1, RECORD_BYTES))
    now = bytes(scene.files[name][place]) if name in scene.files else b""
    before = scene.older.get(name, b"")[place]
    scene.rolled_back = True  # cut early enough, all of the older record is back
    return len(now) == len(before) == RECORD_BYTES and scene.replace(name, place, now[:cut] + before[cut:])


def swap_records(rng: np.random.Generator, scene: Scene) -> bool:
    (name, place), (other_name, other) = scene.a_record(rng), scene.a_record(rng)
    if name not in scene.files or other_name not in scene.files:
        return False
    here, there = bytes(scene.files[name][place]), bytes(scene.files[other_name][other])
    return scene.replace(name, place, there) | scene.replace(other_name, other, here)


def stale_record(rng: np.random.Generator, scene: Scene) -> bool:
    """A record of the older time, sound, over a slot that holds newer bytes."""
    name, place = scene.a_record(rng)
    scene.rolled_back = True  # together with a stale slot it makes a whole block of that time
    return scene.replace(name, place, scene.older.get(name, b"")[place])


def zero_records(rng: np.random.Generator, scene: Scene) -> bool:
    name, place = scene.a_record(rng)
    start = place.start // SECTOR_BYTES * SECTOR_BYTES
    return scene.replace(name, slice(start, start + SECTOR_BYTES), bytes(SECTOR_BYTES))


def flip_superblock(rng: np.random.Generator, scene: Scene) -> bool:
    name = scene.a_slab(rng)
    start = 0 if rng.random() < 0.5 else scene.geometry[name].file_bytes - SUPERBLOCK_BYTES
    length = 80 if rng.random() < 0.7 else SUPERBLOCK_BYTES
    return scene.flip(rng, name, slice(start, start + length))


def stale_superblock(rng: np.random.Generator, scene: Scene) -> bool:
    """The superblock of another slab, or the older one of this slab: sound, at the wrong place or time."""
    name, other = scene.a_slab(rng), scene.a_slab(rng)
    front = scene.older.get(other, bytes(scene.files.get(other, b"")))[:SUPERBLOCK_BYTES]
    return scene.replace(name, slice(0, SUPERBLOCK_BYTES), front)


def truncate_slab(rng: np.random.Generator, scene: Scene) -> bool:
    name = scene.a_slab(rng)
    raw = scene.files.get(name)
    if not raw:
        return False
    del raw[int(rng.integers(len(raw))) :]
    return True


def swap_slab_files(rng: np.random.Generator, scene: Scene) -> bool:
    name, other = scene.a_slab(rng), scene.a_slab(rng)
    if name == other or name not in scene.files or other not in scene.files:
        return False
    scene.files[name], scene.files[other] = scene.files[other], scene.files[name]
    return True


def remove_slab(rng: np.random.Generator, scene: Scene) -> bool:
    return scene.files.pop(scene.a_slab(rng), None) is not None


def roll_slab_back(rng: np.random.Generator, scene: Scene) -> bool:
    """A whole slab file of an earlier time beside newer ones."""
    name = scene.a_slab(rng)
    scene.rolled_back = True
    return name in scene.older and scene.replace(name, slice(0, len(scene.older[name])), scene.older[name])


def flip_seal(rng: np.random.Generator, scene: Scene) -> bool:
    return scene.flip(rng, SEAL, slice(0, len(scene.files.get(SEAL, b""))))


def flip_format(rng: np.random.Generator, scene: Scene) -> bool:
    return scene.flip(rng, "format", slice(0, len(scene.files.get("format", b""))))


def _spoil_slot(kind: str) -> FileDamage:
    def spoil(rng: np.random.Generator, scene: Scene) -> bool:
        name, _, place = scene.a_slot(rng)
        other_name, _, other = scene.a_slot(rng)
        image = np.frombuffer(bytes(scene.files.get(name, b"")[place]), dtype=np.uint8)
        if image.nbytes != place.stop - place.start:
            return False
        former, elsewhere = scene.older.get(name, b"")[place], scene.files.get(other_name, b"")[other]
        slot = SlotBytes(image, image.nbytes, _as_long(former, image.nbytes), _as_long(elsewhere, image.nbytes))
        return scene.replace(name, place, SLOT_DAMAGES[kind](rng, slot).tobytes())

    return spoil


def swap_slots(rng: np.random.Generator, scene: Scene) -> bool:
    name, _, place = scene.a_slot(rng)
    other_name, _, other = scene.a_slot(rng)
    here = bytes(scene.files.get(name, b"")[place])
    there = bytes(scene.files.get(other_name, b"")[other])
    return scene.replace(name, place, there) | scene.replace(other_name, other, here)


def _as_long(raw: bytes | bytearray, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(bytes(raw[:nbytes]).ljust(nbytes, b"\0"), dtype=np.uint8)


FILE_DAMAGES: dict[str, FileDamage] = {
    "record_flipped": flip_record,
    "record_torn": tear_record,
    "records_swapped": swap_records,
    "record_stale": stale_record,
    "records_zeroed": zero_records,
    "slots_swapped": swap_slots,
    **{f"slot_{kind}": _spoil_slot(kind) for kind in SLOT_DAMAGES},
    "superblock_flipped": flip_superblock,
    "superblock_stale": stale_superblock,
    "slab_truncated": truncate_slab,
    "slabs_swapped": swap_slab_files,
    "slab_removed": remove_slab,
    "slab_rolled_back": roll_slab_back,
    "seal_flipped": flip_seal,
    "format_flipped": flip_format,
}
DRASTIC = frozenset(  # leave little to look at: seldom, and at most one a round
    {
        "superblock_flipped", "superblock_stale", "slab_truncated", "slabs_swapped", "slab_removed",
        "slab_rolled_back", "format_flipped",
    }
)  # fmt: skip
