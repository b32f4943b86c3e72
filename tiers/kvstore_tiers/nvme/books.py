"""Whether the NVMe tier's state in memory agrees with itself and with the caller's view of its slots. Reads only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore_tiers.base import Column, Slot
from kvstore_tiers.nvme.slab import Slab, SlotState


def check_books(slabs: dict[int, Slab], quarantined: Iterable[Slot]) -> list[str]:
    """Broken invariants in words: the slots of each slab recounted, and those that are called quarantined."""
    faults: list[str] = []
    for slab in slabs.values():
        out = int(np.count_nonzero(np.frombuffer(slab.states, np.uint8)))
        if out != slab.in_use:
            faults.append(f"slab {slab.number}: {slab.in_use} slots counted, {out} out")
    for slot in quarantined:
        of = slabs.get(slot.container)
        if of is None or of.states[of.superblock.index_of(slot.offset)] != SlotState.QUARANTINED:
            faults.append(f"{slot} is called quarantined and is not")
    return faults


def check_held(slabs: dict[int, Slab], containers: Column, offsets: Column, generations: Column) -> list[str]:
    """Slots that the caller holds, by columns: each must be out, in that generation, and not in quarantine."""
    faults: list[str] = []
    for number in np.unique(containers).tolist():
        slab = slabs.get(number)
        if slab is None:
            faults.append(f"slots of slab {number} are held, there is no such slab")
            continue
        here = containers == number
        behind = offsets[here].astype(np.int64) - slab.superblock.slots_offset
        index, misplaced = np.divmod(behind, slab.superblock.slot_bytes)
        if misplaced.any() or index.min() < 0 or index.max() >= slab.superblock.slots:
            faults.append(f"slab {number}: a slot is held where none begins")
            continue
        states = np.frombuffer(slab.states, np.uint8)[index]
        now = np.frombuffer(slab.generations, np.uint64)[index]
        bad = (states == SlotState.FREE) | (states == SlotState.QUARANTINED) | (now != generations[here])
        for position in np.flatnonzero(bad).tolist():
            faults.append(f"slab {number} slot {index[position]} is held and is not allocated so")
    return faults
