"""What the records of slabs say: read in sequence, judged in bulk, kept as columns.

One thread reads while others judge, so the time is that of a sequential read of the record regions or of judging them,
whichever is longer; what was judged while the daemon loaded its modules is taken as it is. Owns the pass over all
slabs: verdicts.py judges, and what follows from several records (two with one key, too many bytes) is recovery.py's.
Never writes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_tiers.nvme.judging_ahead import JudgingAhead
from kvstore_tiers.nvme.layout import GENERATION_SPREAD, RECORD_BYTES, RecordState
from kvstore_tiers.nvme.read_buffer import read_buffer
from kvstore_tiers.nvme.record_checksums import RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.nvme.verdicts import Array, LiveBlocks, Origins, Verdicts, judge

READ_RECORDS = 16384  # 4 MB a read
READ_AHEAD_SLABS = 16
MAX_JUDGES = 4  # threads: NumPy lets go of the GIL, the medium feeds no more
_SPARE_BUFFERS = 2


@dataclass(kw_only=True)
class JudgedSlab(Verdicts):
    """What all records of a slab say."""

    slab: Slab
    is_cut: bool = False  # some of its blocks were withdrawn after it was judged

    def withdraw(self, slots: Sequence[int]) -> None:
        """These blocks may not stand."""
        self.states[slots] = RecordState.FREE
        self.withdrawn.update(slots)
        self.live = self.live.part(~np.isin(self.live.slots, np.array(slots, np.uint64)))
        self.is_cut = True

    def generations(self) -> npt.NDArray[np.uint64]:
        """The generation of each slot now: that of its block, or one that was never used where there is none."""
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


def judge_slabs(
    slabs: Sequence[Slab], origins: Origins, ahead: JudgingAhead | None = None
) -> tuple[list[JudgedSlab], LiveBlocks]:
    """Judge all records of `slabs`, some of which may have been judged `ahead`: what they say, and all live blocks of
    them in a row.

    Raises OSError when the medium fails.
    """
    every = LiveBlocks.room(sum(slab.superblock.slots for slab in slabs))
    judges = min(MAX_JUDGES, os.cpu_count() or 1)
    scratch = threading.local()
    ends: list[int] = []  # how many pieces there are when a slab has ended
    told: list[Future[list[Verdicts]]] = []

    def look_at(piece: _Piece, room: LiveBlocks) -> list[Verdicts]:
        if piece.verdicts is not None:
            return _brought(piece.verdicts, room)
        if not hasattr(scratch, "checksums"):
            scratch.checksums = RecordChecksums()
        superblock, length_bytes = piece.slab.superblock, piece.slab.file.length_bytes
        try:
            return judge(superblock, length_bytes, piece.first, piece.words(), scratch.checksums, origins, room)
        finally:
            if piece.buffer is not None:
                reader.give_back(piece.buffer)

    slots = 0
    reading = _Reader(slabs, ahead, origins, judges + _SPARE_BUFFERS)
    with ThreadPoolExecutor(judges, "nvme-judge") as threads, reading as reader:
        for piece in reader:
            told.append(threads.submit(look_at, piece, every.part(slice(slots, slots + piece.slots))))
            slots += piece.slots
            if piece.first + piece.slots == piece.slab.superblock.slots:
                ends.append(len(told))
            del piece
    return _in_a_row(slabs, [future.result() for future in told], ends, every)


def _brought(verdicts: list[Verdicts], room: LiveBlocks) -> list[Verdicts]:
    """The live blocks of what was judged elsewhere, at the places that they have in `room`."""
    slots = 0
    for piece in verdicts:
        place = room.part(slice(slots, slots + len(piece.live)))
        piece.live.move_to(place)
        piece.live = place
        slots += len(piece.states)
    return verdicts


def _in_a_row(
    slabs: Sequence[Slab], told: list[list[Verdicts]], ends: list[int], every: LiveBlocks
) -> tuple[list[JudgedSlab], LiveBlocks]:
    """The pieces of each slab as one, and their live blocks moved together: each piece had room for all its slots."""
    judged: list[JudgedSlab] = []
    first = end = room = 0
    for slab, last in zip(slabs, ends, strict=True):
        begin, pieces = end, [piece for part in told[first:last] for piece in part]
        for piece in pieces:
            if end != room:
                piece.live.move_to(every.part(slice(end, end + len(piece.live))))
            end += len(piece.live)
            room += len(piece.states)
        whole = Verdicts.joined(pieces, every.part(slice(begin, end)))
        judged.append(JudgedSlab(slab=slab, **vars(whole)))
        first = last
    return judged, every.part(slice(end))


class _Piece(NamedTuple):
    """Some slots of a slab: their records and the buffer they lie in, or what was found out about all of them."""

    slab: Slab
    first: int
    slots: int
    records: memoryview | None = None
    buffer: memoryview | None = None
    verdicts: list[Verdicts] | None = None

    def words(self) -> Array:
        raw = np.frombuffer(self.records or b"", "<u8", self.slots * RECORD_WORDS)
        return raw.reshape(self.slots, RECORD_WORDS)


class _Reader:
    """Yields what is known of all slabs in order: verdicts where they were judged ahead, else records in parts, with
    their buffers, which are to be given back. What was read ahead has none.
    """

    def __init__(self, slabs: Sequence[Slab], ahead: JudgingAhead | None, origins: Origins, buffers: int) -> None:
        self._slabs = slabs
        self._ahead = ahead
        self._origins = origins
        self._empty: SimpleQueue[memoryview | None] = SimpleQueue()
        self._full: SimpleQueue[_Piece | BaseException | None] = SimpleQueue()
        most = min(READ_RECORDS, max((slab.superblock.slots for slab in slabs), default=0))
        for _ in range(buffers):
            self._empty.put(read_buffer(max(mmap.PAGESIZE, _whole_pages(most * RECORD_BYTES))))
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
        while (told := self._full.get()) is not None:
            if isinstance(told, BaseException):
                raise told
            yield told
            del told  # what was read ahead goes when it is judged

    def _read_all(self) -> None:
        try:
            for position, slab in enumerate(self._slabs):
                if position % READ_AHEAD_SLABS == 0:
                    for soon in self._slabs[position : position + 2 * READ_AHEAD_SLABS]:
                        soon.file.expect_records()
                if not self._tell_of(slab):
                    return
            self._full.put(None)
        except BaseException as error:  # handed to who waits for it
            self._full.put(error)

    def _tell_of(self, slab: Slab) -> bool:
        """False when nobody wants more."""
        superblock, ahead = slab.superblock, self._ahead
        if ahead is not None and (verdicts := ahead.take(superblock, self._origins)) is not None:
            self._full.put(_Piece(slab, 0, superblock.slots, verdicts=verdicts))
            return True
        known = None if ahead is None else ahead.take_records(superblock)
        for first in range(0, superblock.slots, READ_RECORDS):
            count = min(READ_RECORDS, superblock.slots - first)
            if known is not None:
                self._full.put(_Piece(slab, first, count, known[first * RECORD_BYTES :]))
                continue
            buffer = self._empty.get()
            if buffer is None:
                return False
            slab.file.read_records_into(buffer[: _whole_pages(count * RECORD_BYTES)], first)
            self._full.put(_Piece(slab, first, count, buffer, buffer))
        return True


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
