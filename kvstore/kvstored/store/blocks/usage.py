"""The usage rows record how often and when blocks were used, so that a later process can apply the uses to its copies.

The place of a row follows from the slot of the copy: the slots of a container are numbered, and 64 of them make one
value. Blocks that were stored together are therefore written together, and no key has to be looked up. A row has 8
bytes of a hash of its block's key, so that another block in the same slot gets no use from it, and a checksum. Digests,
one number for each bucket of values, show which values differ from the saved ones: a block needs no memory for this,
and no request does any work. Saved times are wall clock times, because the monotonic clock begins anew with the
machine. All work is done in steps: a generator yields where other tasks may run, and returns its result. The module
does no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstored.store.blocks.index import Residency
from kvstored.store.blocks.rows import as_array
from kvstored.tier_set import holding

GROUP_SLOTS = 64
ROW = np.dtype([("block", "<u8"), ("last_use_ns", "<u8"), ("accesses", "<u2"), ("check", "<u4")])
# A row of the index, its generation when it was looked for, and what was saved of it.
USE = np.dtype([("row", "<i8"), ("generation", "<u4"), ("last_use_ns", "<i8"), ("accesses", "<u2")])
GROUP_BYTES = GROUP_SLOTS * ROW.itemsize
_GROUP_KEY = struct.Struct(">II")  # container, number of the group
_STEP_ROWS, _STEP_KEYS, _STEP_VALUES = 1 << 14, 1 << 10, 1 << 6  # between two pauses: some 0.5 ms
_PART_ROWS = 1 << 15  # written between two scans: 4 ms to put them together
_ROWS_A_BUCKET, _LEAST_BUCKETS = 16, 1 << 10
_ACCESSES_MAX = 0xFFFF
_SPREAD, _FOLD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
Numbers = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Entry = tuple[bytes, bytes]


class Known(NamedTuple):
    """The saved uses of blocks that are still stored, an array of dtype `USE`. `wrong` counts saved rows that were left
    out, since their checksum is wrong."""

    uses: npt.NDArray[np.void]
    wrong: int


class UsageRows:
    """A component that saves how often and when the blocks in one tier were used, so that this survives a restart. With
    `alone` it leaves out blocks that have a copy in the durable tier."""

    def __init__(self, residency: Residency, tier: int, *, alone: bool = False) -> None:
        self._residency, self._tier, self._alone = residency, tier, alone
        self.saved: Numbers = np.empty(0, np.uint64)  # the digests of what is saved; empty where that is nothing

    # What is to be saved

    def digests(self, touched_after_ns: int | None = None) -> Generator[None, None, Numbers]:
        """Return an array with one digest for each bucket (a fixed group) of the values to save; a bucket whose digest
        has changed must be saved again. A block used after `touched_after_ns` (monotonic) counts as used once more, so
        its bucket differs. The generator yields where other tasks may run."""
        residency, columns = self._residency, self._residency.rows
        buckets = max(_LEAST_BUCKETS, 2 ** (residency.copies[self._tier].blocks // _ROWS_A_BUCKET).bit_length())
        found = np.zeros(buckets, np.uint64)
        for here in self._steps(_STEP_ROWS, used=True):
            groups, numbers = self._places(here)
            last_ns = np.frombuffer(columns.last_access_ns, np.uint64)[here]
            accesses = np.frombuffer(columns.accesses, np.uint16)[here].astype(np.uint64)
            if touched_after_ns is not None:
                accesses += last_ns > touched_after_ns
            generation = as_array(residency.copies[self._tier].generation)[here].astype(np.uint64)
            digest = _mixed(_mixed(groups * np.uint64(GROUP_SLOTS) + numbers + generation * _FOLD) ^ last_ns) + accesses
            np.add.at(found, _bucket(groups, buckets), _mixed(digest))
            yield
        return found

    def parts(self, digests: Numbers) -> list[Numbers]:
        """Return the numbers of the buckets whose digest in `digests` differs from the saved one, as arrays that are
        small enough to be saved one after another in little memory."""
        is_like = self.saved if len(self.saved) == len(digests) else np.zeros(len(digests), np.uint64)
        changed = np.flatnonzero(is_like != digests).astype(np.uint64)
        return [
            changed[first : first + _PART_ROWS // GROUP_SLOTS]
            for first in range(0, len(changed), _PART_ROWS // GROUP_SLOTS)
        ]

    def entries(self, part: Numbers, buckets: int, wall_less_monotonic_ns: int) -> Generator[None, None, list[Entry]]:
        """Return the keys and values to save for the buckets with the numbers `part`, of `buckets` in all.
        `wall_less_monotonic_ns` is the wall clock minus the monotonic clock. The generator yields where other tasks may
        run."""
        chosen = np.zeros(buckets, bool)
        chosen[part] = True
        found: list[tuple[Numbers, Numbers, npt.NDArray[np.void]]] = []
        for step in self._steps(_STEP_ROWS, used=True):
            picked = np.flatnonzero(chosen[_bucket(self._places(step)[0], buckets)])
            for first in range(0, len(picked), _STEP_KEYS):
                here = step[picked[first : first + _STEP_KEYS]]
                here = here[self._are_here(np.frombuffer(self._residency.rows.mask, np.uint8)[here])]
                groups, numbers = self._places(here)
                mine = chosen[_bucket(groups, buckets)]  # of those that have not moved since
                here, groups, numbers = here[mine], groups[mine], numbers[mine]
                rows = self._row_values(here, wall_less_monotonic_ns)
                rows["check"] = _check(groups, numbers, rows)
                found.append((groups, numbers, rows))
                yield
            yield
        if not found:
            return []
        groups, numbers, rows = (np.concatenate(column) for column in zip(*found, strict=True))
        each, where = np.unique(groups, return_inverse=True)
        values = np.zeros((len(each), GROUP_SLOTS), ROW)
        values[where, numbers] = rows
        keys = (_GROUP_KEY.pack(group >> 32, group & 0xFFFFFFFF) for group in each.tolist())
        return [(key, value.tobytes()) for key, value in zip(keys, values, strict=True)]

    def _row_values(self, here: Rows, wall_less_monotonic_ns: int) -> npt.NDArray[np.void]:
        columns = self._residency.rows
        rows = np.zeros(len(here), ROW)
        rows["block"] = self._hashes(here)
        last_ns = np.frombuffer(columns.last_access_ns, np.uint64)[here].astype(np.int64) + wall_less_monotonic_ns
        rows["last_use_ns"] = np.maximum(last_ns, 0)
        rows["accesses"] = np.frombuffer(columns.accesses, np.uint16)[here]
        return rows

    # What was saved

    def known(self, entries: Sequence[Entry]) -> Generator[None, None, Known]:
        """Return the saved uses of blocks that are in the tier. `entries` are the saved keys and values, sorted by key.
        The generator yields where other tasks may run.
        """
        whole = [each for each in entries if len(each[0]) == _GROUP_KEY.size and len(each[1]) == GROUP_BYTES]
        wrong = GROUP_SLOTS * (len(entries) - len(whole))
        keys = np.frombuffer(b"".join([key for key, _ in whole]), ">u4").reshape(-1, 2).astype(np.uint64)
        saved = keys[:, 0] << np.uint64(32) | keys[:, 1]
        values = np.empty((len(whole), GROUP_SLOTS), ROW)
        for first in range(0, len(whole), _STEP_VALUES):
            some = b"".join([value for _, value in whole[first : first + _STEP_VALUES]])
            values[first : first + _STEP_VALUES] = np.frombuffer(some, ROW).reshape(-1, GROUP_SLOTS)
            yield
        parts = []
        for here in self._steps(_STEP_KEYS) if len(saved) else ():
            groups, numbers = self._places(here)
            at = np.minimum(np.searchsorted(saved, groups), len(saved) - 1)
            found = values[at, numbers.astype(np.int64)]
            is_there = (saved[at] == groups) & (found["accesses"] > 0)
            is_whole = found["check"] == _check(groups, numbers, found)
            wrong += int((is_there & ~is_whole).sum())
            mine = is_there & is_whole & (found["block"] == self._hashes(here))
            uses = np.empty(int(mine.sum()), USE)
            uses["row"] = here[mine]
            uses["generation"] = np.frombuffer(self._residency.rows.generation, np.uint32)[here[mine]]
            uses["last_use_ns"], uses["accesses"] = found["last_use_ns"][mine], found["accesses"][mine]
            parts.append(uses)
            yield
        return Known(np.concatenate(parts) if parts else np.empty(0, USE), wrong)

    def apply(self, known: Known, now_ns: int, wall_ns: int, adopted_ns: int) -> Generator[None, None, int]:
        """Set the last use and the number of uses of blocks to the values in `known`, and return the number of blocks.
        A block that was used after `adopted_ns` keeps that use as its last one. If ages are longer than the time for
        which the monotonic clock has run, all are scaled down together, so their order holds. Make the policies anew
        afterwards."""
        parts = [known.uses[first : first + _STEP_ROWS] for first in range(0, len(known.uses), _STEP_ROWS)]
        longest_ns, blocks = 1, 0
        for part in parts:
            longest_ns = max(longest_ns, wall_ns - int(part["last_use_ns"].min()))
            yield
        scale = min(1.0, now_ns / longest_ns)
        for part in parts:
            blocks += self._apply_some(part, now_ns, wall_ns, adopted_ns, scale)
            yield
        return blocks

    def _apply_some(self, uses: npt.NDArray[np.void], now_ns: int, wall_ns: int, adopted_ns: int, scale: float) -> int:
        columns = self._residency.rows
        still = np.frombuffer(columns.generation, np.uint32)[uses["row"]] == uses["generation"]
        still &= holding(np.frombuffer(columns.mask, np.uint8)[uses["row"]], self._tier)
        uses = uses[still]
        rows, found = uses["row"], uses["accesses"].astype(np.int64)
        ages_ns = np.maximum(wall_ns - uses["last_use_ns"], now_ns - adopted_ns)
        if scale < 1.0:
            ages_ns = (ages_ns * scale).astype(np.int64)
        accesses, last_ns = np.frombuffer(columns.accesses, np.uint16), np.frombuffer(columns.last_access_ns, np.uint64)
        is_used = last_ns[rows] > adopted_ns
        since = np.where(is_used, accesses[rows].astype(np.int64), 0)
        accesses[rows] = np.clip(found + since, 1, _ACCESSES_MAX)
        last_ns[rows] = np.where(is_used, last_ns[rows], np.maximum(now_ns - ages_ns, 0).astype(np.uint64))
        return len(rows)

    # Columns

    def _steps(self, rows: int, *, used: bool = False) -> Generator[Rows, None, None]:
        """Yield the rows of blocks that are in the tier, in arrays from up to `rows` rows of the table each. `used`:
        only rows of blocks that were used since they were recovered; the other rows have nothing to save."""
        residency = self._residency
        for first in range(0, residency.rows.capacity, rows):
            # No view of a column is kept over a step: with one, the column cannot grow, and no block can be stored.
            is_here = self._are_here(np.frombuffer(residency.rows.mask, np.uint8)[first : first + rows])
            if used:
                is_here = is_here & (np.frombuffer(residency.rows.accesses, np.uint16)[first : first + rows] > 0)
            here = first + np.flatnonzero(is_here)
            if len(here):
                yield here

    def _are_here(self, mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        is_here = holding(mask, self._tier)
        if self._alone and self._residency.durable >= 0:
            is_here = is_here & ~holding(mask, self._residency.durable)
        return is_here

    def _places(self, here: Rows) -> tuple[Numbers, Numbers]:
        """Return the group of each row's slot, and the number of the slot in the group."""
        copies = self._residency.copies[self._tier]
        containers = as_array(copies.container)[here].astype(np.uint64)
        sizes = np.maximum(np.frombuffer(copies.nbytes, np.uint32)[here], ALIGNMENT_BYTES).astype(np.uint64)
        slots = as_array(copies.offset)[here] // sizes
        return containers << np.uint64(32) | slots // np.uint64(GROUP_SLOTS), slots % np.uint64(GROUP_SLOTS)

    def _hashes(self, here: Rows) -> Numbers:
        keys, bulk_key = self._residency.rows.keys, self._residency.rows.bulk_key
        packed = b"".join([keys[row] or bulk_key(row) for row in here.tolist()])
        return hashes_of(packed)


def hashes_of(keys: bytes) -> Numbers:
    """Return an array with a 64-bit hash of each of the packed `keys` (16 bytes each), by which saved uses name their
    blocks."""
    halves = np.frombuffer(keys, "<u8").reshape(-1, 2)
    hashes: Numbers = _mixed(_mixed(halves[:, 1].copy()) + halves[:, 0])
    return hashes


def described(key: bytes, value: bytes) -> dict[str, object]:
    """Return the fields of one saved value by name, to be shown to people. Raises ValueError or struct.error for bytes
    of another form.
    """
    container, group = _GROUP_KEY.unpack(key)
    rows = np.frombuffer(value, ROW)
    numbers = np.arange(len(rows), dtype=np.uint64)
    groups = np.full(len(rows), container << 32 | group, np.uint64)
    is_whole = rows["check"] == _check(groups, numbers, rows)
    return {
        "container": container, "first slot": group * GROUP_SLOTS,
        "wrong rows": int(((rows["accesses"] > 0) & ~is_whole).sum()),
        "slots": [
            {"slot": int(number), "block": f"{rows['block'][number]:016x}", "accesses": int(rows["accesses"][number]),
             "last use": float(rows["last_use_ns"][number]) / 1e9}
            for number in np.flatnonzero(is_whole & (rows["accesses"] > 0))
        ],
    }  # fmt: skip


def _mixed(numbers: Numbers) -> Numbers:
    numbers = (numbers ^ numbers >> np.uint64(30)) * _FOLD
    return (numbers ^ numbers >> np.uint64(27)) * _SPREAD


def _bucket(groups: Numbers, buckets: int) -> Numbers:
    return _mixed(groups) >> np.uint64(20) & np.uint64(buckets - 1)


def _check(groups: Numbers, numbers: Numbers, rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
    mixed = _mixed(groups * np.uint64(GROUP_SLOTS) + numbers + _SPREAD)
    for column in ("block", "last_use_ns", "accesses"):
        mixed = _mixed(mixed ^ rows[column].astype(np.uint64))
    return (mixed >> np.uint64(32)).astype(np.uint32)
