"""The columns of the index: the properties of a block, and its place in each tier. One row a block, arrays instead of
objects.

`RowColumns` owns row numbers, their reuse and their generations, and each row's key, parent, child count and use.
`TierCopies` owns, for one tier, which rows have a copy and in which slot, and how many bytes each tenant holds. Neither
decides anything. Invariants: a row is live while it has a key, in `keys` or, as long as nothing has changed it since it
was taken over in bulk (it is a bulk row), in `bulk_keys`; a bulk row has a readable copy; `links[row]` is the number of
live rows whose parent is `row`; a row number is used again only under a new generation. A row has a slot in a tier
exactly while its state there is FILLING or RESIDENT; `kids[row]` counts the children of `row` that have a copy there;
`bytes_by_tenant` sums the slots' `nbytes`, `reserved_by_tenant` counts slots for blocks to come. `optional` are the
columns of `columns`."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_proto.identity import KEY_BYTES
from kvstore_tiers import heap
from kvstore_tiers.base import Slot
from kvstored.store.blocks.columns import OF_BLOCKS, OF_COPIES, OptionalColumns
from kvstored.store.blocks.runs import RowRun, SlotRun

_GROWTH_MIN_ROWS = 1024
_COLUMNS = ("parent", "links", "kind", "depth", "payload_bytes", "last_access_ns", "accesses", "generation")
_OF_BULK_ROWS = {"parent", "links", "kind", "depth", "payload_bytes", "last_access_ns", "mask"}
_COPY_COLUMNS = ("kids", "container", "offset", "nbytes", "generation")
_new_slot = tuple.__new__  # half the time of Slot's own
ROW_BITS = 32
_ROW_MASK: int = 2**ROW_BITS - 1


class RowColumns:
    """The columns of the block table, with one row for each block. They are array.array, whose access to one value is
    three times as fast as numpy's; scans view them by `as_array`. `links`, `kind` and `depth` begin with few bytes,
    and are replaced by wider arrays at the first value that does not fit: no array of them is kept over a call that
    adds a block.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.live = 0
        self._free: array[int] = array("I")
        self.keys: list[bytes | None] = []
        self.bulk_keys = b""  # 16 bytes a row, as far as rows were ever taken over in bulk
        self.parent = array("i")  # row, or -1
        self.links = array("B")  # live child rows
        self.kind = array("B")  # number of (tenant, fingerprint, group)
        self.depth = array("H")
        self.payload_bytes = array("I")
        self.last_access_ns = array("Q")
        self.accesses = array("H")  # saturates
        self.generation = array("I")
        self.mask = bytearray()  # the TierSet of readable copies
        self.filling = bytearray()  # the TierSet of copies that are being filled
        self.optional = OptionalColumns(OF_BLOCKS)

    def _grow(self) -> None:
        first, more = self.capacity, max(_GROWTH_MIN_ROWS, self.capacity >> 4)
        self._add(more)
        self._free.extend(range(first + more - 1, first - 1, -1))

    def _add(self, more: int, filled: Collection[str] = ()) -> None:
        """Add `more` rows to the columns, all zeros. The caller fills the columns `filled` at once."""
        if self.keys:
            self.keys.extend([None] * more)
        else:  # no second list of a million
            self.keys = [None] * more
        add_zeros(self.mask, more, are_filled="mask" in filled)
        add_zeros(self.filling, more)
        for name in _COLUMNS:
            setattr(self, name, grown(getattr(self, name), more, are_filled=name in filled))
        self.capacity += more
        self.optional.grow(self.capacity)

    def fit(self, kind: int, depth: int) -> None:
        """Make the columns wide enough for blocks of the row kinds up to number `kind`, and of up to `depth`."""
        if kind >> 8 * self.kind.itemsize:
            self.kind = widened(self.kind, kind)
        if depth >> 8 * self.depth.itemsize:
            self.depth = widened(self.depth, depth)

    def take_bulk(self, packed_keys: bytes) -> int:
        """Add a new row for each block in `packed_keys` (16 bytes each), without parents, children or copies, and
        return the number of the first one. Their keys are in no dictionary. Give each row a readable copy before
        anything else happens, and fill the columns of a bulk row."""
        first, count = self.capacity, len(packed_keys) // KEY_BYTES
        self._add(count, _OF_BULK_ROWS)
        before = self.bulk_keys.ljust(first * KEY_BYTES, b"\0")
        self.bulk_keys = before + packed_keys if before else packed_keys  # no second copy of a million
        self.live += count
        return first

    def key(self, row: int) -> bytes | None:
        """Return the key of the block at `row`, or None when the row is free."""
        key = self.keys[row]
        return self.bulk_key(row) if key is None and self.mask[row] else key

    def bulk_key(self, row: int) -> bytes:
        """Return the key of the block at `row`, which was taken over at the start and has not changed since, so that
        its key is in no dictionary."""
        return self.bulk_keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]

    def neighbours(self, first: int, packed_keys: bytes) -> list[int] | None:
        """Return the rows from `first` on if they are readable, have `packed_keys` (16 bytes each) in this order, and
        are of one kind; otherwise None. For many keys, a dictionary takes longer."""
        count = len(packed_keys) // KEY_BYTES
        span = slice(first, first + count)
        kinds = self.kind[span]
        if 0 in self.mask[span] or kinds.count(kinds[0]) < count:
            return None
        try:
            are_these = b"".join(self.keys[span]) == packed_keys  # type: ignore[arg-type]
        except TypeError:  # None: the key of a row that was taken over in bulk is elsewhere
            return None
        return list(range(first, first + count)) if are_these else None

    def take(self, key: bytes, kind: int, depth: int, payload_bytes: int) -> int:
        """Return a new row for the block `key`, without parent, children or copies. `kind` is the number of its row
        kind (tenant, fingerprint and layer group), and `depth` its place in the chain, from 0."""
        if not self._free:
            self._grow()
        self.fit(kind, depth)
        row = self._free.pop()
        self.keys[row] = key
        self.parent[row] = -1
        self.kind[row] = kind
        self.depth[row] = depth
        self.payload_bytes[row] = payload_bytes
        self.live += 1
        return row

    def reserve(self, count: int) -> array[int]:
        """Return the list of free rows, after growing the table until there are at least `count` of them. The caller
        takes rows from the list's end, and sets every column that `take` would set."""
        while len(self._free) < count:
            self._grow()
        return self._free

    def give_back(self, row: int) -> None:
        """Free `row`, which may then be used for another block. Raises RuntimeError while its block has a copy or a
        child."""
        if self.keys[row] is None or self.links[row] or self.mask[row] or self.filling[row]:
            raise RuntimeError(f"row {row} given back while in use")
        self.keys[row] = None
        self.parent[row] = -1
        self.generation[row] = (self.generation[row] + 1) & 0xFFFFFFFF
        self.live -= 1
        self._free.append(row)
        if self.optional.used:
            self.optional.reset((row,))

    def give_back_run(self, rows: Sequence[int]) -> None:
        """Free each of `rows`, whose keys, parents and facts the caller has cleared, and which have no children."""
        generation = self.generation
        for row in rows:
            generation[row] = (generation[row] + 1) & 0xFFFFFFFF
        self.live -= len(rows)
        self._free.extend(rows)

    def renew(self, row: int) -> None:
        """Make every token that names the present block of `row` stale, since the block is gone: `current` returns -1
        for it from now on."""
        self.generation[row] = (self.generation[row] + 1) & 0xFFFFFFFF

    def token(self, row: int) -> int:
        return self.generation[row] << ROW_BITS | row

    def current(self, token: int) -> int:
        """Return the row that `token` names, or -1 when the block it stood for is gone."""
        row = token & _ROW_MASK
        if row >= self.capacity or self.generation[row] != token >> ROW_BITS:
            return -1
        if self.keys[row] is None and not self.mask[row]:
            return -1
        return row

    def tokens_of(self, rows: Sequence[int]) -> list[int]:
        """Return the token of each of `rows`."""
        generation = self.generation
        return [generation[row] << ROW_BITS | row for row in rows]

    def chains_of(self, rows: Iterable[int]) -> list[list[int]]:
        """Return `rows` in lists, each of blocks that follow one another in a chain."""
        parent, found, last = self.parent, list[list[int]](), -1
        for row in rows:
            if last >= 0 and parent[row] == last:
                found[-1].append(row)
            else:
                found.append([row])
            last = row
        return found

    def run_of(self, rows: list[int]) -> RowRun:
        """Return `rows`, live ones, as a run; `still_there` knows its blocks from later ones."""
        run = RowRun(rows)
        run.generations = run.of(self.generation)
        return run

    def still_there(self, named: Sequence[int] | RowRun) -> list[int]:
        """Return the rows that `named` (tokens, or a run of `run_of`) names, without those whose blocks are gone."""
        generation = self.generation
        if isinstance(named, RowRun):
            if named.of(generation) == named.generations:
                return named.rows
            made = zip(named.rows, named.generations, strict=True)
            return [row for row, first in made if generation[row] == first]
        keys, mask, capacity, found = self.keys, self.mask, self.capacity, []
        for token in named:
            row = token & _ROW_MASK
            if row < capacity and generation[row] == token >> ROW_BITS and (keys[row] is not None or mask[row]):
                found.append(row)
        return found


def as_array(column: array[int] | bytearray) -> npt.NDArray[Any]:
    """Return an array view of a column of the index, of the column's own width. Drop it before a row is added."""
    return np.frombuffer(column, "B" if isinstance(column, bytearray) else column.typecode)


def widened(column: array[int], largest: int) -> array[int]:
    """Return `column`, or a copy in an array of a wider type if the number `largest` does not fit into it."""
    if not largest >> 8 * column.itemsize:
        return column
    wider = array(next(code for code in "HIQ" if not largest >> 8 * array(code).itemsize), [0]) * len(column)
    as_array(wider)[:] = as_array(column)
    return wider


def counted(column: array[int], row: int) -> array[int]:
    """Add 1 to the value of `row` in `column`. Return the column, which is a wider copy if the value did not fit."""
    try:
        column[row] += 1
    except OverflowError:
        column = widened(column, column[row] + 1)
        column[row] += 1
    return column


def add_zeros(column: array[int] | array[float] | bytearray, more: int, *, are_filled: bool = False) -> None:
    """Append `more` zeros to `column`, in place. Many of them take no memory until they are written; with `are_filled`
    they keep it, because they are written at once."""
    before = len(column)
    if isinstance(column, bytearray):
        column.extend(bytes(more))
    elif column or not more:
        column.frombytes(bytes(column.itemsize * more))
    else:
        column.append(0)
        column *= more
    if not are_filled:
        heap.release_zeros(column, before)


def grown(column: array[int], more: int, *, are_filled: bool = False) -> array[int]:
    """Return `column` with `more` zeros appended, as `add_zeros` appends them. An empty array is replaced by a new one
    of exactly this length; otherwise it is the same array.
    """
    if column:
        add_zeros(column, more, are_filled=are_filled)
        return column
    column = array(column.typecode, [0]) * more
    if not are_filled:
        heap.release_zeros(column, 0)
    return column


class TierCopies:
    """The columns of one tier: by row, the state and the slot of the block's copy. Rows beyond the columns' end have no
    copy; call `grow` before the first `put` of a row. `kids`, `container`, `offset` and `generation` begin with few
    bytes a row, and are replaced by wider arrays when one does not fit.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._capacity = 0
        self.blocks = 0
        self.bytes_by_tenant: list[int] = []
        self.reserved_by_tenant: defaultdict[int, int] = defaultdict(int)
        self.state = bytearray()  # CopyState
        self.kids = array("B")
        self.container = array("H")
        self.offset = array("I")
        self.nbytes = array("I")
        self.generation = array("I")
        self.optional = OptionalColumns(OF_COPIES)

    def grow(self, rows: int, *, are_filled: bool = False) -> None:
        """Extend the columns to `rows` rows. With `are_filled` the caller enters a copy of each new one at once."""
        more = rows - self._capacity
        add_zeros(self.state, more, are_filled=are_filled)
        for name in _COPY_COLUMNS:
            setattr(self, name, grown(getattr(self, name), more, are_filled=are_filled))
        self._capacity = rows
        self.optional.grow(rows)

    def widen(self, container: int, offset: int, generation: int) -> bool:
        """Make the columns wide enough for container numbers up to `container`, offsets up to `offset` and generations
        up to `generation`. Return whether they were not."""
        is_new = False
        for name, most in (("container", container), ("offset", offset), ("generation", generation)):
            column = getattr(self, name)
            setattr(self, name, widened(column, most))
            is_new |= getattr(self, name) is not column
        return is_new

    def place(self, row: int, slot: Slot) -> None:
        self.nbytes[row] = slot.nbytes
        try:
            self.container[row], self.offset[row], self.generation[row] = slot.container, slot.offset, slot.generation
        except OverflowError:
            self.widen(slot.container, slot.offset, slot.generation)
            self.container[row], self.offset[row], self.generation[row] = slot.container, slot.offset, slot.generation

    def put(self, row: int, slot: Slot, tenant: int) -> None:
        self.place(row, slot)
        self.bytes_by_tenant[tenant] += slot.nbytes
        self.blocks += 1

    def put_run(self, rows: Sequence[int], slots: Sequence[Slot], tenant: int) -> None:
        """Enter a copy for each of `rows`, all of `tenant`, in the slot of `slots` at the same position."""
        containers, offsets, sizes, generations = self.container, self.offset, self.nbytes, self.generation
        held_bytes = 0
        try:
            for row, (container, offset, nbytes, generation) in zip(rows, slots, strict=True):
                containers[row] = container
                offsets[row] = offset
                sizes[row] = nbytes
                generations[row] = generation
                held_bytes += nbytes
        except OverflowError:
            most = [max(slot[at] for slot in slots) for at in (0, 1, 3)]
            if not self.widen(*most):
                raise
            self.put_run(rows, slots, tenant)
            return
        self.bytes_by_tenant[tenant] += held_bytes
        self.blocks += len(rows)

    def reserve(self, tenant: int, nbytes: int) -> None:
        """Count `nbytes` more of this tier's slots as reserved for blocks that `tenant` is about to put. A negative
        number subtracts."""
        self.reserved_by_tenant[tenant] += nbytes

    def take(self, row: int, tenant: int) -> Slot:
        nbytes = self.nbytes[row]
        self.bytes_by_tenant[tenant] -= nbytes
        self.blocks -= 1
        if self.optional.used:
            self.optional.reset((row,))
        return _new_slot(Slot, (self.container[row], self.offset[row], nbytes, self.generation[row]))

    def take_run(self, rows: Sequence[int], tenant: int) -> list[Slot]:
        """Remove the copies of `rows`, which belong to `tenant`, and return their slots."""
        containers, offsets, sizes, generations = self.container, self.offset, self.nbytes, self.generation
        taken = [_new_slot(Slot, (containers[row], offsets[row], sizes[row], generations[row])) for row in rows]
        self.bytes_by_tenant[tenant] -= sum([sizes[row] for row in rows])
        self.blocks -= len(rows)
        if self.optional.used:
            self.optional.reset(rows)
        return taken

    def slots(self, run: RowRun) -> SlotRun:
        """Return the slot of each row of `run`, which has a copy."""
        of = run.of
        return SlotRun(of(self.container), of(self.offset), of(self.nbytes), of(self.generation))

    def slot(self, row: int) -> Slot:
        return Slot(self.container[row], self.offset[row], self.nbytes[row], self.generation[row])
