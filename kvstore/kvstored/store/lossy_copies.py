"""Lossy copies give way to exact puts.

Whoever puts a block under `exact=True` is promised that the store holds these bytes. So the put takes away every lossy
copy of the block, leased or not, and no copy of it is made lossy from then on. A block that has an exact copy lives on
with that; one that has none is stored anew by the put. Readers of a lossy copy keep its bytes until their leases end.
`blocks/exactness.py` knows which copies are lossy. Invariant: a block of which a copy is being made, or is about to be
written, is left alone, and its put comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore_tiers.base import Slot
from kvstored.clock import Clock
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.telemetry import Counters
from kvstored.tier_set import ONLY

_NO_POSITIONS: frozenset[int] = frozenset()


class LossyCopies:
    """The lossy copies of all blocks. `discard[tier](slot, tenant)` takes a slot that a copy has left.
    `is_coming(token)` returns whether a write of the block to the durable tier is about to read a copy."""

    def __init__(
        self,
        residency: Residency,
        clock: Clock,
        counters: Counters,
        discard: Sequence[Callable[[Slot, int], None]],
        damage: Damage,
        is_coming: Callable[[int], bool],
    ) -> None:
        self._residency, self._exactness, self._clock = residency, residency.exactness, clock
        self._counters, self._discard, self._damage = counters, discard, damage
        self._is_coming = is_coming
        self._columns = residency.rows.optional.used

    def accept(self, row: int) -> None:
        """Note that lossy copies may be made of a block that was published just now, unless it has other copies, which
        an exact put may have made."""
        if self._residency.rows.mask[row] == ONLY[self._residency.mapped]:
            self._exactness.accept_lossy(row, accepts=self._residency.tenant_of(row) in self._exactness.tenants)

    def give_way(self, rows: list[int]) -> tuple[list[int], frozenset[int]]:
        """Take away the lossy copies of `rows`, -1 for none, for an exact put. Return the rows that are still stored,
        and the positions of blocks that cannot be decided now."""
        if not (self._exactness.has_lossy or "takes_lossy" in self._columns):
            return rows, _NO_POSITIONS
        kept, waiting = list(rows), set[int]()
        for position, row in enumerate(rows):
            exactness = self._exactness
            if row < 0 or not (exactness.lossy_tiers(row) or exactness.is_accepted(row) or exactness.is_coming(row)):
                continue
            self._exactness.accept_lossy(row, accepts=False)  # at once: a write that is coming then makes no lossy copy
            if self._residency.being_filled(row) or self._is_coming(self._residency.token(row)):
                waiting.add(position)
            else:
                kept[position] = self._only_exact(row)
        return kept, frozenset(waiting)

    def _only_exact(self, row: int) -> int:
        """Leave the block its exact copies alone; return its row, or -1 when it has none."""
        residency, tenant = self._residency, self._residency.tenant_of(row)
        lossy, token = self._exactness.lossy_tiers(row), residency.token(row)
        self._counters.add("replaced_lossy_copies", len(lossy))
        if not self._exactness.exact_tiers(row):
            for taken in residency.remove(row, Cause.LOSSY_ONLY, self._clock.monotonic_ns()):
                self._discard[taken.tier](taken.slot, tenant)
            return -1
        for tier in lossy:
            self._discard[tier](residency.detach(row, tier), tenant)
        if residency.durable in lossy:
            self._damage.to_write_again.append(token)
        return row
