"""The chance of return by age, of every class of session: the tables that session-return learns.

A class is a path of features, coarse to fine, in each of several orders (`Ladder`); each step of a path is a node with
counts by age bin: how many sessions got through the bin or returned in it, and how many returned. A node's estimate is
its own counts shrunk towards the node above. Which order is believed is decided by how well it foretold what came.
Counts decay, so that a workload that changes is followed.

What is seen is logged, folded into the deepest nodes some dozen entries at a time, and pushed up by a renewal, which
then estimates anew: both in slices. Unlike the policy's `HazardTables` it makes no ranks. Never knows sessions, keys or
time. Bounded: cells by `_CELLS_MAX` (then classes are coarser), nodes by the values of features.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import numpy as np

from kvstore_predictor.base import Piece, State
from kvstore_predictor.features import AWAITED, NEXT_STEPS, Features, coarse
from kvstore_predictor.gittins import BINS, Floats, Ints
from kvstore_predictor.hazards import (
    COPIED,
    EVIDENCE_DECAY,
    GAIN_MAX,
    LEAST,
    MOST,
    PADDING,
    ROOT,
    STEP,
    TRUST,
    Ladder,
)  # fmt: skip
from kvstore_predictor.hint_factors import CHANCE_MEANS, NEXT_STEP_MEANS, HintFactors
from kvstore_predictor.shrinkage import FLAT, SHRINK, SHRINK_FIRST

_STEPS_MAX = STEP["path"].shape[0]  # of a ladder: the root and the features
_CELLS_MAX, _COARSE_MAX, _FREED = 16384, 512, 256
_NODES_FIRST = 1 << 12
_NODES_A_SLICE = 1024


Seen = tuple[int, int, int, bool, int]  # cell, first age bin, bin that was reached, whether it returned there, hint


class ReturnHazards:
    """See the module. A *cell* is a number for a class: the deepest node of each ladder."""

    def __init__(self, ladders: Sequence[Ladder]) -> None:
        self.orders = [ladder.order for ladder in ladders]
        self._taken = [_taker(tuple(map(Features._fields.index, order))) for order in self.orders]
        self._nodes: dict[tuple[int, ...], int] = {}  # by ladder and path; node 0 is above the roots
        self._paths: list[tuple[int, ...]] = []  # of the nodes from 1 on
        self._above: Ints = np.zeros(_NODES_FIRST, np.int64)
        self._counts: Floats = np.zeros((_NODES_FIRST, 2, BINS))  # exposed and returned, times the gain
        # What does not count yet: how many more are exposed in this bin than in the one before, and returned.
        self._late: Floats = np.zeros((_NODES_FIRST, 2, BINS + 1))
        self._estimates: Floats = np.zeros((_NODES_FIRST, BINS))
        self._survival: Floats = np.zeros((_NODES_FIRST, BINS + 1))  # its logarithm at the start of each bin
        self._estimates[0] = FLAT
        self._is_late = np.zeros(_NODES_FIRST, np.bool_)
        self._in_use: list[array[int]] = [array("q") for _ in range(_STEPS_MAX)]  # nodes that a class has, by step
        self._is_in_use = bytearray(_NODES_FIRST)
        self._gain = 1.0  # what one session counts now
        self._leaf_of: list[dict[tuple[int, ...], int]] = [{} for _ in ladders]  # by ladder and its features
        self._cells: dict[Features, int] = {}
        self._features: list[Features] = []  # by cell
        self._free: list[int] = []
        self._leaves = array("q", bytes(8 * _CELLS_MAX * len(ladders)))  # by cell and ladder
        self.log: list[Seen] = []  # does not count yet
        self._hint_factors = (HintFactors(CHANCE_MEANS), HintFactors(NEXT_STEP_MEANS))
        self.evidence: Floats = np.zeros(len(ladders))  # decayed log-likelihood of what came, by ladder
        self._decide()
        for number, ladder in enumerate(ladders):
            for path, counts in sorted(ladder.counts.items(), key=lambda each: len(each[0])):
                node = self._node((number, *path))
                self._counts[node] = counts
        steps = np.array([len(name) - 1 for name in self._nodes], np.int64)
        for step in range(_STEPS_MAX):
            self._estimate(1 + np.flatnonzero(steps == step), step)

    # Classes

    def cell(self, features: Features) -> int:
        """The cell of a class."""
        found = self._cells.get(features)
        return self._add(features) if found is None else found

    def _add(self, features: Features) -> int:
        if len(self._cells) >= _CELLS_MAX - _COARSE_MAX:
            features = coarse(features)
            if features not in self._cells and len(self._cells) >= _CELLS_MAX - 3:
                features = ROOT._replace(kind=features.kind)
            if features in self._cells:
                return self._cells[features]
        if self._free:
            cell = self._free.pop()
            self._features[cell] = features
        else:
            cell = len(self._features)
            self._features.append(features)
        self._cells[features] = cell
        first, leaves = cell * len(self.orders), self._leaves
        for number, (taken, leaf_of) in enumerate(zip(self._taken, self._leaf_of, strict=True)):
            path = taken(features)
            leaf = leaf_of.get(path)
            leaves[first + number] = self._leaf(number, path) if leaf is None else leaf
        return cell

    def _leaf(self, number: int, path: tuple[int, ...]) -> int:
        """The deepest node of a ladder for a class with these features; those down to it are in use from now on."""
        known = path.index(AWAITED) if AWAITED in path else len(path)
        for step in range(known + 1):
            node = self._node((number, *path[:step]))
            if not self._is_in_use[node]:
                self._is_in_use[node] = 1
                self._in_use[step].append(node)
        self._leaf_of[number][path] = node
        return node

    def _node(self, name: tuple[int, ...]) -> int:
        node = self._nodes.get(name)
        if node is None:
            above = self._node(name[:-1]) if len(name) > 1 else 0
            self._paths.append(name)
            node = self._nodes[name] = len(self._paths)
            if node >= len(self._counts):
                self._grow()
            self._above[node] = above
            self._estimates[node], self._survival[node] = self._estimates[above], self._survival[above]
        return node

    def _grow(self) -> None:
        for name in ("_above", "_counts", "_late", "_estimates", "_survival", "_is_late"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._is_in_use.extend(bytes(len(self._is_in_use)))

    def free_unused(self, live: Ints) -> None:
        """Give up some of the cells that none of the sessions `live` (their cells) is of, once there are many."""
        if len(self._cells) <= _CELLS_MAX // 2:
            return
        self.fold()
        is_used = np.zeros(len(self._features), np.bool_)
        is_used[live] = True
        is_used[self._free] = True
        for cell in np.flatnonzero(~is_used)[:_FREED].tolist():
            del self._cells[self._features[cell]]
            self._free.append(cell)

    # Learning

    def count_many(self, cells: Ints, first: Ints, reached: Ints, hints: Ints) -> None:
        """What many sessions got through that have not returned; and what is in the log."""
        self.fold()
        self._count(cells, first, reached, np.zeros_like(cells), hints)

    def fold(self) -> None:
        """Let what is in the log count, in the deepest nodes."""
        if self.log:
            columns = np.array(self.log, np.int64).T
            self.log.clear()
            self._count(*columns)

    def _count(self, cells: Ints, first: Ints, reached: Ints, returned: Ints, hints: Ints) -> None:
        came = np.flatnonzero(returned)
        nodes = self._leaves_of(cells)
        survival, late = self._survival.reshape(-1), self._late.reshape(-1)
        rows = nodes * (BINS + 1)
        evidence = survival[rows + reached[:, None]] - survival[rows + first[:, None]]
        self.evidence += evidence.sum(axis=0)
        self.evidence += np.log(self._estimates.reshape(-1)[nodes[came] * BINS + reached[came, None]]).sum(axis=0)
        if hints.any():
            self._follow_hints(cells, first, reached, returned, hints)
        np.add.at(late, (2 * rows + first[:, None]).reshape(-1), 1.0)
        np.add.at(late, (2 * rows + (reached + returned)[:, None]).reshape(-1), -1.0)
        np.add.at(late, ((2 * rows + BINS + 1)[came] + reached[came, None]).reshape(-1), 1.0)
        self._is_late[nodes.reshape(-1)] = True

    def _follow_hints(self, cells: Ints, first: Ints, reached: Ints, returned: Ints, hints: Ints) -> None:
        said = np.flatnonzero(hints)
        through = (reached - first + returned)[said]
        entry = np.repeat(said, through)
        bins = np.arange(len(entry)) - np.repeat(np.cumsum(through) - through, through) + first[entry]
        came = (returned[entry] == 1) & (bins == reached[entry])
        predicted = self._estimates.reshape(-1)[self._leaves_of(cells[entry]) * BINS + bins[:, None]] @ self._weights
        values = np.divmod(hints[entry], NEXT_STEPS)
        for number, factors in enumerate(self._hint_factors):
            other = 1 - number  # what that has said already is not to be said twice
            by_other = predicted * self._by_hint[other][values[other], bins]
            factors.happened(values[number], bins, by_other, came.astype(np.float64))

    def _leaves_of(self, cells: Ints) -> Ints:
        return np.frombuffer(self._leaves, np.int64).reshape(_CELLS_MAX, -1)[cells]

    def _decide(self) -> None:
        """What the evidence and hints are worth, until the next renewal."""
        odds = np.exp(TRUST * (self.evidence - self.evidence.max()))
        self._weights: Floats = odds / odds.sum()
        self._by_hint = [factors.factors() for factors in self._hint_factors]

    def renewal(self, factor: float) -> Iterator[None]:
        """Decay the counts by `factor`, push up what was seen, and estimate anew; in slices."""
        self.evidence *= factor**EVIDENCE_DECAY
        for factors in self._hint_factors:
            factors.decay(factor)
        self._gain /= factor
        if self._gain > GAIN_MAX:  # once in many thousand requests
            self._counts /= self._gain
            self._gain = 1.0
        self._decide()
        yield from self._pushed()
        for step, in_use in enumerate(self._in_use):
            for first in range(0, len(in_use), _NODES_A_SLICE):
                self._estimate(np.array(in_use[first : first + _NODES_A_SLICE]), step)
                yield

    def _pushed(self) -> Iterator[None]:
        for in_use in reversed(self._in_use):
            for first in range(0, len(in_use), _NODES_A_SLICE):
                nodes = np.array(in_use[first : first + _NODES_A_SLICE])
                nodes = nodes[self._is_late[nodes]]
                if not len(nodes):
                    continue
                late, above = self._late[nodes], self._above[nodes]
                self._counts[nodes, 0] += np.cumsum(late[:, 0, :BINS], axis=1) * self._gain
                self._counts[nodes, 1] += late[:, 1, :BINS] * self._gain
                self._late[nodes], self._is_late[nodes] = 0.0, False
                if above[0]:
                    order = np.argsort(above, kind="stable")
                    above = above[order]
                    firsts = np.flatnonzero(np.diff(above, prepend=-1))
                    self._late[above[firsts]] += np.add.reduceat(late[order], firsts, axis=0)
                    self._is_late[above[firsts]] = True
                yield

    def _estimate(self, nodes: Ints, step: int) -> None:
        weight = self._gain * (SHRINK if step else SHRINK_FIRST)
        exposed, returned = self._counts[nodes].transpose(1, 0, 2)
        found = (returned + weight * self._estimates[self._above[nodes]]) / (exposed + weight)
        self._estimates[nodes] = found = np.minimum(np.maximum(found, LEAST), MOST)
        self._survival[nodes, 1:] = np.cumsum(np.log1p(-found), axis=1)

    # Answers

    def hazards(self, cells: Ints, hints: Ints) -> Floats:
        """The chance of return in each age bin, as it was estimated last."""
        mixed: Floats = np.matmul(self._weights, self._estimates[self._leaves_of(cells)])
        if hints.any():
            chance, next_step = np.divmod(hints, NEXT_STEPS)
            mixed = np.clip(mixed * self._by_hint[0][chance] * self._by_hint[1][next_step], LEAST, MOST)
        return mixed

    # Over a restart

    def copied(self) -> Iterator[Piece]:
        """What is known, in small pieces; `steps` are what `ladders_of` makes ladders of."""
        self.fold()
        for _ in self._pushed():
            yield "steps", np.empty(0, STEP)
        for first in range(0, max(len(self._paths), 1), COPIED):
            names = self._paths[first : first + COPIED]
            part = np.empty(len(names), STEP)
            part["path"] = [(*name, *(PADDING,) * (_STEPS_MAX - len(name))) for name in names]
            part["counts"] = self._counts[first + 1 : first + 1 + len(names)] / self._gain
            yield "steps", part[part["counts"].any(axis=(1, 2))]
        yield "evidence", self.evidence.copy()
        for number, factors in enumerate(self._hint_factors):
            yield f"factors{number}", factors.numbers()

    def restore(self, state: State) -> None:
        """Go on from what `copied` gave beside the steps. Raises ValueError for what other ladders gave, KeyError."""
        if state["evidence"].shape != self.evidence.shape or not np.isfinite(state["evidence"]).all():
            raise ValueError("other ladders")
        for number, factors in enumerate(self._hint_factors):
            factors.restore(state[f"factors{number}"].copy())
        self.evidence = state["evidence"].copy()
        self._decide()


def hint_number(features: Features) -> int:
    """What engines said of a session, as one number."""
    return features.chance * NEXT_STEPS + features.next_step


def _taker(places: tuple[int, ...]) -> Callable[[Features], tuple[int, ...]]:
    """What picks these features."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda features: tuple([features[at] for at in places])
