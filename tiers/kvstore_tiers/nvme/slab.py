"""One slab in memory: which slots are out, in which generation, and what the record on the medium says of each.

Owns the books of one slab file and keeps its records in step. 25 bytes a slot; keys are not kept here.
Two sides use it. The control thread allocates and frees, touching memory alone. I/O threads and the group commit touch
records, under `_records`, the lock that orders "withdraw the old record" before "overwrite the slot" before "publish
the new record", whoever does each.
Invariants: `recorded[i]` is the generation that the live record of slot i on the medium names, 0 when there is none; a
slot whose record is live is never overwritten; a record is published only for the generation that is still out.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

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
)
from kvstore_tiers.nvme.slab_file import SlabFile

Column = npt.NDArray[np.uint64]


class SlotState(IntEnum):
    FREE = 0
    ALLOCATED = 1  # handed out, its image is not whole
    WRITTEN = 2  # its image is whole
    QUARANTINED = 3


@dataclass(frozen=True, slots=True)
class Location:
    """Where the index says a block is."""

    slab: int
    index: int
    generation: int


class Slab:
    """The books of slab `superblock.number`. Its file is made, or its predecessor reformatted, at the first write."""

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
        self.number = superblock.number
        self.in_use = 0
        self.states = bytearray(superblock.slots)
        self.generations = array("Q", [superblock.first_generation]) * superblock.slots
        self.payload_bytes = array("Q", bytes(8 * superblock.slots))
        self.recorded = array("Q", bytes(8 * superblock.slots))
        self._returned = array("I")
        self._untouched = 0
        self._directory = directory
        self._file = file
        self._replaces = replaces
        self._require_direct = require_direct
        self._making = threading.Lock()
        self._making_error: OSError | None = None
        self._records = threading.Lock()

    # -- the control thread's side -----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return self._making_error is None and (bool(self._returned) or self._untouched < self.superblock.slots)

    def allocate(self) -> Slot:
        """A free slot; the caller has looked at `has_room`."""
        if self._returned:
            index = self._returned.pop()
        else:
            index = self._untouched
            self._untouched += 1
        self.states[index] = SlotState.ALLOCATED
        self.in_use += 1
        return self.slot(index)

    def free(self, slot: Slot) -> int:
        """Take a slot back, quarantined ones too; its index. The next use has a higher generation."""
        index = self.require_out(slot)
        self.states[index] = SlotState.FREE
        self.generations[index] += 1
        self._returned.append(index)
        self.in_use -= 1
        return index

    def slot(self, index: int) -> Slot:
        """Slot `index` in its present generation."""
        superblock = self.superblock
        return Slot(self.number, superblock.slot_offset(index), superblock.slot_bytes, self.generations[index])

    def require_out(self, slot: Slot) -> int:
        """The index of an allocated slot. Raises RuntimeError when this use of it is not allocated."""
        index = self.superblock.index_of(slot.offset)
        if not self.states[index] or self.generations[index] != slot.generation:
            raise RuntimeError(f"{slot} is not allocated")
        return index

    def indices_in(self, state: SlotState) -> list[int]:
        """The slots in a state."""
        found: list[int] = np.flatnonzero(np.frombuffer(self.states, np.uint8) == state).tolist()
        return found

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
        """The slab whose file it takes over at its first write; None when it has a file, or will get a new one."""
        return self._replaces

    @property
    def is_stillborn(self) -> bool:
        """Its file could not be made, and nothing of it is on the medium."""
        return self._making_error is not None and self._file is None and self._replaces is None

    def made_file(self) -> tuple[SlabFile, list[tuple[bytes, Location]]]:
        """The file, made or reformatted now if need be, and what the reformat made the index wrong about.

        Raises OSError; the slab then hands out no more slots.
        """
        with self._making:
            if self._file is not None:
                return self._file, []
            if self._making_error is not None:
                raise self._making_error
            try:
                old = self._replaces
                if old is None:
                    self._file = SlabFile.create(self._directory, self.superblock, require_direct=self._require_direct)
                    return self._file, []
                withdrawn = old.retire()
                old.file.reformat(self.superblock)
            except OSError as error:
                self._making_error = error
                raise
            self._file, self._replaces = old.file, None
            return self._file, withdrawn

    def retire(self) -> list[tuple[bytes, Location]]:
        """The file is about to get another geometry: forget the live records, and say what they were."""
        with self._records:
            indices = [index for index, generation in enumerate(self.recorded) if generation]
            withdrawn = [self._recorded_block(index) for index in indices]
            self.recorded = array("Q", bytes(8 * self.superblock.slots))
            return withdrawn

    def withdraw(self, indices: Iterable[int], sequence: int) -> list[tuple[bytes, Location]]:
        """Overwrite live records of these slots whose generation is over; the blocks they named, for the index."""
        with self._records:
            return self._withdraw(indices, sequence)

    def publish(self, blocks: Iterable[tuple[int, BlockHeader]], sequence: int) -> list[tuple[bytes, Location]]:
        """Write live records of the blocks that are still in their slots; those blocks, for the index."""
        with self._records:
            current = [(i, header) for i, header in blocks if self._holds(i, header.generation)]
            seed = self.superblock.record_seed
            self.file.write_records((i, pack_record(h, RecordState.LIVE, sequence, seed(i))) for i, h in current)
            for index, header in current:
                self.recorded[index] = header.generation
            return [(h.key, Location(self.number, i, h.generation)) for i, h in current]

    def publish_quarantine(self, indices: Iterable[int], sequence: int) -> list[tuple[bytes, Location]]:
        """Mark the records of quarantined slots; the blocks that are no longer served, for the index.

        A slot that was freed meanwhile is in the next batch; its block must be gone after this one all the same.
        """
        with self._records:
            indices = set(indices)
            current = [index for index in indices if self.states[index] == SlotState.QUARANTINED]
            freed = self._withdraw(indices.difference(current), sequence)
            named = {index for index in current if self.recorded[index]}
            withdrawn = [self._recorded_block(index) for index in current if index in named]
            marked = []
            for index in current:
                generation, seed = self.generations[index], self.superblock.record_seed(index)
                header = record_header(self.file.read_record(index)) if index in named else nothing_at(generation)
                marked.append((index, pack_record(header, RecordState.QUARANTINED, sequence, seed)))
                self.recorded[index] = generation
            self.file.write_records(marked)
            return freed + withdrawn

    def note_written(self, index: int, header: BlockHeader) -> None:
        """A slot's image is whole."""
        self.payload_bytes[index] = header.payload_bytes
        self.states[index] = SlotState.WRITTEN

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._replaces is not None:
            self._replaces.close()

    # -- recovery ----------------------------------------------------------------------------------------------------

    def adopt(self, states: bytes, generations: Column, payload_bytes: Column) -> None:
        """Take over what recovery found, a SlotState, a generation and a payload length a slot."""
        self.states = bytearray(states)
        self.generations = _column(generations)
        self.payload_bytes = _column(payload_bytes)
        taken = np.frombuffer(states, np.uint8) != SlotState.FREE
        self.recorded = _column(np.where(taken, np.asarray(generations), 0))
        self.in_use = int(np.count_nonzero(taken))
        self._returned = array("I", np.flatnonzero(~taken)[::-1].astype(np.uint32).tobytes())
        self._untouched = len(states)

    # -- under `_records` --------------------------------------------------------------------------------------------

    def _withdraw(self, indices: Iterable[int], sequence: int) -> list[tuple[bytes, Location]]:
        over = [i for i in indices if self.recorded[i] and self.recorded[i] != self._current(i)]
        if not over:
            return []
        withdrawn = [self._recorded_block(index) for index in over]
        seed = self.superblock.record_seed
        nothing = [(index, nothing_at(self.generations[index])) for index in over]
        self.file.write_records((i, pack_record(h, RecordState.FREE, sequence, seed(i))) for i, h in nothing)
        for index in over:
            self.recorded[index] = 0
        return withdrawn

    def _current(self, index: int) -> int:
        """The generation of a whole block that is in the slot now; 0 when there is none."""
        return self.generations[index] if self.states[index] in (SlotState.WRITTEN, SlotState.QUARANTINED) else 0

    def _holds(self, index: int, generation: int) -> bool:
        """Whether that block is in the slot now, whole and not quarantined."""
        return self.states[index] == SlotState.WRITTEN and self.generations[index] == generation

    def _recorded_block(self, index: int) -> tuple[bytes, Location]:
        raw = self.file.read_record(index)
        sound = record_holds(raw, self.superblock.record_seed(index))
        key = record_header(raw).key if sound else bytes(16)
        return key, Location(self.number, index, self.recorded[index])


def _column(values: Column) -> array[int]:
    return array("Q", np.ascontiguousarray(values, np.uint64).tobytes())
