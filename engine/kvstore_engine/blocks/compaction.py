"""Moves a sequence's scattered blocks together when that saves more than it costs.

Owns the decision and the moves. A move is one more copy of its bytes, so it pays only by the transfers that follow it:
runs saved x measured seconds per run x expected transfers, against the measured seconds of the move. Where it does not
pay, nothing is moved: that holds for every single move, so a compaction is never at a loss by the model's figures.
Invariants: only blocks without another holder are moved; a move goes to free blocks; tokens keep their order.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.runs import count_runs, split_runs
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.table import Holding
from kvstore_engine.blocks.transfer_costs import TransferCosts
from kvstore_engine.free_list import free_runs

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Move:
    """Table entries [first, first + count) to the free blocks [target, target + count); saves `runs` pieces."""

    first: int
    count: int
    target: int
    runs: int


@dataclass(frozen=True, slots=True)
class Compaction:
    """What was done for one sequence; `gain_s` is the expected saving less the expected cost of the moves."""

    moved_blocks: int = 0
    runs_before: int = 0
    runs_after: int = 0
    gain_s: float = 0.0
    move_s: float = 0.0


class Compactor:
    """Compacts holdings of one space."""

    def __init__(self, space: BlockSpace, costs: TransferCosts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._space = space
        self._costs = costs
        self._clock = clock
        self._block_bytes = space.pool.payload_bytes(1)

    def compact(self, holding: Holding, transfers: float) -> Compaction:
        """Move what pays if the sequence is copied `transfers` more times, as a whole."""
        before = count_runs(holding.table)
        moved, gain_s, begin = 0, 0.0, self._clock()
        while (best := self._best(holding, transfers)) is not None:
            gain, move = best
            self._apply(holding, move)
            moved, gain_s = moved + move.count, gain_s + gain
        return Compaction(moved, before, count_runs(holding.table), gain_s, self._clock() - begin)

    def _best(self, holding: Holding, transfers: float) -> tuple[float, Move] | None:
        saved_s = self._costs.run_s * transfers
        most_s = (count_runs(holding.table) - 1) * saved_s
        if most_s <= self._costs.copy_s(self._block_bytes, 2):
            return None  # not even one block, moved to join all the others, would pay: no need to look for it
        best: tuple[float, Move] | None = None
        for move in self._candidates(holding):
            gain = move.runs * saved_s - self._costs.copy_s(move.count * self._block_bytes, 2)
            if gain > 0.0 and (best is None or gain > best[0]):
                best = gain, move
        return best

    def _candidates(self, holding: Holding) -> Iterator[Move]:
        """Each piece to where its neighbour ends or begins, and the whole to one place."""
        blocks, free = holding.blocks, self._space.pool.free_flags
        pieces, first = [], 0
        for start, count in split_runs(blocks):
            pieces.append((first, start, count))
            first += count
        movable = [all(self._space.is_alone(holding, i) for i in range(f, f + n)) for f, _, n in pieces]
        for index, (first, _, count) in enumerate(pieces):
            if not movable[index]:
                continue
            targets = []
            if index:
                _, start, length = pieces[index - 1]
                targets.append(start + length)
            if index + 1 < len(pieces):
                targets.append(pieces[index + 1][1] - count)
            for target in targets:
                if _is_free(free, target, count):
                    yield Move(first, count, target, _saved(blocks, first, count, target))
        if len(pieces) > 1 and all(movable):
            starts, lengths = free_runs(free)
            fitting = np.flatnonzero(lengths >= len(blocks))
            if fitting.size:
                smallest = fitting[np.argmin(lengths[fitting])]
                yield Move(0, len(blocks), int(starts[smallest]), len(pieces) - 1)

    def _apply(self, holding: Holding, move: Move) -> None:
        space = self._space
        sources = holding.blocks[move.first : move.first + move.count]
        targets = space.references.take(range(move.target, move.target + move.count))
        begin = self._clock()
        space.pool.copy_blocks(sources, targets)
        self._costs.observe(move.count * self._block_bytes, 1 + count_runs(sources), self._clock() - begin)
        for offset, block in enumerate(targets):
            space.relocate(holding, move.first + offset, block)


def _is_free(free: Bools, first: int, count: int) -> bool:
    return first >= 0 and first + count <= len(free) and bool(free[first : first + count].all())


def _saved(blocks: list[int], first: int, count: int, target: int) -> int:
    """Pieces that the table has less after the move."""
    moved = [*blocks[:first], *range(target, target + count), *blocks[first + count :]]
    return count_runs(blocks) - count_runs(moved)
