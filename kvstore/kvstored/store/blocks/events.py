"""What residency tells others: the policy of a tier the four things that can happen to a copy, and one observer where
each block can be read.

Residency calls; a listener only updates its own books and never calls back into a method that changes
residency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TierListener(Protocol):
    def inserted(self, row: int, now_ns: int) -> None:
        """`row` has become resident in this tier (stored, promoted, demoted into, or recovered)."""

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        """`inserted` for each of `rows`, a piece of one chain, head first."""

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        """`rows`, in chain order (head first), all resident here, were used together."""

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        """`accessed`, by a request that asked for the blocks `missing` after them, which no tier has; `rows` may be
        empty.
        """

    def removed(self, row: int) -> None:
        """`row` has left this tier; the row number may be used again for another block."""

    def removed_run(self, rows: Sequence[int]) -> None:
        """`removed` for each of `rows`, a piece of one chain, its end first."""

    def released(self, row: int) -> None:
        """What kept `row` from leaving this tier (a lease, a child, being the last copy) may be gone."""


class NobodyListens:
    """The listener of a tier without a policy."""

    def inserted(self, row: int, now_ns: int) -> None:
        pass

    def inserted_run(self, rows: Sequence[int], now_ns: int) -> None:
        pass

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        pass

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        pass

    def removed(self, row: int) -> None:
        pass

    def removed_run(self, rows: Sequence[int]) -> None:
        pass

    def released(self, row: int) -> None:
        pass


class PresenceListener(Protocol):
    """Told of every change of where a block can be read, in any tier."""

    def changed(self, tenant: int, key: bytes, mask: int) -> None:
        """Bit t of `mask`: there is a readable copy in tier t now; 0: in none."""
