"""Chances of return by age: age bins, chances within a time ahead, and the effect of hints.

Within an age bin the chance is spread evenly; after the last bin nothing returns. The module owns the counts about
hints, by value and age bin. It knows no chains.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_predictor.features import CHANCES, NEXT_STEPS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 24
_FIRST_S, _RATIO = 0.75, 1.42
EDGES_S: Floats = np.concatenate([[0.0], _FIRST_S * _RATIO ** np.arange(BINS - 1)])  # where each bin begins
WIDTHS_S: Floats = np.diff(np.concatenate([EDGES_S, [EDGES_S[-1] * 2]]))
_LEAN_S = 10.0
_INNER_EDGES = EDGES_S[1:]
_NARROW = 12  # bins
SHARE_A_S: Floats = np.where(np.arange(BINS) < _NARROW, 1.0 / WIDTHS_S, 0.0)
ENDS_S: Floats = np.append(_INNER_EDGES, EDGES_S[-1] + WIDTHS_S[-1])
_ENDS_S: list[float] = ENDS_S.tolist()


def bins_of(ages_s: Floats) -> Ints:
    """Return for each age in seconds (the time since a chain's last use) the number of the age bin that contains it.
    Longer ages are in the last bin.
    """
    return np.searchsorted(_INNER_EDGES, ages_s, side="right")


def places_of(ages_s: Floats) -> tuple[Ints, Floats]:
    """Return for each age in seconds the number of its age bin, and how far through the bin the age is, from 0 to 1.
    The second value is used to interpolate ranks between two bins. It is 0 in the wide bins of long ages, whose ranks
    are not known so well.
    """
    bins = bins_of(ages_s)
    share: Floats = (np.maximum(ages_s, 0.0) - EDGES_S[bins]) * SHARE_A_S[bins]
    return bins, share


def passed_by(ages_s: Floats) -> Ints:
    """Return for each age in seconds the number of age bins that end at or before it."""
    return np.searchsorted(ENDS_S, ages_s, side="right")


def passed(age_s: float) -> int:
    return bisect_right(_ENDS_S, age_s)


def fading(ages_s: Floats) -> Floats:
    """Return for each age in seconds the factor by which to multiply a rank of the last age bin. It is 1 up to the
    beginning of that bin, and then falls as 1 / age.
    """
    faded: Floats = EDGES_S[-1] / np.maximum(ages_s, EDGES_S[-1])
    return faded


def leaning(ages_s: Floats, lean: float) -> Floats:
    """Return for each age in seconds a factor for ranks that falls with age, so that ranks follow the order of last use
    more. `lean` says how fast it falls; with 0 all factors are 1.
    """
    found: Floats = (1.0 + np.maximum(ages_s, 0.0) / _LEAN_S) ** -lean
    return found


END_S = float(EDGES_S[-1] + WIDTHS_S[-1])


def cumulative(hazards: Floats) -> Floats:
    """Return for each row of `hazards` the cumulative hazard, -log of the chance that the chain has not returned, at
    the start of each age bin and at END_S. A row has the chance of a return in each age bin, given no return before.
    """
    found = np.zeros((len(hazards), BINS + 1))
    np.cumsum(-np.log1p(-hazards), axis=1, out=found[:, 1:])
    return found


def at_age(table: Floats, rows: Ints, ages_s: Floats) -> Floats:
    """Return the cumulative hazard of row `rows[i]` of `table`, made by `cumulative`, at the age `ages_s[i]` in
    seconds.
    """
    ages_s = np.clip(ages_s, 0.0, END_S)
    bins = bins_of(ages_s)
    flat, places = table.reshape(-1), rows * (BINS + 1) + bins
    found: Floats = flat[places]
    found += (flat[places + 1] - found) * (ages_s - EDGES_S[bins]) / WIDTHS_S[bins]
    return found


def chance(before: Floats, after: Floats) -> Floats:
    """Return the chance that a chain returns (is used again) between two ages, given no return before. `before` and
    `after` are the cumulative hazards at these ages.
    """
    found: Floats = -np.expm1(before - after)
    return found


def age_of(table: Floats, rows: Ints, reached: Floats) -> Floats:
    """Return the age in seconds at which the cumulative hazard of row `rows[i]` of `table` is `reached[i]`."""
    lines = table[rows]
    bins = np.minimum((lines[:, 1:] <= reached[:, None]).sum(axis=1), BINS - 1)
    each = np.arange(len(rows))
    first, last = lines[each, bins], lines[each, bins + 1]
    share = np.clip((reached - first) / np.maximum(last - first, 1e-12), 0.0, 1.0)
    found: Floats = EDGES_S[bins] + share * WIDTHS_S[bins]
    return found


_WEIGHT = 20.0  # returns that it takes for what was seen to count as much as the meaning,
_BIN_WEIGHT = 10.0  # and in one age bin, as much as in all of them
_STEP, _MOST = 0.5, 2.2  # a fifth more of a chance makes returns so many times e as frequent; more than that is learnt
HINT_MEANS = (  # of chances to go on, by fifths; of the wire's NextStep
    tuple(min(float(np.exp(_STEP * (step - (CHANCES - 1) / 2))), _MOST) for step in range(CHANCES)),
    (1.0,) * (NEXT_STEPS - 1),
)


class HintFactors:
    """The learned effect of one kind of hint: for each value of the hint, how many times as often its chains return as
    was predicted without it. `means` are the factors for the values 1 and up before anything was counted. The value 0
    means that the hint was not given. A factor corrects what is known about the chain itself, instead of replacing it.
    """

    def __init__(self, means: Sequence[float]) -> None:
        self._means: Floats = np.array([1.0, *means])
        self._predicted, self._seen = np.zeros((2, len(self._means), BINS))
        self._factors: Floats | None = None

    def happened(self, values: Ints, bins: Ints, predicted: Floats, returns: Floats) -> None:
        """Count `returns` of chains in the age bins `bins`, whose hints had the values `values`. Without the hints
        `predicted` returns were expected.
        """
        np.add.at(self._predicted, (values, bins), predicted)
        np.add.at(self._seen, (values, bins), returns)
        self._factors = None

    def numbers(self) -> Floats:
        """Return the predicted and the counted returns, as an array [2, values, age bins]."""
        return np.stack([self._predicted, self._seen])

    def restore(self, numbers: Floats) -> None:
        """Continue from the array that `numbers` of another object returned. Raises ValueError for another number of
        values or bins.
        """
        if numbers.shape != (2, *self._seen.shape):
            raise ValueError(f"hints of another kind: {numbers.shape}")
        self._predicted, self._seen = numbers
        self._factors = None

    def decay(self, factor: float) -> None:
        self._predicted *= factor
        self._seen *= factor
        self._factors = None

    def factors(self) -> Floats:
        """Return the factor for each value of the hint and each age bin."""
        if self._factors is None:
            seen, predicted = self._seen.sum(axis=1), self._predicted.sum(axis=1)
            whole = (_WEIGHT * self._means + seen) / (_WEIGHT + predicted)
            self._factors = (_BIN_WEIGHT * whole[:, None] + self._seen) / (_BIN_WEIGHT + self._predicted)
            self._factors[0] = 1.0
        return self._factors
