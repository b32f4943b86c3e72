"""The likeliest next tokens of a step: all that plain greedy answers need of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Of each wanted token the likeliest next one, the first of equal ones, and its logit: NaN where one of the row's
    is."""

    tokens: npt.NDArray[np.int32]
    logits: Floats

    @classmethod
    def of(cls, logits: Floats) -> Self:
        """Of rows [outputs, vocabulary]."""
        best = logits.argmax(axis=1)
        return cls(best.astype(np.int32), logits[np.arange(len(logits)), best])
