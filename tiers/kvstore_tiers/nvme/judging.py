"""What the records of slabs say: read in sequence, judged in bulk, kept as columns.

One thread reads while others judge, so the time is that of a sequential read of the record regions or of judging them,
whichever is longer. Owns the judgement of single records and the columns; what follows from several of them
(two with one key, too many bytes) is recovery.py's. Never writes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_tiers.nvme.layout import RECORD_BYTES, RECORD_MAGIC_WORD, RecordState
from kvstore_tiers.nvme.reading_ahead import ReadAhead
from kvstore_tiers.nvme.record_checksums import BATCH_RECORDS, RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.recovered import BlockOrigin

READ_RECORDS = 16384  # 4 MB a read
READ_AHEAD_SLABS = 16
MAX_JUDGES = 4  # threads: NumPy lets go of the GIL, the medium feeds no more
_SPARE_BUFFERS = 2
# Words of a record; docs/format.md gives the bytes.
_HEAD, _GENERATION, _SEQUENCE, _KEY, _PARENT, _ORIGIN, _GROUP_AND_DEPTH, _PAYLOAD = 0, 1, 2, 3, 5, 9, 15, 17
_ORIGIN_WORDS = 6
_GROUP_MASK = np.uint64(0xFFFF)
_MAGIC_MASK = np.uint64(0xFFFFFFFF)
_STATE_SHIFT, _DEPTH_SHIFT = np.uint64(48), np.uint64(32)

Array = npt.NDArray[Any]


@dataclass
class LiveBlocks:
    """Blocks that live records name, in slot order. `origin` is the number of a `BlockOrigin`."""

    slots: Array
    key: Array
    parent: Array
    origin: Array
    depth: Array
    sequence: Array
    payload_bytes: Array
    generation: Array

    @classmethod
    def room(cls, blocks: int) -> LiveBlocks:
        """Columns to be filled, for so many blocks at most."""
        return cls(
            slots=np.empty(blocks, np.uint64),
            key=np.empty((blocks, 2), "<u8"),
            parent=np.empty((blocks, 2), "<u8"),
            origin=np.empty(blocks, np.uint32),
            depth=np.empty(blocks, np.uint32),
            sequence=np.empty(blocks, np.uint64),
            payload_bytes=np.empty(blocks, np.uint64),
            generation=np.empty(blocks, np.uint64),
        )

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, chosen: Any) -> LiveBlocks:
        """Those of a slice (which stay where they are), or of a mask (copied)."""
        return LiveBlocks(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def move_to(self, place: LiveBlocks) -> None:
        """Copy to columns that may overlap these."""
        for column in fields(self):
            np.copyto(getattr(place, column.name), getattr(self, column.name))

    @staticmethod
    def joined(parts: Sequence[LiveBlocks]) -> LiveBlocks:
        names = [column.name for column in fields(LiveBlocks)]
        return LiveBlocks(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass
class JudgedSlab:
    """What one slab's records say. `states` has a RecordState a slot; `withdrawn` are records that must go."""

    slab: Slab
    states: npt.NDArray[np.uint8]
    seen_generations: npt.NDArray[np.uint64]
    payload_bytes: npt.NDArray[np.uint64]
    live: LiveBlocks
    is_cut: bool = False  # some of its blocks were withdrawn after it was judged
    last_sequence: int = 0
    damaged: int = 0
    truncated: int = 0
    withdrawn: set[int] = field(default_factory=set)

    def withdraw(self, slots: Sequence[int]) -> None:
        """These blocks may not stand."""
        self.states[slots] = RecordState.FREE
        self.withdrawn.update(slots)
        self.live = self.live.part(~np.isin(self.live.slots, np.array(slots, np.uint64)))
        self.is_cut = True

    def generations(self) -> npt.NDArray[np.uint64]:
        """The generation of each slot now: that of its block, or one that was never used where there is none."""
        first = np.uint64(self.slab.superblock.first_generation)
        seen: npt.NDArray[np.uint64] = np.maximum(self.seen_generations, first - np.uint64(1))
        if self.withdrawn:
            sound = np.ones(len(seen), dtype=bool)
            sound[list(self.withdrawn)] = False
            seen[~sound] = seen[sound].max(initial=first)  # a damaged record's own generation means nothing
        seen[self.states == RecordState.FREE] += np.uint64(1)
        return seen


class Origins:
    """Numbers for what many blocks share. For several threads at once."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def number(self, words: Array) -> Array:
        """A number for each of the records in these columns, new ones where they name something new."""
        origin, groups = words[_ORIGIN : _ORIGIN + _ORIGIN_WORDS], words[_GROUP_AND_DEPTH] & _GROUP_MASK
        found = np.empty(len(groups), np.uint32)
        left = np.ones(len(groups), dtype=bool)
        while left.any():  # one turn for each origin among them
            at = int(left.argmax())
            same = (groups == groups[at]) & (origin == origin[:, at : at + 1]).all(axis=0)
            raw = origin[:, at].tobytes() + int(groups[at]).to_bytes(2, "little")
            with self._lock:
                number = self._numbers.setdefault(raw, len(self._numbers))
            found[same] = number
            left &= ~same
        return found

    def named(self) -> list[BlockOrigin]:
        return [BlockOrigin(raw[32:48], raw[:32], int.from_bytes(raw[48:], "little")) for raw in self._numbers]


def judge_slabs(
    slabs: Sequence[Slab], origins: Origins, ahead: ReadAhead | None = None
) -> tuple[list[JudgedSlab], LiveBlocks]:
    """Judge all records of `slabs`, some of which may have been read `ahead`: what they say, and all live blocks of
    them in a row.

    Raises OSError when the medium fails.
    """
    every = LiveBlocks.room(sum(slab.superblock.slots for slab in slabs))
    judges = min(MAX_JUDGES, os.cpu_count() or 1)
    scratch = threading.local()
    begins: list[int] = []  # of each slab's first slot, in `every`
    told: list[Future[list[JudgedSlab]]] = []

    def judge(slab: Slab, first: int, records: Array, room: LiveBlocks, buffer: memoryview | None) -> list[JudgedSlab]:
        if not hasattr(scratch, "checksums"):
            scratch.checksums = RecordChecksums()
        try:
            return [
                _judge(slab, first + begin, piece, scratch.checksums, origins, room.part(slice(begin, None)))
                for begin, piece in _batches(records)
            ]
        finally:
            if buffer is not None:
                reader.give_back(buffer)

    slots = 0
    with ThreadPoolExecutor(judges, "nvme-judge") as threads, _Reader(slabs, ahead, judges + _SPARE_BUFFERS) as reader:
        for slab, first, records, buffer in reader:
            room = every.part(slice(slots, slots + len(records)))
            told.append(threads.submit(judge, slab, first, records, room, buffer))
            slots += len(records)
            if first + len(records) == slab.superblock.slots:
                begins.append(len(told))
    return _in_a_row([future.result() for future in told], begins, every)


def _in_a_row(told: list[list[JudgedSlab]], ends: list[int], every: LiveBlocks) -> tuple[list[JudgedSlab], LiveBlocks]:
    """The pieces of each slab as one, and their live blocks moved together: each piece had room for all its slots."""
    judged: list[JudgedSlab] = []
    first = end = room = 0
    for last in ends:
        begin, pieces = end, [piece for part in told[first:last] for piece in part]
        for piece in pieces:
            if end != room:
                piece.live.move_to(every.part(slice(end, end + len(piece.live))))
            end += len(piece.live)
            room += len(piece.states)
        judged.append(_joined(pieces, every.part(slice(begin, end))))
        first = last
    return judged, every.part(slice(end))


def _batches(records: Array) -> Iterator[tuple[int, Array]]:
    for first in range(0, len(records), BATCH_RECORDS):
        yield first, records[first : first + BATCH_RECORDS]


def _judge(
    slab: Slab, first: int, records: Array, checksums: RecordChecksums, origins: Origins, room: LiveBlocks
) -> JudgedSlab:
    """Judge records of the slots from `first` on, and put the live blocks at the beginning of `room`."""
    words = checksums.load(records)
    head = words[_HEAD]
    used = head != 0
    if not used.all():
        used[~used] = records[~used].any(axis=1)  # nothing but zeros: never used
    seeds = np.uint64(slab.superblock.record_seed(first)) + np.arange(len(records), dtype=np.uint64)
    sound = used & (checksums.digests(words, seeds) == words[-1]) & (head & _MAGIC_MASK == RECORD_MAGIC_WORD)
    said = (head >> _STATE_SHIFT).astype(np.uint8)
    sound &= said <= max(RecordState)
    states = np.where(sound, said, 0).astype(np.uint8)
    live = states == RecordState.LIVE
    end = slab.file.length_bytes - slab.superblock.slots_offset
    within = max(0, end // slab.superblock.slot_bytes - first)
    truncated = np.flatnonzero(live[within:]) + within
    live[within:] = False
    states[truncated] = RecordState.FREE
    bad = np.flatnonzero(used & ~sound)
    slots = np.flatnonzero(live)
    blocks = words if len(slots) == len(records) else words[:, slots]
    found = room.part(slice(len(slots)))
    found.slots[:] = slots + first
    found.key[:] = blocks[_KEY : _KEY + 2].T
    found.parent[:] = blocks[_PARENT : _PARENT + 2].T
    found.origin[:] = origins.number(blocks)
    found.depth[:] = blocks[_GROUP_AND_DEPTH] >> _DEPTH_SHIFT
    found.sequence[:] = blocks[_SEQUENCE]
    found.payload_bytes[:] = blocks[_PAYLOAD]
    found.generation[:] = blocks[_GENERATION]
    return JudgedSlab(
        slab,
        states,
        words[_GENERATION].copy(),
        words[_PAYLOAD].copy(),
        found,
        last_sequence=int(words[_SEQUENCE][sound].max(initial=0)),
        damaged=len(bad),
        truncated=len(truncated),
        withdrawn={int(slot) + first for slot in (*bad, *truncated)},
    )


def _joined(pieces: list[JudgedSlab], live: LiveBlocks) -> JudgedSlab:
    if len(pieces) == 1:
        pieces[0].live = live  # it was moved: where it lay others may lie by now
        return pieces[0]
    return JudgedSlab(
        pieces[0].slab,
        np.concatenate([piece.states for piece in pieces]),
        np.concatenate([piece.seen_generations for piece in pieces]),
        np.concatenate([piece.payload_bytes for piece in pieces]),
        live,
        last_sequence=max(piece.last_sequence for piece in pieces),
        damaged=sum(piece.damaged for piece in pieces),
        truncated=sum(piece.truncated for piece in pieces),
        withdrawn=set().union(*(piece.withdrawn for piece in pieces)),
    )


_Piece = tuple[Slab, int, int, memoryview, memoryview | None]  # with its first slot, how many, bytes, and the buffer


class _Reader:
    """Yields (slab, first slot, records, their buffer) of all slabs in order; buffers are to be given back. What was
    read ahead has none.
    """

    def __init__(self, slabs: Sequence[Slab], ahead: ReadAhead | None, buffers: int) -> None:
        self._slabs = slabs
        self._ahead = ahead
        self._empty: SimpleQueue[memoryview | None] = SimpleQueue()
        self._full: SimpleQueue[_Piece | BaseException | None] = SimpleQueue()
        most = min(READ_RECORDS, max((slab.superblock.slots for slab in slabs), default=0))
        for _ in range(buffers):
            self._empty.put(memoryview(mmap.mmap(-1, max(mmap.PAGESIZE, _whole_pages(most * RECORD_BYTES)))))
        self._thread = threading.Thread(target=self._read_all, name="nvme-recover", daemon=True)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._empty.put(None)
        self._thread.join()

    def give_back(self, buffer: memoryview) -> None:
        self._empty.put(buffer)

    def __iter__(self) -> Iterator[tuple[Slab, int, Array, memoryview | None]]:
        while (told := self._full.get()) is not None:
            if isinstance(told, BaseException):
                raise told
            slab, first, count, raw, buffer = told
            del told  # what was read ahead goes when it is judged
            yield slab, first, np.frombuffer(raw, "<u8", count * RECORD_WORDS).reshape(count, RECORD_WORDS), buffer

    def _read_all(self) -> None:
        try:
            for position, slab in enumerate(self._slabs):
                if position % READ_AHEAD_SLABS == 0:
                    for soon in self._slabs[position : position + 2 * READ_AHEAD_SLABS]:
                        soon.file.expect_records()
                slots = slab.superblock.slots
                known = None if self._ahead is None else self._ahead.take(slab.number, slots * RECORD_BYTES)
                for first in range(0, slots, READ_RECORDS):
                    count = min(READ_RECORDS, slots - first)
                    if known is not None:
                        self._full.put((slab, first, count, known[first * RECORD_BYTES :], None))
                        continue
                    buffer = self._empty.get()
                    if buffer is None:
                        return
                    slab.file.read_records_into(buffer[: _whole_pages(count * RECORD_BYTES)], first)
                    self._full.put((slab, first, count, buffer, buffer))
            self._full.put(None)
        except BaseException as error:  # handed to who waits for it
            self._full.put(error)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
