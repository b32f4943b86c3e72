"""What an engine's word is worth: how many times as often chains that it was said of return as was foretold without it.

One table for each thing that can be said. It begins with what the words mean, as far as that is known, and learns from
what comes; multiplying keeps what is known of the chain itself, which tables by word would have to learn again.

Owns what was seen by word and age bin. Never knows chains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstored.store.policies.chains.features import CHANCES, NEXT_STEPS
from kvstored.store.policies.chains.gittins import BINS, Floats, Ints

_WEIGHT = 20.0  # returns that it takes for what was seen to count as much as the meaning,
_BIN_WEIGHT = 10.0  # and in one age bin, as much as in all of them
_STEP, _MOST = 0.5, 2.2  # a fifth more of a chance makes returns so many times e as frequent; more than that is learnt
CHANCE_MEANS = tuple(min(float(np.exp(_STEP * (step - (CHANCES - 1) / 2))), _MOST) for step in range(CHANCES))
NEXT_STEP_MEANS = (1.0,) * (NEXT_STEPS - 1)


class Word:
    """Values are 0 (not told) and up; `means` are the factors of 1 and up before anything was seen."""

    def __init__(self, means: Sequence[float]) -> None:
        self._means: Floats = np.array([1.0, *means])
        self._foretold, self._seen = np.zeros((2, len(self._means), BINS))
        self._factors: Floats | None = None

    def happened(self, values: Ints, bins: Ints, foretold: Floats, returns: Floats) -> None:
        """Of chains of which `values` were said, so many returns in `bins`, and as many as were foretold without it."""
        np.add.at(self._foretold, (values, bins), foretold)
        np.add.at(self._seen, (values, bins), returns)
        self._factors = None

    def numbers(self) -> Floats:
        """What was foretold and what was seen, by value and age bin."""
        return np.stack([self._foretold, self._seen])

    def restore(self, numbers: Floats) -> None:
        """Go on from what `numbers` gave. Raises ValueError for another number of values or bins."""
        if numbers.shape != (2, *self._seen.shape):
            raise ValueError(f"words of another kind: {numbers.shape}")
        self._foretold, self._seen = numbers
        self._factors = None

    def decay(self, factor: float) -> None:
        self._foretold *= factor
        self._seen *= factor
        self._factors = None

    def factors(self) -> Floats:
        """By value and age bin."""
        if self._factors is None:
            seen, foretold = self._seen.sum(axis=1), self._foretold.sum(axis=1)
            whole = (_WEIGHT * self._means + seen) / (_WEIGHT + foretold)
            self._factors = (_BIN_WEIGHT * whole[:, None] + self._seen) / (_BIN_WEIGHT + self._foretold)
            self._factors[0] = 1.0
        return self._factors
