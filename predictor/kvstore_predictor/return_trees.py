"""A learned model of return: boosted trees upon session-return's log odds, as plain arrays. Needs NumPy alone.

Without a tree it says what session-return says. Checked as a whole when it is made, since it comes from a file: a walk
down a tree always ends, and never leaves its arrays. Never does I/O; `kvstore_simulator.fitting` makes models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from kvstore_predictor.base import Array
from kvstore_predictor.chain_rows import COLUMNS, SESSION_RETURN
from kvstore_predictor.gittins import Floats

VERSION = 1
NODES_MAX, TREES_MAX, DEPTH_MAX = 1 << 16, 256, 8
LARGEST = 1e100  # of values and of the calibration: odds made of them stay finite
_AT_ONCE = 2048  # rows
_NODES: dict[str, type] = {"column": np.int32, "threshold": np.float64, "left": np.int32, "right": np.int32}


class ReturnTrees:
    """`arrays`: by name, as `as_arrays` gives them. Raises ValueError with one line where they make no model."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        version = arrays.get("version")
        if version is None or version.shape != () or version.dtype.kind != "i":
            raise ValueError("it has no version")
        if int(version) != VERSION:
            raise ValueError(f"it has version {int(version)}, this program reads version {VERSION}: train it anew")
        names = arrays.get("columns")
        if names is None or tuple(names.tolist()) != COLUMNS:
            raise ValueError("it was trained for other features: train it anew")
        self._column, self._threshold, self._left, self._right = (
            _array(arrays, name, kind, 1) for name, kind in _NODES.items()
        )
        self._value, self._roots = _array(arrays, "value", np.float64, 1), _array(arrays, "roots", np.int32, 1)
        self._low, self._high = (_array(arrays, name, np.float32, 1) for name in ("low", "high"))
        self._straight = _array(arrays, "straight", np.float64, 1)
        if any((np.abs(each) > LARGEST).any() for each in (self._value, self._straight)):
            raise ValueError("its values or its calibration are too large")
        self._depth = self._checked_depth()
        self.digest = hashlib.sha256(b"".join(each.tobytes() for each in self.as_arrays().values())).digest()

    @property
    def trees(self) -> int:
        return len(self._roots)

    def as_arrays(self) -> dict[str, Array]:
        """`column` to `value`: of each node of all trees; a leaf is its own child. `roots`: each tree's first node.
        `straight`: offset and factor of the calibration. `low`, `high`: of each column, what was seen in training."""
        return {
            "version": np.array(VERSION), "columns": np.array(COLUMNS), "column": self._column,
            "threshold": self._threshold, "left": self._left, "right": self._right, "value": self._value,
            "roots": self._roots, "straight": self._straight, "low": self._low, "high": self._high,
        }  # fmt: skip

    def knows(self, rows: Floats) -> Array:
        """Which rows are like those that it was trained with: no column is outside of what was seen."""
        found: Array = np.all((rows >= self._low) & (rows <= self._high), axis=1)
        return found

    def chances(self, rows: Floats) -> Floats:
        """Of a return, by row."""
        offset, factor = self._straight
        odds = offset + factor * np.concatenate(
            [np.empty(0), *(self._odds(rows[first : first + _AT_ONCE]) for first in range(0, len(rows), _AT_ONCE))]
        )
        found: Floats = 1.0 / (1.0 + np.exp(-np.clip(odds, -30.0, 30.0)))
        return found

    def _odds(self, rows: Floats) -> Floats:
        nodes = np.broadcast_to(self._roots, (len(rows), self.trees)).astype(np.int32)
        each = np.arange(len(rows))[:, None]
        for _ in range(self._depth):
            is_left = rows[each, self._column[nodes]] <= self._threshold[nodes]
            nodes = np.where(is_left, self._left[nodes], self._right[nodes])
        found: Floats = rows[:, SESSION_RETURN] + self._value[nodes].sum(axis=1)
        return found

    def _checked_depth(self) -> int:
        """How many steps lead from any root to a leaf."""
        nodes = len(self._value)
        if nodes > NODES_MAX or len(self._roots) > TREES_MAX:
            raise ValueError(f"it has {nodes} nodes and {len(self._roots)} trees, over {NODES_MAX} or {TREES_MAX}")
        if {len(each) for each in (self._column, self._threshold, self._left, self._right)} != {nodes}:
            raise ValueError("its nodes do not fit together")
        if len(self._straight) != 2 or {len(self._low), len(self._high)} != {len(COLUMNS)}:
            raise ValueError("its calibration or its ranges do not fit")
        places = (self._left, nodes), (self._right, nodes), (self._roots, nodes), (self._column, len(COLUMNS))
        if any(((each < 0) | (each >= end)).any() for each, end in places):
            raise ValueError("a node points outside of its tree")
        reached = self._roots
        for depth in range(DEPTH_MAX + 1):
            inner = reached[(self._left[reached] != reached) | (self._right[reached] != reached)]
            if not len(inner):
                return depth
            reached = np.unique(np.concatenate([self._left[inner], self._right[inner]]))
        raise ValueError(f"a tree is deeper than {DEPTH_MAX}, or goes in a circle")


def without_trees() -> ReturnTrees:
    """The model that says what session-return says."""
    ends = {"low": -np.inf, "high": np.inf}
    return ReturnTrees({
        "version": np.array(VERSION), "columns": np.array(COLUMNS), "value": np.empty(0),
        "roots": np.empty(0, np.int32), "straight": np.array([0.0, 1.0]),
        **{name: np.empty(0, kind) for name, kind in _NODES.items()},
        **{name: np.full(len(COLUMNS), end, np.float32) for name, end in ends.items()},
    })  # fmt: skip


def _array(arrays: Mapping[str, Array], name: str, kind: type, dimensions: int) -> Array:
    found = arrays.get(name)
    if found is None or found.dtype != kind or found.ndim != dimensions:
        raise ValueError(f"its array {name!r} is missing or of another kind")
    if found.dtype.kind == "f" and np.isnan(found).any():
        raise ValueError(f"its array {name!r} has values that are no numbers")
    return found.copy()
