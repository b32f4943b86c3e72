"""The logits of a step, on the device that computed them; the choice of tokens asks for the few numbers that it needs.

A row has as many float32 as the vocabulary has tokens, half a megabyte for 128k, and greedy choices need none of it in
host memory. The module has no policy: `batching.answer` samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class StepLogits(ABC):
    """The logits of a step, one row for each token that needs them. They are valid until the next step."""

    @abstractmethod
    def likeliest(self, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        """Return two lists with an entry for each row number in `rows`: the token with the largest logit (the first of
        equal ones), and that logit. For a row with NaN they are any token and NaN.
        """

    @abstractmethod
    def rows(self, rows: Sequence[int]) -> FloatArray:
        """Return the logits of the rows with the numbers `rows`, float32 [len(rows), vocabulary]. These rows must have
        been named when the step was computed.
        """


class HostLogits(StepLogits):
    """The logits of a step in host memory, float32 [outputs, vocabulary]."""

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits

    def likeliest(self, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        chosen = self.rows(rows)
        best = chosen.argmax(axis=1)  # the first NaN, where there is one
        return best.tolist(), chosen[np.arange(len(rows)), best].tolist()

    def rows(self, rows: Sequence[int]) -> FloatArray:
        every = len(rows) == len(self._logits) and all(at == row for at, row in enumerate(rows))
        return self._logits if every else self._logits[list(rows)]
