"""From chances of return to a rank: the most uses to be had for each second a block is held.

For a chain of age a and a horizon k, the chance of its return by then is S(a) - S(k), and the time it would be held is
the integral of S from a to k; the rank is the best ratio over all horizons (Gittins, JRSS B 41, 1979; as "hits per
space-time" in LHD: Beckmann, Chen, Cidon, NSDI 2018). So a chain just used, whose return is sure but half a minute
away, outranks one that could return this second but probably never does.

Owns the age bins. Pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 24
_FIRST_S, _RATIO = 0.75, 1.42
EDGES_S: Floats = np.concatenate([[0.0], _FIRST_S * _RATIO ** np.arange(BINS - 1)])  # where each bin begins
WIDTHS_S: Floats = np.diff(np.concatenate([EDGES_S, [EDGES_S[-1] * 2]]))
_IS_LATER = np.tril(np.ones((BINS, BINS)))[:, None, :]  # horizon at the end of bin k >= a, bin a
_LEAN_S = 10.0
_INNER_EDGES = EDGES_S[1:]
_NARROW = 12  # bins
_SHARE_A_S: Floats = np.where(np.arange(BINS) < _NARROW, 1.0 / WIDTHS_S, 0.0)
_ENDS_S: list[float] = [*_INNER_EDGES.tolist(), float(EDGES_S[-1] + WIDTHS_S[-1])]


def bins_of(ages_s: Floats) -> Ints:
    """The bin of each age; ages beyond the last bin are in it."""
    return np.searchsorted(_INNER_EDGES, ages_s, side="right")


def places_of(ages_s: Floats) -> tuple[Ints, Floats]:
    """The bin of each age, and how far through it: between the ranks at two ends the truth goes on about evenly. Only
    where bins are some seconds wide, as the pauses of agents are; the ranks of longer ones are not known so well.
    """
    bins = bins_of(ages_s)
    share: Floats = (np.maximum(ages_s, 0.0) - EDGES_S[bins]) * _SHARE_A_S[bins]
    return bins, share


def passed_by(ages_s: Floats) -> Ints:
    """How many bins each age is past; the last one ends, too, when it has lasted as long as all those before."""
    return np.searchsorted(_ENDS_S, ages_s, side="right")


def passed(age_s: float) -> int:
    return bisect_right(_ENDS_S, age_s)


def fading(ages_s: Floats) -> Floats:
    """What is left of the last bin's rank: in bins that grow with age, an even hazard is a rate of 1 / age."""
    faded: Floats = EDGES_S[-1] / np.maximum(ages_s, EDGES_S[-1])
    return faded


def leaning(ages_s: Floats, lean: float) -> Floats:
    """What to multiply ranks by, so that they lean to the order of last use: not at all where `lean` is 0."""
    found: Floats = (1.0 + np.maximum(ages_s, 0.0) / _LEAN_S) ** -lean
    return found


def ranks(hazards: Floats) -> Floats:
    """For each row of `hazards` (chance of return in each bin, given none before), the rank at the start of each bin,
    in uses a second.
    """
    rows = len(hazards)
    survival = np.ones((rows, BINS + 1))
    np.cumprod(1.0 - hazards, axis=1, out=survival[:, 1:])
    held = np.zeros((rows, BINS + 1))
    np.cumsum(survival[:, :-1] * WIDTHS_S * (1.0 - 0.5 * hazards), axis=1, out=held[:, 1:])
    returns, seconds = np.empty((2, BINS, rows, BINS))  # horizons first: their maximum goes through whole rows
    np.subtract(survival[:, :-1], survival.T[1:, :, None], out=returns)
    np.subtract(held.T[1:, :, None], held[:, :-1], out=seconds)
    np.maximum(seconds, 1e-12, out=seconds)
    np.divide(returns, seconds, out=returns)
    returns *= _IS_LATER
    best: Floats = returns.max(axis=0)
    return best
