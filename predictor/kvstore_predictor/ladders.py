"""Ladders: counts of chains by ever finer classes, and the nodes in which hazard tables keep them.

A node is one step of one ladder: a path of features, with counts of its own for each age bin. The module owns the
numbers of nodes and their counts. It knows no cells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_predictor.ages import BINS, Floats, Ints
from kvstore_predictor.base import Array, untouched
from kvstore_predictor.estimates import count
from kvstore_predictor.features import AWAITED, Features, taking

STEPS_MAX = 6  # of a ladder: the root and five features
_PATH = 8 * STEPS_MAX  # bytes
_NODES_FIRST = 1 << 14  # memory that is not touched costs nothing, and a growing array is copied
GAIN_MAX = 1e12
COPIED = 128  # steps or cells copied between two pauses: 0.3 ms
STEP = np.dtype([("path", "i1", (STEPS_MAX,)), ("counts", "f4", (2, BINS))])  # ladder and features
_PADDING = (PADDING := -2,) * (STEPS_MAX - 1)


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


class Nodes:
    """The numbered nodes of several ladders. `counts` has the exposed and the returned chains by node and age bin; one
    chain counts `gain`. Node 0 is void: a feature that is still to come, or a step that a ladder lacks, is known by the
    step above.
    """

    def __init__(self, ladders: Sequence[Ladder]) -> None:
        self.orders: list[tuple[str, ...]] = []  # of the ladders
        self._taken: list[Callable[[Features], tuple[int, ...]]] = []  # the features that each order takes
        self._steps: list[dict[tuple[int, ...], bytes]] = []  # by ladder and these, or the first: nodes
        self._nodes: list[dict[tuple[int, ...], int]] = []  # by ladder and path
        self._names: list[tuple[int, tuple[int, ...]]] = []  # of the nodes from 1 on
        self.counts = untouched(_NODES_FIRST, 2, BINS)
        self.gain = 1.0
        self.version = 1  # of the counts and the gain
        for ladder in ladders:
            self._learn_by(ladder)
        self.classless = [number for number, order in enumerate(self.orders) if not order]

    def _learn_by(self, ladder: Ladder) -> None:
        number, first = len(self.orders), len(self._names) + 1
        self.orders.append(ladder.order)
        self._taken.append(taking(ladder.order))
        self._steps.append({})
        self._names += [(number, path) for path in ladder.counts]
        self._nodes.append({path: node for node, path in enumerate(ladder.counts, first)})
        while len(self._names) >= len(self.counts):
            self._grow()
        self.counts[first : len(self._names) + 1] = [*ladder.counts.values()] or 0.0

    def _grow(self) -> None:
        self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])

    def ladders(self) -> list[Ladder]:
        """Return the present ladders (counts of chains by ever finer classes)."""
        found = [Ladder(order) for order in self.orders]
        for node, (number, path) in enumerate(self._names, 1):
            found[number].counts[path] = self.counts[node] / self.gain
        return found

    def copied(self) -> Iterator[Array]:
        """Yield the nodes that have counts, in small arrays of dtype STEP."""
        for first in range(0, len(self._names), COPIED):
            names = self._names[first : first + COPIED]
            part = np.empty(len(names), STEP)
            part["path"] = [(number, *path, *_PADDING[len(path) :]) for number, path in names]
            part["counts"] = self.counts[first + 1 : first + 1 + len(names)] / self.gain
            yield part[part["counts"].any(axis=(1, 2))]

    def paths(self, features: Features) -> bytes:
        """Return the nodes of the class of chains with `features`: for each ladder STEPS_MAX numbers of eight bytes,
        the void node's last. A class without nodes gets them.
        """
        paths = []
        for number, (take, steps) in enumerate(zip(self._taken, self._steps, strict=True)):
            taken = take(features)
            paths.append(steps.get(taken) or self._path(number, taken))
        return b"".join(paths)

    def _path(self, number: int, taken: tuple[int, ...]) -> bytes:
        """Return the nodes of a ladder's steps for the features `taken`, or for the first of them."""
        steps = self._steps[number]
        found = steps.get(taken)
        if found is None:
            if AWAITED in taken:
                found = self._path(number, taken[: taken.index(AWAITED)])
            else:
                above = self._path(number, taken[:-1])[: 8 * len(taken)] if taken else b""
                found = (above + self._node(number, taken).to_bytes(8, sys.byteorder)).ljust(_PATH, b"\0")
            steps[taken] = found
        return found

    def _node(self, number: int, path: tuple[int, ...]) -> int:
        nodes = self._nodes[number]
        node = nodes.get(path)
        if node is None:
            self._names.append((number, path))
            node = nodes[path] = len(self._names)
        if node >= len(self.counts):
            self._grow()
        return node

    def add(self, paths: Ints, cells: Ints, bins: Ints, exposed: Floats, returned: Floats) -> None:
        """Add the numbers of chains `exposed` and `returned`, seen of the classes `cells` in the age bins `bins`, to
        the counts of their nodes in `paths`.
        """
        count(self.counts, paths, cells, bins, exposed * self.gain, returned * self.gain)
        self.version += 1

    def fade(self, factor: float, of_ages: float) -> None:
        """Multiply the counts by `factor`, and the counts of ladders that know ages alone by `of_ages`, too."""
        for number in self.classless:
            self.counts[self._node(number, ())] *= of_ages
        self.gain /= factor
        if self.gain > GAIN_MAX:  # once in many thousand requests
            self.counts[: len(self._names) + 1] /= self.gain
            self.gain = 1.0
        self.version += 1
