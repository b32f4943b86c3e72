"""A step may take as long as similar steps take, many times over, and never less than some seconds."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_engine.errors import UsageError
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.worker.patience import MOST_S, StepPatience


def _step(count: int, start: int = 0, slices: int = 1) -> list[SequenceSlice]:
    return [SequenceSlice(np.zeros(count, np.int32), start, np.zeros(1, np.int32))] * slices


def _learned(token_s: float, least_s: float = 20.0) -> StepPatience:
    """Return a patience after prompts of up to 208 tokens and decodes of four, which take `token_s`
    a token, and 5 ms.
    """
    patience = StepPatience(least_s)
    for number in range(10):
        for step in (_step(64 + 16 * number), _step(1, 100, 4)):
            patience.took(step, 0.005 + token_s * sum(len(piece.tokens) for piece in step))
    return patience


def test_nothing_is_known_of_the_first_steps_nor_of_larger_ones() -> None:
    patience = StepPatience()
    assert patience.limit_s(_step(4)) == MOST_S
    patience.took(_step(64), 0.01)
    assert patience.limit_s(_step(64)) == patience.limit_s(_step(4)) == 20.0
    assert patience.limit_s(_step(128)) == MOST_S
    assert patience.limit_s(_step(1, 1_000_000)) == MOST_S
    patience.took(_step(1, 1_000_000), 0.5)  # that says nothing of many tokens
    assert patience.limit_s(_step(1, 1_000_000)) == 20.0
    assert patience.limit_s(_step(64, 10_000)) == MOST_S


def test_a_quick_step_has_the_least_and_a_long_one_many_times_its_own() -> None:
    assert _learned(0.001).limit_s(_step(1, 100, 4)) == 20.0
    assert _learned(0.001, 3.0).limit_s(_step(1, 100, 4)) == 3.0
    slow = _learned(0.02)
    assert slow.limit_s(_step(1, 100, 4)) == 20.0
    assert slow.limit_s(_step(100)) == pytest.approx(30 * (0.005 + 0.02 * 112))  # the slowest of 64 to 127 tokens
    for token_s in (1.0, 50.0):  # a model far too large for the machine: no step of it is cut off
        patience = _learned(token_s)
        assert all(patience.limit_s(_step(count)) >= min(MOST_S, 5 * token_s * count) for count in range(1, 208))


def test_a_step_that_was_slow_once_is_forgotten() -> None:
    patience = StepPatience()
    patience.took(_step(64), 8.0)
    assert patience.limit_s(_step(64)) == 240.0
    for _ in range(500):
        patience.took(_step(64), 0.1)
    assert patience.limit_s(_step(64)) == 20.0


def test_the_least_may_be_more_than_the_greatest() -> None:
    assert _learned(0.001, 1000.0).limit_s(_step(4)) == 1000.0
    assert StepPatience(1000.0).limit_s(_step(4)) == 1000.0
    with pytest.raises(UsageError, match="some seconds"):
        StepPatience(0.0)
