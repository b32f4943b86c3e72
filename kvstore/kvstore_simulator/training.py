"""Training of a learned model, and its quality: rows from recordings, each split by its time.

Boosted trees are fitted with scikit-learn, in a process of its own; only this file needs it. They start from
session-return's chance, so a model without trees changes nothing. The number of trees is the one that predicts the rows
of the second part best, none if the gain is below its standard error. The chances are calibrated on these rows too: an
offset and a factor of the log odds, shrunk towards no change.

The first part of a recording is for fitting, the next chooses the number of trees and calibrates their chances, the
last one judges, and training never sees it. Examples come from the predictor that will use the model.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvstore_predictor.ages import Floats
from kvstore_predictor.base import Array, Predictor
from kvstore_predictor.learned import LearnedPredictor
from kvstore_predictor.return_trees import COLUMNS, LEAST, SESSION_RETURN, VERSION, ReturnTrees, without_trees
from kvstore_predictor.session_return import SessionReturn
from kvstore_proto.version import pip_install
from kvstore_simulator.judging import ALL, Judged, RequestTimes, events, judge_all, question_times
from kvstore_simulator.trace import Trace

EXTRA = "learned"
TREES, DEPTH, RATE, LEAF_ROWS, SHARE = 80, 3, 0.05, 200, 0.5
_DRAWN = 20.0  # rows that the calibration's start counts for
_NICE = 10
_MARGIN = 0.5  # of a column's range, beyond which a row is unlike those seen


class Examples(NamedTuple):
    """Training examples about chains: the model's inputs, float32 with a row for each chain, and for each row whether
    the chain was requested within the horizon for which the row was made.
    """

    rows: Array
    came: Array


def need_scikit_learn() -> None:
    """Check that scikit-learn is installed. Raises ValueError that names the extra to install."""
    if find_spec("sklearn") is None:
        raise ValueError(f"training needs scikit-learn, serving does not: {pip_install(EXTRA)}")


def fitted(first: Examples, second: Examples, progress: Callable[[int, int], None]) -> dict[str, Array]:
    """Return the arrays of a model fitted to `first` and calibrated on `second`. Raises RuntimeError if the fitting
    process ended early.
    """
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
    """The initial estimator for scikit-learn's boosting: session-return's chance."""

    def fit(self, rows: Array, came: Array, sample_weight: Array | None = None) -> _FromSessionReturn:
        return self

    def predict_proba(self, rows: Array) -> Floats:
        chances = 1.0 / (1.0 + np.exp(-rows[:, SESSION_RETURN].astype(np.float64)))
        return np.stack([1.0 - chances, chances], axis=1)


def _work(out: Connection, first: Examples, second: Examples) -> None:
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
    out.send(_arrays(trees, _calibrate(stages[kept], second.came), first.rows))


def _arrays(trees: list[Any], calibration: Floats, rows: Array) -> dict[str, Array]:
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
        "version": np.array(VERSION), "columns": np.array(COLUMNS), **nodes, "roots": roots, "calibration": calibration,
        "low": (low - margin).astype(np.float32), "high": (high + margin).astype(np.float32),
    }  # fmt: skip


def _losses(odds: Floats, came: Array) -> Floats:
    found: Floats = np.logaddexp(0.0, np.where(came, -odds, odds))
    return found


def _calibrate(odds: Floats, came: Array) -> Floats:
    """Return the offset and factor of log odds with the least loss, by Newton's method."""
    start = np.array([0.0, 1.0])
    found, columns = start.copy(), np.stack([np.ones_like(odds), odds], axis=1)
    for _ in range(30):
        chances = 1.0 / (1.0 + np.exp(-np.clip(columns @ found, -30.0, 30.0)))
        slope = columns.T @ (chances - came) + _DRAWN * (found - start)
        bend = columns.T @ (columns * (chances * (1.0 - chances))[:, None]) + _DRAWN * np.eye(2)
        found = found - np.linalg.solve(bend, slope)
    return np.array([found[0], np.clip(found[1], 0.1, 3.0)])


FITTED, CHOSEN = 0.6, 0.75  # of the requests: up to here for fitting, up to here for choosing; the rest judges
QUESTIONS, A_QUESTION = 800, 128  # rows of one recording at most
JUDGING = 60  # questions
HORIZON_MIN_S, HORIZON_MAX_S = 5.0, 900.0
RETURNS_MIN = 100  # rows that came true, and others, in the first part
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of training a predictor's model. `arrays` is the model. `learned` and `plain` have, by horizon in
    seconds, the judged guesses of the model and of the predictor session-return, for the parts of the traces that were
    kept for judging.
    """

    arrays: dict[str, Array]
    fitted_rows: int
    chosen_rows: int
    returned_rows: int
    learned: dict[float, Judged]
    plain: dict[float, Judged]


def train(traces: Sequence[Trace], progress: Progress) -> Trained:
    """Train a model on `traces`. Raises ValueError with one line if there is too little to learn from, and RuntimeError
    if the fitting process ended early.
    """
    parts: list[list[Examples]] = [[], []]
    for trace in traces:
        for part, rows in zip(parts, _rows_of(trace, progress), strict=True):
            part.append(rows)
    first, second = (
        Examples(np.concatenate([each.rows for each in part]), np.concatenate([each.came for each in part]))
        for part in parts
    )
    returned = int(first.came.sum())
    if min(returned, len(first.came) - returned) < RETURNS_MIN or len(set(second.came.tolist())) < 2:
        raise ValueError(
            f"too few returns to learn from: of {len(first.came):,} looks at known chains {returned:,} were followed "
            f"by a request, {RETURNS_MIN} and as many others are needed; record for longer"
        )
    arrays = fitted(first, second, lambda done, total: progress("fitting", done, total))
    model = ReturnTrees(arrays)
    makers: tuple[Callable[[], Predictor], ...] = (lambda: LearnedPredictor(model), SessionReturn)
    learned, plain = (judge_all(traces, make, CHOSEN, JUDGING, progress) for make in makers)
    return Trained(arrays, len(first.came), len(second.came), returned, learned, plain)


def _rows_of(trace: Trace, progress: Progress) -> tuple[Examples, Examples]:
    """Return the examples of the first and of the second part of the recording."""
    predictor, uses, chance = LearnedPredictor(without_trees()), RequestTimes(trace), random.Random(0)
    ask_s = question_times(trace, 0.02, CHOSEN, QUESTIONS)
    times_s = (trace.times_ns - trace.times_ns[0]) / 1e9
    ends_s = [float(times_s[min(int(trace.requests * part), trace.requests - 1)]) for part in (FITTED, CHOSEN)]
    found: list[tuple[list[Array], list[bool]]] = [([], []), ([], [])]
    turn = 0
    for now_s, said in events(trace, ask_s):
        if said is not None:
            said(predictor)
            continue
        progress(f"replaying {trace.name}", turn, len(ask_s))
        turn += 1
        horizon_s = math.exp(chance.uniform(math.log(HORIZON_MIN_S), math.log(HORIZON_MAX_S)))
        part = int(now_s >= ends_s[0])
        if now_s + horizon_s > ends_s[part]:  # what came is of the next part, which is not to be seen
            continue
        guesses = predictor.guesses(now_s, horizon_s, ALL)
        if guesses:
            guesses = chance.sample(guesses, min(len(guesses), A_QUESTION))
            found[part][0].append(predictor.rows(guesses, now_s, horizon_s))
            found[part][1].extend(uses.is_within(guess.key, now_s, horizon_s) for guess in guesses)
    width = without_trees().as_arrays()["low"].shape[0]
    first, second = (
        Examples(np.concatenate([np.empty((0, width), np.float32), *rows]), np.array(came, np.bool_))
        for rows, came in found
    )
    return first, second
