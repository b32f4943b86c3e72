"""From hazards to answers about a time ahead: how likely a return within it is, and when.

Within an age bin the chance is spread evenly; after the last bin nothing returns. Pure arithmetic.
"""

from __future__ import annotations

import numpy as np

from kvstore_predictor.gittins import BINS, EDGES_S, WIDTHS_S, Floats, Ints, bins_of

END_S = float(EDGES_S[-1] + WIDTHS_S[-1])


def cumulative(hazards: Floats) -> Floats:
    """For each row of hazards by age bin, -log of survival at the start of each bin, and at END_S."""
    found = np.zeros((len(hazards), BINS + 1))
    np.cumsum(-np.log1p(-hazards), axis=1, out=found[:, 1:])
    return found


def at_age(table: Floats, rows: Ints, ages_s: Floats) -> Floats:
    """The cumulative hazard of rows `rows` of `cumulative` at these ages."""
    ages_s = np.clip(ages_s, 0.0, END_S)
    bins = bins_of(ages_s)
    flat, places = table.reshape(-1), rows * (BINS + 1) + bins
    found: Floats = flat[places]
    found += (flat[places + 1] - found) * (ages_s - EDGES_S[bins]) / WIDTHS_S[bins]
    return found


def chance(before: Floats, after: Floats) -> Floats:
    """Of a return between two ages of these cumulative hazards, given none before."""
    found: Floats = -np.expm1(before - after)
    return found


def age_of(table: Floats, rows: Ints, reached: Floats) -> Floats:
    """At which age the cumulative hazard of each of `rows` is `reached`."""
    lines = table[rows]
    bins = np.minimum((lines[:, 1:] <= reached[:, None]).sum(axis=1), BINS - 1)
    each = np.arange(len(rows))
    first, last = lines[each, bins], lines[each, bins + 1]
    share = np.clip((reached - first) / np.maximum(last - first, 1e-12), 0.0, 1.0)
    found: Floats = EDGES_S[bins] + share * WIDTHS_S[bins]
    return found
