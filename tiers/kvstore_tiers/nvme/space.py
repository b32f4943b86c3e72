"""The slabs of the tier and the slot size of each, within its capacity.

Owns the slabs, the slot size of each, and the sum of everything the tier may put on the medium. Never does I/O: a new
slab is charged here at once and made by the I/O thread that first writes to it.
Invariants: slab files, damaged ones and the small files beside them never exceed the capacity; a slab gets another slot
size only when none of its slots is out; a slab that is set aside hands out no slot.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

import numpy as np

from kvstore_tiers.base import Column, ContainerReport, Slot
from kvstore_tiers.containers import Containers
from kvstore_tiers.image import aligned_down, aligned_up
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.layout import Superblock, slots_that_fit, smallest_file_bytes
from kvstore_tiers.nvme.slab import Slab, SlotState

DEFAULT_SLAB_BYTES = 256 * 2**20
FILES_BYTES = 32 << 10  # lock, format, identity.json and seal: a page each, two while one is replaced
MAX_SLABS = 512  # two descriptors each


class SlabSpace(Containers[Slab]):
    """The list of an NVMe tier's slabs (files cut into slots of one size), which allocates their slots within
    `capacity_bytes`. New slab files have `slab_bytes` bytes, or more if there would be more than 512 files. It does no
    I/O.
    """

    def __init__(
        self, directory: TierDirectory, capacity_bytes: int, slab_bytes: int, *, require_direct: bool = False
    ) -> None:
        super().__init__(capacity_bytes)
        self.charges.update(files=FILES_BYTES, damaged=directory.damaged_bytes())
        self.slabs = self.by_number
        self._directory = directory
        self._slab_bytes = max(aligned_down(slab_bytes), aligned_up(capacity_bytes // MAX_SLABS))
        self._require_direct = require_direct
        self._next_number = max([*directory.numbers(), *directory.numbers("damaged"), 0]) + 1

    @property
    def growth_bytes(self) -> int:
        """The size in bytes of a new slab file, if the capacity has room for one."""
        return self._slab_bytes

    def allocate(self, nbytes: int, *, may_grow: bool) -> tuple[Slab, Slot] | None:
        """Return a slab (a file cut into slots) and a free slot of exactly `nbytes` bytes in it, or None if there is no
        room. If no slab has a free slot, a new slab is made, provided that `may_grow` is true. If that is not possible,
        an empty slab of another slot size is used.
        """
        candidates = self.with_room["", nbytes]
        while candidates and not candidates[-1].has_room:
            candidates.pop()  # its file could not be made
        if not candidates:
            slab = (self._new(nbytes) if may_grow else None) or self._reshaped(nbytes)
            if slab is None:
                return None
            candidates.append(slab)
        if not candidates[-1].has_settled_room:
            settled = next((at for at, slab in enumerate(candidates) if slab.has_settled_room), -1)
            candidates[settled], candidates[-1] = candidates[-1], candidates[settled]
        slab = candidates[-1]
        slot = slab.allocate()
        if not slab.has_room:
            candidates.pop()
        self.empty.pop(slab.number, None)
        return slab, slot

    def free(self, slot: Slot) -> tuple[Slab, int]:
        """Free `slot`, and return its slab and its number in that slab. Raises RuntimeError if the slot is not
        allocated.
        """
        slab = self.of(slot)
        had_room = slab.has_room
        index = slab.free(slot)
        if slab.number in self.aside:
            return slab, index
        if not had_room and slab.has_room:
            self._list_room(slab)
        if slab.used_slots == 0:
            if slab.is_stillborn:
                self.discard(slab)
            elif slab.has_room:
                self.empty[slab.number] = slab
        return slab, index

    def adopt(self, slab: Slab) -> None:
        """Add `slab`, whose file exists already, to the list. Its slots are not handed out before `open_room`."""
        self.slabs[slab.number] = slab
        self.nbytes += slab.nbytes

    def open_room(self, slabs: Iterable[Slab]) -> None:
        """Let the free slots of `slabs`, which recovery has examined, be handed out."""
        for slab in slabs:
            if slab.has_room:
                self._list_room(slab)
            if slab.used_slots == 0:
                self.empty[slab.number] = slab

    def discard(self, slab: Slab) -> None:
        """Remove `slab` from the list, because its file is gone or was never made."""
        self.remove(slab)
        self.aside.discard(slab.number)

    def makes_room(self, number: int, nbytes: int, owner: str) -> bool:
        return super().makes_room(number, nbytes, "")  # slots of a slab are any owner's

    def convertible(self, nbytes: int, owner: str) -> list[ContainerReport]:
        found = super().convertible(nbytes, "")
        return [report for report in found if slots_that_fit(report.nbytes, nbytes)]

    def put_back(self, number: int) -> bool:
        self.aside.discard(number)
        slab = self.slabs.get(number)
        if slab is None:
            return False
        if slab.has_room:
            self._list_room(slab)
        if slab.used_slots == 0:
            if slab.is_stillborn:
                self.discard(slab)
            elif slab.has_room:
                self.empty[number] = slab
        return slab.used_slots == 0

    def check_books(self, quarantined: Iterable[Slot]) -> list[str]:
        """Recount the used slots of each slab, and check that each slot in `quarantined` is marked as quarantined.
        Return a sentence for each fault.
        """
        faults: list[str] = []
        for slab in self.slabs.values():
            out = int(np.count_nonzero(np.frombuffer(slab.states, np.uint8)))
            if out != slab.used_slots:
                faults.append(f"slab {slab.number}: {slab.used_slots} slots counted, {out} out")
        for slot in quarantined:
            of = self.slabs.get(slot.container)
            if of is None or of.states[of.superblock.index_of(slot.offset)] != SlotState.QUARANTINED:
                faults.append(f"{slot} is called quarantined and is not")
        return faults

    def check_held(self, containers: Column, offsets: Column, generations: Column) -> list[str]:
        """Check that every slot that the caller holds is allocated and not quarantined. The caller's slot i is
        `containers[i]`, `offsets[i]` (bytes), `generations[i]`. Return a sentence for each slot that is not.
        """
        faults: list[str] = []
        for number in np.unique(containers).tolist():
            slab = self.slabs.get(number)
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
            now = np.asarray(slab.generations)[index]
            bad = (states == SlotState.FREE) | (states == SlotState.QUARANTINED) | (now != generations[here])
            for position in np.flatnonzero(bad).tolist():
                faults.append(f"slab {number} slot {index[position]} is held and is not allocated so")
        return faults

    def _new(self, slot_bytes: int) -> Slab | None:
        room_bytes = aligned_down(self.ceiling_bytes - self.used_bytes)
        file_bytes = min(max(self._slab_bytes, smallest_file_bytes(slot_bytes)), room_bytes)
        slots = slots_that_fit(file_bytes, slot_bytes)
        if slots < 1:
            return None
        superblock = Superblock(
            secrets.token_bytes(16),
            secrets.randbits(64),
            self._next_number,
            slot_bytes,
            slots,
            1,
            file_bytes,
            time.time_ns(),
        )
        self._next_number += 1
        slab = Slab(self._directory, superblock, require_direct=self._require_direct)
        self.adopt(slab)
        return slab

    def _reshaped(self, slot_bytes: int) -> Slab | None:
        for old in list(self.empty.values()):
            if old.superblock.slot_bytes == slot_bytes:
                continue
            made = old if old.is_made else old.replaces
            if made is None:
                self.discard(old)  # it was planned and never written to
                return self._new(slot_bytes)
            room_bytes = aligned_down(old.superblock.file_bytes + self.ceiling_bytes - self.used_bytes)
            file_bytes = min(old.superblock.file_bytes, room_bytes)
            slots = slots_that_fit(file_bytes, slot_bytes)
            if slots < 1:
                continue
            superblock = Superblock(
                old.superblock.uuid, secrets.randbits(64), old.number, slot_bytes, slots, max(old.generations) + 1,
                file_bytes, time.time_ns(),
            )  # fmt: skip
            self.discard(old)
            slab = Slab(self._directory, superblock, replaces=made, require_direct=self._require_direct)
            self.adopt(slab)
            return slab
        return None
