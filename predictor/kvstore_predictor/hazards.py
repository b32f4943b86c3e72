"""Hazard tables: the chance that a chain of some class and age is used again, learnt from every chain seen.

A class is a path of features, coarse to fine. Each step of the path has counts of its own for each age bin: how many
chains got through the bin or returned in it (exposed), and how many returned (events). The estimate of a step is its
own counts shrunk towards the step above: rare classes borrow from common ones. Counts decay, so that the tables follow
a changing workload; instead of a pass over old counts, new ones weigh ever more. A ladder of no features knows ages
alone, forgets faster and starts later. The more the estimates trust this ladder, the more ranks should follow the order
of last use (`lean`).

Observations are gathered by cell and bin first; `fold` adds a part of them to the counts, `make` recomputes the ranks
of some cells. Until then a new cell has the ranks of a coarser one, unless an engine gave a hint about it.

The module owns cells (distinct features), their counts and ranks. It knows no rows and no time. Bounded: of
`_CELLS_MAX` cells, those without chains are reused; while all are taken, new ones are distinguished by their coarse
features only. The time of a call does not grow with the number of cells.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of
from kvstore_predictor.ages import BINS, HINT_MEANS, Floats, HintFactors, Ints, fading, places_of
from kvstore_predictor.base import Piece, State, untouched
from kvstore_predictor.estimates import LEAST, MOST, count, estimated, make, ranks
from kvstore_predictor.features import AWAITED, Features, coarse, taking, unhinted

_CELLS_MAX = 16384
_STEPS_MAX = 6  # of a ladder: the root and five features
TRUST = 0.05  # how sharply likelihood separates ladders; cells are not independent of each other
EVIDENCE_DECAY = 2.0
_BEHIND_MAX = 120.0  # how far a ladder falls behind the best: when the workload changes it has to catch up
_FAST_DECAY = 10.0  # times the others', of a ladder of no features
_STARTS_BEHIND = 30.0  # such a ladder: it is believed once it has foretold better than the others
_LEAN = 1.5  # `ages.leaning`, where ages alone are believed
_FOLDED, _MADE = 48, 64  # cells a call
_NODES_FIRST = 1 << 14  # memory that is not touched costs nothing, and a growing array is copied
GAIN_MAX = 1e12
COPIED = 128  # steps or cells copied between two pauses: 0.3 ms
STEP = np.dtype([("path", "i1", (_STEPS_MAX,)), ("counts", "f4", (2, BINS))])  # ladder and features
LATE = np.dtype([("cell", "i4"), ("seen", "f4", (2, BINS))])
_PADDING = (PADDING := -2,) * (_STEPS_MAX - 1)
KINDS = 3
_COARSE_MAX = 512  # cells that are left for coarse features
_FREED = 256  # cells a renewal, once most are taken,
_UNUSED_EPOCHS = 2  # that no chain has been of for so many
ROOT = Features(kind=0, new_blocks=0, length=0, turn=0, answer=0, gap=0, pace=0, text=0, type=0)


class Ladder:
    """Counts of chains by ever finer classes, which the features in `order` divide from coarse to fine."""

    def __init__(self, order: Sequence[str], counts: Mapping[tuple[int, ...], Floats] | None = None) -> None:
        self.order = tuple(order)
        self.counts = dict(counts or {})


def ladders_of(orders: Sequence[Sequence[str]], steps: npt.NDArray[np.void]) -> list[Ladder]:
    """Return ladders (counts by ever finer classes) with these `orders` of features, filled with the table `steps`."""
    found = [Ladder(order) for order in orders]
    for (number, *path), counts in zip(steps["path"].tolist(), steps["counts"].astype(np.float64), strict=True):
        found[number].counts[tuple(at for at in path if at != PADDING)] = counts
    return found


class HazardTables:
    """Tables of how likely chains are used again (return), by class of chain and by age. A class is called a cell. The
    counts are in several ladders, which divide classes by different orders of features.
    """

    def __init__(self, ladders: Sequence[Ladder], *, ranked: bool = True) -> None:
        """`ranked`: `ranks` will be asked for, not `hazards` alone."""
        self._is_ranked = ranked
        self.orders: list[tuple[str, ...]] = []  # of the ladders
        self._taken: list[Callable[[Features], tuple[int, ...]]] = []  # the features that each order takes
        self._steps: list[dict[tuple[int, ...], bytes]] = []  # by ladder and these: the nodes, as in `_paths`
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}  # by ladder and path
        self._names: list[tuple[int, tuple[int, ...]]] = []  # of the nodes from 1 on
        # Node 0 is void: a feature that is still to come, or a step that a ladder lacks, is known by the step above.
        self._counts = untouched(_NODES_FIRST, 2, BINS)  # times the gain
        self._gain = 1.0  # what one chain counts now
        self._cells: dict[Features, int] = {}
        self._is_wanted = bytearray(_CELLS_MAX)  # cells whose ranks are to be made anew
        self._epoch = 1
        self._features: list[Features] = []  # by cell
        self._free: list[int] = []
        self._used_in: Ints = untouched(_CELLS_MAX).view(np.int64)  # by cell: the last epoch in which a chain was of it
        self._epoch_of = array("q", bytes(8 * _CELLS_MAX))  # by cell: when its ranks were made, or asked for
        self._asked: list[int] = []  # cells in use that are of an epoch before, or stand in for coarser ones
        self._is_late = bytearray(_CELLS_MAX)  # cells of which something was seen
        self._late = untouched(_CELLS_MAX, 2, BINS)  # got through, returned
        self._late_one_by_one = self._late.reshape(-1).data.cast("B").cast("d")
        # By cell, the nodes of each ladder and its hazards as of the same time as the ranks. What no cell has touched
        # costs no memory.
        self._paths: Ints = untouched(_CELLS_MAX, len(ladders), _STEPS_MAX).view(np.int64)
        self._packed_paths = self._paths.reshape(-1).data.cast("B")
        self._estimates = untouched(_CELLS_MAX, len(ladders), BINS)
        self._mixed = untouched(_CELLS_MAX, BINS)  # of all ladders, before what a hint adds
        self._ranks = untouched(_CELLS_MAX, BINS)
        self.ranks_at = address_of(self._ranks)
        self._hints: Ints = untouched(2, _CELLS_MAX).view(np.int64)  # chance and next step
        self._hint_factors = [HintFactors(means) for means in HINT_MEANS]
        self.lean = 0.0  # how far to lean to the order of last use; as of the same time as the ranks
        self.evidence: Floats = np.zeros(len(ladders))  # decayed log-likelihood of what came, by ladder
        self._weighed, self._weights, self._next_lean = b"", self.evidence, 0.0  # the evidence that they follow
        for ladder in ladders:
            self._learn_by(ladder)
        self._classless = [number for number, order in enumerate(self.orders) if not order]
        self.evidence[self._classless] = -_STARTS_BEHIND
        for kind in range(KINDS):
            self._make(np.array([self._add(ROOT._replace(kind=kind))]))

    def _learn_by(self, ladder: Ladder) -> None:
        number, first = len(self.orders), len(self._names) + 1
        self.orders.append(ladder.order)
        self._taken.append(taking(ladder.order))
        self._steps.append({})
        names = [(number, path) for path in ladder.counts]  # none is known: the number is new
        self._names += names
        self._nodes.update(zip(names, range(first, first + len(names)), strict=True))
        while len(self._names) >= len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._counts[first : first + len(names)] = [*ladder.counts.values()] or 0.0

    def counts(self) -> list[Ladder]:
        """Return the present ladders (counts of chains by ever finer classes)."""
        found = [Ladder(order) for order in self.orders]
        for (number, path), node in self._nodes.items():
            found[number].counts[path] = self._counts[node] / self._gain
        return found

    def copied(self) -> Iterator[Piece]:
        """Yield the learned state as pairs of a table's name and a part of that table."""
        for first in range(0, len(self._names), COPIED):
            names = self._names[first : first + COPIED]
            part = np.empty(len(names), STEP)
            part["path"] = [(number, *path, *_PADDING[len(path) :]) for number, path in names]
            part["counts"] = self._counts[first + 1 : first + 1 + len(names)] / self._gain
            yield "steps", part[part["counts"].any(axis=(1, 2))]
        for first in range(0, len(self._features), COPIED):
            yield "cells", np.array(self._features[first : first + COPIED], np.int8)
        late = np.flatnonzero(np.frombuffer(self._is_late, np.uint8))
        for first in range(0, len(late), COPIED):
            part = np.empty(len(late[first : first + COPIED]), LATE)
            part["cell"] = late[first : first + COPIED]
            part["seen"] = self._late[part["cell"]]
            yield "late", part
        yield "evidence", self.evidence.copy()
        yield "kinds", np.append(self._estimates[:KINDS], self._mixed[:KINDS, None], axis=1)
        for number, factors in enumerate(self._hint_factors):
            yield f"factors{number}", factors.numbers()

    def restore(self, state: State, numbers: Ints) -> None:
        """Continue from `state`, which `copied` of other tables yielded. `numbers` maps old numbers of cells to present
        ones. The ladders have their counts already. Raises ValueError if the state belongs to other ladders.
        """
        if state["evidence"].shape != self.evidence.shape:
            raise ValueError("other ladders")
        self.evidence, kinds = state["evidence"].copy(), state["kinds"]
        self._estimates[:KINDS], self._mixed[:KINDS] = kinds[:, :-1], kinds[:, -1]
        self._ranks[:KINDS] = ranks(self._mixed[:KINDS])  # what stands in for new cells, as it was
        for number, factors in enumerate(self._hint_factors):
            factors.restore(state[f"factors{number}"])
        late = state.get("late", np.empty(0, LATE))
        cells = numbers[late["cell"]]
        np.add.at(self._late, cells, late["seen"])
        np.frombuffer(self._is_late, np.uint8)[cells] = 1
        np.frombuffer(self._is_wanted, np.uint8)[KINDS : len(self._features)] = 1
        while self.make():
            pass

    def cell(self, features: Features) -> int:
        """Return the number of the cell (class) of chains with `features`; new features get a new cell."""
        cells = self._cells
        found = cells.get(features)
        if found is None and len(cells) >= _CELLS_MAX - _COARSE_MAX:
            features = unhinted(features)
            found = cells.get(features)
            if found is None:
                features = coarse(features)
                found = cells.get(features)
            if found is None and len(cells) >= _CELLS_MAX:
                features = ROOT._replace(kind=features.kind)
                found = cells[features]
        if found is not None:
            self._used_in[found] = self._epoch
            if self._epoch_of[found] != self._epoch:
                self._ask(found, features)
            return found
        found = self._add(features)
        like = cells.get(unhinted(features)) if features.chance or features.next_step else found
        if like is None or like == found:
            like = cells.get(coarse(features))
        if like is None or like == found:
            like = cells[ROOT._replace(kind=features.kind)]
        for column in (self._estimates, self._mixed, self._ranks):
            column[found] = column[like]
        self._ask(found, features)
        return found

    def _ask(self, cell: int, features: Features) -> None:
        """Ask for the cell's ranks to be recomputed. If an engine gave a hint, that happens at once, at most once an
        epoch; otherwise it would come too late.
        """
        self._epoch_of[cell] = self._epoch
        if features.chance or features.next_step:
            self._make(np.array([cell]))
        else:
            self._asked.append(cell)

    def _add(self, features: Features) -> int:
        if self._free:
            found = self._free.pop()
            self._features[found] = features
        else:
            found = len(self._features)
            self._features.append(features)
        self._cells[features] = found
        self._used_in[found] = self._epoch
        paths = []
        for number, (take, steps) in enumerate(zip(self._taken, self._steps, strict=True)):
            taken = take(features)
            paths.append(steps.get(taken) or self._path(number, taken))
        self._packed_paths[found * (size := len(paths) * 8 * _STEPS_MAX) : (found + 1) * size] = b"".join(paths)
        self._hints[0, found], self._hints[1, found] = features.chance, features.next_step
        return found

    def _path(self, number: int, taken: tuple[int, ...]) -> bytes:
        """Return the nodes of a ladder's steps for the features `taken`, which are new to it."""
        known = taken.index(AWAITED) if AWAITED in taken else len(taken)
        nodes = [self._node(number, taken[:step]) for step in range(known + 1)]
        self._steps[number][taken] = steps = array("q", nodes + [0] * (_STEPS_MAX - len(nodes))).tobytes()
        return steps

    def _node(self, number: int, path: tuple[int, ...]) -> int:
        node = self._nodes.get((number, path))
        if node is None:
            self._names.append(name := (number, path))
            node = self._nodes[name] = len(self._names)
        if node >= len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        return node

    def exposed(self, cells: Ints, bins: Ints) -> None:
        """Count for each of `cells` a chain that got through its age bin in `bins` without a use."""
        np.add.at(self._late.reshape(-1), cells * (2 * BINS) + bins, 1.0)
        np.frombuffer(self._is_late, np.uint8)[cells] = 1

    def passed(self, cell: int, first: int, last: int) -> None:
        """Count a chain of class `cell` that got through the age bins `first` to `last` - 1 without a use."""
        late = self._late_one_by_one
        for place in range(2 * BINS * cell + first, 2 * BINS * cell + last):
            late[place] += 1.0
        self._is_late[cell] = 1

    def returned(self, cell: int, at_bin: int) -> None:
        self._late_one_by_one[(2 * cell + 1) * BINS + at_bin] += 1.0
        self._is_late[cell] = 1

    def in_use(self, cells: npt.NDArray[np.int32]) -> None:
        """Note that classes `cells` have chains. Classes without chains for long lose their numbers to others."""
        self._used_in[cells] = self._epoch

    def want(self, cells: npt.NDArray[np.int32]) -> None:
        """Have the ranks of the classes `cells` recomputed by later calls of `make`."""
        np.frombuffer(self._is_wanted, np.uint8)[cells] = 1

    def fold(self, most: int = _FOLDED) -> int:
        """Add new observations of at most `most` cells to the ladders' counts. Return the number of these cells."""
        is_late = np.frombuffer(self._is_late, np.uint8, len(self._features))
        cells = np.flatnonzero(is_late)[: min(most, _FOLDED)]
        if not len(cells):
            return 0
        folded = len(cells)
        is_late[cells] = 0
        late = self._late[cells]
        self._late[cells] = 0.0
        at, bins = np.nonzero(late.any(axis=1))
        through, returns, cells = late[at, 0, bins], late[at, 1, bins], cells[at]
        estimate, either = self._estimates[cells, :, bins], through + returns
        self.evidence += through @ np.log1p(-estimate) + returns @ np.log(estimate)
        hints = self._hints[:, cells]
        if hints.any():
            predicted = self._mixed[cells, bins] * either
            for number, factors in enumerate(self._hint_factors):
                other = 1 - number  # what that has said already is not to be said twice
                by_other = predicted * self._hint_factors[other].factors()[hints[other], bins]
                factors.happened(hints[number], bins, by_other, returns)
        count(self._counts, self._paths, cells, bins, either * self._gain, returns * self._gain)
        return folded

    def renew(self, factor: float) -> None:
        """Multiply the counts by `factor`, so that they fade, and have the ranks of all cells recomputed."""
        self._epoch += 1
        self.evidence *= factor**EVIDENCE_DECAY
        np.maximum(self.evidence, self.evidence.max() - _BEHIND_MAX, out=self.evidence)
        for number in self._classless:
            self._counts[self._node(number, ())] *= factor ** (_FAST_DECAY - 1.0)
        for factors in self._hint_factors:
            factors.decay(factor)
        if len(self._cells) > _CELLS_MAX // 2:
            self._free_unused()
        self._gain /= factor
        if self._gain > GAIN_MAX:  # once in many thousand requests
            self._counts[: len(self._nodes) + 1] /= self._gain
            self._gain = 1.0

    def _free_unused(self) -> None:
        taken = self._used_in[KINDS : len(self._features)]
        is_late, is_wanted = (
            np.frombuffer(flags, np.uint8, len(self._features))[KINDS:] for flags in (self._is_late, self._is_wanted)
        )
        unused = (taken > 0) & (taken < self._epoch - _UNUSED_EPOCHS)
        unused &= (is_late | is_wanted) == 0
        for cell in (np.flatnonzero(unused)[:_FREED] + KINDS).tolist():
            del self._cells[self._features[cell]]
            self._used_in[cell] = 0  # of no chain
            self._free.append(cell)

    def make(self, most: int = _MADE) -> int:
        """Recompute the ranks of at most `most` wanted cells (classes of chains). Return the number of cells."""
        most = min(most, _MADE)
        is_wanted = np.frombuffer(self._is_wanted, np.uint8, len(self._features))
        cells = np.array(self._asked[:most], np.int64) if self._asked else np.flatnonzero(is_wanted)[:most]
        del self._asked[:most]
        if len(cells):
            is_wanted[cells] = 0
            self._make(cells)
            np.frombuffer(self._epoch_of, np.int64)[cells] = self._epoch
        return len(cells)

    @property
    def is_any_asked(self) -> bool:
        return bool(self._asked)

    @property
    def is_any_wanted(self) -> bool:
        return bool(self._asked) or self._is_wanted.find(1, 0, len(self._features)) >= 0

    @property
    def are_many_asked(self) -> bool:
        """True if `make` should be called, because many cells wait for new ranks; more where nobody asks for these."""
        return len(self._asked) >= (_MADE // 4 if self._is_ranked else _MADE)

    def weights(self) -> Floats:
        """Return the weight of each ladder, by how well its estimates predicted outcomes. They sum to 1."""
        if self._weighed != (evidence := self.evidence.tobytes()):
            odds = np.exp(TRUST * (self.evidence - self.evidence.max()))
            self._weights = odds / odds.sum()
            self._next_lean = _LEAN * max(0.0, 2.0 * float(self._weights[self._classless].sum()) - 1.0)
            self._weighed = evidence
        return self._weights

    def hint_factors(self) -> tuple[Floats, Floats]:
        """Return the factors for hints of a chance, and of a next step, as arrays [value of the hint, age bin]."""
        chances, next_steps = self._hint_factors
        return chances.factors(), next_steps.factors()

    def takes(self, feature: str) -> bool:
        """Return whether any ladder distinguishes chains by `feature`."""
        return any(feature in order for order in self.orders)

    def ranks(self, cells: Ints | npt.NDArray[np.int32], ages_s: Floats) -> Floats:
        """Return the rank (uses a second) of a chain of class `cells[i]` at age `ages_s[i]` in seconds, from `make`."""
        bins, share = places_of(ages_s)
        flat, places = self._ranks.reshape(-1), bins + cells * BINS
        found: Floats = flat[places]
        found += share * (flat[places + (share > 0.0)] - found)  # a share that is not 0 is not of the last bin
        return found * fading(ages_s)

    def hazards(self, cells: Ints | Sequence[int]) -> Floats:
        """Return the chance of a return in each age bin, given none before, with a row for each of `cells`."""
        mixed, hints = self._mixed[cells], self._hints[:, cells]
        waiting = set(self._asked)
        if waiting and (asked := [at for at, cell in enumerate(cells) if cell in waiting]):
            self._counts[0], paths = 0.0, self._paths[np.asarray(cells)[asked]]
            _, mixed[asked] = estimated(self._counts, paths, self._gain, self.weights())
        if hints.any():
            (chances, next_steps), (chance, next_step) = self.hint_factors(), hints
            mixed = np.clip(mixed * chances[chance] * next_steps[next_step], LEAST, MOST)
        return mixed

    def rank_of_new(self, cell: int) -> float:
        """Return the rank (uses a second) of a chain of the class `cell` that was used just now."""
        return float(self._ranks[cell, 0])

    def _make(self, cells: Ints) -> None:
        weights, is_hinted = self.weights(), self._is_ranked and self._hints[:, cells].any()
        self.lean, self._counts[0] = self._next_lean, 0.0
        best = self._ranks if self._is_ranked and not is_hinted else None
        make(cells, self._counts, self._paths, self._gain, weights, self._estimates, self._mixed, best)
        if is_hinted:
            self._ranks[cells] = ranks(self.hazards(cells))
