"""Moves a sequence's scattered blocks together when that saves more than it costs.

The module owns the decision and the moves. A move is one more copy of its bytes, so it pays only through later
transfers: runs saved x measured seconds per run x expected transfers, against the measured seconds of the move. Every
single move must pay, with a margin for errors of the measurements. The usual case, that none pays, is decided in
microseconds. Invariants: only blocks with one holder are moved; the targets are free blocks; tokens keep their order.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.transfers import TransferCosts, count_runs, split_runs
from kvstore_engine.free_list import free_runs

Bools = npt.NDArray[np.bool_]
_REFRESH_CALLS = 16  # between two looks at the costs, which change slowly
_MARGIN = 1.25  # both costs are estimates: their errors must not make a move a loss


@dataclass(frozen=True, slots=True)
class _Piece:
    """Table entries [first, first + count), which are the blocks [start, start + count)."""

    first: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class TableMove:
    """A move of blocks of one sequence within the pool: its `count` blocks from number `first` on, which are in
    `sources` contiguous pieces, go to the free pool blocks from `target` on. Afterwards the sequence has `runs` pieces
    fewer.
    """

    first: int
    count: int
    sources: int
    target: int
    runs: int

    @property
    def pieces(self) -> int:
        """The number of contiguous pieces of the pool that the move reads and writes."""
        return self.sources + 1


@dataclass(frozen=True, slots=True)
class Compaction:
    """The result of moving one sequence's blocks together: the number of moved blocks, the contiguous pieces before and
    after (0 if nothing was moved), and seconds. `gain_s` is the expected saving less the expected cost, `move_s` the
    time that the moves took.
    """

    moved_blocks: int = 0
    runs_before: int = 0
    runs_after: int = 0
    gain_s: float = 0.0
    move_s: float = 0.0


_NOTHING = Compaction()


class Compactor:
    """A mover of blocks within the pool. It moves the scattered blocks of a sequence together, if that saves more time
    in later copies than it takes.
    """

    def __init__(self, space: BlockSpace, costs: TransferCosts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._space = space
        self._costs = costs
        self._clock = clock
        self._block_bytes = space.pool.payload_bytes(1)
        self._least_runs = math.inf  # that all transfers together must save to pay for moving one block
        self._calls = 0

    def compact(self, table: BlockTable, transfers: float) -> Compaction:
        """Move those blocks of `table` together whose move saves more time than it takes, if the whole sequence will be
        copied `transfers` more times (a fraction is allowed). Return the result.
        """
        if self._calls % _REFRESH_CALLS == 0:
            run_s = self._costs.run_s
            self._least_runs = self._cost_s(1, 2) / run_s if run_s else math.inf
        self._calls += 1
        # The usual case first: in code that runs rarely each line is a cache miss.
        if max(2, table.count - 1) * transfers <= self._least_runs:
            return _NOTHING
        saved_s = self._costs.run_s * transfers
        if not self._can_pay(table, table.count, saved_s):
            return _NOTHING
        before = count_runs(table.ids)
        moved, gain_s, began_s = 0, 0.0, self._clock()
        done_s = began_s
        while (best := self._best(table, saved_s)) is not None:
            gain, move = best
            self._apply(table, move)
            moved, gain_s = moved + move.count, gain_s + gain
            last_s, done_s = done_s, self._clock()
            # Half of the time of a small move is not copying: it is finding the move and updating references.
            self._costs.observe_move(move.count * self._block_bytes, move.pieces, done_s - last_s)
        if not moved:
            return _NOTHING
        return Compaction(moved, before, count_runs(table.ids), gain_s, done_s - began_s)

    def _can_pay(self, table: BlockTable, runs: int, saved_s: float) -> bool:
        """Return whether moving a block that joins two pieces can pay, or moving all of `runs` pieces to one place."""
        return 2 * saved_s > self._cost_s(1, 2) or self._whole_pays(table, runs, saved_s)

    def _whole_pays(self, table: BlockTable, runs: int, saved_s: float) -> bool:
        return (runs - 1) * saved_s > self._cost_s(table.count, runs + 1)

    def _best(self, table: BlockTable, saved_s: float) -> tuple[float, TableMove] | None:
        """Return the move that gains most, if one run fewer saves `saved_s` seconds."""
        runs = count_runs(table.ids)
        if not self._can_pay(table, runs, saved_s):
            return None
        pieces = _pieces(table.blocks)
        cost_s = {count: self._cost_s(count, 2) for count in {each.count for each in pieces}}
        worth = [index for index, each in enumerate(pieces) if 2 * saved_s > cost_s[each.count]]
        best: tuple[float, TableMove] | None = None
        moves = [*self._joining(table, pieces, worth)]
        if self._whole_pays(table, runs, saved_s):
            moves += self._gathering(table, pieces)
        for move in moves:
            gain = move.runs * saved_s - self._cost_s(move.count, move.pieces)
            if gain > 0.0 and (best is None or gain > best[0]):
                best = gain, move
        return best

    def _joining(self, table: BlockTable, pieces: list[_Piece], worth: list[int]) -> Iterator[TableMove]:
        """Yield moves of the pieces `worth` moving to the place where a neighbour ends or begins."""
        free = self._space.pool.free_flags
        for index in worth:
            first, start, count = pieces[index].first, pieces[index].start, pieces[index].count
            before = pieces[index - 1].end if index else None
            behind = pieces[index + 1].start - count if index + 1 < len(pieces) else None
            for target in {before, behind} - {None, start}:
                assert target is not None
                if _is_free(free, target, count) and self._is_movable(table, pieces[index]):
                    yield TableMove(first, count, 1, target, (target == before) + (target == behind))

    def _gathering(self, table: BlockTable, pieces: list[_Piece]) -> Iterator[TableMove]:
        """Yield the move of all blocks to one place."""
        starts, lengths = free_runs(self._space.pool.free_flags)
        fitting = np.flatnonzero(lengths >= table.count)
        if fitting.size and all(self._is_movable(table, piece) for piece in pieces):
            smallest = fitting[np.argmin(lengths[fitting])]
            yield TableMove(0, table.count, len(pieces), int(starts[smallest]), len(pieces) - 1)

    def _cost_s(self, count: int, pieces: int) -> float:
        """Return the seconds that moving `count` blocks in `pieces` must save."""
        return _MARGIN * self._costs.move_s(count * self._block_bytes, pieces)

    def _is_movable(self, table: BlockTable, piece: _Piece) -> bool:
        return all(self._space.is_alone(table, piece.first + offset) for offset in range(piece.count))

    def _apply(self, table: BlockTable, move: TableMove) -> None:
        space = self._space
        sources = table.blocks[move.first : move.first + move.count]
        targets = space.references.take(range(move.target, move.target + move.count))
        space.pool.copy_blocks(sources, targets)
        for offset, block in enumerate(targets):
            space.relocate(table, move.first + offset, block)


def _is_free(free: Bools, first: int, count: int) -> bool:
    return first >= 0 and first + count <= len(free) and bool(free[first : first + count].all())


def _pieces(blocks: list[int]) -> list[_Piece]:
    pieces, first = [], 0
    for start, count in split_runs(blocks):
        pieces.append(_Piece(first, start, count))
        first += count
    return pieces
