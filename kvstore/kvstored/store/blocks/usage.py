"""The uses of blocks, how often and when, as columns that a later process can apply to the copies it takes over.

A copy is named by its place and generation in its tier, which outlive the process if the copy does; so nothing is
looked up by key, and a million blocks take some 10 ms. Times are the wall clock's, since the monotonic one begins anew
with the machine. The module does no I/O and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstored.store.blocks.index import Residency

STEP_ROWS = 1 << 14  # collected between two pauses: about 0.4 ms
DTYPE = np.dtype([("place", "<u8"), ("generation", "<u8"), ("last_use_ns", "<u8"), ("accesses", "<u2")])
Usage = npt.NDArray[np.void]


def collect(residency: Residency, tier: int, wall_less_monotonic_ns: int) -> Iterator[Usage]:
    """Yield the usage of every copy in a tier, a step at a time; the caller may let others go on between two steps."""
    rows, copies = residency.rows, residency.copies[tier]
    for first in range(0, len(copies.state), STEP_ROWS):
        part = slice(first, first + STEP_ROWS)
        here = first + np.flatnonzero(np.frombuffer(copies.state, np.uint8)[part])
        found = np.empty(len(here), DTYPE)
        found["place"] = _places(residency, tier, here)
        found["generation"] = np.frombuffer(copies.generation, np.uint64)[here]
        found["accesses"] = np.frombuffer(rows.accesses, np.uint16)[here]
        last_ns = np.frombuffer(rows.last_access_ns, np.uint64)[here].astype(np.int64) + wall_less_monotonic_ns
        found["last_use_ns"] = np.maximum(last_ns, 0)
        yield found


def apply(residency: Residency, tier: int, usage: Usage, now_ns: int, wall_ns: int) -> int:
    """Set the use counts and times of the copies in `tier` that `usage` names; return their number.

    Call it before policies take over the blocks. Ages that are longer than the monotonic clock has run are scaled down,
    so that their order holds.
    """
    rows, copies = residency.rows, residency.copies[tier]
    here = np.flatnonzero(np.frombuffer(copies.state, np.uint8))
    if not len(here) or not len(usage):
        return 0
    ordered = usage[np.argsort(usage["place"], kind="stable")]
    places = _places(residency, tier, here)
    at = np.minimum(np.searchsorted(ordered["place"], places), len(ordered) - 1)
    same = (ordered["place"][at] == places) & (
        ordered["generation"][at] == np.frombuffer(copies.generation, np.uint64)[here]
    )
    here, found = here[same], ordered[at[same]]
    if not len(here):
        return 0
    ages_ns = np.maximum(wall_ns - found["last_use_ns"].astype(np.int64), 0)
    longest_ns = int(ages_ns.max())
    if longest_ns > now_ns:
        ages_ns = (ages_ns * (now_ns / longest_ns)).astype(np.int64)
    np.frombuffer(rows.accesses, np.uint16)[here] = np.maximum(found["accesses"], 1)
    np.frombuffer(rows.last_access_ns, np.uint64)[here] = np.maximum(now_ns - ages_ns, 0).astype(np.uint64)
    return len(here)


def _places(residency: Residency, tier: int, here: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    copies = residency.copies[tier]
    containers = np.frombuffer(copies.container, np.uint32)[here].astype(np.uint64)
    units = np.frombuffer(copies.offset, np.uint64)[here] // np.uint64(ALIGNMENT_BYTES)
    places: npt.NDArray[np.uint64] = containers << np.uint64(32) | units
    return places
