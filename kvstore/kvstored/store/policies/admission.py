"""Admission: the decision whether a block should be written to a tier at all.

76 % of the blocks of a production chat trace are used once; writing them to flash wears it and evicts what is used
again. Admission keeps prefixes whole: a block with a child in the tier that needs it is always admitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvstored.store.blocks import ResidencyView
from kvstored.store.policies.base import WARM_WORTH, EvictionPolicy, Weighs


class Admission(ABC):
    """A rule that decides which blocks are written to a tier. It reads the block index and changes nothing. `above` is
    the policy of the tier from which the blocks come."""

    def __init__(self, residency: ResidencyView, tier: int, above: EvictionPolicy | None = None) -> None:
        self.residency = residency
        self.tier = tier
        self.above = above

    def admit(self, row: int, now_ns: int) -> bool:
        """Return whether the block at `row` should get a copy in this tier."""
        return self.residency.dependents(row, self.tier) > 0 or self._worth(row, now_ns)

    def judges_by_worth(self, row: int, now_ns: int) -> bool:
        """Return True if this rule decides about the block at `row` by its chain's expected uses, False if by the
        block's number of uses so far."""
        return False

    @abstractmethod
    def _worth(self, row: int, now_ns: int) -> bool: ...


class Always(Admission):
    """An admission of every block. It suits a tier that outlives restarts and whose wear does not matter."""

    def _worth(self, row: int, now_ns: int) -> bool:
        return True


class SecondTouch(Admission):
    """An admission of blocks that were used at least twice. Uses before an eviction count if they are remembered.

    A block that returns after eviction starts with its former count, as with the ghost lists of 2Q (Johnson & Shasha,
    VLDB 1994) and ARC. A bad choice if a session's blocks must survive a restart after one use, and if the time between
    two uses is longer than removed blocks are remembered.
    """

    _ACCESSES = 2

    def _worth(self, row: int, now_ns: int) -> bool:
        return self.residency.accesses(row) >= self._ACCESSES


class Reused(Admission):
    """An admission of blocks that other nodes are likely to use too: used at least twice, or continued by at least two
    chains.
    """

    _ACCESSES, _CHILDREN = 2, 2

    def _worth(self, row: int, now_ns: int) -> bool:
        residency = self.residency
        return residency.accesses(row) >= self._ACCESSES or residency.children(row) >= self._CHILDREN


class ByWorth(SecondTouch):
    """An admission of blocks whose expected uses an hour are high enough: at least `keep_worth` of the policy of the
    tier above or, if that is 0, as many as of a warm block. Without an estimate (that policy has none, or decides as
    LRU for now) two uses admit a block, as with SecondTouch.

    So a new session is written if similar sessions come back, and a prompt similar to ones that are never asked for
    again is not. A bad choice if every block must survive a restart."""

    def judges_by_worth(self, row: int, now_ns: int) -> bool:
        return self._known(row, now_ns) is not None

    def _worth(self, row: int, now_ns: int) -> bool:
        worth = self._known(row, now_ns)
        if worth is None or self.above is None:
            return super()._worth(row, now_ns)
        return worth >= (self.above.settings.keep_worth or WARM_WORTH)

    def _known(self, row: int, now_ns: int) -> float | None:
        above = self.above
        return (
            above.expected_uses_per_hour(row, now_ns)
            if isinstance(above, Weighs) and self.residency.has(row, above.tier)
            else None
        )
