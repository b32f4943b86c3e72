"""Which block of a container's kind is evicted next, while the container is emptied.

Owns the order: the policy's, as long as it answers in time. Never evicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from kvstore_tiers.base import ContainerReport
from kvstored.store.blocks import Residency
from kvstored.store.transfer.victims import AllBut, Victims


class Coldest:
    """Which block of a container's kind is evicted next: the policy's order over all containers of that kind; where
    that takes too long to ask for, the container's own blocks, the one that was not used for longest first. Never one
    of `stuck`, which the caller adds to."""

    def __init__(
        self,
        residency: Residency,
        victims: Victims,
        kind: AbstractSet[int],
        report: ContainerReport,
        stuck: set[int],
    ) -> None:
        self._residency = residency
        self._position = victims.tier
        self._victims = victims
        self._container = report.container
        self._others = AllBut(residency.copies[victims.tier], kind)
        self._others.rows = stuck
        self._oldest: Iterator[int] | None = None

    def next(self) -> int:
        """A row, or -1."""
        if self._oldest is None:
            self._others.begin()
            row = self._victims.next(self._others)
            if row >= 0 and not self._others.is_exhausted:
                return row
            self._oldest = self._by_last_use()
        return next((row for row in self._oldest if row not in self._others.rows and self._may_go(row)), -1)

    def _by_last_use(self) -> Iterator[int]:
        """Children before their parents: a run of blocks is used at once, and a parent whenever its child is."""
        residency, position = self._residency, self._position
        rows = residency.rows_in(position, self._container)
        rows.sort(key=lambda row: (residency.last_access_ns(row), -residency.depth(row)))
        for token in [residency.token(row) for row in rows]:
            row = residency.current(token)
            if row >= 0 and residency.has(row, position):
                yield row

    def _may_go(self, row: int) -> bool:
        return self._residency.is_evictable(row, self._position) and self._victims.spares_minimum(row)
