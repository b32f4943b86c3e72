"""What an engine's hint is worth: how many times as often its chains return as was predicted without it.

One table for each kind of hint. It begins with what the values mean, as far as that is known, and learns from
what follows; multiplying keeps what is known of the chain itself, which tables by value would have to learn again.

Owns what was seen by value and age bin. Never knows chains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore_predictor.features import CHANCES, NEXT_STEPS
from kvstore_predictor.gittins import BINS, Floats, Ints

_WEIGHT = 20.0  # returns that it takes for what was seen to count as much as the meaning,
_BIN_WEIGHT = 10.0  # and in one age bin, as much as in all of them
_STEP, _MOST = 0.5, 2.2  # a fifth more of a chance makes returns so many times e as frequent; more than that is learnt
CHANCE_MEANS = tuple(min(float(np.exp(_STEP * (step - (CHANCES - 1) / 2))), _MOST) for step in range(CHANCES))
NEXT_STEP_MEANS = (1.0,) * (NEXT_STEPS - 1)


class HintFactors:
    """Values are 0 (not said) and up; `means` are the factors of 1 and up before anything was seen."""

    def __init__(self, means: Sequence[float]) -> None:
        self._means: Floats = np.array([1.0, *means])
        self._predicted, self._seen = np.zeros((2, len(self._means), BINS))
        self._factors: Floats | None = None

    def happened(self, values: Ints, bins: Ints, predicted: Floats, returns: Floats) -> None:
        """Of chains with hints `values`, so many returns in `bins`, and as many as were predicted without them."""
        np.add.at(self._predicted, (values, bins), predicted)
        np.add.at(self._seen, (values, bins), returns)
        self._factors = None

    def numbers(self) -> Floats:
        """What was predicted and what was seen, by value and age bin."""
        return np.stack([self._predicted, self._seen])

    def restore(self, numbers: Floats) -> None:
        """Go on from what `numbers` gave. Raises ValueError for another number of values or bins."""
        if numbers.shape != (2, *self._seen.shape):
            raise ValueError(f"hints of another kind: {numbers.shape}")
        self._predicted, self._seen = numbers
        self._factors = None

    def decay(self, factor: float) -> None:
        self._predicted *= factor
        self._seen *= factor
        self._factors = None

    def factors(self) -> Floats:
        """By value and age bin."""
        if self._factors is None:
            seen, predicted = self._seen.sum(axis=1), self._predicted.sum(axis=1)
            whole = (_WEIGHT * self._means + seen) / (_WEIGHT + predicted)
            self._factors = (_BIN_WEIGHT * whole[:, None] + self._seen) / (_BIN_WEIGHT + self._predicted)
            self._factors[0] = 1.0
        return self._factors
