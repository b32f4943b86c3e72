"""Chooses the next token of every sequence of a step from its row of logits.

Owns the order: the constraint's mask, then the sampler. Log probabilities come from the row as the model gave it. Plain
greedy rows are chosen together, where the logits are. It never changes the logits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.answer import Answer
from kvstore_engine.executors.logits import StepLogits

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, or why there is none (`failure`). `is_unsound`: the logits are no numbers, so the K/V that they
    were computed from cannot be trusted.
    """

    token: int
    failure: str = ""
    is_unsound: bool = False


def choose(logits: StepLogits, answers: Mapping[int, Answer], whole: Mapping[int, Floats]) -> dict[int, Choice]:
    """The choice for each row of `answers`. `whole`: rows of `logits`, all of those that are not plain among them."""
    choices: dict[int, Choice] = {}
    plain = [row for row, answer in answers.items() if answer.is_plain]
    if plain:
        for row, token, value in zip(plain, *logits.likeliest(plain), strict=True):
            choices[row] = Choice(token) if math.isfinite(value) else _unsound(value)
    return choices | {row: choose_one(whole[row], answer) for row, answer in answers.items() if row not in choices}


def log_probabilities(logits: Floats, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log probability of `token`, and the `count` likeliest tokens with theirs, likeliest first, ties by id."""
    row = logits.astype(np.float64) - _log_of_sum(logits)
    top: list[int] = []
    if count:
        threshold = np.partition(row, len(row) - count)[len(row) - count] if count < len(row) else -math.inf
        candidates = np.flatnonzero(row >= threshold)
        top = candidates[np.argsort(-row[candidates], kind="stable")][:count].tolist()
    return float(row[token]), tuple((other, float(row[other])) for other in top)


def _log_of_sum(logits: Floats) -> float:
    """log(sum(exp(logits))). Not finite where the logits are not."""
    most = float(logits.max())
    if not math.isfinite(most):
        return most
    return most + math.log(float(np.exp(logits.astype(np.float64) - most).sum()))


def _unsound(value: float) -> Choice:
    return Choice(0, f"the model produced logits that cannot be sampled: {value}", is_unsound=True)


def choose_one(row: Floats, answer: Answer) -> Choice:
    """The choice for a row of logits, float32 [vocabulary]."""
    most = float(row.max())  # NaN if there is one anywhere
    if not math.isfinite(most):
        return _unsound(most)
    try:
        mask = answer.constraint.mask() if answer.constraint is not None else None
        if mask is not None:
            row = _masked(row, mask)
            if not np.isfinite(row.max()):
                return Choice(0, "the constraint allows no token that the model has")
        token = answer.sampler.choose(row)
    except Exception as error:  # from a constraint: the other answers go on
        return Choice(0, str(error) or type(error).__name__)
    return Choice(token)


def _masked(row: Floats, mask: npt.NDArray[np.uint32]) -> Floats:
    """`row` with minus infinity where `mask` has no bit; tokens past the mask are not allowed."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), bitorder="little", count=None)
    allowed = np.zeros(len(row), np.bool_)
    known = min(len(row), len(bits))
    allowed[:known] = bits[:known]
    masked: Floats = np.where(allowed, row, np.float32(-np.inf))
    return masked
