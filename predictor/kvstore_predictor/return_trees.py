"""A learned model of return: boosted trees on top of session-return's log odds, as plain arrays. Needs NumPy alone.

The model judges a chain by a row of numbers from `ChainRows`. Without a tree it gives session-return's chance. Since a
model comes from a file, it is checked as a whole when it is made: a walk down a tree always ends, and never leaves its
arrays. The module does no I/O; `kvstore_simulator.training` makes models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvstore_predictor.ages import Floats, Ints
from kvstore_predictor.base import Array, Guess, Piece, State
from kvstore_predictor.features import Features
from kvstore_predictor.session_return import SessionReturn

COLUMNS = (
    "session_return", "horizon", "age", "against_pace", "pace", "turn", "length", "tokens", *Features._fields,
    "tenant_returns", "tenant_gap",
)  # fmt: skip
SESSION_RETURN = COLUMNS.index("session_return")
TENANTS_MAX = 1024
LEAST = 1e-6
_MEMORY_S = 900.0  # after which a tenant's requests count 1/e
_NOT_KNOWN = -1.0
_COUNTS = ("at_s", "requests", "returns", "gaps")
_TENANT = np.dtype([("tenant", "i8"), *((name, "f8") for name in _COUNTS)])


class ChainRows:
    """A maker of the inputs of a trained model: one row of numbers for each chain that the predictor `sessions_of`
    guesses. It reads that predictor and does not change it. It counts by itself how often and how soon each tenant's
    chains go on.

    A row has a number for each of COLUMNS: log odds of session-return's chance, logarithms of times and counts, and the
    classes of `Features`; -1 means not known. No column depends on the date, from which a model would learn when the
    recording was made.
    """

    def __init__(self, sessions_of: SessionReturn) -> None:
        self._of = sessions_of
        self._tenants: dict[int, list[float]] = {}  # at_s, requests, returns, sum of the returns' gap classes

    def requested(self, tenant: int, now_s: float) -> None:
        """Count a request of `tenant`, which session-return has just seen."""
        sessions = self._of.sessions
        features = self._of.features[sessions.hand - 1]
        assert features is not None
        known = self._tenants.get(tenant)
        if known is None:
            if len(self._tenants) >= TENANTS_MAX:
                del self._tenants[next(iter(self._tenants))]
            known = self._tenants[tenant] = [now_s, 0.0, 0.0, 0.0]
        fade = math.exp(min(0.0, known[0] - now_s) / _MEMORY_S)  # what was restored may be ahead: a clock was set back
        is_return = features.kind == 1
        known[0] = now_s
        known[1] = known[1] * fade + 1.0
        known[2] = known[2] * fade + is_return
        known[3] = known[3] * fade + features.gap * is_return

    def forget(self, tenant: int) -> None:
        self._tenants.pop(tenant, None)

    def rows(self, guesses: Sequence[Guess], now_s: float, horizon_s: float) -> Floats:
        """Return an array with a row for each of `guesses` and a column for each of COLUMNS: the inputs of the trained
        model. The guesses were made at the time `now_s` for the next `horizon_s` seconds.
        """
        sessions = self._of.sessions
        slots: Ints = np.array([sessions.by_end(guess.tenant, guess.key) for guess in guesses], np.int64)
        if not len(slots):
            return np.empty((0, len(COLUMNS)), np.float32)
        chances = np.clip([guess.probability for guess in guesses], LEAST, 1.0 - LEAST)
        age = np.log1p(np.maximum(now_s - np.frombuffer(sessions.used_s)[slots], 0.0))
        turn = np.frombuffer(sessions.turn, np.int32)[slots]
        pace = np.where(turn > 1, np.frombuffer(sessions.pace)[slots], _NOT_KNOWN)
        tokens = np.frombuffer(sessions.tokens, np.int64)[slots]
        length = np.frombuffer(sessions.length, np.int32)[slots]
        classes = np.array([self._of.features[slot] for slot in slots.tolist()], np.float64).T
        columns = [
            np.log(chances / (1.0 - chances)), np.full(len(slots), math.log(max(horizon_s, LEAST))), age,
            np.where(turn > 1, age - pace, 0.0), pace, np.log(turn), np.log(length),
            np.where(tokens >= 0, np.log1p(np.maximum(tokens, 0)), _NOT_KNOWN), *classes,
            *np.array([self._of_tenant(guess.tenant) for guess in guesses]).T,
        ]  # fmt: skip
        return np.stack(columns, axis=1).astype(np.float32)

    def _of_tenant(self, tenant: int) -> tuple[float, float]:
        known = self._tenants.get(tenant)
        if known is None:
            return _NOT_KNOWN, _NOT_KNOWN
        _, requests, returns, gaps = known
        return returns / requests, gaps / returns if returns > LEAST else _NOT_KNOWN

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        yield "tenants", np.array([(tenant, *known) for tenant, known in self._tenants.items()], _TENANT)

    def import_state(self, state: State, later_s: float) -> None:
        """Continue from `state`, which another object exported. `later_s` is the number of seconds by which this
        object's clock is ahead of the exporter's. Raises ValueError for a state that this version cannot use.
        """
        found: Array | None = state.get("tenants")
        if found is None or found.dtype != _TENANT or not all(np.isfinite(found[name]).all() for name in _COUNTS):
            raise ValueError("the state of another version")
        self._tenants = {
            tenant: [at_s + later_s, *counts] for tenant, at_s, *counts in found[-TENANTS_MAX:].tolist()
        }  # fmt: skip


VERSION = 1
NODES_MAX, TREES_MAX, DEPTH_MAX = 1 << 16, 256, 8
LARGEST = 1e100  # of values and of the calibration: odds made of them stay finite
_AT_ONCE = 2048  # rows
_NODES: dict[str, type] = {"column": np.int32, "threshold": np.float64, "left": np.int32, "right": np.int32}


class ReturnTrees:
    """A trained model of when chains are requested again, made of boosted trees. `arrays` maps names to arrays, as
    `as_arrays` returns them. Raises ValueError with one line if they make no model.
    """

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
        self._calibration = _array(arrays, "calibration", np.float64, 1)
        if any((np.abs(each) > LARGEST).any() for each in (self._value, self._calibration)):
            raise ValueError("its values or its calibration are too large")
        self._depth = self._checked_depth()
        self.digest = hashlib.sha256(b"".join(each.tobytes() for each in self.as_arrays().values())).digest()

    @property
    def trees(self) -> int:
        return len(self._roots)

    def as_arrays(self) -> dict[str, Array]:
        """Return the model as arrays by name. `column`, `threshold`, `left`, `right` and `value` have an entry for each
        node of all trees; a leaf is its own child. `roots` has the first node of each tree, `calibration` the offset
        and factor for the odds, and `low` and `high` the range of each column in training.
        """
        return {
            "version": np.array(VERSION), "columns": np.array(COLUMNS), "column": self._column,
            "threshold": self._threshold, "left": self._left, "right": self._right, "value": self._value,
            "roots": self._roots, "calibration": self._calibration, "low": self._low, "high": self._high,
        }  # fmt: skip

    def knows(self, rows: Floats) -> Array:
        """Return for each of `rows` True if the model can judge it: every column is inside its range in the training
        data.
        """
        found: Array = np.all((rows >= self._low) & (rows <= self._high), axis=1)
        return found

    def chances(self, rows: Floats) -> Floats:
        """Return for each of `rows` (the inputs about one chain) the chance that the chain is requested again within
        the row's horizon.
        """
        offset, factor = self._calibration
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
        """Check the arrays, and return the most steps from any root to a leaf. Raises ValueError."""
        nodes = len(self._value)
        if nodes > NODES_MAX or len(self._roots) > TREES_MAX:
            raise ValueError(f"it has {nodes} nodes and {len(self._roots)} trees, over {NODES_MAX} or {TREES_MAX}")
        if {len(each) for each in (self._column, self._threshold, self._left, self._right)} != {nodes}:
            raise ValueError("its nodes do not fit together")
        if len(self._calibration) != 2 or {len(self._low), len(self._high)} != {len(COLUMNS)}:
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
    """Return a model that gives the chances of the predictor session-return unchanged, because it has no trees."""
    ends = {"low": -np.inf, "high": np.inf}
    return ReturnTrees({
        "version": np.array(VERSION), "columns": np.array(COLUMNS), "value": np.empty(0),
        "roots": np.empty(0, np.int32), "calibration": np.array([0.0, 1.0]),
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
