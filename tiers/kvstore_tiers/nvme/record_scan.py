"""The scan over all slabs' records: read in sequence, judged in bulk, kept as columns.

One thread reads while others judge, so the scan takes as long as the slower of the two. A process that started while
the daemon loaded its modules (early_scan.py) does a part. verdicts.py judges single records, recovery.py decides what
follows from several (two with one key, too many bytes). Never writes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_tiers.nvme.early_scan import EarlyRecordScan, SlabReport
from kvstore_tiers.nvme.layout import GENERATION_SPREAD, RECORD_BYTES, RecordState
from kvstore_tiers.nvme.record_checksums import RecordChecksums, words_of
from kvstore_tiers.nvme.region_reader import FileStamp, SlabSlots, read_buffer, whole_pages
from kvstore_tiers.nvme.shared_columns import SharedColumns
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.nvme.verdicts import Judge, LiveBlocks, Origins, Verdicts

READ_RECORDS = 16384  # 4 MB a read
READ_AHEAD_SLABS = 4
MAX_SCAN_THREADS = 4  # threads: NumPy releases the GIL; the medium keeps no more of them busy
_SPARE_BUFFERS = 2


@dataclass(kw_only=True)
class ScannedSlab(Verdicts):
    """The verdicts on all records of one slab: which slots have a block, which records are damaged, and which must be
    removed. `is_cut` becomes True by `withdraw`.
    """

    slab: Slab
    is_cut: bool = False  # some of its blocks were withdrawn after the scan

    def withdraw(self, slots: Sequence[int]) -> None:
        """Give up the blocks in the slots with the numbers `slots`: their records must be removed from the medium, and
        `live` no longer contains them.
        """
        self.states[slots] = RecordState.FREE
        self.withdrawn.update(slots)
        self.live = self.live.part(~np.isin(self.live.slots, np.array(slots, np.uint64)))
        self.is_cut = True

    def generations(self) -> npt.NDArray[np.uint64]:
        """Return the generation of each slot, uint64 of the shape (slots,): the block's generation, or one that was
        never used if the slot is free.
        """
        superblock, one = self.slab.superblock, np.uint64(1)
        unused, unsound = self.seen_generations == 0, list(self.withdrawn)
        seen: npt.NDArray[np.uint64] = np.maximum(self.seen_generations, np.uint64(superblock.first_generation) - one)
        if unsound or unused.any():
            firsts = superblock.first_generations()
            seen[unused] = firsts[unused] - one
            if unsound:  # a damaged record's own generation means nothing
                sound = np.ones(len(seen), dtype=bool)
                sound[unsound] = False
                past = max(int(seen[sound].max(initial=0)), superblock.first_generation + GENERATION_SPREAD)
                seen[unsound] = firsts[unsound] + np.uint64(past - superblock.first_generation)
        seen[self.states == RecordState.FREE] += one
        return seen


def scan_slabs(
    slabs: Sequence[Slab], origins: Origins, ahead: EarlyRecordScan | None = None
) -> tuple[list[ScannedSlab], LiveBlocks]:
    """Read and judge all records of `slabs`, except for slabs that the early scan `ahead` has judged already. `origins`
    numbers the tenants and fingerprints. Return the verdicts for each slab, and the stored blocks of all slabs as
    arrays. Raises OSError if the medium fails.
    """
    scan = _Scan(slabs, origins)
    if ahead is not None:
        scan.share_with(ahead)
    scan.judge((position for position in range(len(slabs)) if not scan.is_done(position)), _scan_threads())
    return scan.result()


def _scan_threads() -> int:
    return min(MAX_SCAN_THREADS, os.cpu_count() or 1)


class _Scan:
    """The verdicts so far, by slab. All live blocks are in one set of columns; each slab has a part of it."""

    def __init__(self, slabs: Sequence[Slab], origins: Origins) -> None:
        self._slabs = slabs
        self._origins = origins
        self._ends = np.cumsum([0, *(slab.superblock.slots for slab in slabs)]).tolist()
        self._room = LiveBlocks.room(self._ends[-1])
        self._verdicts: list[Verdicts | None] = [None] * len(slabs)

    def is_done(self, position: int) -> bool:
        return self._verdicts[position] is not None

    def share_with(self, ahead: EarlyRecordScan) -> None:
        """Judge slabs that the early scan has not claimed, while its reports on the others arrive. All verdicts are in
        its memory then. Nothing happens if it found other slabs.
        """
        layout, reports = ahead.begun()
        if layout != [SlabSlots(slab.superblock.number, slab.superblock.slots) for slab in self._slabs]:
            return
        size = len(self._slabs), self._ends[-1]
        columns = SharedColumns.within(ahead.memory(SharedColumns.nbytes(*size)), *size)
        self._room = columns.live
        positions = {slab.superblock.number: position for position, slab in enumerate(self._slabs)}
        claimed = (positions[number] for number in iter(ahead.claim, None) if number in positions)
        with ThreadPoolExecutor(1, "nvme-scan") as beside:
            judged = beside.submit(self.judge, claimed, max(1, _scan_threads() - 1))  # that process is one
            for report in reports:
                if report.slab in positions:
                    self._take(positions[report.slab], report, columns)
            judged.result()
        if not ahead.has_ended:
            self._leave_shared()

    def judge(self, positions: Iterable[int], threads: int) -> None:
        """Read and judge these slabs. Raises OSError when the medium fails."""
        scratch = threading.local()
        pieces_of: defaultdict[int, list[Future[list[Verdicts]]]] = defaultdict(list)

        def judge_piece(piece: _Piece) -> list[Verdicts]:
            try:
                if not hasattr(scratch, "checksums"):
                    scratch.checksums = RecordChecksums()
                slab, begin = self._slabs[piece.position], self._ends[piece.position] + piece.first
                room = self._room.part(slice(begin, begin + piece.slots))
                judge = Judge(slab.superblock, slab.file.length_bytes, scratch.checksums, self._origins)
                return judge.judge(piece.first, words_of(piece.buffer, piece.slots), room)
            finally:
                reader.give_back(piece.buffer)

        with (
            ThreadPoolExecutor(threads, "nvme-judge") as pool,
            _Reader(self._slabs, positions, threads + _SPARE_BUFFERS) as reader,
        ):
            for piece in reader:
                pieces_of[piece.position].append(pool.submit(judge_piece, piece))
        for position, pieces in pieces_of.items():
            verdicts = [verdict for piece in pieces for verdict in piece.result()]
            self._verdicts[position] = Verdicts.joined(verdicts, self._room_of(position))

    def result(self) -> tuple[list[ScannedSlab], LiveBlocks]:
        """Return the verdicts on all slabs, and their live blocks moved together."""
        judged: list[ScannedSlab] = []
        end = 0
        for position, (slab, whole) in enumerate(zip(self._slabs, self._verdicts, strict=True)):
            assert whole is not None
            place = self._room.part(slice(end, end + len(whole.live)))
            if end != self._ends[position]:
                whole.live.move_to(place)
            whole.live = place
            end += len(place)
            judged.append(ScannedSlab(slab=slab, **vars(whole)))
        return judged, self._room.part(slice(end))

    def _room_of(self, position: int) -> LiveBlocks:
        return self._room.part(slice(self._ends[position], self._ends[position + 1]))

    def _take(self, position: int, report: SlabReport, columns: SharedColumns) -> None:
        """Use the verdicts of the early scan, unless the slab file has changed since."""
        slab = self._slabs[position]
        ours = columns.of(position, self._ends[position], slab.superblock.slots)
        with suppress(OSError):
            if report.stamp != FileStamp.at(os.fstat(slab.file.slot_fd)):
                return
            if ours.superblocks.tobytes() != slab.superblock.pack():
                return
            live = ours.live.part(slice(report.live))
            numbers = [self._origins.number_of(raw) for raw in report.origins]
            if numbers != [*range(len(numbers))]:
                live.origin[:] = np.array(numbers, np.uint32)[live.origin]
            self._verdicts[position] = Verdicts(
                ours.states,
                ours.seen_generations,
                ours.stored,
                live,
                report.last_sequence,
                report.damaged,
                report.truncated,
                set(report.withdrawn),
            )

    def _leave_shared(self) -> None:
        """Copy all verdicts to memory of this process: a scan that hangs may still write to the other."""
        self._room = self._room.copied()
        for position, whole in enumerate(self._verdicts):
            if whole is not None:
                whole.live = self._room_of(position).part(slice(len(whole.live)))
                whole.states, whole.stored = whole.states.copy(), whole.stored.copy()
                whole.seen_generations = whole.seen_generations.copy()


class _Piece(NamedTuple):
    """Some slots of the slab at `position`, and the buffer with their records."""

    position: int
    first: int
    slots: int
    buffer: memoryview


class _Reader:
    """Yields the records of slabs in pieces. The caller gives each piece's buffer back."""

    def __init__(self, slabs: Sequence[Slab], positions: Iterable[int], buffers: int) -> None:
        self._slabs = slabs
        self._positions = positions
        self._empty: SimpleQueue[memoryview | None] = SimpleQueue()
        self._full: SimpleQueue[_Piece | BaseException | None] = SimpleQueue()
        most = min(READ_RECORDS, max((slab.superblock.slots for slab in slabs), default=0))
        for _ in range(buffers):
            self._empty.put(read_buffer(max(mmap.PAGESIZE, whole_pages(most * RECORD_BYTES))))
        self._thread = threading.Thread(target=self._read_all, name="nvme-recover", daemon=True)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._empty.put(None)
        self._thread.join()

    def give_back(self, buffer: memoryview) -> None:
        self._empty.put(buffer)

    def __iter__(self) -> Iterator[_Piece]:
        while (piece := self._full.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def _read_all(self) -> None:
        try:
            for position in self._positions:
                for soon in self._slabs[position + 1 : position + 1 + READ_AHEAD_SLABS]:
                    soon.file.expect_records()
                if not self._read(position):
                    return
            self._full.put(None)
        except BaseException as error:  # raised in the thread that iterates
            self._full.put(error)

    def _read(self, position: int) -> bool:
        """Read the slab at `position`. Return False when the scan has ended early."""
        slab = self._slabs[position]
        slots = slab.superblock.slots
        for first in range(0, slots, READ_RECORDS):
            count = min(READ_RECORDS, slots - first)
            buffer = self._empty.get()
            if buffer is None:
                return False
            slab.file.read_records_into(buffer[: whole_pages(count * RECORD_BYTES)], first)
            self._full.put(_Piece(position, first, count, buffer))
        return True
