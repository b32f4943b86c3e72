"""Fits the trees of a learned model with scikit-learn, in a process of its own. The one file that needs it.

Boosting starts from session-return's chance, so that no tree is the model that changes nothing; as many trees are kept
as foretell the rows of the second part best, none if they gain less than that gain's standard error. Their chances are
straightened on the same rows: an offset and a factor of the log odds, drawn towards none.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvstore_predictor.base import Array
from kvstore_predictor.chain_rows import COLUMNS, LEAST, SESSION_RETURN
from kvstore_predictor.gittins import Floats
from kvstore_predictor.return_trees import VERSION

EXTRA = "learned"
TREES, DEPTH, RATE, LEAF_ROWS, SHARE = 80, 3, 0.05, 200, 0.5
_DRAWN = 20.0  # rows that the calibration's start counts for
_NICE = 10
_MARGIN = 0.5  # of a column's range, beyond which a row is unlike those seen


class Rows(NamedTuple):
    """What was known of chains (float32, a row each), and whether each was requested within its horizon."""

    rows: Array
    came: Array


def need_scikit_learn() -> None:
    """Raises ValueError that names the extra."""
    if find_spec("sklearn") is None:
        raise ValueError(f"training needs scikit-learn: pip install 'kvstored[{EXTRA}]'; serving does not")


def fitted(first: Rows, second: Rows, progress: Callable[[int, int], None]) -> dict[str, Array]:
    """The arrays of a model. Raises RuntimeError where the process that fits ended early."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, first, second), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            said = ours.recv()
            if isinstance(said, dict):
                return said
            progress(*said)
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that fits the model ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()


class _FromSessionReturn:
    """What scikit-learn boosts from."""

    def fit(self, rows: Array, came: Array, sample_weight: Array | None = None) -> _FromSessionReturn:
        return self

    def predict_proba(self, rows: Array) -> Floats:
        chances = 1.0 / (1.0 + np.exp(-rows[:, SESSION_RETURN].astype(np.float64)))
        return np.stack([1.0 - chances, chances], axis=1)


def _work(out: Connection, first: Rows, second: Rows) -> None:
    from sklearn.ensemble import GradientBoostingClassifier

    os.nice(_NICE)
    boosted = GradientBoostingClassifier(
        init=_FromSessionReturn(), n_estimators=TREES, max_depth=DEPTH, learning_rate=RATE, subsample=SHARE,
        min_samples_leaf=LEAF_ROWS, random_state=0,
    )  # fmt: skip

    def watch(number: int, *_: object) -> bool:
        out.send((number + 1, TREES))
        return False

    boosted.fit(first.rows, first.came, monitor=watch)
    stages = [second.rows[:, SESSION_RETURN].astype(np.float64)]
    stages += [stage.reshape(-1) for stage in boosted.staged_decision_function(second.rows)]
    losses = [_losses(stage, second.came) for stage in stages]
    kept = int(np.argmin([each.mean() for each in losses]))
    gain = losses[0] - losses[kept]
    if gain.mean() * len(gain) ** 0.5 < gain.std():
        kept = 0
    trees = [estimator.tree_ for estimator in boosted.estimators_[:kept, 0]]
    out.send(_arrays(trees, _straight(stages[kept], second.came), first.rows))


def _arrays(trees: list[Any], straight: Floats, rows: Array) -> dict[str, Array]:
    roots = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1].astype(np.int32)
    parts: dict[str, list[Array]] = {name: [] for name in ("column", "threshold", "left", "right", "value")}
    for root, tree in zip(roots.tolist(), trees, strict=True):
        own = np.arange(tree.node_count)
        is_leaf = tree.children_left < 0
        parts["column"].append(np.where(is_leaf, 0, tree.feature).astype(np.int32))
        parts["threshold"].append(np.where(is_leaf, 0.0, tree.threshold))
        parts["left"].append((root + np.where(is_leaf, own, tree.children_left)).astype(np.int32))
        parts["right"].append((root + np.where(is_leaf, own, tree.children_right)).astype(np.int32))
        parts["value"].append(RATE * tree.value[:, 0, 0].astype(np.float64))
    kinds = {"column": np.int32, "threshold": np.float64, "left": np.int32, "right": np.int32, "value": np.float64}
    nodes = {name: np.concatenate([np.empty(0, kind), *parts[name]]).astype(kind) for name, kind in kinds.items()}
    low, high = rows.min(axis=0), rows.max(axis=0)
    margin = _MARGIN * (high - low) + np.float32(LEAST)
    return {
        "version": np.array(VERSION), "columns": np.array(COLUMNS), **nodes, "roots": roots, "straight": straight,
        "low": (low - margin).astype(np.float32), "high": (high + margin).astype(np.float32),
    }  # fmt: skip


def _losses(odds: Floats, came: Array) -> Floats:
    found: Floats = np.logaddexp(0.0, np.where(came, -odds, odds))
    return found


def _straight(odds: Floats, came: Array) -> Floats:
    """Offset and factor of log odds under which the loss is least, by Newton's method."""
    start = np.array([0.0, 1.0])
    found, columns = start.copy(), np.stack([np.ones_like(odds), odds], axis=1)
    for _ in range(30):
        chances = 1.0 / (1.0 + np.exp(-np.clip(columns @ found, -30.0, 30.0)))
        slope = columns.T @ (chances - came) + _DRAWN * (found - start)
        bend = columns.T @ (columns * (chances * (1.0 - chances))[:, None]) + _DRAWN * np.eye(2)
        found = found - np.linalg.solve(bend, slope)
    return np.array([found[0], np.clip(found[1], 0.1, 3.0)])
