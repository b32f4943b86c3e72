"""What a chain's age teaches hazard tables: which bins it got through, and in which one it returned.

For the policy's chains and the predictor's sessions alike. `reached`: the age bin up to which a chain's age has been
counted. Owns nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_predictor.gittins import BINS, Ints, passed
from kvstore_predictor.hazards import HazardTables

Column = npt.NDArray[np.int32]


def count_age(tables: HazardTables, cell: int, reached: int, age_s: float) -> int:
    """One chain of `cell` is so old and has not returned; the bin that is reached now."""
    now_bin = max(reached, passed(age_s))
    if reached < now_bin:
        tables.passed(cell, reached, now_bin)
    return now_bin


def count_return(tables: HazardTables, cell: int, reached: int, age_s: float) -> None:
    """One chain of `cell` has returned at this age. Beyond the last bin it counts as one that did not."""
    now_bin = count_age(tables, cell, reached, age_s)
    if now_bin < BINS:
        tables.returned(cell, now_bin)


def count_ages(tables: HazardTables, cells: Column, reached: Column, live: Ints, now_bins: Ints) -> None:
    """Chains `live`, which have not returned, are past `now_bins`; `reached` is brought up to date."""
    while True:
        behind = reached[live] < now_bins
        live, now_bins = live[behind], now_bins[behind]
        if not len(live):
            return
        tables.exposed(cells[live].astype(np.int64), reached[live].astype(np.int64))
        reached[live] += 1
