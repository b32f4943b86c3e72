"""Verdicts on the records of a slab, judged in bulk and kept as columns.

Owns the judgement of single records and the columns; record_scan.py goes over all slabs, recovery.py decides what
follows from several records (two with one key, too many bytes). Never reads a file, never writes.
"""

from __future__ import annotations

import ctypes as ct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of, native
from kvstore_tiers.nvme.layout import CODEC_SHIFT, RECORD_MAGIC_WORD, STORED_MASK, RecordState, Superblock
from kvstore_tiers.nvme.record_checksums import BATCH_RECORDS, RecordChecksums
from kvstore_tiers.recovered import BlockOrigin

# Words of a record; docs/format.md gives the bytes.
_HEAD, _GENERATION, _SEQUENCE, _KEY, _PARENT, _ORIGIN = 0, 1, 2, 3, 5, 9
_GROUP_AND_DEPTH, _ERROR, _PAYLOAD, _STORED, _KEPT, _DATA_KEY = 15, 16, 17, 20, 22, 23  # the codec is in the first
_ORIGIN_WORDS = 6
_ORIGINS_MAX = 256  # among records that are judged at once by compiled code, which compares one by one
_GROUP_MASK = np.uint64(0xFFFF)
_MAGIC_MASK = np.uint64(0xFFFFFFFF)
_STATE_SHIFT, _DEPTH_SHIFT = np.uint64(48), np.uint64(32)
_LAST_STATE = int(max(RecordState))
_CODEC_MASK, _CODEC_UP, _LENGTH_MASK = np.uint64(0xFFFF0000), np.uint64(CODEC_SHIFT - 16), np.uint64(STORED_MASK)

Array = npt.NDArray[Any]


@dataclass
class LiveBlocks:
    """The stored blocks of one or more slabs as arrays with an entry for each block, in slot order. `slots` are slot
    numbers. `key` and `parent` have the shape (blocks, 2): the two 64-bit halves of a key. `origin` is the number of
    the block's tenant, fingerprint and layer group (see `Origins`).
    """

    slots: Array
    key: Array
    parent: Array
    origin: Array
    depth: Array
    sequence: Array
    payload_bytes: Array
    generation: Array
    kept: Array
    error: Array

    @classmethod
    def room(cls, blocks: int, make: Callable[..., Array] = np.empty) -> LiveBlocks:
        """Return arrays with room for `blocks` entries, whose values are not set. `make(shape, dtype)` makes each
        array.
        """
        return cls(
            slots=make(blocks, np.uint64),
            key=make((blocks, 2), "<u8"),
            parent=make((blocks, 2), "<u8"),
            origin=make(blocks, np.uint32),
            depth=make(blocks, np.uint32),
            sequence=make(blocks, np.uint64),
            payload_bytes=make(blocks, np.uint64),
            generation=make(blocks, np.uint64),
            kept=make(blocks, np.uint64),
            error=make(blocks, np.uint32),
        )

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, chosen: Any) -> LiveBlocks:
        """Return the entries that `chosen` selects: a slice gives views of the arrays, a boolean mask gives copies."""
        return LiveBlocks(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def move_to(self, place: LiveBlocks) -> None:
        """Copy all entries to the arrays of `place`, which has as many entries. The two may overlap."""
        for column in fields(self):
            np.copyto(getattr(place, column.name), getattr(self, column.name))

    def copied(self) -> LiveBlocks:
        """Return copies of the arrays."""
        return LiveBlocks(*(getattr(self, column.name).copy() for column in fields(self)))

    @staticmethod
    def joined(parts: Sequence[LiveBlocks]) -> LiveBlocks:
        names = [column.name for column in fields(LiveBlocks)]
        return LiveBlocks(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass
class Verdicts:
    """The verdicts on consecutive records of a slab, as arrays with an entry for each slot. `states` are RecordStates,
    `stored` are `stored_word`s. `live` has the stored blocks, `withdrawn` the slots whose record must be removed.
    `damaged` and `truncated` are counts of records.
    """

    states: npt.NDArray[np.uint8]
    seen_generations: npt.NDArray[np.uint64]
    stored: npt.NDArray[np.uint64]
    live: LiveBlocks
    last_sequence: int = 0
    damaged: int = 0
    truncated: int = 0
    withdrawn: set[int] = field(default_factory=set)

    @staticmethod
    def joined(pieces: Sequence[Verdicts], room: LiveBlocks) -> Verdicts:
        """Join `pieces`, the verdicts on consecutive slots, into one object. The stored blocks of each piece are in the
        arrays `room`, from the place of the piece's first slot on; they are moved together to the beginning.
        """
        if len(pieces) == 1:
            return pieces[0]
        live = slots = 0
        for piece in pieces:
            if live != slots:
                piece.live.move_to(room.part(slice(live, live + len(piece.live))))
            live += len(piece.live)
            slots += len(piece.states)
        return Verdicts(
            np.concatenate([piece.states for piece in pieces]),
            np.concatenate([piece.seen_generations for piece in pieces]),
            np.concatenate([piece.stored for piece in pieces]),
            room.part(slice(live)),
            last_sequence=max(piece.last_sequence for piece in pieces),
            damaged=sum(piece.damaged for piece in pieces),
            truncated=sum(piece.truncated for piece in pieces),
            withdrawn=set().union(*(piece.withdrawn for piece in pieces)),
        )


class Origins:
    """A table of block origins (tenant, fingerprint, layer group and the number of the key that encrypts them, which
    many blocks share) that gives each a number. Any thread may use it.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def number(self, words: Array) -> Array:
        """Return the number of the origin of each record, uint32 (n,). `words` are the records as uint64 (32, n). New
        origins get new numbers.
        """
        origin, groups = words[_ORIGIN : _ORIGIN + _ORIGIN_WORDS], words[_GROUP_AND_DEPTH] & _GROUP_MASK
        data_keys = words[_DATA_KEY]
        found = np.empty(len(groups), np.uint32)
        left = np.ones(len(groups), dtype=bool)
        while left.any():  # one turn for each origin among them
            at = int(left.argmax())
            equal, same = origin == origin[:, at : at + 1], groups == groups[at]
            same &= data_keys == data_keys[at]
            number = self.number_of(_origin_of(words[:, at]))
            if equal.all() and same.all():  # as a rule
                found.fill(number)
                break
            same &= equal.all(axis=0)
            found[same] = number
            left &= ~same
        return found

    def number_of(self, raw: bytes) -> int:
        """Return the number of the origin `raw`, 58 bytes: fingerprint, tenant, layer group, number of the key. A new
        origin gets a new number.
        """
        with self._lock:
            return self._numbers.setdefault(raw, len(self._numbers))

    def raw(self) -> list[bytes]:
        """Return all origins in the order of their numbers, each as the 58 bytes of `number_of`."""
        return list(self._numbers)

    def named(self) -> list[BlockOrigin]:
        return [BlockOrigin(raw[32:48], raw[:32], int.from_bytes(raw[48:50], "little")) for raw in self._numbers]

    def data_keys(self) -> list[bytes]:
        """Return for each origin the number of the key that encrypts its blocks, 8 bytes; zeros if they are not
        encrypted.
        """
        return [raw[50:] for raw in self._numbers]


def _origin_of(record: Array) -> bytes:
    """Return the origin of `record`, its 32 words, as `Origins.number_of` takes it."""
    group = int(record[_GROUP_AND_DEPTH] & _GROUP_MASK).to_bytes(2, "little")
    return bytes(record[_ORIGIN : _ORIGIN + _ORIGIN_WORDS].tobytes() + group + record[_DATA_KEY].tobytes())


class Judge(NamedTuple):
    """A judge of the records of one slab file, which has `superblock` and is `length_bytes` bytes long. It uses
    `checksums`, which no other thread may use meanwhile, and `origins`, a table of tenants and fingerprints.
    """

    superblock: Superblock
    length_bytes: int
    checksums: RecordChecksums
    origins: Origins

    def judge(self, first: int, records: Array, room: LiveBlocks) -> list[Verdicts]:
        """Judge `records`, uint64 (n, 32), of the slots from number `first` on: by compiled code where it is loaded,
        else by NumPy, with equal results. Return the verdicts in pieces. The stored blocks of a piece are written to
        the arrays `room`, from the place of the piece's first slot on."""
        library = native.library
        if library is not None and records.flags.c_contiguous:
            whole = self._compiled(library, first, records, room)
            if whole is not None:
                return [whole]
        begins = range(0, len(records), BATCH_RECORDS)
        return [
            self._judge(first + begin, records[begin : begin + BATCH_RECORDS], room.part(slice(begin, None)))
            for begin in begins
        ]

    def _within(self, first: int) -> int:
        """Return how many of the slots from number `first` on are within the file."""
        superblock = self.superblock
        return max(0, (self.length_bytes - superblock.slots_offset) // superblock.slot_bytes - first)

    def _compiled(self, library: ct.CDLL, first: int, records: Array, room: LiveBlocks) -> Verdicts | None:
        """Return the verdicts on all `records`, made by compiled code; None if they have too many origins."""
        count = len(records)
        states, bad, origins = np.empty(count, np.uint8), np.empty(count, np.uint32), np.empty(_ORIGINS_MAX, np.uint32)
        generations, stored, counts = (np.empty(size, np.uint64) for size in (count, count, 5))
        columns = np.array([address_of(getattr(room, column.name)) for column in fields(room)], np.uint64)
        filled = [address_of(array) for array in (states, generations, stored, columns, bad, origins)]
        if library.kv_judge_records(
            address_of(records), count, self.superblock.record_seed(first), first, self._within(first),
            *filled, len(origins), address_of(counts),
        ):  # fmt: skip
            return None
        live, damaged, truncated, known, last = counts.tolist()
        found = room.part(slice(live))
        numbers = [self.origins.number_of(_origin_of(records[at])) for at in origins[:known].tolist()]
        if numbers != [*range(known)]:
            found.origin[:] = np.array(numbers, np.uint32)[found.origin]
        withdrawn = {first + at for at in (*bad[:damaged].tolist(), *bad[count - truncated :].tolist())}
        return Verdicts(states, generations, stored, found, last, damaged, truncated, withdrawn)

    def _judge(self, first: int, records: Array, room: LiveBlocks) -> Verdicts:
        superblock = self.superblock
        seeds = np.uint64(superblock.record_seed(first)) + np.arange(len(records), dtype=np.uint64)
        words, digests = self.checksums.load(records, seeds)
        head = words[_HEAD]
        used = head != 0
        if not used.all():
            used[~used] = records[~used].any(axis=1)  # nothing but zeros: never used
        sound = used & (digests == words[-1]) & (head & _MAGIC_MASK == RECORD_MAGIC_WORD)
        said = (head >> _STATE_SHIFT).astype(np.uint8)
        sound &= said <= _LAST_STATE
        states = np.where(sound, said, 0).astype(np.uint8)
        live = states == RecordState.LIVE
        within = self._within(first)
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
        found.origin[:] = self.origins.number(blocks)
        found.depth[:] = blocks[_GROUP_AND_DEPTH] >> _DEPTH_SHIFT
        found.sequence[:] = blocks[_SEQUENCE]
        found.payload_bytes[:] = blocks[_PAYLOAD]
        found.generation[:] = blocks[_GENERATION]
        found.kept[:] = blocks[_KEPT]
        found.error[:] = blocks[_ERROR] >> _DEPTH_SHIFT
        return Verdicts(
            states,
            words[_GENERATION].copy(),
            words[_STORED] & _LENGTH_MASK | (words[_GROUP_AND_DEPTH] & _CODEC_MASK) << _CODEC_UP,
            found,
            last_sequence=int(words[_SEQUENCE][sound].max(initial=0)),
            damaged=len(bad),
            truncated=len(truncated),
            withdrawn={int(slot) + first for slot in (*bad, *truncated)},
        )
