"""The columns of the index that say where a block is in one tier: state, slot and in-tier children.

Owns, for each tier, which rows have a copy and in which slot, and how many bytes each tenant holds. Never
decides. Invariants: a row has a slot exactly while its state is FILLING or RESIDENT; `kids[row]` counts the
children of `row` that have a copy here; `bytes_by_tenant` sums the slots' `nbytes`, `reserved_by_tenant` those of slots
for blocks to come.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from kvstore_tiers.base import Slot
from kvstored.store.blocks.rows import add_zeros, grown

_PLACE_COLUMNS = ("container", "offset", "nbytes", "generation")
_new_slot = tuple.__new__  # half the time of Slot's own


class TierCopies:
    """One tier's columns. Rows beyond the columns' end have no copy: call `grow` before the first `put` of a
    row.
    """

    __slots__ = (
        "_capacity",
        "blocks",
        "bytes_by_tenant",
        "container",
        "generation",
        "kids",
        "name",
        "nbytes",
        "offset",
        "reserved_by_tenant",
        "state",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self._capacity = 0
        self.blocks = 0
        self.bytes_by_tenant: list[int] = []
        self.reserved_by_tenant: defaultdict[int, int] = defaultdict(int)
        self.state = bytearray()  # CopyState
        self.kids = array("I")
        self.container = array("I")
        self.offset = array("Q")
        self.nbytes = array("I")
        self.generation = array("Q")

    def grow(self, rows: int) -> None:
        more = rows - self._capacity
        self.state.extend(bytes(more))
        add_zeros(self.kids, more)  # which policies keep hold of
        for name in _PLACE_COLUMNS:
            setattr(self, name, grown(getattr(self, name), more))
        self._capacity = rows

    def place(self, row: int, slot: Slot) -> None:
        self.container[row] = slot.container
        self.offset[row] = slot.offset
        self.nbytes[row] = slot.nbytes
        self.generation[row] = slot.generation

    def put(self, row: int, slot: Slot, tenant: int) -> None:
        self.place(row, slot)
        self.bytes_by_tenant[tenant] += slot.nbytes
        self.blocks += 1

    def put_run(self, rows: Sequence[int], slots: Sequence[Slot], tenant: int) -> None:
        """`put` for each row."""
        containers, offsets, sizes, generations = self.container, self.offset, self.nbytes, self.generation
        held_bytes = 0
        for row, (container, offset, nbytes, generation) in zip(rows, slots, strict=True):
            containers[row] = container
            offsets[row] = offset
            sizes[row] = nbytes
            generations[row] = generation
            held_bytes += nbytes
        self.bytes_by_tenant[tenant] += held_bytes
        self.blocks += len(rows)

    def reserve(self, tenant: int, nbytes: int) -> None:
        """So many more bytes of slots, or fewer, are held for blocks to come."""
        self.reserved_by_tenant[tenant] += nbytes

    def take(self, row: int, tenant: int) -> Slot:
        nbytes = self.nbytes[row]
        self.bytes_by_tenant[tenant] -= nbytes
        self.blocks -= 1
        return _new_slot(Slot, (self.container[row], self.offset[row], nbytes, self.generation[row]))

    def take_run(self, rows: Sequence[int], tenant: int) -> list[Slot]:
        """`take` for each row."""
        containers, offsets, sizes, generations = self.container, self.offset, self.nbytes, self.generation
        taken = [_new_slot(Slot, (containers[row], offsets[row], sizes[row], generations[row])) for row in rows]
        self.bytes_by_tenant[tenant] -= sum([sizes[row] for row in rows])
        self.blocks -= len(rows)
        return taken

    def slot(self, row: int) -> Slot:
        return Slot(self.container[row], self.offset[row], self.nbytes[row], self.generation[row])

    def rows_in(self, container: int) -> list[int]:
        """Rows with a copy in `container`, by offset. A scan: about 1 ms a million rows, fit for reclaim
        only.
        """
        state = np.frombuffer(self.state, dtype=np.uint8)
        here = np.frombuffer(self.container, dtype=np.uint32) == container
        rows = np.flatnonzero(here & (state != 0))
        order = np.argsort(np.frombuffer(self.offset, dtype=np.uint64)[rows], kind="stable")
        found: list[int] = rows[order].tolist()
        return found

    def row_at(self, container: int, offset: int) -> int:
        """The row whose slot begins at `offset` of `container`, or -1. A scan, as `rows_in`."""
        state = np.frombuffer(self.state, dtype=np.uint8)
        here = np.frombuffer(self.offset, dtype=np.uint64) == offset
        rows = np.flatnonzero(here & (np.frombuffer(self.container, dtype=np.uint32) == container) & (state != 0))
        return int(rows[0]) if len(rows) else -1
