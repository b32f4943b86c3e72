"""The logits of a step, where they were computed: what chooses tokens asks for the little that it needs of them.

A row has as many float32 as the vocabulary has tokens, half a megabyte for 128k, and greedy choices need none of it in
host memory. Owns no policy: sampling is `batching.answer`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class StepLogits(ABC):
    """Of the wanted tokens of a step, in the order of its slices. For use before the next step."""

    @abstractmethod
    def likeliest(self, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        """Of each of these rows the token with the largest logit, the first of equal ones, and that logit: NaN, and any
        token, where a logit of the row is NaN."""

    @abstractmethod
    def rows(self, rows: Sequence[int]) -> FloatArray:
        """These rows, float32 [len(rows), vocabulary], which the step was asked for whole."""


class HostLogits(StepLogits):
    """Of `logits`, float32 [outputs, vocabulary], in host memory."""

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits

    def likeliest(self, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        chosen = self.rows(rows)
        best = chosen.argmax(axis=1)  # the first NaN, where there is one
        return best.tolist(), chosen[np.arange(len(rows)), best].tolist()

    def rows(self, rows: Sequence[int]) -> FloatArray:
        every = len(rows) == len(self._logits) and all(at == row for at, row in enumerate(rows))
        return self._logits if every else self._logits[list(rows)]
