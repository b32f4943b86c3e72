"""What few chains of a class are taken to show: their counts, shrunk towards those of a coarser class.

Pure arithmetic. A step's own counts weigh as much as the step above once they have so many exposures, and once the step
above lets expect so many returns of them: one return in a narrow bin is chance, however many chains were exposed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore_predictor.gittins import EDGES_S, WIDTHS_S, Floats

FLAT: Final[Floats] = np.clip(0.02 * WIDTHS_S / (5 + EDGES_S), 1e-5, 0.05)  # before anything is known
SHRINK_FIRST, SHRINK = 15.0, 30.0  # exposures, at the root and below
_RETURNS = 1.0


def shrunk(exposed: Floats, events: Floats, gain: float) -> Floats:
    """The chance of return by the last step. Both have a row for each step, coarse to fine, and count `gain` for each
    chain.
    """
    first = gain * SHRINK_FIRST
    estimate: Floats = (events[0] + first * FLAT) / (exposed[0] + first)
    for own, returned in zip(exposed[1:], events[1:], strict=True):
        weight = np.maximum(gain * _RETURNS / estimate, gain * SHRINK)
        estimate *= weight
        estimate += returned
        weight += own
        estimate /= weight
    return estimate
