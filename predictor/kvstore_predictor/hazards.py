"""Hazard tables: the chance that a chain of some class and age is used again, learnt from every chain seen.

A class is a path of features, coarse to fine. Each step of the path has counts of its own for each age bin: how many
chains got through the bin or returned in it (exposed), and how many returned (events). The estimate of a step is its
own counts shrunk towards the step above: rare classes borrow from common ones. Counts decay, so that the tables follow
a changing workload; instead of a pass over old counts, new ones weigh ever more. A ladder of no features knows ages
alone, forgets faster and starts later. The more the estimates trust this ladder, the more ranks should follow the order
of last use (`lean`).

Observations are gathered by cell and bin first; `fold` adds a part of them to the counts, `make` recomputes the ranks
of some cells. Until then a new cell has the ranks of a coarser one, unless an engine gave a hint about it.

The module owns cells (distinct features) and their ranks. It knows no rows and no time. Bounded: of
`_CELLS_MAX` cells, those without chains are reused; while all are taken, new ones are distinguished by their coarse
features only. The time of a call does not grow with the number of cells.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of
from kvstore_predictor.ages import BINS, HINT_MEANS, Floats, HintFactors, Ints, fading, places_of
from kvstore_predictor.base import Piece, State, untouched
from kvstore_predictor.estimates import LEAST, MOST, ClassEstimates, estimated, ranks
from kvstore_predictor.features import Features, coarse, unhinted
from kvstore_predictor.ladders import COPIED, STEPS_MAX, Ladder, Nodes
from kvstore_predictor.observations import FOLDED, LATE, Observations

_CELLS_MAX = 16384
TRUST = 0.05  # how sharply likelihood separates ladders; cells are not independent of each other
EVIDENCE_DECAY = 2.0
_BEHIND_MAX = 120.0  # how far a ladder falls behind the best: when the workload changes it has to catch up
_FAST_DECAY = 10.0  # times the others', of a ladder of no features
_STARTS_BEHIND = 30.0  # such a ladder: it is believed once it has foretold better than the others
_LEAN = 1.5  # `ages.leaning`, where ages alone are believed
_MADE = 64  # cells a call
KINDS = 3
_COARSE_MAX = 512  # cells that are left for coarse features
_FREED = 256  # cells a renewal, once most are taken,
_UNUSED_EPOCHS = 2  # that no chain has been of for so many
ROOT = Features(kind=0, new_blocks=0, length=0, turn=0, answer=0, gap=0, pace=0, text=0, type=0)


class HazardTables:
    """Tables of how likely chains are used again (return), by class of chain and by age. A class is called a cell. The
    counts are in several ladders, which divide classes by different orders of features.
    """

    def __init__(self, ladders: Sequence[Ladder], *, ranked: bool = True) -> None:
        """`ranked`: `ranks` will be asked for, not `hazards` alone."""
        self._is_ranked = ranked
        self._nodes = Nodes(ladders)
        self.orders = self._nodes.orders  # of the ladders
        self._cells: dict[Features, int] = {}
        self._is_wanted = bytearray(_CELLS_MAX)  # cells whose ranks are to be made anew
        self.epoch = 1
        self._features: list[Features] = []  # by cell
        self._free: list[int] = []
        self._used_in: Ints = untouched(_CELLS_MAX).view(np.int64)  # by cell: the last epoch in which a chain was of it
        self._epoch_of = array("q", bytes(8 * _CELLS_MAX))  # by cell: when its ranks were made, or asked for
        self._asked: list[int] = []  # cells in use that are of an epoch before, or stand in for coarser ones
        # By cell, the nodes of each ladder and its hazards as of the same time as the ranks. What no cell has touched
        # costs no memory.
        self._paths: Ints = untouched(_CELLS_MAX, len(ladders), STEPS_MAX).view(np.int64)
        self._packed_paths = self._paths.reshape(-1).data.cast("B")
        self._estimates = untouched(_CELLS_MAX, len(ladders), BINS)
        self.seen = Observations(_CELLS_MAX, self._estimates)
        self.passed, self.returned = self.seen.passed, self.seen.returned
        self.written_at = address_of(self._used_in), *self.seen.places  # by those who count ages
        self._mixed = untouched(_CELLS_MAX, BINS)  # of all ladders, before what a hint adds
        self._ranks = untouched(_CELLS_MAX, BINS)
        self.ranks_at = address_of(self._ranks)
        self._made = ClassEstimates(self._paths, self._estimates, self._mixed, self._ranks)
        self._hints: Ints = untouched(2, _CELLS_MAX).view(np.int64)  # chance and next step
        self._is_any_hinted = False
        self._hint_factors = [HintFactors(means) for means in HINT_MEANS]
        self.lean = 0.0  # how far to lean to the order of last use; as of the same time as the ranks
        self.evidence: Floats = np.zeros(len(ladders))  # decayed log-likelihood of what came, by ladder
        self._weighed, self._weights, self._next_lean = b"", self.evidence, 0.0  # the evidence that they follow
        self.evidence[self._nodes.classless] = -_STARTS_BEHIND
        for kind in range(KINDS):
            self._make(np.array([self._add(ROOT._replace(kind=kind))]))

    def counts(self) -> list[Ladder]:
        """Return the present ladders (counts of chains by ever finer classes)."""
        return self._nodes.ladders()

    def copied(self) -> Iterator[Piece]:
        """Yield the learned state as pairs of a table's name and a part of that table."""
        for part in self._nodes.copied():
            yield "steps", part
        for first in range(0, len(self._features), COPIED):
            yield "cells", np.array(self._features[first : first + COPIED], np.int8)
        for part in self.seen.copied():
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
        self.seen.restore(numbers[late["cell"]], late["seen"])
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
            self._used_in[found] = self.epoch
            if self._epoch_of[found] != self.epoch:
                self._ask(found, features)
            return found
        found = self._add(features)
        if self._is_ranked:  # else the estimates are read once they are made, or made for who reads them
            self._stand_in(found, features)
        self._ask(found, features)
        return found

    def _stand_in(self, found: int, features: Features) -> None:
        """Let the new cell `found` have the ranks of a coarser one for a while."""
        cells = self._cells
        like = cells.get(unhinted(features)) if features.chance or features.next_step else found
        if like is None or like == found:
            like = cells.get(coarse(features))
        if like is None or like == found:
            like = cells[ROOT._replace(kind=features.kind)]
        for column in (self._estimates, self._mixed, self._ranks):
            column[found] = column[like]

    def _ask(self, cell: int, features: Features) -> None:
        """Ask for the cell's ranks to be recomputed. If an engine gave a hint, that happens at once, at most once an
        epoch; otherwise it would come too late.
        """
        self._epoch_of[cell] = self.epoch
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
        self._used_in[found] = self.epoch
        paths = self._nodes.paths(features)
        self._packed_paths[found * (size := len(paths)) : (found + 1) * size] = paths
        self._hints[0, found], self._hints[1, found] = features.chance, features.next_step
        self._is_any_hinted |= bool(features.chance or features.next_step)
        return found

    def in_use(self, cells: npt.NDArray[np.int32]) -> None:
        """Note that classes `cells` have chains. Classes without chains for long lose their numbers to others."""
        self._used_in[cells] = self.epoch

    def want(self, cells: npt.NDArray[np.int32]) -> None:
        """Have the ranks of the classes `cells` recomputed by later calls of `make`."""
        np.frombuffer(self._is_wanted, np.uint8)[cells] = 1

    def fold(self, most: int = FOLDED) -> int:
        """Add new observations of at most `most` cells to the ladders' counts. Return the number of these cells."""
        while self._asked and not self._is_ranked:  # what came is held against what is predicted
            self.make()
        folded, (cells, bins, through, returns, estimate) = self.seen.taken(most, len(self._features))
        if not folded:
            return 0
        either = through + returns
        self.evidence += through @ np.log1p(-estimate) + returns @ np.log(estimate)
        hints = self._hints[:, cells]
        if self._is_any_hinted and hints.any():
            predicted = self._mixed[cells, bins] * either
            for number, factors in enumerate(self._hint_factors):
                other = 1 - number  # what that has said already is not to be said twice
                by_other = predicted * self._hint_factors[other].factors()[hints[other], bins]
                factors.happened(hints[number], bins, by_other, returns)
        self._nodes.add(self._paths, cells, bins, either, returns)
        return folded

    def renew(self, factor: float) -> None:
        """Multiply the counts by `factor`, so that they fade, and have the ranks of all cells recomputed."""
        self.epoch += 1
        self.evidence *= factor**EVIDENCE_DECAY
        np.maximum(self.evidence, self.evidence.max() - _BEHIND_MAX, out=self.evidence)
        for factors in self._hint_factors:
            factors.decay(factor)
        if len(self._cells) > _CELLS_MAX // 2:
            self._free_unused()
        self._nodes.fade(factor, factor ** (_FAST_DECAY - 1.0))

    def _free_unused(self) -> None:
        taken = self._used_in[KINDS : len(self._features)]
        is_late = self.seen.flags(len(self._features))[KINDS:]
        is_wanted = np.frombuffer(self._is_wanted, np.uint8, len(self._features))[KINDS:]
        unused = (taken > 0) & (taken < self.epoch - _UNUSED_EPOCHS)
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
            np.frombuffer(self._epoch_of, np.int64)[cells] = self.epoch
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
            self._next_lean = _LEAN * max(0.0, 2.0 * float(self._weights[self._nodes.classless].sum()) - 1.0)
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
            self._nodes.counts[0], paths = 0.0, self._paths[np.asarray(cells)[asked]]
            _, mixed[asked] = estimated(self._nodes.counts, paths, self._nodes.gain, self.weights())
        if hints.any():
            (chances, next_steps), (chance, next_step) = self.hint_factors(), hints
            mixed = np.clip(mixed * chances[chance] * next_steps[next_step], LEAST, MOST)
        return mixed

    def rank_of_new(self, cell: int) -> float:
        """Return the rank (uses a second) of a chain of the class `cell` that was used just now."""
        return float(self._ranks[cell, 0])

    def _make(self, cells: Ints) -> None:
        weights, is_hinted = self.weights(), self._is_any_hinted and self._is_ranked and self._hints[:, cells].any()
        nodes, self.lean = self._nodes, self._next_lean
        nodes.counts[0] = 0.0
        with_ranks = self._is_ranked and not is_hinted
        self._made.make(cells, nodes.counts, nodes.gain, nodes.version, weights, with_ranks=with_ranks)
        if is_hinted:
            self._ranks[cells] = ranks(self.hazards(cells))
