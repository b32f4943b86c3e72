"""One slab in memory: which slots are out, in which generation, and what the record on the medium says of each.

Owns the state of one slab file's slots and keeps its records in step. 7 bytes a slot, 15 where blocks have codecs;
keys are not kept here. Two sides use it. The control thread allocates and frees, touching memory alone. I/O threads and
the group commit touch records, under `_records`, the lock that orders "withdraw the old record" before "overwrite the
slot" before "publish the new record" across threads.

Invariants: `recorded[i]` is the `mark` of the generation that a live record of slot i on the medium may name, 0 when
there is none; a slot whose record is live is never overwritten; a record is published only for the generation that is
still out; a free record of a sync that failed is written again before the next one.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from enum import IntEnum
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import Slot
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.layout import (
    RecordState,
    Superblock,
    nothing_at,
    pack_record,
    record_header,
    record_holds,
    stored_word,
)
from kvstore_tiers.nvme.slab_file import SlabFile
from kvstore_tiers.nvme.slot_words import StoredWords, generations_of, mark, marks

Column = npt.NDArray[np.uint64]
_SETTLED_AT_ONCE = 1024  # freed slots whose records one write takes along: some milliseconds


class SlotState(IntEnum):
    FREE = 0
    ALLOCATED = 1  # handed out, its image is not whole
    WRITTEN = 2  # its image is whole
    QUARANTINED = 3


class Slab:
    """The state in memory of one slab file's slots: which are in use, in which generation, and whether a record on the
    medium names them. The file is made at the first write. If `replaces` is given, the file of that other slab, whose
    slots have another size, is used instead.
    """

    def __init__(
        self,
        directory: TierDirectory,
        superblock: Superblock,
        *,
        file: SlabFile | None = None,
        replaces: Slab | None = None,
        require_direct: bool = False,
    ) -> None:
        self.superblock = superblock
        self.number, self.owner, self.used_slots = superblock.number, "", 0
        self.nbytes, self.slot_bytes, self.slots = superblock.file_bytes, superblock.slot_bytes, superblock.slots
        self.states = bytearray(superblock.slots)
        self.generations = array("I", bytes(4 * superblock.slots))  # of a file that is there already: see `adopt`
        if file is None:
            self.generations = generations_of(superblock.first_generations())
        self._stored = StoredWords(superblock.slots)
        self.recorded = array("H", bytes(2 * superblock.slots))
        self._returned = array("I")  # their records are free on the medium; the commit appends, allocating takes
        self._untouched = 0
        self._unsettled: dict[int, int] = {}  # freed in that generation; a record on the medium may still be live
        self._hot: set[int] = set()  # handed out all the same
        self._settling = threading.Lock()
        self._syncing = threading.Lock()
        self._is_retired = False
        self.failed_syncs = 0
        self._directory = directory
        self._file = file
        self._replaces = replaces
        self._require_direct = require_direct
        self._making = threading.Lock()
        self._making_error: OSError | None = None
        self._records = threading.Lock()
        self._unsynced_free: dict[int, bytes] = {}  # free records written since the last sync began
        self._doubtful_free: dict[int, bytes] = {}  # and those of a sync that failed: the kernel calls them written

    # -- the control thread's side -----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return self._making_error is None and self.used_slots < self.superblock.slots

    @property
    def has_settled_room(self) -> bool:
        """True if there is a free slot that no record on the medium names, so that it can be written without a sync
        first.
        """
        return self._making_error is None and (bool(self._returned) or self._untouched < self.superblock.slots)

    def allocate(self) -> Slot:
        """Return a free slot, if possible one that no record on the medium names. The caller has checked that
        `has_room` is true.
        """
        if self._returned:
            index = self._returned.pop()
        elif self._untouched < self.superblock.slots:
            index = self._untouched
            self._untouched += 1
        else:
            index = self._unsettled_slot()
        self.states[index] = SlotState.ALLOCATED
        self.used_slots += 1
        return self.slot(index)

    def free(self, slot: Slot) -> int:
        """Free the allocated or quarantined `slot`, and return its number in the slab. Its next use has a higher
        generation. Raises RuntimeError if it is not allocated.
        """
        index = self.require_out(slot)
        may_be_live = self._may_be_live(index)
        self.states[index] = SlotState.FREE
        try:
            self.generations[index] += 1
        except OverflowError:
            self.generations = array("Q", self.generations)
            self.generations[index] += 1
        with self._settling:
            self._hot.discard(index)
            if may_be_live:
                self._unsettled[index] = self.generations[index]
            else:
                self._returned.append(index)
        self.used_slots -= 1
        return index

    def settle(self, freed: dict[int, int]) -> None:
        """Note that no record on the medium names the blocks of freed slots any more. `freed` has the generations in
        which slots were freed, by slot number.
        """
        with self._settling:
            for index, generation in freed.items():
                if self._unsettled.get(index) == generation:
                    del self._unsettled[index]
                    self._returned.append(index)
                elif self.generations[index] == generation:
                    self._hot.discard(index)

    def slot(self, index: int) -> Slot:
        """Return the slot with the number `index`, in its present generation."""
        superblock = self.superblock
        return Slot(self.number, superblock.slot_offset(index), superblock.slot_bytes, self.generations[index])

    def require_out(self, slot: Slot) -> int:
        """Return the number of the allocated `slot` in this slab. Raises RuntimeError if it is not allocated in this
        generation.
        """
        index = self.superblock.index_of(slot.offset)
        if not self.states[index] or self.generations[index] != slot.generation:
            raise RuntimeError(f"{slot} is not allocated")
        return index

    def indices_in(self, state: SlotState) -> list[int]:
        """Return the numbers of all slots that are in `state`."""
        found: list[int] = np.flatnonzero(np.frombuffer(self.states, np.uint8) == state).tolist()
        return found

    def stored(self, index: int) -> tuple[int, int]:
        """Return the number of bytes that slot number `index` stores behind its header, and the number of the codec
        that made them (0 for none).
        """
        return self._stored.of(index)

    # -- the I/O threads' side ---------------------------------------------------------------------------------------

    @property
    def file(self) -> SlabFile:
        assert self._file is not None, f"slab {self.number} was read before it was written"
        return self._file

    @property
    def is_made(self) -> bool:
        return self._file is not None

    @property
    def replaces(self) -> Slab | None:
        """The slab whose file this slab will use from its first write on; None if this slab makes a file of its own."""
        return self._replaces

    @property
    def is_stillborn(self) -> bool:
        """True if the slab's file could not be made, so that nothing of it is on the medium."""
        return self._making_error is not None and self._file is None and self._replaces is None

    def make_file(self) -> None:
        """Make the slab's file, or give the file that it takes over the new layout, unless that was done before. Raises
        OSError; then the slab hands out no more slots.
        """
        with self._making:
            if self._file is not None:
                return
            if self._making_error is not None:
                raise self._making_error
            try:
                old = self._replaces
                if old is None:
                    self._file = SlabFile.create(self._directory, self.superblock, require_direct=self._require_direct)
                    return
                old.retire()
                old.file.reformat(self.superblock)
            except OSError as error:
                self._making_error = error
                raise
            self._file, self._replaces = old.file, None

    def retire(self) -> None:
        """Forget which blocks the records on the medium name, because the file will be overwritten or deleted."""
        with self._records:
            self.recorded = array("H", bytes(2 * self.superblock.slots))
            self._unsynced_free, self._doubtful_free = {}, {}
            self._is_retired = True  # nothing of it may be written to the file any more

    def remove(self) -> None:
        """Delete the slab's file. None of its slots may be in use. Raises OSError."""
        file = self._file or (self._replaces.file if self._replaces is not None else None)
        (self._replaces or self).retire()
        if file is not None:
            file.remove()

    def withdraw(self, indices: Iterable[int], sequence: int) -> None:
        """Overwrite the records of those slots `indices` whose block is gone, as a part of commit number `sequence`.
        Records of blocks that are still in their slots stay. Raises OSError.
        """
        with self._records:
            self._withdraw(indices, sequence)

    def publish(self, blocks: Iterable[tuple[int, BlockHeader]], sequence: int) -> None:
        """Write records for those `blocks` (pairs of slot number and header) that are still in their slots, as a part
        of commit number `sequence`. Raises OSError.
        """
        with self._records:
            current = [(i, header) for i, header in blocks if self._holds(i, header.generation)]
            seed = self.superblock.record_seed
            records = [(i, pack_record(h, RecordState.LIVE, sequence, seed(i))) for i, h in current]
            for index, header in current:
                self._will_name(index, header.generation)
            self.file.write_records(records)

    def publish_quarantine(self, indices: Iterable[int], sequence: int) -> None:
        """Write records that mark the slots with the numbers `indices` as quarantined, as a part of commit number
        `sequence`. Slots that were freed meanwhile lose their record instead.
        """
        with self._records:
            indices = set(indices)
            current = {i: self.generations[i] for i in indices if self.states[i] == SlotState.QUARANTINED}
            self._withdraw(indices.difference(current), sequence)
            marked = []
            for index, generation in current.items():
                header = self._sound_header(index)
                if header is None or header.generation != generation:
                    header = nothing_at(generation)
                seed = self.superblock.record_seed(index)
                marked.append((index, pack_record(header, RecordState.QUARANTINED, sequence, seed)))
            for index, generation in current.items():
                self._will_name(index, generation)
            self.file.write_records(marked)

    def sync(self) -> None:
        """Make written slots and records durable. Raises OSError; then the records of freed slots are written again
        before the next sync, because the kernel may have dropped the first writes.
        """
        with self._syncing:
            self._sync()

    def sync_hot(self, index: int, sequence: int) -> None:
        """Make sure that no record on the medium names slot number `index`, whose bytes are about to be overwritten. If
        one may, its record and the records of other freed slots are removed and synced, as a part of commit number
        `sequence`. Raises OSError.
        """
        if index not in self._hot:
            return
        with self._syncing:
            with self._settling:
                if index not in self._hot:
                    return  # the sync that we waited for took it along
                freed = dict(islice(self._unsettled.items(), _SETTLED_AT_ONCE))
                freed.update((at, self.generations[at]) for at in self._hot)
            self.withdraw(freed, sequence)
            self._sync()
        self.settle(freed)

    def note_written(self, index: int, header: BlockHeader) -> None:
        """Note that slot number `index` contains a whole block with this `header`."""
        self._stored.note(index, stored_word(header.stored_bytes, header.codec))
        self.states[index] = SlotState.WRITTEN

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._replaces is not None:
            self._replaces.close()

    # -- recovery ----------------------------------------------------------------------------------------------------

    def adopt(self, states: bytes, generations: Column, stored: Column) -> None:
        """Set the state (a SlotState), the generation and the `stored_word` of each slot, as recovery found them."""
        self.states[:] = states
        taken = np.frombuffer(states, np.uint8) != SlotState.FREE
        self.generations = generations_of(generations)
        self._stored.adopt(stored, taken)
        np.frombuffer(self.recorded, np.uint16)[:] = marks(generations, taken)
        self.used_slots = int(np.count_nonzero(taken))
        self._returned = array("I", np.flatnonzero(~taken)[::-1].astype(np.uint32).tobytes())
        self._untouched = len(states)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _unsettled_slot(self) -> int:
        """Take the slot that was freed first, or one that was settled meanwhile."""
        with self._settling:
            if self._returned:
                return self._returned.pop()
            index = next(iter(self._unsettled))
            del self._unsettled[index]
            self._hot.add(index)
            return index

    def _may_be_live(self, index: int) -> bool:
        """Return whether a record on the medium may name a slot that is being freed."""
        return (
            self.states[index] != SlotState.ALLOCATED
            or self.recorded[index] != 0
            or index in self._unsynced_free
            or index in self._doubtful_free
        )

    def _sync(self) -> None:
        with self._records:
            if self._doubtful_free:
                self.file.write_records(self._doubtful_free.items())
                self._unsynced_free = {**self._doubtful_free, **self._unsynced_free}
                self._doubtful_free = {}
            begun, self._unsynced_free = self._unsynced_free, {}
        try:
            self.file.sync()
        except OSError:
            with self._records:
                self.failed_syncs += 1
                if self._is_retired:
                    raise
                since, self._unsynced_free = self._unsynced_free, {}
                self._doubtful_free = {i: raw for i, raw in {**begun, **since}.items() if not self.recorded[i]}
            raise

    # -- under `_records` --------------------------------------------------------------------------------------------

    def _withdraw(self, indices: Iterable[int], sequence: int) -> None:
        over = [i for i in indices if self.recorded[i] and self.recorded[i] != mark(self._current(i))]
        if not over:
            return
        seed = self.superblock.record_seed
        free = {i: pack_record(nothing_at(self.generations[i]), RecordState.FREE, sequence, seed(i)) for i in over}
        self.file.write_records(free.items())
        self._unsynced_free.update(free)
        for index in over:
            self.recorded[index] = 0

    def _will_name(self, index: int, generation: int) -> None:
        """Note that the record of slot `index` is about to name the block of `generation`: from now on it may, however
        the write ends.
        """
        self.recorded[index] = mark(generation)
        self._unsynced_free.pop(index, None)
        self._doubtful_free.pop(index, None)

    def _current(self, index: int) -> int:
        """Return the generation of the whole block that is in the slot now; 0 when there is none."""
        return self.generations[index] if self.states[index] in (SlotState.WRITTEN, SlotState.QUARANTINED) else 0

    def _holds(self, index: int, generation: int) -> bool:
        """Return whether the block of `generation` is in the slot now, whole and not quarantined."""
        return self.states[index] == SlotState.WRITTEN and self.generations[index] == generation

    def _sound_header(self, index: int) -> BlockHeader | None:
        """Return what the record on the medium says, if the record is valid and describes the use of the slot that the
        books know.
        """
        if not self.recorded[index]:
            return None
        try:
            raw = self.file.read_record(index)
        except OSError:  # unreadable: it can still be written over
            return None
        header = record_header(raw) if record_holds(raw, self.superblock.record_seed(index)) else None
        return header if header and mark(header.generation) == self.recorded[index] else None
