"""Sets of tiers: the tiers with copies of a block, the tiers a client reads in place, the tiers that take no new lease.

All arithmetic on their bits is in this file. A tier is named by its position in the residency, 0 the fastest. A set is
an int whose bit t stands for tier t, the form of the columns `mask` and `filling` of the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_TIERS = 8


class TierSet(int):
    """A set of tiers, by position, stored as an int whose bit t stands for tier t. `one & other` tests quickly for a
    common member. `TIER_SETS[mask]` gives the set for an int faster than a call.
    """

    __slots__ = ()

    @classmethod
    def of(cls, *tiers: int) -> TierSet:
        """Return the set of the tiers at these positions."""
        return cls(sum(ONLY[tier] for tier in frozenset(tiers)))

    @property
    def first(self) -> int:
        """The position of the fastest tier in this set, -1 if the set is empty."""
        return next(iter(MEMBERS[self]), -1)

    def __contains__(self, tier: int) -> bool:
        return tier in MEMBERS[self]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the tiers, the fastest first."""
        return iter(MEMBERS[self])

    def __len__(self) -> int:
        return len(MEMBERS[self])

    def with_tier(self, tier: int) -> TierSet:
        """Return this set plus `tier`."""
        return TIER_SETS[self | ONLY[tier]]

    def without(self, tier: int) -> TierSet:
        """Return this set less `tier`, which need not be in it."""
        return TIER_SETS[self & ~ONLY[tier]]

    def union(self, other: int) -> TierSet:
        """Return the tiers that are in this set or in `other`."""
        return TIER_SETS[self | other]

    def difference(self, other: int) -> TierSet:
        """Return the tiers of this set that are not in `other`."""
        return TIER_SETS[self & ~other]


ONLY = tuple(TierSet(1 << tier) for tier in range(MAX_TIERS))
"""By tier: the set of that tier alone."""
TIER_SETS = tuple(map(TierSet, range(1 << MAX_TIERS)))
MEMBERS = tuple(tuple(tier for tier in range(MAX_TIERS) if mask >> tier & 1) for mask in range(1 << MAX_TIERS))
"""By set, or an int of a column: its tiers, the fastest first. `tier in MEMBERS[mask[row]]` is the fastest test."""
NO_TIERS = TIER_SETS[0]
ALL_TIERS = TIER_SETS[-1]


def holding(column: npt.NDArray[Any], tier: int) -> npt.NDArray[np.bool_]:
    """Return a bool for each entry of `column`, an array of tier sets: whether it contains `tier`."""
    return holding_any(column, ONLY[tier])


def holding_any(column: npt.NDArray[Any], tiers: int) -> npt.NDArray[np.bool_]:
    """Return a bool for each entry of `column`, an array of tier sets: whether it contains any of `tiers`."""
    found: npt.NDArray[np.bool_] = column & column.dtype.type(tiers) != 0
    return found
