"""Recovery: from slab files back to books, whatever the last process was doing when it died.

Owns the judgement of records: which block is in which slot. Reads superblocks and record regions only, so its time is
that of a sequential read of the records (256 bytes a slot); slot images are judged when they are read.
Steps: drop what cannot be trusted (records that do not hold, slots behind the end of a truncated file, older copies of
a key, slabs beyond the capacity), withdraw it on the medium, sync, make the index agree, hand the rest out.
Invariants: idempotent, since each step only withdraws and a second run finds less to do; of two records with one key
the one with the higher sequence wins, because its slot image was on the medium before its record was written, while
the other's slot may have been overwritten since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import BlockHeader
from kvstore_tiers import failpoints
from kvstore_tiers.base import Slot
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.index import Entry, KeyIndex
from kvstore_tiers.nvme.layout import (
    RECORD_BYTES,
    Records,
    RecordState,
    nothing_at,
    pack_record,
    record_header,
    record_holds,
)
from kvstore_tiers.nvme.slab import Location, Slab, SlotState
from kvstore_tiers.nvme.slab_file import SlabFile
from kvstore_tiers.nvme.space import SlabSpace

_SLOT_STATES = np.array([SlotState.FREE, SlotState.WRITTEN, SlotState.QUARANTINED], dtype=np.uint8)


@dataclass
class RecoveryReport:
    """What recovery found and what it did about it."""

    blocks: int = 0
    quarantined_slots: int = 0
    damaged_records: int = 0
    truncated_blocks: int = 0
    superseded_blocks: int = 0
    dropped_slabs: int = 0
    damaged_slabs: int = 0
    unfinished_slabs: int = 0
    index_rebuilt: bool = False
    last_sequence: int = 0

    def sentence(self) -> str:
        """What was lost, for people; empty when nothing was."""
        losses = {
            "damaged records": self.damaged_records,
            "blocks behind the end of truncated slabs": self.truncated_blocks,
            "slabs beyond the capacity": self.dropped_slabs,
            "slabs without a superblock": self.damaged_slabs,
        }
        lost = ", ".join(f"{count} {what}" for what, count in losses.items() if count)
        return f"recovery dropped {lost}" if lost else ""


@dataclass
class _Judged:
    """What one slab's records say. `states` has a RecordState a slot; `withdrawn` are records that must go."""

    slab: Slab
    records: Records
    states: npt.NDArray[np.uint8]
    withdrawn: set[int] = field(default_factory=set)

    def live(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.states == RecordState.LIVE)

    def withdraw(self, index: int) -> None:
        self.states[index] = RecordState.FREE
        self.withdrawn.add(index)

    def sound(self) -> npt.NDArray[np.bool_]:
        """Which slots have a record that stands, or none."""
        mask = np.ones(len(self.records), dtype=bool)
        mask[list(self.withdrawn)] = False
        return mask

    def generations(self) -> npt.NDArray[np.uint64]:
        """The generation of each slot now: that of its block, or one that was never used where there is none."""
        first = np.uint64(self.slab.superblock.first_generation)
        seen: npt.NDArray[np.uint64] = np.maximum(self.records["generation"], first - np.uint64(1))
        sound = self.sound()
        seen[~sound] = seen[sound].max(initial=first)  # a damaged record's own generation means nothing
        seen[self.states == RecordState.FREE] += np.uint64(1)
        return seen


@dataclass
class _LiveBlocks:
    """All live blocks as columns, 40 bytes a block: position of the slab in the list judged, slot, key, sequence."""

    slabs: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    high: npt.NDArray[np.uint64]  # the key as two numbers whose order is that of its bytes
    low: npt.NDArray[np.uint64]
    sequences: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, judged: list[_Judged]) -> _LiveBlocks:
        live = [one.live() for one in judged]
        none = [np.empty(0, np.int64)]
        keys = b"".join(one.records["key"][slots].tobytes() for one, slots in zip(judged, live, strict=True))
        words = np.frombuffer(keys, dtype=">u8").astype(np.uint64).reshape(-1, 2)
        sequences = [one.records["sequence"][slots] for one, slots in zip(judged, live, strict=True)]
        return cls(
            slabs=np.repeat(np.arange(len(judged)), [len(slots) for slots in live]),
            slots=np.concatenate(live or none),
            high=words[:, 0],
            low=words[:, 1],
            sequences=np.concatenate(sequences or [np.empty(0, np.uint64)]),
        )


def open_slabs(directory: TierDirectory, space: SlabSpace, *, require_direct: bool) -> RecoveryReport:
    """Open every slab file and count it; nothing of them is handed out yet. A file without geometry is put aside."""
    report = RecoveryReport(unfinished_slabs=directory.remove_unfinished())
    for number in directory.numbers():
        file = SlabFile.open(directory, number, require_direct=require_direct)
        if isinstance(file, str):
            directory.slab_path(number).rename(directory.slab_path(number, "damaged"))
            report.damaged_slabs += 1
        else:
            space.adopt(Slab(directory, file.superblock, file=file, require_direct=require_direct))
    space.damaged_bytes = directory.damaged_bytes()
    return report


class Recovery:
    """One pass over the slabs that `open_slabs` opened."""

    def __init__(self, space: SlabSpace, index: KeyIndex, report: RecoveryReport) -> None:
        self._space = space
        self._index = index
        self._report = report

    def run(self) -> None:
        """Judge, repair, make the index agree, open the slabs for use. Raises OSError when the medium fails."""
        judged = [self._judge(slab) for slab in self._space.slabs.values()]
        self._drop_superseded(judged)
        judged = self._drop_excess(judged)
        failpoints.hit("nvme.recover-before-repair")
        for one in judged:
            self._repair(one)
        failpoints.hit("nvme.recover-before-index")
        self._mend_index(judged)
        self._space.open_room(one.slab for one in judged)
        for one in judged:
            self._report.blocks += len(one.live())
            self._report.quarantined_slots += int(np.count_nonzero(one.states == RecordState.QUARANTINED))

    def _judge(self, slab: Slab) -> _Judged:
        records = slab.file.read_records()
        words = np.frombuffer(records.tobytes(), dtype=np.uint64).reshape(len(records), -1)
        judged = _Judged(slab, records, np.where(words.any(axis=1), records["state"], 0).astype(np.uint8))
        raw = memoryview(records.tobytes())
        for index in np.flatnonzero(words.any(axis=1)).tolist():
            record = bytes(raw[index * RECORD_BYTES : (index + 1) * RECORD_BYTES])
            if not record_holds(record, slab.superblock.record_seed(index)):
                judged.withdraw(index)
                self._report.damaged_records += 1
        end = slab.file.length_bytes - slab.superblock.slots_offset
        within = max(0, end // slab.superblock.slot_bytes)
        last = int(records["sequence"][judged.sound()].max(initial=0))
        self._report.last_sequence = max(self._report.last_sequence, last)
        live = judged.live()
        for index in live[live >= within].tolist():
            judged.withdraw(index)
            self._report.truncated_blocks += 1
        return judged

    def _drop_superseded(self, judged: list[_Judged]) -> None:
        """Of several records with one key, keep the newest."""
        blocks = _LiveBlocks.of(judged)
        order = np.lexsort((blocks.sequences, blocks.low, blocks.high))
        high, low = blocks.high[order], blocks.low[order]
        older = order[:-1][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
        for position in older.tolist():
            judged[blocks.slabs[position]].withdraw(int(blocks.slots[position]))
            self._report.superseded_blocks += 1

    def _drop_excess(self, judged: list[_Judged]) -> list[_Judged]:
        """The capacity was made smaller: give up slabs, those with the fewest bytes first."""
        kept = sorted(judged, key=lambda one: len(one.live()) * one.slab.superblock.slot_bytes)
        while kept and self._space.used_bytes > self._space.capacity_bytes:
            slab = kept.pop(0).slab
            slab.file.path.unlink()
            slab.close()
            self._space.discard(slab)
            self._report.dropped_slabs += 1
        return sorted(kept, key=lambda one: one.slab.number)

    def _repair(self, one: _Judged) -> None:
        slab, generations = one.slab, one.generations()
        if one.withdrawn:
            sequence, seed = self._report.last_sequence + 1, slab.superblock.record_seed
            nothing = [(index, nothing_at(int(generations[index]))) for index in one.withdrawn]
            slab.file.write_records((i, pack_record(h, RecordState.FREE, sequence, seed(i))) for i, h in nothing)
        with suppress(OSError):  # no room: the slots behind the end fail when they are written
            slab.file.restore_length()
        slab.file.sync()
        slab.adopt(_SLOT_STATES[one.states].tobytes(), generations, one.records["payload_bytes"])

    def _mend_index(self, judged: list[_Judged]) -> None:
        blocks = sum(len(one.live()) for one in judged)
        untouched = not any(one.withdrawn for one in judged) and not self._report.dropped_slabs
        if untouched and not self._index.is_fresh and self._index.count() == blocks:
            return
        self._index.resize(self._space.index_budget_bytes)
        self._index.rebuild(_sorted_entries(judged))
        self._report.index_rebuilt = True


def _sorted_entries(judged: list[_Judged]) -> Iterator[Entry]:
    """Every live block in key order, as the index wants it."""
    blocks = _LiveBlocks.of(judged)
    for position in np.lexsort((blocks.low, blocks.high)).tolist():
        one, index = judged[blocks.slabs[position]], int(blocks.slots[position])
        record = one.records[index]
        yield record["key"].tobytes(), Location(one.slab.number, index, int(record["generation"]))


def recovered_blocks(slab: Slab, last_sequence: int) -> Iterator[tuple[Slot, BlockHeader]]:
    """The blocks of a slab that were in it at recovery and that nobody freed meanwhile."""
    records = slab.file.read_records()
    raw = memoryview(records.tobytes())
    for index in np.flatnonzero(records["state"] == RecordState.LIVE).tolist():
        still_there = slab.states[index] == SlotState.WRITTEN and slab.recorded[index] == slab.generations[index]
        if still_there and records["sequence"][index] <= last_sequence:
            yield (
                slab.slot(index),
                record_header(bytes(raw[index * RECORD_BYTES : (index + 1) * RECORD_BYTES])),
            )
