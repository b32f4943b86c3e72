"""The known chains: one slot each, columns instead of objects.

A chain is the blocks that one request used, up to its last block; the request that goes on from there continues it. A
slot lives as long as a block in the tier or in the ghost names it. The module owns slots and their reuse, and the uses
of shared blocks by row.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of
from kvstored.store.blocks.rows import add_zeros

_GROWTH_MIN, _GROWTH_MAX = 256, 4096
_LATE_S = 30.0
_SOON_S = 0.25  # what is due sooner is all as urgent
_STEP = 4096  # chains copied between two pauses: 0.2 ms
CHAIN = np.dtype(
    [
        ("length", "i4"), ("cell", "i4"), ("bin", "i4"), ("turn", "i4"), ("tenant", "i4"), ("new_blocks", "i4"),
        ("tokens", "i8"), ("answer", "i8"), ("order", "i8"), ("used_s", "f8"), ("pace", "f8"), ("live", "?"),
    ]
)  # fmt: skip
_KEPT: tuple[str, ...] = CHAIN.names or ()
_Column: TypeAlias = "array[int] | array[float] | bytearray"


class ChainTable:
    """A table of the chains that the policy chain-hazard knows, in columns with one entry for each chain number. `tail`
    is the row of the chain's deepest block that is in the tier and may be evicted, or -1. `blocked` is 1 when that
    block turned out not to be evictable. `live` is 1 while a next request of the chain is expected; once another chain
    continues it, it is 0."""

    def __init__(self) -> None:
        self.tail = array("i")
        self.length = array("i")  # in blocks, from the first of the prompt
        self.cell = array("i")
        self.bin = array("i")  # the age bin up to which its age has been counted
        self.turn = array("i")
        self.tenant = array("i")
        self.new_blocks = array("i")
        self.tokens = array("q")  # of prompt and answer, as far as known; -1: not known
        self.answer = array("q")  # of those, what the answer to its last request is said to be
        self.entry = array("q")  # the valid entry of the chain among the candidates
        self.order = array("q")  # when it was last used, among all accesses
        self.used_s = array("d")
        self.due_s = array("d")  # when a queued request will use it; 0: none is queued
        self.due_depth = array("i")  # how deep it will be used then, while one is
        self.pace = array("d")  # mean logarithm of the seconds between its turns, the last ones above all
        self.base = array("d")  # its rank when it was last looked at
        self.blocked = bytearray()
        self.live = bytearray()
        self.marks = bytearray()  # the collector's: it is named
        self._is_free = bytearray()
        self.slots = 0  # ever used: the others are free or beyond
        self._free: list[int] = []
        self._columns = (
            self.tail, self.length, self.cell, self.bin, self.turn, self.tenant, self.new_blocks, self.tokens,
            self.answer, self.entry, self.order, self.used_s, self.due_s, self.due_depth, self.pace, self.base,
        )  # fmt: skip
        self.read_at: list[int] = []  # the addresses of the columns that tell a chain's worth, until they grow,
        self.written_at: list[int] = []  # and those of `base` and `entry`

    def take(self) -> int:
        """Return a free number for a new chain. The caller sets the chain's entry in every column."""
        if self._free:
            slot = self._free.pop()
            self._is_free[slot] = 0
            return slot
        slot = self.slots
        if slot == len(self.tail):
            self._grow(min(max(_GROWTH_MIN, slot >> 1), _GROWTH_MAX))
        self.slots += 1
        return slot

    def _grow(self, more: int) -> None:
        for column in self._columns:
            column.frombytes(bytes(column.itemsize * more))
        for flags in (self.blocked, self.live, self.marks, self._is_free):
            flags.extend(bytes(more))
        read: tuple[_Column, ...] = (
            self.tail, self.blocked, self.tenant, self.live, self.cell, self.length, self.used_s, self.due_s,
        )  # fmt: skip
        self.read_at = [*map(_place, read)]
        self.written_at = [_place(self.base), _place(self.entry)]

    def copied(self) -> Iterator[npt.NDArray[np.void]]:
        """Yield the columns of all chains to save (dtype CHAIN) in steps, without the due times of queued requests."""
        for first in range(0, self.slots, _STEP):
            last = min(first + _STEP, self.slots)
            found = np.empty(last - first, CHAIN)
            for name in _KEPT:
                found[name] = np.frombuffer(getattr(self, name), CHAIN[name])[first:last]
            yield found

    def restore(self, chains: npt.NDArray[np.void]) -> None:
        """Fill the empty table with the saved `chains` (dtype CHAIN), numbered from 0. No chain has a row yet."""
        self._grow(len(chains))
        self.slots = len(chains)
        for name in _KEPT:
            np.frombuffer(getattr(self, name), CHAIN[name])[: self.slots] = chains[name]
        self.ints(self.tail)[:] = -1

    @property
    def in_use(self) -> int:
        return self.slots - len(self._free)

    def free_unmarked(self, first: int, last: int) -> None:
        """Free the chains with numbers from `first` up to `last` (excluded) that are not marked as in use."""
        last = min(last, self.slots)
        marks, is_free = (np.frombuffer(flags, np.uint8) for flags in (self.marks, self._is_free))
        free = first + np.flatnonzero((marks[first:last] | is_free[first:last]) == 0)
        is_free[free] = 1
        np.frombuffer(self.live, np.uint8)[free] = 0
        np.frombuffer(self.tail, np.int32)[free] = -1
        self._free += free[::-1].tolist()

    def wanted(self, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the chains among the numbers `live` that have a block in the tier, so that their ranks will be
        needed."""
        return live[self.ints(self.tail)[live] >= 0]

    def due_rank(self, chain: int, depth: int, now_s: float) -> float:
        """Return the rate (uses a second) that an announced request adds to the block of `chain` at `depth`: one use,
        divided by the time until it is due, or since it was. Return 0 when none is announced or it does not reach that
        deep. A request that is 30 s late is dropped.
        """
        due_s = self.due_s[chain]
        if due_s and now_s >= due_s + _LATE_S:
            due_s = self.due_s[chain] = 0.0
        if not due_s or depth > self.due_depth[chain] + 1:
            return 0.0
        return 1.0 / max(abs(due_s - now_s), _SOON_S)

    def worth(self, chain: int, depth: int, base: float, now_s: float) -> float:
        """Return the rank (uses a second) of the block of `chain` at `depth`. `base` is its rank without announced
        requests; a request that is due and takes up the whole chain is the return that `base` foretells, so its own
        rank counts alone.
        """
        rank = self.due_rank(chain, depth, now_s)
        is_return = rank > 0.0 and self.due_depth[chain] + 2 >= self.length[chain]
        return rank if is_return else max(base, rank)

    def ints(self, column: array[int]) -> npt.NDArray[np.int32]:
        """Return an int32 view of `column`, up to the highest chain number that was ever used. Drop it before the next
        `take`."""
        return np.frombuffer(column, np.int32)[: self.slots]

    def floats(self, column: array[float]) -> npt.NDArray[np.float64]:
        return np.frombuffer(column, np.float64)[: self.slots]

    def longs(self, column: array[int]) -> npt.NDArray[np.int64]:
        return np.frombuffer(column, np.int64)[: self.slots]

    def flags(self, column: bytearray) -> npt.NDArray[np.bool_]:
        return np.frombuffer(column, np.bool_)[: self.slots]


def _place(column: _Column) -> int:
    """Return the address of the first entry of `column`."""
    if isinstance(column, bytearray):
        return address_of(np.frombuffer(column, np.uint8)) if column else 0
    return column.buffer_info()[0]


TAU_S = 300.0
_SPAN_MIN_S, _SPAN_FULL_S = 10.0, 0.999 * TAU_S
_FEW = 24  # rows, for which arrays do not pay


class SharedTouches:
    """A count, for each row, of uses of its block by other chains than the one that owns it (touches).

    `count` has the touches of each row, decayed to the time `as_of_s`. `span_s` is the number of seconds by which a
    decayed count is divided to get a rate."""

    def __init__(self) -> None:
        self.count = array("d")
        self.as_of_s = array("d")
        self.span_s = _SPAN_MIN_S
        self.began_s = math.nan

    def grow(self, more: int) -> None:
        add_zeros(self.count, more)
        add_zeros(self.as_of_s, more)

    def rate(self, row: int, now_s: float) -> float:
        """Return how many times a second other chains than its own use the block at `row`, as of `now_s`."""
        touches = self.count[row]
        if not touches:
            return 0.0
        return touches * math.exp((self.as_of_s[row] - now_s) / TAU_S) / self.span_s

    def add(self, rows: Sequence[int], now_s: float) -> None:
        """Count one more use by another chain, at `now_s`, of each of `rows`."""
        if len(rows) <= _FEW:
            for row in rows:
                left = self.count[row] * math.exp((self.as_of_s[row] - now_s) / TAU_S)
                self.count[row], self.as_of_s[row] = left + 1.0, now_s
            return
        at = np.array(rows)
        count, since = np.frombuffer(self.count, np.float64), np.frombuffer(self.as_of_s, np.float64)
        count[at] = count[at] * np.exp((since[at] - now_s) / TAU_S) + 1.0
        since[at] = now_s

    def widen_span(self, now_s: float) -> None:
        """Update `span_s`, the divisor for rates, at `now_s`. In the first minutes of counting it grows up to the decay
        time `TAU_S`."""
        if self.span_s >= _SPAN_FULL_S:
            return
        if math.isnan(self.began_s):
            self.began_s = now_s
        self.span_s = max(_SPAN_MIN_S, TAU_S * -math.expm1((self.began_s - now_s) / TAU_S))
