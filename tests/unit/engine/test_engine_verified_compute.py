"""A step counts only if the model's file was the same after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvstore_engine.batching.compute import VerifiedCompute
from kvstore_engine.executors.logits import HostLogits, StepLogits
from kvstore_engine.gguf import FileChanged
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.worker import StepFailed
from tests.reference.twin_compute import twin_pool

_SLICES = [SequenceSlice(np.zeros(1, np.int32), 0, np.zeros(1, np.int32))]


class _Compute:
    """Notes its steps in `order`; the first `failures` of them fail."""

    limits = StepLimits(10, 4, 16, 32, 4, 64)
    pool = twin_pool(4)

    def __init__(self, order: list[str], failures: int = 0) -> None:
        self._order, self._failures = order, failures

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        self._order.append("computed")
        if self._order.count("computed") <= self._failures:
            raise StepFailed("no numbers", (0,))
        return HostLogits(np.zeros((1, 10), np.float32))


def _check(order: list[str], *answers: bool | FileChanged) -> Callable[[], bool]:
    left = list(answers)

    def check() -> bool:
        order.append("checked")
        answer = left.pop(0)
        if isinstance(answer, FileChanged):
            raise answer
        return answer

    return check


def test_a_step_is_checked_after_it_was_computed() -> None:
    order: list[str] = []
    VerifiedCompute(_Compute(order), _check(order, True)).step(_SLICES)
    assert order == ["computed", "checked"]


def test_a_step_beside_which_the_file_was_touched_is_computed_again() -> None:
    order: list[str] = []
    VerifiedCompute(_Compute(order), _check(order, False, False, True)).step(_SLICES)
    assert order == ["computed", "checked"] * 3


@pytest.mark.parametrize("failures", [0, 1])
def test_a_changed_file_ends_the_step_whatever_came_of_it(failures: int) -> None:
    order: list[str] = []
    with pytest.raises(FileChanged):
        VerifiedCompute(_Compute(order, failures), _check(order, FileChanged("it was changed"))).step(_SLICES)


def test_a_step_fails_only_with_the_weights_as_they_were() -> None:
    order: list[str] = []
    VerifiedCompute(_Compute(order, failures=1), _check(order, False, True)).step(_SLICES)
    assert order == ["computed", "checked"] * 2
    with pytest.raises(StepFailed):
        VerifiedCompute(_Compute([], failures=1), _check([], True)).step(_SLICES)
