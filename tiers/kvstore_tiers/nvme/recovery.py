"""Recovery: from slab files to the state in memory, wherever the last process died.

Reads superblocks and record regions only, in sequence (256 bytes a slot). Slot images are judged when they are read.
Owns what follows from the records (verdicts.py says what each of them is). Steps: drop what cannot be trusted (records
that do not hold, slots behind the end of a truncated file, older copies of a key, slabs beyond the capacity), withdraw
it on the medium, sync, hand the rest out.
Invariants: idempotent, since each step only withdraws and a second run finds less to do; of two records with one key
the one with the higher sequence wins, because its slot image was on the medium before its record was written, while
the other's slot may have been overwritten since.
"""

from __future__ import annotations

import errno
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvstore_cuda.host_copies import load_if_compiled
from kvstore_proto.arena import BlockHeader
from kvstore_tiers import failpoints
from kvstore_tiers.base import CANNOT_WRITE, Slot
from kvstore_tiers.heap import expect
from kvstore_tiers.key_table import KeyTable
from kvstore_tiers.nvme.data_keys import DataKeys
from kvstore_tiers.nvme.directory import Seal, TierDirectory
from kvstore_tiers.nvme.directory_files import DirectoryUnusable
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstore_tiers.nvme.layout import (
    CODEC_SHIFT,
    RECORD_BYTES,
    STORED_MASK,
    RecordState,
    nothing_at,
    pack_record,
    record_header,
)
from kvstore_tiers.nvme.record_scan import ScannedSlab, scan_slabs
from kvstore_tiers.nvme.slab import Slab, SlotState
from kvstore_tiers.nvme.slab_file import SlabFile
from kvstore_tiers.nvme.slot_words import mark
from kvstore_tiers.nvme.space import SlabSpace
from kvstore_tiers.nvme.verdicts import Array, LiveBlocks, Origins
from kvstore_tiers.recovered import RecoveredBlocks

_REPAIR_THREADS = 8  # they wait for the medium
_HEAP_BYTES_A_SLOT = 256  # what books of all kinds take of a block, and what making them takes meanwhile
_MANY_SLOTS = 1 << 16  # checking fewer records takes less time than loading compiled code
_SLOT_STATES = np.array([SlotState.FREE, SlotState.WRITTEN, SlotState.QUARANTINED], dtype=np.uint8)


@dataclass
class RecoveryReport:
    """The counts of what was found and what was dropped when a tier was opened on the slab files of a former
    process. `sealed_blocks` are encrypted; `lost_blocks` were, under keys that were destroyed.
    """

    blocks: int = 0
    quarantined_slots: int = 0
    damaged_records: int = 0
    truncated_blocks: int = 0
    superseded_blocks: int = 0
    dropped_slabs: int = 0
    damaged_slabs: int = 0
    sealed_blocks: int = 0
    lost_blocks: int = 0
    last_sequence: int = 0

    def sentence(self) -> str:
        """Return a sentence for the operator about what recovery lost; "" if nothing was lost."""
        losses = {
            "damaged records": self.damaged_records,
            "blocks behind the end of truncated slabs": self.truncated_blocks,
            "slabs beyond the capacity": self.dropped_slabs,
            "slabs without a superblock": self.damaged_slabs,
            "blocks that no key opens": self.lost_blocks,
        }
        lost = ", ".join(f"{count} {what}" for what, count in losses.items() if count)
        return f"recovery dropped {lost}" if lost else ""


def open_slabs(directory: TierDirectory, space: SlabSpace, *, require_direct: bool) -> RecoveryReport:
    """Open every slab file of `directory` and add it to `space`, which does not hand out its slots yet. A file without
    a valid superblock is renamed to `.damaged`. Return a report with the number of these files.
    """
    report = RecoveryReport()
    opened = {n: SlabFile.open(directory, n, require_direct=require_direct) for n in directory.numbers()}
    directory.keep_format()  # all are ours: from here on the directory may be changed
    directory.remove_unfinished()
    files = []
    for number, file in opened.items():
        if isinstance(file, str):
            with suppress(OSError):  # where nothing can be written it stays, and is not looked at
                directory.put_aside(number)
            report.damaged_slabs += 1
        else:
            files.append(file)
    slots = sum(file.superblock.slots for file in files)
    if slots >= _MANY_SLOTS:
        expect(slots * _HEAP_BYTES_A_SLOT)
        threading.Thread(target=load_if_compiled, name="nvme-load", daemon=True).start()
    for file in files:
        space.adopt(Slab(directory, file.superblock, file=file, require_direct=require_direct))
    space.charges["damaged"] = directory.damaged_bytes()
    return report


class Recovery:
    """The search for stored blocks in the slab files that `open_slabs` opened. If damaged records could not be removed
    from the medium, `owed` has the error, and nothing may be written before `make_up` succeeds.
    """

    def __init__(
        self,
        directory: TierDirectory,
        space: SlabSpace,
        seal: Seal,
        report: RecoveryReport,
        ahead: EarlyRecordScan | None = None,
        keys: DataKeys | None = None,
    ) -> None:
        self._keys = keys
        self.owed: OSError | None = None
        self._making_up = threading.Lock()
        self._judged: list[ScannedSlab] = []
        self._ahead = ahead
        self._directory = directory
        self._space = space
        self._seal = seal
        self._report = report
        self._origins = Origins()

    def run(self) -> RecoveredBlocks:
        """Judge the records of all slabs, remove bad records from the medium, make the slots usable, and return the
        stored blocks. If the medium cannot be written, the blocks are returned all the same, and `make_up` must be
        called. Raises OSError if the medium cannot be read, DirectoryUnusable if the keys of encrypted blocks are lost.
        """
        judged, live = scan_slabs(list(self._space.slabs.values()), self._origins, self._ahead)
        for one in judged:
            self._report.last_sequence = max(self._report.last_sequence, one.last_sequence)
            self._report.damaged_records += one.damaged
            self._report.truncated_blocks += one.truncated
        if self._reveal(judged):
            live = LiveBlocks.joined([one.live for one in judged])
        table: KeyTable | None = self._drop_superseded(judged, live)
        judged = self._withdraw_what_must_go(judged)
        if self._report.dropped_slabs or any(one.is_cut for one in judged):
            live, table = LiveBlocks.joined([one.live for one in judged]) if judged else LiveBlocks.room(0), None
        self._judged = judged
        if self.owed is None:
            self._try(self._repair_all)
        for one in judged:
            one.slab.adopt(_SLOT_STATES[one.states].tobytes(), one.generations(), one.stored)
        failpoints.hit("nvme.recover-after-repair")
        blocks = _columns(judged, live, self._origins, table)
        self._space.open_room(one.slab for one in judged)
        self._report.blocks = len(blocks)
        for one in judged:
            self._report.quarantined_slots += int(np.count_nonzero(one.states == RecordState.QUARANTINED))
        self._let_go()
        return blocks

    @property
    def is_on_medium(self) -> bool:
        """True if the recovered blocks survive a power loss: this process has synced their records, or the former
        process left a seal file which says so.
        """
        return self.owed is None or self._seal.held

    def make_up(self) -> None:
        """Remove the bad records that `run` could not remove from the medium, and sync. Without such records it does
        nothing. Raises OSError if it fails again.
        """
        with self._making_up:
            if self.owed is None:
                return
            for one in self._judged:
                if one.slab.file.why_read_only is not None:
                    one.slab.file.open_to_write()
            self._begin_changes()
            if not self._seal.held:
                for one in self._judged:
                    _write_again(one)
            self._repair_all()
            self.owed = None
            self._let_go()

    def _let_go(self) -> None:
        """Forget the verdicts, 110 bytes a block, once the medium is as they say."""
        if self.owed is None:
            self._judged = []

    def _withdraw_what_must_go(self, judged: list[ScannedSlab]) -> list[ScannedSlab]:
        """Remove the seal, and slabs beyond the capacity. Return the slabs that are left."""
        self.owed = next((one.slab.file.why_read_only for one in judged if one.slab.file.why_read_only), None)
        if self.owed is not None:
            return judged
        self._try(self._begin_changes)
        return judged if self.owed is not None else self._drop_excess(judged)

    def _begin_changes(self) -> None:
        self._directory.sync_names()
        self._seal.remove()

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            self.owed = error

    def _repair_all(self) -> None:
        failpoints.hit("nvme.recover-before-repair")
        with ThreadPoolExecutor(_REPAIR_THREADS, thread_name_prefix="nvme-repair") as threads:
            list(threads.map(self._repair, self._judged))

    def _reveal(self, judged: list[ScannedSlab]) -> bool:
        """Give encrypted blocks their own keys again, and withdraw the blocks that no key opens, which none ever will.
        Return whether there were any of these."""
        sealed = {origin: number for origin, number in enumerate(self._origins.data_keys()) if any(number)}
        keys = {origin: self._keys.numbered(number) for origin, number in sealed.items()} if self._keys else {}
        lost = [origin for origin, key in keys.items() if key is None]
        for one in judged if sealed else ():
            live = one.live
            self._report.sealed_blocks += int(np.isin(live.origin, list(sealed)).sum())
            for origin, key in keys.items():
                ours = live.origin == origin
                if key is not None:
                    live.key[ours] = key.unveil_column(live.key[ours])
                    live.parent[ours] = key.unveil_column(live.parent[ours])
            is_lost = np.isin(live.origin, lost)
            self._report.lost_blocks += int(is_lost.sum())
            if is_lost.any() and self._keys is not None and self._keys.are_complete:
                one.withdraw(live.slots[is_lost].tolist())
        if self._report.lost_blocks and self._keys is not None and not self._keys.are_complete:
            raise DirectoryUnusable(
                f"{self._directory.path} has {self._report.lost_blocks} encrypted blocks and their keys are not here: "
                "restore the file `keys` and set encryption.key_file, or run `kvstored serve --new-secret` once, which "
                "drops them"
            )
        return self._report.lost_blocks > 0

    def _drop_superseded(self, judged: list[ScannedSlab], live: LiveBlocks) -> KeyTable:
        """Keep the newest of several records with one key, and withdraw the older ones. Return a table of the keys."""
        table = KeyTable(live.key)
        if not table.may_repeat:
            return table
        words = live.key[:, 0]
        ordered = np.sort(words)
        suspects = np.flatnonzero(np.isin(words, ordered[1:][ordered[1:] == ordered[:-1]]))
        slabs = np.repeat(np.arange(len(judged)), [len(one.live) for one in judged])[suspects]
        slots, (high, low) = live.slots[suspects], live.key[suspects].T
        order = np.lexsort((live.sequence[suspects], low, high))
        high, low = high[order], low[order]
        older = order[:-1][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
        found: defaultdict[int, list[int]] = defaultdict(list)
        self._report.superseded_blocks += len(older)
        for slab, slot in zip(slabs[older].tolist(), slots[older].tolist(), strict=True):
            found[slab].append(slot)
        for number, withdrawn in found.items():
            judged[number].withdraw(withdrawn)
        return table

    def _drop_excess(self, judged: list[ScannedSlab]) -> list[ScannedSlab]:
        """Give up slabs, those with the fewest bytes first, when the capacity was made smaller."""
        kept = sorted(judged, key=lambda one: len(one.live) * one.slab.superblock.slot_bytes)
        if self._space.used_bytes <= self._space.capacity_bytes:
            return judged
        while kept and self._space.used_bytes > self._space.capacity_bytes:
            slab = kept[0].slab
            try:
                slab.file.path.unlink()
            except OSError as error:
                if error.errno not in CANNOT_WRITE:
                    raise
                self.owed = error
                break
            kept.pop(0)
            slab.close()
            self._space.discard(slab)
            self._report.dropped_slabs += 1
        return sorted(kept, key=lambda one: one.slab.number)

    def _repair(self, one: ScannedSlab) -> None:
        """Withdraw the records that must not stay, and make durable what the last process wrote and perhaps did not
        sync.

        After a clean close there is nothing of either kind, and the medium is left alone.
        """
        slab = one.slab
        is_whole = slab.file.is_whole
        if self._seal.held and is_whole and not one.withdrawn:
            return
        if one.withdrawn:
            generations, seed = one.generations(), slab.superblock.record_seed
            nothing = [(index, nothing_at(int(generations[index]))) for index in one.withdrawn]
            sequence = self._report.last_sequence + 1
            slab.file.write_records((i, pack_record(h, RecordState.FREE, sequence, seed(i))) for i, h in nothing)
        if not is_whole:
            with suppress(OSError):  # no room: the slots behind the end fail when they are written
                slab.file.restore_length()
        slab.file.sync()


def _write_again(one: ScannedSlab) -> None:
    """Write the records of a slab over themselves: after a sync that failed the kernel takes pages for written that the
    medium did not get, and the next sync answers for nothing. Raises OSError, also where a record is lost by now."""
    records, live = one.slab.file.rewrite_records(), one.states == RecordState.LIVE
    found = records["state"][live], records["generation"][live]
    if not (np.all(found[0] == RecordState.LIVE) and np.array_equal(found[1], one.generations()[live])):
        raise OSError(
            errno.EIO, "records are gone that the start found: a restart drops their blocks", str(one.slab.file.path)
        )


def _columns(judged: list[ScannedSlab], live: LiveBlocks, origins: Origins, table: KeyTable | None) -> RecoveredBlocks:
    """Return all live blocks as columns, ordered by slab and slot; `table` is one of their keys."""
    counts = [len(one.live) for one in judged]
    geometries = [one.slab.superblock for one in judged]

    def spread(values: list[int]) -> Array:
        return np.repeat(np.array(values, np.uint32 if max(values, default=0) < 1 << 32 else np.uint64), counts)

    pairs = zip([one.live.slots for one in judged], geometries, strict=True)
    offsets = [slots * np.uint64(each.slot_bytes) + np.uint64(each.slots_offset) for slots, each in pairs]
    return RecoveredBlocks(
        origins.named(),
        key=live.key,
        parent=live.parent,
        origin=live.origin,
        depth=live.depth,
        payload_bytes=live.payload_bytes,
        container=spread([geometry.number for geometry in geometries]),
        offset=np.concatenate(offsets) if offsets else np.empty(0, np.uint64),
        nbytes=spread([geometry.slot_bytes for geometry in geometries]),
        generation=live.generation,
        kept=live.kept if live.kept.any() else None,
        error=live.error.view(np.float32) if live.error.any() else None,
        table=table,
        **_forms(judged),
    )


def _forms(judged: list[ScannedSlab]) -> dict[str, Any]:
    """The columns of codecs and lengths, where a block has a codec."""
    if not any((one.stored > STORED_MASK).any() for one in judged):
        return {}
    stored = np.concatenate([one.stored[one.live.slots.astype(np.int64)] for one in judged])
    codec = (stored >> np.uint64(CODEC_SHIFT)).astype(np.uint8)  # without SEALED
    return {
        "codec": codec,
        "stored_bytes": np.where(codec, stored & np.uint64(STORED_MASK), np.uint64(0)),
    }


def recovered_blocks(slab: Slab, last_sequence: int) -> Iterator[tuple[Slot, BlockHeader]]:
    """Yield the slot and the header of each block of `slab` that recovery found and that was not freed since.
    `last_sequence` is the highest commit number that recovery found; records of later commits are new blocks.
    """
    records = slab.file.read_records()
    raw = memoryview(records.tobytes())
    for index in np.flatnonzero(records["state"] == RecordState.LIVE).tolist():
        still_there = slab.states[index] == SlotState.WRITTEN and slab.recorded[index] == mark(slab.generations[index])
        if still_there and records["sequence"][index] <= last_sequence:
            yield (
                slab.slot(index),
                record_header(bytes(raw[index * RECORD_BYTES : (index + 1) * RECORD_BYTES])),
            )


def still_there(slabs: dict[int, Slab], blocks: RecoveredBlocks) -> Array:
    """Return a boolean array with an entry for each of `blocks`: True if the block was neither freed nor quarantined
    since recovery. `slabs` has the slabs by number.
    """
    found = np.zeros(len(blocks), dtype=bool)
    for first, last in _runs_of(blocks.container):
        slab = slabs.get(int(blocks.container[first]))
        if slab is not None:
            geometry = slab.superblock
            slots = (blocks.offset[first:last] - np.uint64(geometry.slots_offset)) // np.uint64(geometry.slot_bytes)
            written = np.frombuffer(slab.states, np.uint8)[slots] == SlotState.WRITTEN
            generations = np.asarray(slab.generations)[slots]
            found[first:last] = written & (generations == blocks.generation[first:last])
    return found


def _runs_of(column: Array) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each run of equal values."""
    if len(column):
        begins = [0, *(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist(), len(column)]
        yield from pairwise(begins)
