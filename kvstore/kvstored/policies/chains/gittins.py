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

BINS = 24
_FIRST_S, _RATIO = 0.75, 1.42
EDGES_S: Floats = np.concatenate([[0.0], _FIRST_S * _RATIO ** np.arange(BINS - 1)])  # where each bin begins
WIDTHS_S: Floats = np.diff(np.concatenate([EDGES_S, [EDGES_S[-1] * 2]]))
_IS_LATER = np.triu(np.ones((BINS, BINS), dtype=bool))  # bin a, horizon at the end of bin k >= a
_INNER_EDGES = EDGES_S[1:]
_INNER: list[float] = _INNER_EDGES.tolist()


def bins_of(ages_s: Floats) -> npt.NDArray[np.int64]:
    """The bin of each age; ages beyond the last bin are in it."""
    return np.searchsorted(_INNER_EDGES, ages_s, side="right")


def bin_of(age_s: float) -> int:
    return bisect_right(_INNER, age_s)


def ranks(hazards: Floats) -> Floats:
    """For each row of `hazards` (chance of return in each bin, given none before), the rank at the start of each bin,
    in uses a second.
    """
    rows = len(hazards)
    survival = np.ones((rows, BINS + 1))
    np.cumprod(1.0 - hazards, axis=1, out=survival[:, 1:])
    held = np.zeros((rows, BINS + 1))
    np.cumsum(survival[:, :-1] * WIDTHS_S * (1.0 - 0.5 * hazards), axis=1, out=held[:, 1:])
    returns = survival[:, :-1, None] - survival[:, None, 1:]
    seconds = held[:, None, 1:] - held[:, :-1, None]
    np.maximum(seconds, 1e-12, out=seconds)
    np.divide(returns, seconds, out=returns)
    returns *= _IS_LATER
    best: Floats = returns.max(axis=2)
    return best
