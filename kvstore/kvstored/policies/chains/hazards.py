"""Hazard tables: the chance that a chain of some class and age is used again, learnt from every chain seen.

A class is a path of features, coarse to fine; each step of the path has counts of its own for each age bin: how many
chains got through the bin or returned in it (exposed), and how many returned (events). The estimate of a step is its
own counts shrunk towards the step above: rare classes borrow from common ones. Counts decay, so that a workload that
changes is followed.

Owns cells (distinct features), their counts and ranks. Never knows rows or time. Bounded: beyond `_CELLS_MAX` cells
new ones are told apart by their coarse features only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstored.policies.chains.features import AWAITED, Features
from kvstored.policies.chains.gittins import BINS, EDGES_S, WIDTHS_S, Floats, ranks

Ints = npt.NDArray[np.int64]
_CELLS_MAX = 4096
_STEPS_MAX = 6  # of a ladder: the root and five features
_SHRINK_FIRST, _SHRINK = 15.0, 30.0  # how many exposures of its own a step needs to weigh as much as the one above
_LEAST, _MOST = 1e-7, 0.999
_TRUST = 0.05  # how sharply likelihood tells ladders apart; cells are not independent of each other
_EVIDENCE_DECAY = 2.0
_HINTS_MAX = 15
_HINT_WEIGHT = 10.0  # returns that it takes for a hint to be believed by half
FLAT: Final[Floats] = np.clip(0.02 * WIDTHS_S / (5 + EDGES_S), 1e-5, 0.05)  # before anything is known


class Ladder:
    """One order of features, and what is known of each path through it: exposed and events, by bin."""

    def __init__(self, order: Sequence[str], counts: Mapping[tuple[int, ...], Floats] | None = None) -> None:
        self.order = tuple(order)
        self.counts = dict(counts or {})


class HazardTables:
    """Cells, the counts of every step of every ladder (a node each), and the cells' ranks as of the last `renew`."""

    def __init__(self, ladders: Sequence[Ladder]) -> None:
        self._orders: list[tuple[str, ...]] = []
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}  # by ladder and path
        # Node 0 is void: a feature that is still to come, or a step that a ladder lacks, is known by the step above.
        self._counts: Floats = np.zeros((256, 2, BINS))
        self._cells: dict[Features, int] = {}
        self._epoch = 1
        self._late_cells: list[int] = []
        self._late_bins: list[int] = []
        self._epoch_of = np.zeros(256, dtype=np.int64)  # by cell, as are the following
        self._paths: Ints = np.zeros((256, 0, _STEPS_MAX), dtype=np.int64)
        self._told: Floats = np.zeros((256, 0, BINS))  # each ladder's hazards, as of the same time as the ranks
        self._mixed: Floats = np.zeros((256, BINS))  # of all ladders, before what a hint adds
        self._ranks: Floats = np.zeros((256, BINS))
        self._hint_of: Ints = np.zeros(256, dtype=np.int64)
        # By hint: returns foretold without it, and seen.
        self._hinted: Floats = np.full((_HINTS_MAX + 1, 2), _HINT_WEIGHT)
        self.evidence: Floats = np.zeros(0)  # decayed log-likelihood of what came, by ladder
        for ladder in ladders:
            self._learn_by(ladder)

    def _learn_by(self, ladder: Ladder) -> None:
        number = len(self._orders)
        self._orders.append(ladder.order)
        for path, counts in ladder.counts.items():
            node = self._node(number, path)  # first: the array may grow
            self._counts[node] = counts
        size = len(self._epoch_of)
        self._paths = np.concatenate([self._paths, np.zeros((size, 1, _STEPS_MAX), dtype=np.int64)], axis=1)
        self._told = np.concatenate([self._told, np.broadcast_to(FLAT, (size, 1, BINS))], axis=1)
        self.evidence = np.append(self.evidence, 0.0)

    def counts(self) -> list[Ladder]:
        """What is known by now."""
        found = [Ladder(order) for order in self._orders]
        for (number, path), node in self._nodes.items():
            found[number].counts[path] = self._counts[node].copy()
        return found

    def cell(self, features: Features) -> int:
        """The cell of these features, new when first seen."""
        found = self._cells.get(features)
        if found is not None:
            return found
        if len(self._cells) >= _CELLS_MAX:
            features = coarse(features)
            if features in self._cells:
                return self._cells[features]
        found = self._cells[features] = len(self._cells)
        if found >= len(self._epoch_of):
            self._epoch_of, self._paths, self._told, self._mixed, self._ranks, self._hint_of = (
                np.concatenate([column, np.zeros_like(column)])
                for column in (self._epoch_of, self._paths, self._told, self._mixed, self._ranks, self._hint_of)
            )
        for number in range(len(self._orders)):
            self._set_path(found, number, features)
        self._told[found] = self._mixed[found] = FLAT
        self._hint_of[found] = min(max(features.hint, 0), _HINTS_MAX)
        if features.hint > 0:  # what comes is held against what is foretold without it, not against a guess
            self._make(np.array([found]))
        return found

    def _set_path(self, cell: int, number: int, features: Features) -> None:
        path = tuple(getattr(features, name) for name in self._orders[number])
        for step in range(len(path) + 1):
            self._paths[cell, number, step] = self._node(number, path[:step])

    def _node(self, number: int, path: tuple[int, ...]) -> int:
        if AWAITED in path:
            return 0
        node = self._nodes.setdefault((number, path), len(self._nodes) + 1)
        if node >= len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        return node

    # Learning

    def exposed(self, cells: Ints, bins: Ints) -> None:
        """Chains of `cells` got through `bins` without a return."""
        self.evidence += np.log1p(-self._told[cells, :, bins]).sum(axis=0)
        np.add.at(self._hinted[:, 0], self._hint_of[cells], self._mixed[cells, bins])
        places = self._paths[cells].reshape(len(cells), -1) * (2 * BINS) + bins[:, None]
        np.add.at(self._counts.reshape(-1), places.reshape(-1), 1.0)

    def passed(self, cell: int, first: int, last: int) -> None:
        """One chain got through bins `first` up to `last`; counted with the next `renew`."""
        self._late_cells += [cell] * (last - first)
        self._late_bins += range(first, last)

    def returned(self, cell: int, at_bin: int) -> None:
        self.evidence += np.log(np.maximum(self._told[cell, :, at_bin], _LEAST))
        self._hinted[self._hint_of[cell]] += (self._mixed[cell, at_bin], 1.0)
        counts, places = self._counts.reshape(-1), self._paths[cell].reshape(-1) * (2 * BINS) + at_bin
        counts[places] += 1.0
        counts[places + BINS] += 1.0

    def renew(self, factor: float) -> None:
        """Decay the counts; ranks asked for from now on are made anew."""
        if self._late_cells:
            cells, bins = np.array(self._late_cells), np.array(self._late_bins)
            self._late_cells, self._late_bins = [], []
            self.exposed(cells, bins)
        self._epoch += 1
        self.evidence *= factor**_EVIDENCE_DECAY
        self._counts[: len(self._nodes) + 1] *= factor
        self._hinted = _HINT_WEIGHT + (self._hinted - _HINT_WEIGHT) * factor

    # Telling

    def weights(self) -> Floats:
        """What each ladder's estimate counts, by how well it foretold what came."""
        odds = np.exp(_TRUST * (self.evidence - self.evidence.max()))
        weights: Floats = odds / odds.sum()
        return weights

    def hint_factors(self) -> Floats:
        """By hint: how many times as often its chains returned as was foretold without it. Multiplying keeps what the
        ladders know, which tables by hint would have to learn again.
        """
        factors: Floats = self._hinted[:, 1] / self._hinted[:, 0]
        factors[0] = 1.0
        return factors

    def ranks(self, cells: Ints, bins: Ints) -> Floats:
        stale = np.unique(cells[self._epoch_of[cells] != self._epoch])
        if len(stale):
            self._make(stale)
        found: Floats = self._ranks[cells, bins]
        return found

    def rank_of_new(self, cell: int, features: Features) -> float:
        """At age 0, as of any renewal, or of a coarser cell: good until the next look at all, and cheap."""
        if not self._epoch_of[cell]:
            cell = self.cell(coarse(features))
            if not self._epoch_of[cell]:
                self._make(np.array([cell]))
        return float(self._ranks[cell, 0])

    def _make(self, cells: Ints) -> None:
        self._counts[0] = 0.0
        paths = self._paths[cells]
        told = np.broadcast_to(FLAT, (len(cells), len(self._orders), BINS))
        for step in range(_STEPS_MAX):
            weight = _SHRINK if step else _SHRINK_FIRST
            taken = self._counts[paths[:, :, step]]
            told = (taken[:, :, 1] + weight * told) / (taken[:, :, 0] + weight)
        self._told[cells] = told = np.clip(told, _LEAST, _MOST)
        self._mixed[cells] = mixed = np.einsum("clb,l->cb", told, self.weights())
        hints = self._hint_of[cells]
        if hints.any():
            mixed = np.clip(mixed * self.hint_factors()[hints, None], _LEAST, _MOST)
        self._ranks[cells] = ranks(mixed)
        self._epoch_of[cells] = self._epoch


def coarse(features: Features) -> Features:
    """What nearly every cell of these would be taken for."""
    return features._replace(gap=0, text=0, type=0)
