"""What a learned model is trained with, and how good it is: rows from recordings, each split by its time.

The first part of a recording is for fitting, the next chooses how many trees are kept and straightens their chances,
the last one judges, and nothing of it is seen before. Rows come from the predictor that will use the model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore_predictor.base import Array, Predictor
from kvstore_predictor.learned import Learned
from kvstore_predictor.return_trees import ReturnTrees, without_trees
from kvstore_predictor.session_return import SessionReturn
from kvstore_simulator.fitting import Rows, fitted
from kvstore_simulator.judging import ALL, Judged, Uses, events, judge_all, question_times
from kvstore_simulator.trace import Trace

FITTED, CHOSEN = 0.6, 0.75  # of the requests: up to here for fitting, up to here for choosing; the rest judges
QUESTIONS, A_QUESTION = 800, 128  # rows of one recording at most
JUDGING = 60  # questions
HORIZON_MIN_S, HORIZON_MAX_S = 5.0, 900.0
RETURNS_MIN = 100  # rows that came true, and others, in the first part
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """`arrays`: the model. `learned` and `plain`: by horizon, what the model's predictor and session-return foretold
    of the parts that judge."""

    arrays: dict[str, Array]
    fitted_rows: int
    chosen_rows: int
    returned_rows: int
    learned: dict[float, Judged]
    plain: dict[float, Judged]


def train(traces: Sequence[Trace], progress: Progress) -> Trained:
    """Raises ValueError with one line where there is too little to learn from; RuntimeError."""
    parts: list[list[Rows]] = [[], []]
    for trace in traces:
        for part, rows in zip(parts, _rows_of(trace, progress), strict=True):
            part.append(rows)
    first, second = (
        Rows(np.concatenate([each.rows for each in part]), np.concatenate([each.came for each in part]))
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
    makers: tuple[Callable[[], Predictor], ...] = (lambda: Learned(model), SessionReturn)
    learned, plain = (judge_all(traces, make, CHOSEN, JUDGING, progress) for make in makers)
    return Trained(arrays, len(first.came), len(second.came), returned, learned, plain)


def _rows_of(trace: Trace, progress: Progress) -> tuple[Rows, Rows]:
    """Of the first and of the second part of the recording."""
    predictor, uses, chance = Learned(without_trees()), Uses(trace), random.Random(0)
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
        Rows(np.concatenate([np.empty((0, width), np.float32), *rows]), np.array(came, np.bool_))
        for rows, came in found
    )
    return first, second
