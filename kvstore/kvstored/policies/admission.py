"""Admission: whether a block is worth writing to a tier at all.

76 % of the blocks of a production chat trace are used once; writing them to flash wears it and evicts what is
used again. Admission keeps prefixes whole: a block with a child in the tier is always admitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvstored.residency import ResidencyView


class Admission(ABC):
    """Pure: asks residency, changes nothing."""

    name: ClassVar[str]

    def __init__(self, residency: ResidencyView, tier: int) -> None:
        self.residency = residency
        self.tier = tier

    def admit(self, row: int, now_ns: int) -> bool:
        """Whether `row` should get a copy in this tier."""
        return self.residency.children(row, self.tier) > 0 or self._worth(row, now_ns)

    @abstractmethod
    def _worth(self, row: int, now_ns: int) -> bool: ...


class Always(Admission):
    """Admits everything. Right where the tier outlives restarts and wear does not matter."""

    name: ClassVar[str] = "always"

    def _worth(self, row: int, now_ns: int) -> bool:
        return True


class SecondTouch(Admission):
    """Admits a block from its second use on, counting uses before it was last forgotten.

    The ghost of residency is the memory: a block that returns after eviction starts with the count it went
    with, as the ghost lists of 2Q (Johnson & Shasha, VLDB 1994) and ARC do. A bad choice where a session's
    blocks must survive a restart after one use, and where the time between two uses is longer than the ghost
    remembers.
    """

    name: ClassVar[str] = "second-touch"
    _ACCESSES = 2

    def _worth(self, row: int, now_ns: int) -> bool:
        return self.residency.accesses(row) >= self._ACCESSES
